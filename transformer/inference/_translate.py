"""Translation of lines of text by beam search, in chunks, with one result per line in order."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from transformer.config._checks import ConfigError
from transformer.config._progress import counting
from transformer.generate._batches import beam_search_all
from transformer.generate._beam import Beam, Hypothesis
from transformer.inference._generation_settings import longest_target, recommended_beam
from transformer.inference._loaded_model import LoadedModel

USUAL_SOURCE = 1024
"""Default maximum number of source tokens per line, unless the model was trained on longer sources."""


@dataclass(frozen=True)
class TranslatedText:
    """A hypothesis as text. Line breaks in the output are replaced by spaces."""

    text: str
    score: float
    """`log_probability` divided by the length penalty."""
    log_probability: float
    """Log-probability in nats."""
    ended: bool
    """False: the hypothesis was truncated at the maximum length."""


@dataclass(frozen=True)
class TranslatedLine:
    """The translation of a line."""

    number: int
    """Line number, starting at 1."""
    source: str
    """The input line."""
    best: tuple[TranslatedText, ...]
    """Hypotheses, best first; a single empty text for a line with nothing to translate."""


def translate_lines(
    opened: LoadedModel,
    lines: Iterable[str],
    *,
    beam: Beam | None = None,
    max_new_tokens: int | None = None,
    max_source_tokens: int | None = None,
    batch_tokens: int = 1024,
    chunk_lines: int = 2000,
) -> Iterator[list[TranslatedLine]]:
    """Translate any number of lines, in chunks that bound the memory.

    Every line gets a result. A blank line gives an empty translation. A line is truncated if it exceeds the learned
    position table of the model or `max_source_tokens`, and a line that the tokenizer can't encode gives an empty
    translation; both cases, and lines longer than the training data, cause a warning with the line number.

    Args:
        opened: the model.
        lines: texts. Invalid UTF-8 may be represented by lone surrogates (`errors="surrogateescape"`).
        beam: beam search options, see `beam_search_all`; None: as the authors of the model recommend in
            generation_config.json, otherwise the default ones.
        max_new_tokens: see `beam_search_all`; a start token that generation_config.json forces counts as one.
        max_source_tokens: maximum number of source tokens per line, because time grows with the square of the length;
            None: 1,024, or the maximum source length of the training data if that is larger.
        batch_tokens: see `beam_search_all`.
        chunk_lines: number of lines that are translated together and yielded as one list.

    Returns:
        An iterator of lists with up to `chunk_lines` translations.

    Raises:
        ConfigError: the model does not translate text, or max_source_tokens, chunk_lines or batch_tokens is below 1.
        ValueError: see `beam_search_all`.
    """
    if opened.kind.writes != "translation":
        raise ConfigError(
            f"{opened.directory} contains a {type(opened.model).__name__}, which does not translate text. Pass an "
            f"encoder-decoder model for text."
        )
    sizes = {"chunk_lines": chunk_lines, "batch_tokens": batch_tokens, "max_source_tokens": max_source_tokens}
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}.")
    if max_source_tokens is None:
        max_source_tokens = max(USUAL_SOURCE, _trained_length(opened) or 0)
    # Evaluated now, so that errors are raised by the call instead of the first iteration.
    options = {"begin": opened.target_start, "eos_id": opened.eos_ids, "suppress": opened.suppressed}
    beam = recommended_beam(opened) if beam is None else beam
    most = longest_target(opened, max_new_tokens)
    options |= {"beam": beam, "max_new_tokens": most, "batch_tokens": batch_tokens}
    return _chunks(opened, lines, chunk_lines, max_source_tokens, options)


def _chunks(
    opened: LoadedModel, lines: Iterable[str], chunk_lines: int, most: int, options: dict[str, Any]
) -> Iterator[list[TranslatedLine]]:
    numbered, add = enumerate(lines, 1), counting("lines")
    while chunk := list(itertools.islice(numbered, chunk_lines)):
        sources = {number: ids for number, line in chunk if (ids := _source(opened, number, line, most))}
        found = beam_search_all(opened.model, opened.params, list(sources.values()), **options)
        best = dict(zip(sources, found, strict=True))
        nothing = [Hypothesis([], 0.0, 0.0, ended=True)]
        yield [
            TranslatedLine(number, line, tuple(_text(opened, one) for one in best.get(number, nothing)))
            for number, line in chunk
        ]
        add(len(chunk))


def _text(opened: LoadedModel, found: Hypothesis) -> TranslatedText:
    return TranslatedText(text_of(opened, found), found.score, found.log_probability, found.ended)


def text_of(opened: LoadedModel, found: Hypothesis) -> str:
    """Return the text of a hypothesis on one line."""
    return " ".join(opened.tokenizer.decode(found.tokens).splitlines())


def _trained_length(opened: LoadedModel) -> int | None:
    """Return the maximum source length of the training data, or None if it is unknown."""
    return opened.context if opened.run is None else opened.run.recipe.data.max_source_length


def _source(opened: LoadedModel, number: int, line: str, most: int) -> list[int]:
    """Return at most `most` token ids of a line, or an empty list if the line is blank or can't be encoded."""
    if not line.strip():
        return []
    try:
        line.encode()
    except UnicodeEncodeError as error:
        place = len(line[: error.start].encode())
        warnings.warn(
            f"line {number} is not valid UTF-8 at byte {place}, so its translation is empty. Convert it to UTF-8.",
            stacklevel=4,
        )
        return []
    try:
        ids = opened.tokenizer.encode_source(line)
    except ValueError as error:
        warnings.warn(f"line {number} can't be encoded, so its translation is empty: {error}", stacklevel=4)
        return []
    if not ids:
        warnings.warn(f"line {number} has no tokens after preprocessing, so its translation is empty", stacklevel=4)
    room, why = opened.model.config.longest_source, "the size of the model's position table"
    if room is None or most < room:
        room, why = most, "the value of max_source_tokens: increase it, or pass shorter lines"
    if len(ids) > room:
        warnings.warn(f"line {number} has {len(ids)} tokens and is truncated to {room}, {why}", stacklevel=4)
        # Keep a special token that the tokenizer adds at the end of every text.
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
