"""`python -m transformer classify`: the most likely class of each text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from transformer.cli._arguments import parse
from transformer.cli._models import TextsCommand


@dataclass(frozen=True, kw_only=True)
class Classify(TextsCommand):
    """Print the most likely class of each text, its probability and the text, separated by tabs."""


def main(arguments: Sequence[str]) -> None:
    """Print the most likely class of each text."""
    command = parse(Classify, "classify", arguments)
    from transformer.cli._texts import shown
    from transformer.inference._reading import classify

    opened, texts = command.load_with_texts()
    found = classify(opened, texts)
    if command.json:
        results = [{"text": text, **dataclasses.asdict(one)} for text, one in zip(texts, found, strict=True)]
        command.print_json(opened, results=results)
        return
    for text, one in zip(texts, found, strict=True):
        print(f"{one.label}\t{one.probability:.4f}\t{shown(text)}")
