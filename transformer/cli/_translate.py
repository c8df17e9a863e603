"""`python -m transformer translate`: a stream of lines into a stream of translations."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformer.cli._arguments import parse, told_as_options
from transformer.cli._models import ModelCommand
from transformer.config._checks import ConfigError

if TYPE_CHECKING:
    from transformer.cli._texts import UnknownParts


@dataclass(frozen=True, kw_only=True)
class Translate(ModelCommand):
    """Translates stdin, line by line, by beam search: line n of the output is the translation of line n.

    An empty line stays empty, and one that can't be read becomes empty. Such lines are reported on stderr, also lines
    that are cut, words that the tokenizer does not know, and at the end the speed.
    """

    beam_size: int = 4
    """hypotheses that are followed at once; 1: always the likeliest token"""
    alpha: float = 0.6
    """length penalty: a log-probability is divided by ((5 + length) / 6)^alpha; more: longer translations"""
    n_best: int = 1
    """translations of a line; of more than one, each is a line of its own: number, score and text, between tabs"""
    exact: bool = False
    """search on until no hypothesis can get better than those found; slower"""
    max_ratio: float = 1.0
    """tokens of a translation at most, for each of its source"""
    max_extra: int = 50
    """tokens of a translation beyond that"""
    max_source_tokens: int | None = None
    """tokens that are read of a line, of a longer one the first: time grows with the square of its length; None: 1024,
    or as many as the model was trained on where those are more"""
    batch_tokens: int = 1024
    """source tokens that are translated at once, padding included"""
    chunk_lines: int = 2000
    """lines that are read before their translations are written; 1 answers line by line"""
    json: bool = False
    """print one JSON object a line"""


def main(arguments: Sequence[str]) -> None:
    """Prints the translations."""
    command = parse(Translate, "translate", arguments)
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("there is nothing to translate. Pipe lines of text into this command, or < FILE.")
    from transformer.cli._texts import UnknownParts, shown
    from transformer.generate._beam import Beam
    from transformer.inference._translating import translate_lines

    typed = {"size": "beam_size", "length_ratio": "max_ratio", "length_extra": "max_extra"}
    with told_as_options(**typed, n_best="n_best", alpha="alpha"):
        beam = Beam(
            size=command.beam_size,
            alpha=command.alpha,
            n_best=command.n_best,
            early_stop=not command.exact,
            length_ratio=command.max_ratio,
            length_extra=command.max_extra,
        )
    opened = command.load()
    begun, lines, cut, unknown = time.monotonic(), 0, 0, UnknownParts(opened)
    sizes = {name: getattr(command, name) for name in ("max_source_tokens", "batch_tokens", "chunk_lines")}
    with told_as_options(**{name: name for name in sizes}):
        chunks = translate_lines(opened, _lines(unknown), beam=beam, **sizes)
    for chunk in chunks:
        for line in chunk:
            if command.json:
                best = [dataclasses.asdict(one) for one in line.best]
                print(json.dumps({"line": line.number, "source": line.source, "translations": best}))
            elif command.n_best > 1:
                for one in line.best:
                    print(f"{line.number}\t{one.score:.4f}\t{shown(one.text)}")
            else:
                print(shown(line.best[0].text))
            cut += not line.best[0].ended
        lines += len(chunk)
        sys.stdout.flush()
    unknown.warn()
    took = time.monotonic() - begun
    also = f"; {cut:,} cut at their longest length" if cut else ""
    print(f"{lines:,} lines in {took:.1f} s, {lines / max(took, 1e-9):.1f} a second{also}", file=sys.stderr)


def _lines(unknown: UnknownParts) -> Iterator[str]:
    """The lines of stdin, as they come; bytes that are no UTF-8 as lone surrogates. `unknown` collects what the
    tokenizer does not know.
    """
    for number, line in enumerate(sys.stdin.buffer):
        text = line.decode("utf-8" if number else "utf-8-sig", errors="surrogateescape")
        text = text.removesuffix("\n").removesuffix("\r")
        unknown.add(text)
        yield text
