"""Lines of text translated by beam search, a chunk at a time: one result for every line, in order."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from transformer.config._checks import ConfigError
from transformer.generate._batches import beam_search_all
from transformer.generate._beam import USUAL, Beam, Hypothesis
from transformer.inference._loading import LoadedModel
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.nn.models._speech import SpeechToText

USUAL_SOURCE = 1024
"""tokens that are read of a line, where nobody says otherwise and the model was not trained on more"""


@dataclass(frozen=True)
class TranslatedText:
    """A hypothesis as text: one line, whatever the model wrote."""

    text: str
    score: float
    """log_probability over the length penalty"""
    log_probability: float
    """nats"""
    ended: bool
    """False: it was cut at the longest length"""


@dataclass(frozen=True)
class TranslatedLine:
    """What became of a line."""

    number: int
    """from 1"""
    source: str
    """the line, as it was read"""
    best: tuple[TranslatedText, ...]
    """the best first; an empty text for a line with nothing to translate"""


def translate_lines(
    opened: LoadedModel,
    lines: Iterable[str],
    *,
    beam: Beam = USUAL,
    max_new_tokens: int | None = None,
    max_source_tokens: int | None = None,
    batch_tokens: int = 1024,
    chunk_lines: int = 2000,
) -> Iterator[list[TranslatedLine]]:
    """Translations of any number of lines, yielded a chunk of `chunk_lines` after the other; no more is held.

    Every line gets a result. A line of blanks becomes an empty one. What the model's learned position table has no room
    for, or is beyond `max_source_tokens`, is cut, and a text that the tokenizer can't read becomes an empty line, each
    with a warning that names the line; more tokens than the model was trained to read are a warning, too.

    Args:
        lines: texts; what was no UTF-8 may be in them as lone surrogates (`errors="surrogateescape"`).
        beam: with `max_new_tokens` and `batch_tokens` as `beam_search_all` takes it.
        max_source_tokens: a longer line is cut, as time grows with the square of its length; None: 1,024, or as many as
            the model was trained to read where those are more.

    Raises:
        ConfigError: a model that translates no text; max_source_tokens, chunk_lines or batch_tokens below 1.
        ValueError: as `beam_search_all`.
    """
    if not isinstance(opened.model, Seq2Seq) or isinstance(opened.model, SpeechToText):
        raise ConfigError(
            f"{opened.directory} holds a {type(opened.model).__name__}, which translates no text. Take an "
            f"encoder-decoder that reads text."
        )
    sizes = {"chunk_lines": chunk_lines, "batch_tokens": batch_tokens, "max_source_tokens": max_source_tokens}
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}.")
    if max_source_tokens is None:
        max_source_tokens = max(USUAL_SOURCE, _trained_length(opened) or 0)
    options = {"begin": opened.target_start, "eos_id": opened.eos_ids, "suppress": opened.suppressed}  # wrong: now
    options |= {"beam": beam, "max_new_tokens": max_new_tokens, "batch_tokens": batch_tokens}
    return _chunks(opened, lines, chunk_lines, max_source_tokens, options)


def _chunks(
    opened: LoadedModel, lines: Iterable[str], chunk_lines: int, most: int, options: dict[str, Any]
) -> Iterator[list[TranslatedLine]]:
    numbered = enumerate(lines, 1)
    while chunk := list(itertools.islice(numbered, chunk_lines)):
        sources = {number: ids for number, line in chunk if (ids := _source(opened, number, line, most))}
        found = beam_search_all(opened.model, opened.params, list(sources.values()), **options)
        best = dict(zip(sources, found, strict=True))
        nothing = [Hypothesis([], 0.0, 0.0, ended=True)]
        yield [
            TranslatedLine(number, line, tuple(_text(opened, one) for one in best.get(number, nothing)))
            for number, line in chunk
        ]


def _text(opened: LoadedModel, found: Hypothesis) -> TranslatedText:
    text = " ".join(opened.tokenizer.decode(found.tokens).splitlines())
    return TranslatedText(text, found.score, found.log_probability, found.ended)


def _trained_length(opened: LoadedModel) -> int | None:
    """Tokens of the longest source that the model was trained on; None: nothing says."""
    return opened.context if opened.run is None else opened.run.recipe.data.max_source_length


def _source(opened: LoadedModel, number: int, line: str, most: int) -> list[int]:
    """At most so many token ids of a line; none for an empty one, and for one that can't be read."""
    if not line.strip():
        return []
    try:
        line.encode()
    except UnicodeEncodeError as error:
        place = len(line[: error.start].encode())
        warnings.warn(
            f"line {number} is not UTF-8 text, and its translation is empty: byte {place} of it can't be read. Convert "
            f"it to UTF-8.",
            stacklevel=4,
        )
        return []
    try:
        ids = opened.tokenizer.encode_source(line)
    except ValueError as error:
        warnings.warn(f"line {number} can't be read, and its translation is empty: {error}", stacklevel=4)
        return []
    if not ids:
        warnings.warn(f"nothing of line {number} is left as the model reads it: its translation is empty", stacklevel=4)
    room, why = opened.model.config.longest_source, "the rows of the model's position table"
    if room is None or most < room:
        room, why = most, "as max_source_tokens says: give more, or shorter lines"
    if len(ids) > room:
        warnings.warn(f"line {number} has {len(ids)} tokens and is cut to {room}, {why}", stacklevel=4)
        # What a tokenizer puts at the end of every text stays there.
        kept = [] if ids[-1] in opened.tokenizer.encode(line)[-1:] else ids[-1:]
        return ids[: room - len(kept)] + kept
    trained = _trained_length(opened)
    if trained is not None and len(ids) > trained:
        warnings.warn(
            f"line {number} has {len(ids)} tokens, but the model was trained on at most {trained}: its translation may "
            f"be poor",
            stacklevel=4,
        )
    return ids
