"""`transformer-zoo classify text`: the most likely classes of each text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformer.cli._arguments import check_least
from transformer.cli._models import ModelCommand, TextsCommand

if TYPE_CHECKING:
    from transformer.inference._classify import Class
    from transformer.inference._loaded_model import LoadedModel


@dataclass(frozen=True, kw_only=True)
class ClassifyCommand(ModelCommand):
    """Options of a command that prints classes."""

    top_k: int = 1
    """number of classes to print for each input, the most likely first"""

    def print_classes(self, opened: LoadedModel, kind: str, inputs: Sequence[str], found: Sequence[Class]) -> None:
        """Print the most likely classes of each input; `kind` names an input in the JSON."""
        from transformer.cli._texts import shown

        def lines() -> Iterator[str]:
            for name, one in zip(inputs, found, strict=True):
                for label, probability in one.top(self.top_k):
                    yield f"{label}\t{probability:.4f}\t{shown(name)}"

        results = [{kind: name, **dataclasses.asdict(one)} for name, one in zip(inputs, found, strict=True)]
        self.answer_of(opened, lines(), results=results)


@dataclass(frozen=True, kw_only=True)
class ClassifyText(ClassifyCommand, TextsCommand):
    """Print the most likely class of each text, its probability and the text, separated by tabs."""


def main(command: ClassifyText) -> None:
    check_least("top-k", command.top_k)
    from transformer.inference._classify import classify

    opened, texts = command.load_with_texts()
    command.print_classes(opened, "text", texts, classify(opened, texts))
