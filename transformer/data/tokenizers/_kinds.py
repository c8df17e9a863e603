"""Build a tokenizer from texts, or load it from a file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

from transformer.config._checks import nearest
from transformer.config._local_paths import local_path
from transformer.config._untrusted import parse_json, read_bounded
from transformer.data._config import TokenizerConfig
from transformer.data.tokenizers._base import FORMAT, SPECIAL_TOKENS, TOKENIZER_FILE, Tokenizer
from transformer.data.tokenizers._bpe import BPETokenizer
from transformer.data.tokenizers._vocabularies import ByteTokenizer, CharTokenizer, WordTokenizer

DEFAULT_BPE_SIZE = 8192
"""default vocabulary size of bpe"""

TOKENIZERS: dict[str, type[Tokenizer]] = {
    kind.kind: kind for kind in (CharTokenizer, ByteTokenizer, WordTokenizer, BPETokenizer)
}
"""tokenizers by kind"""


def build_tokenizer(
    config: TokenizerConfig,
    train: Iterable[str],
    held_out: Iterable[str] = (),
    normalization: str = "none",
    masked: bool = False,
) -> Tokenizer:
    """Build a tokenizer for texts, perhaps with a mask token; the normalization applies to sources and prompts.

    A closed vocabulary (char, and word without a size) contains everything that occurs in any text, including held-out
    texts, so that all texts can be encoded. A learned or counted vocabulary (bpe, word with a size) is built from the
    training texts alone.
    """
    if config.kind == "byte":
        return ByteTokenizer(normalization, masked)
    if config.kind == "bpe":
        return BPETokenizer.train(train, config.vocab_size or DEFAULT_BPE_SIZE, normalization, masked)
    if config.kind == "char":
        characters = set().union(*(set(text) for text in train), *(set(text) for text in held_out))
        return CharTokenizer(sorted(characters), normalization, masked)
    words = Counter(word for text in train for word in text.split())
    if config.vocab_size is None:
        known = sorted(words.keys() | {word for text in held_out for word in text.split()})
        return WordTokenizer(known, normalization, masked=masked)
    # The most frequent words; 4 special tokens (padding, begin, end, unknown) and perhaps the mask token take the rest.
    # Ties are sorted alphabetically, so that the vocabulary does not depend on the order of the texts.
    frequent = sorted(words, key=lambda word: (-words[word], word))[: config.vocab_size - 4 - masked]
    return WordTokenizer(frequent, normalization, unknown=True, masked=masked)


def tokenizer_of_splits(
    config: TokenizerConfig, texts: Mapping[str, Iterable[str]], normalization: str = "none", masked: bool = False
) -> Tokenizer:
    """Build a tokenizer for texts by split; all splits but `train` are held out."""
    held_out = chain.from_iterable(part for split, part in texts.items() if split != "train")
    return build_tokenizer(config, texts["train"], held_out, normalization, masked)


def load_tokenizer(directory: str | os.PathLike) -> Tokenizer:
    """Load a tokenizer that was saved without a model.

    Raises:
        FileNotFoundError: the directory has no tokenizer.
        ValueError: the file is damaged.
    """
    path = local_path(directory, "directory") / TOKENIZER_FILE
    if not os.path.lexists(path):
        raise FileNotFoundError(
            f"no tokenizer in {directory}: expected a file {path}. Pass the folder that save() wrote."
        )
    try:
        state = parse_json(read_bounded(Path(directory), TOKENIZER_FILE))
        if isinstance(state, dict) and "format" not in state and "model" in state:  # a file of the tokenizers library
            from transformer.data.tokenizers._pretrained import load_saved_alone

            return load_saved_alone(directory)
        return _from_state(state)
    except ValueError as error:
        problem = str(error).rstrip(".")
        raise ValueError(
            f"{path} is not a valid tokenizer: {problem}. Restore it from a copy, or train again."
        ) from error


def _from_state(state: object) -> Tokenizer:
    if not isinstance(state, dict):
        raise ValueError(f"expected a JSON object, got {type(state).__name__}.")
    if state.get("format") != FORMAT:
        raise ValueError(f"expected format {FORMAT}, got {state.get('format')!r:.80}.")
    kind, normalization = state.get("kind"), state.get("normalization")
    if not isinstance(kind, str) or kind not in TOKENIZERS:
        hint = nearest(str(kind), TOKENIZERS)
        raise ValueError(f"kind must be one of {', '.join(TOKENIZERS)}, got {kind!r:.80}.{hint}")
    if not isinstance(normalization, str):
        raise ValueError(f"normalization must be a string, got {normalization!r:.80}.")
    unknown, masked = _extras(state.get("special_tokens"), kind)
    if kind == "byte":
        return ByteTokenizer(normalization, masked)
    vocabulary = _strings(state, "vocabulary")
    if kind == "char":
        return CharTokenizer(vocabulary, normalization, masked)
    if kind == "word":
        return WordTokenizer(vocabulary, normalization, unknown, masked)
    return BPETokenizer(vocabulary, [merge.split(" ") for merge in _strings(state, "merges")], normalization, masked)


def _extras(special: object, kind: str) -> tuple[bool, bool]:
    """Return whether the special tokens in a file include an unknown token and a mask token."""
    given = special if isinstance(special, list) else []
    unknown, masked = "<unk>" in given, "<mask>" in given
    expected = [*SPECIAL_TOKENS[:3], *["<unk>"][: unknown and kind == "word"], *["<mask>"][:masked]]
    if given != expected:
        raise ValueError(
            f"special_tokens must be {list(SPECIAL_TOKENS[:3])} (then <unk> for words, and <mask>), got "
            f"{special!r:.200}."
        )
    return unknown, masked


def _strings(state: dict, field: str) -> list[str]:
    value = state.get(field)
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise ValueError(f"{field} must be a list of strings, got {type(value).__name__}.")
    return value
