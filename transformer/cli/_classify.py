"""`python -m transformer classify`: the likeliest class of each text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from transformer.cli._arguments import parse
from transformer.cli._models import ModelCommand


@dataclass(frozen=True, kw_only=True)
class Classify(ModelCommand):
    """Prints the likeliest class of each text, its probability and the text, between tabs."""

    text: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """text to read; again for more texts; - reads lines from stdin"""


def main(arguments: Sequence[str]) -> None:
    """Prints the classes."""
    command = parse(Classify, "classify", arguments)
    from transformer.cli._texts import read_prompts, shown, warn_of_unknown
    from transformer.inference._reading import classify

    texts = read_prompts(command.text, lines=True, option="--text")
    opened = command.load()
    warn_of_unknown(opened, texts)
    found = classify(opened, texts)
    if command.json:
        results = [{"text": text, **dataclasses.asdict(one)} for text, one in zip(texts, found, strict=True)]
        command.print_json(opened, results=results)
        return
    for text, one in zip(texts, found, strict=True):
        print(f"{one.label}\t{one.probability:.4f}\t{shown(text)}")
