"""`transformer-zoo list`: the pretrained families and their published sizes."""

from __future__ import annotations

import json
from dataclasses import dataclass

from transformer.cli._arguments import Command


@dataclass(frozen=True, kw_only=True)
class List(Command):
    """List the supported families of pretrained models, their classes, and their variants with parameter counts."""

    markdown: bool = False
    """print the table in docs/families.md"""


def main(command: List) -> None:
    from transformer.zoo.families import ENTRIES

    if command.json:
        families = {
            family.name: {
                "title": family.title,
                "citation": family.citation,
                "model_types": [family.name, *family.aliases],
                "architectures": {name: head.model.__name__ for name, head in family.heads.items()},
                "variants": {
                    name: {"hub": variant.hub, "parameters": variant.parameters}
                    for name, variant in family.variants.items()
                },
            }
            for family in ENTRIES.values()
        }
        print(json.dumps(families, indent=2))
        return
    if command.markdown:
        print(markdown())
        return
    width = max(len(name) for family in ENTRIES.values() for name in family.variants)
    for family in ENTRIES.values():
        kinds = dict.fromkeys(head.model.__name__ for head in family.heads.values())
        print(f"{family.title} ({', '.join(kinds)}). {family.citation}")
        for name, variant in family.variants.items():
            print(f"  {name:{width}} {size(variant.parameters):>7}  {variant.hub}")


def markdown() -> str:
    """Return the table in docs/families.md: families, their model classes, and their variants with parameter counts."""
    from transformer.zoo.families import ENTRIES

    lines = ["| family | models | variants |", "| --- | --- | --- |"]
    for family in ENTRIES.values():
        kinds = ", ".join(dict.fromkeys(f"`{head.model.__name__}`" for head in family.heads.values()))
        variants = ", ".join(f"{name} ({size(v.parameters)})" for name, v in family.variants.items())
        lines.append(f"| {family.title} | {kinds} | {variants} |")
    return "\n".join(lines)


def size(parameters: int) -> str:
    """Format a number of parameters: 124_439_808 -> "124M", 8_030_261_248 -> "8.03B"."""
    return f"{parameters / 1e9:.3g}B" if parameters >= 999.5e6 else f"{parameters / 1e6:.3g}M"
