"""`transformer-zoo evaluate text`: loss, perplexity and bits per byte of a text file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from transformer.cli._models import ModelCommand
from transformer.config._checks import ConfigError


@dataclass(frozen=True, kw_only=True)
class EvaluateText(ModelCommand):
    """Print loss, perplexity and bits per byte of a causal model on a text file."""

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """text file (UTF-8)"""
    max_length: int | None = None
    """maximum number of tokens that the model reads at once; None: its context length"""


def main(command: EvaluateText) -> None:
    from transformer.data.files._texts import read_text
    from transformer.inference._score import score_text

    text = read_text(str(command.file))
    opened = command.load()
    if opened.kind.writes != "continuation":
        raise ConfigError(
            f"evaluate text needs a causal language model, but {command.directory} contains a "
            f"{type(opened.model).__name__}. Pass another model."
        )
    if command.max_length is not None:
        table = opened.model.config.max_length
        if not 0 < command.max_length <= (table or command.max_length):
            limit = "" if table is None else f" and at most {table}, the length of the position table"
            raise ConfigError(f"--max-length must be at least 1{limit}, got {command.max_length}. Change it.")
        opened = dataclasses.replace(opened, context=command.max_length)
    found = score_text(opened, text)
    values = {"loss": found.loss, "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}
    sizes = {"tokens": found.tokens, "bytes": found.num_bytes, "max_length": opened.context}
    lines = [
        f"{command.file}: {found.tokens:,} predicted tokens, {found.num_bytes:,} bytes",
        f"loss: {found.loss:.4f} nats per token, perplexity {found.perplexity:.4g}, bits per byte "
        f"{found.bits_per_byte:.4f}",
    ]
    command.answer_of(opened, lines, text=str(command.file), **values, **sizes)
