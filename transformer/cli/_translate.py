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
    """Translate stdin with beam search: line n of the output is the translation of line n.

    An empty line stays empty; a line that can't be read becomes empty. The program reports unreadable lines, truncated
    lines, unknown words and the speed on stderr.
    """

    beam_size: int = 4
    """beam size; 1 is greedy decoding"""
    alpha: float = 0.6
    """length penalty: log-probabilities are divided by ((5 + length) / 6)^alpha; larger values favor longer
    translations"""
    n_best: int = 1
    """translations per line; with more than one, each is printed on its own line: line number, score and text,
    separated by tabs"""
    exact: bool = False
    """continue the search until no hypothesis can exceed the best finished ones; slower"""
    max_ratio: float = 1.0
    """maximum length of a translation, in target tokens per source token"""
    max_extra: int = 50
    """tokens that a translation may be longer than that"""
    max_source_tokens: int | None = None
    """maximum source tokens per line; longer lines are truncated, because the time grows with the square of the length;
    None: 1024, or the training length if that is larger"""
    batch_tokens: int = 1024
    """source tokens per batch, including padding"""
    chunk_lines: int = 2000
    """lines to read before their translations are printed; 1 prints each translation at once"""
    json: bool = False
    """print one JSON object per line"""


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
