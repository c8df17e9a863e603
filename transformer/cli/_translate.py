"""`transformer-zoo translate`: translate the lines of stdin."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformer.cli._arguments import option_names_in_errors
from transformer.cli._models import ModelCommand
from transformer.config._checks import ConfigError
from transformer.config._untrusted import bounded_lines

if TYPE_CHECKING:
    from transformer.cli._texts import UnknownParts
    from transformer.generate._beam import Beam

USUAL_NORM = (5, 6)
"""numbers of the formula of --alpha"""


@dataclass(frozen=True, kw_only=True)
class Translate(ModelCommand):
    """Translate stdin with beam search: line n of the output is the translation of line n.

    The translation of an empty line, or of a line that can't be encoded, is an empty line. Unreadable lines, truncated
    lines, unknown words and the throughput are reported on stderr.
    """

    beam_size: int | None = None
    """beam size; 1 is greedy decoding; None: num_beams of generation_config.json, or 4"""
    alpha: float | None = None
    """length penalty: log-probabilities are divided by ((5 + length) / 6)^alpha; higher values favor longer ones;
    None: length_penalty of generation_config.json, with its formula length^length_penalty, or 0.6"""
    n_best: int = 1
    """translations per line; if more than 1, each is printed as a line: line number, score and text, tab-separated"""
    exact: bool = False
    """continue the search until no hypothesis can exceed the score of the best finished ones; slower"""
    max_ratio: float | None = None
    """maximum length of a translation: MAX_RATIO x source tokens + MAX_EXTRA, in target tokens; None: 1, or with
    max_length of generation_config.json that length"""
    max_extra: int | None = None
    """constant term of the maximum length; see --max-ratio; None: 50"""
    max_source_tokens: int | None = None
    """maximum source tokens per line; longer lines are truncated; None: 1024, or the training length if larger"""
    batch_tokens: int = 1024
    """source tokens per batch, including padding"""
    chunk_lines: int = 2000
    """lines to read before their translations are printed; 1 prints each translation immediately"""
    json: bool = False
    """print one JSON object per line"""


def main(command: Translate) -> None:
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError(
            "stdin is a terminal, so there is nothing to translate. Pipe lines of text into this command, or use "
            "< FILE."
        )
    from transformer.cli._texts import UnknownParts, shown
    from transformer.generate._beam import USUAL
    from transformer.inference._generation_settings import recommended_beam
    from transformer.inference._translate import translate_lines

    _beam(command, USUAL)  # reports invalid options before the model is loaded
    opened = command.load()
    beam = _beam(command, recommended_beam(opened))
    start, lines, cut, unknown = time.monotonic(), 0, 0, UnknownParts(opened)
    sizes = {name: getattr(command, name) for name in ("max_source_tokens", "batch_tokens", "chunk_lines")}
    with option_names_in_errors(**{name: name for name in sizes}):
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
    took = time.monotonic() - start
    also = f"; {cut:,} truncated at the maximum length" if cut else ""
    print(f"{lines:,} lines in {took:.1f} s, {lines / max(took, 1e-9):.1f} lines/s{also}", file=sys.stderr)


def _beam(command: Translate, recommended: Beam) -> Beam:
    """Return a beam search with the given options; raise ConfigError for invalid ones."""
    given: dict[str, Any] = {"size": command.beam_size, "n_best": command.n_best}
    if command.alpha is not None:
        given |= {"alpha": command.alpha, "norm": USUAL_NORM}
    if command.exact:
        given |= {"early_stop": False, "estimated": False}
    if command.max_ratio is not None or command.max_extra is not None:
        given["length_ratio"] = 1.0 if command.max_ratio is None else command.max_ratio
        given["length_extra"] = 50 if command.max_extra is None else command.max_extra
    renamed = {"size": "beam_size", "length_ratio": "max_ratio", "length_extra": "max_extra"}
    with option_names_in_errors(**renamed, n_best="n_best", alpha="alpha"):
        return dataclasses.replace(recommended, **{name: value for name, value in given.items() if value is not None})


def _lines(unknown: UnknownParts) -> Iterator[str]:
    """Yield the lines of stdin; `unknown` collects the words that the tokenizer does not know.

    Bytes that are not UTF-8 become lone surrogates: only their line fails.
    """
    for number, line in enumerate(bounded_lines(sys.stdin.buffer, "stdin")):
        text = line.decode("utf-8" if number else "utf-8-sig", errors="surrogateescape")
        text = text.removesuffix("\n").removesuffix("\r")
        unknown.add(text)
        yield text
