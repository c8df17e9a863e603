"""Text to token ids and back: characters, bytes, words, or learned parts of words; saved as readable JSON."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from transformer.config import nearest
from transformer.data.configs import TokenizerConfig
from transformer.data.normalization import NORMALIZERS

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
"""names by id"""
TOKENIZER_FILE = "tokenizer.json"
FORMAT = 1
"""version of that file"""
DEFAULT_BPE_SIZE = 8192
"""ids of a bpe vocabulary whose config names no size"""

_VISIBLE = str.maketrans({" ": "␣", "\n": "\\n", "\t": "\\t", "\r": "\\r"})


class Tokenizer(ABC):
    """One vocabulary: ids of special tokens first (`pad_id` 0, `bos_id` 1, `eos_id` 2, and `unk_id` 3 where there is an
    unknown), then text.

    Special tokens have ids but no spelling: `encode("<eos>")` gives the ids of these five characters, never the end
    token, so that no text of a user can end a sequence.

    Raises:
        ValueError: an unknown normalization.
    """

    kind: ClassVar[str]
    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    unk_id: int | None = None

    def __init__(self, vocabulary: list[str], normalization: str = "none"):
        if normalization not in NORMALIZERS:
            raise ValueError(
                f"normalization must be one of {', '.join(NORMALIZERS)}, got {normalization!r}."
                f"{nearest(normalization, NORMALIZERS)}"
            )
        self.normalization = normalization
        self.vocabulary = vocabulary

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Names of the special tokens, by id."""
        return SPECIAL_TOKENS[: 3 if self.unk_id is None else 4]

    @property
    def begin_id(self) -> int | None:
        """The token that a target of an encoder-decoder begins with."""
        return self.bos_id

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return len(self.special_tokens) + len(self.vocabulary)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text; no special token is added or recognized. ValueError names what the vocabulary lacks."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special tokens are left out. ValueError if an id is outside the vocabulary."""

    def normalize(self, text: str) -> str:
        """A source or prompt as the model was trained to read it (for number words: case, commas, hyphens, "and")."""
        return NORMALIZERS[self.normalization](text)

    def encode_source(self, text: str) -> list[int]:
        """`encode(normalize(text))`: what every source and prompt goes through, in training and afterwards."""
        return self.encode(self.normalize(text))

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """One label per id, for a picture: blanks and line ends made visible, special tokens by name."""
        special = self.special_tokens
        return [special[i] if i < len(special) else self._label(i - len(special)) for i in self._checked(ids)]

    def save(self, directory: str | os.PathLike) -> None:
        """Writes `tokenizer.json` into a directory, which is made when missing."""
        path = Path(directory) / TOKENIZER_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.state(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    def save_alone(self, directory: str | os.PathLike) -> None:
        """Writes all that `load_tokenizer` needs into a directory that holds nothing else."""
        self.save(directory)

    def state(self) -> dict[str, Any]:
        """All that makes this tokenizer, as JSON values."""
        return {
            "format": FORMAT,
            "kind": self.kind,
            "normalization": self.normalization,
            "special_tokens": list(self.special_tokens),
            "vocabulary": self.vocabulary,
        }

    def _label(self, entry: int) -> str:
        return self.vocabulary[entry].translate(_VISIBLE)

    def _checked(self, ids: Iterable[int]) -> Iterator[int]:
        for place, i in enumerate(ids):
            i = int(i)
            if not 0 <= i < self.vocab_size:
                raise ValueError(
                    f"token id {i} at position {place} is outside the vocabulary: expected 0 to {self.vocab_size - 1}. "
                    "Use the tokenizer the model was trained with."
                )
            yield i

    def _entries(self, ids: Iterable[int]) -> Iterator[int]:
        """Places in the vocabulary of those ids that are text."""
        first = len(self.special_tokens)
        return (i - first for i in self._checked(ids) if i >= first)


class CharTokenizer(Tokenizer):
    """Every character its own token; a character not in the vocabulary is an error.

    Raises:
        ValueError: a vocabulary that is empty, or holds something twice or other than single characters.
    """

    kind = "char"

    def __init__(self, vocabulary: list[str], normalization: str = "none"):
        super().__init__(vocabulary, normalization)
        _check_vocabulary(vocabulary)
        if wrong := [entry for entry in vocabulary if len(entry) != 1]:
            raise ValueError(f"a char vocabulary holds single characters, got {wrong[0]!r}.")
        self._ids = {entry: len(self.special_tokens) + i for i, entry in enumerate(vocabulary)}

    def encode(self, text: str) -> list[int]:
        """One id per character; ValueError names those that the vocabulary lacks."""
        try:
            return [self._ids[character] for character in text]
        except KeyError:
            missing = sorted({character for character in text if character not in self._ids})
            raise ValueError(
                f"the text has {_listed(missing, 'character')} that this tokenizer does not know. It knows "
                f"{_listed(self.vocabulary, 'character', 100)}."
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The characters, joined."""
        return "".join(self.vocabulary[i] for i in self._entries(ids))


class WordTokenizer(Tokenizer):
    """Whatever blanks separate is a token. Without `unknown`, a word outside the vocabulary is an error.

    Raises:
        ValueError: a vocabulary that is empty, or holds something twice or words with blanks.
    """

    kind = "word"

    def __init__(self, vocabulary: list[str], normalization: str = "none", unknown: bool = False):
        super().__init__(vocabulary, normalization)
        _check_vocabulary(vocabulary)
        if wrong := [entry for entry in vocabulary if entry.split() != [entry]]:
            raise ValueError(f"a word vocabulary holds words without blanks, got {wrong[0]!r}.")
        self.unk_id = 3 if unknown else None
        self._ids = {entry: len(self.special_tokens) + i for i, entry in enumerate(vocabulary)}

    def encode(self, text: str) -> list[int]:
        """One id per word; ValueError names those that the vocabulary lacks, unless there is an unknown token."""
        words = text.split()
        if self.unk_id is not None:
            return [self._ids.get(word, self.unk_id) for word in words]
        if missing := sorted({word for word in words if word not in self._ids}):
            hints = "".join(nearest(word, self.vocabulary) for word in missing[:1])
            raise ValueError(
                f"the text has {_listed(missing, 'word')} that this tokenizer does not know.{hints} "
                f"It knows {len(self.vocabulary)} words."
            )
        return [self._ids[word] for word in words]

    def decode(self, ids: Iterable[int]) -> str:
        """The words, one blank between them."""
        return " ".join(self.vocabulary[i] for i in self._entries(ids))


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8: knows every text, with the longest sequences."""

    kind = "byte"

    def __init__(self, normalization: str = "none"):
        super().__init__([f"{byte:02x}" for byte in range(256)], normalization)

    def encode(self, text: str) -> list[int]:
        """One id per byte."""
        return [3 + byte for byte in _utf8(text)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the bytes; bytes that are no UTF-8 become U+FFFD."""
        return bytes(self._entries(ids)).decode("utf-8", errors="replace")

    def state(self) -> dict[str, Any]:
        """All that makes this tokenizer, as JSON values (its vocabulary goes without saying)."""
        return {key: value for key, value in super().state().items() if key != "vocabulary"}

    def _label(self, entry: int) -> str:
        character = chr(entry)
        return character.translate(_VISIBLE) if entry < 127 and character.isprintable() else f"{entry:02x}"


class BPETokenizer(Tokenizer):
    """Byte-pair encoding over bytes: knows every text, frequent parts of words are one token.

    The `tokenizers` library learns and applies the merges. It is given no special tokens, so none can be found in a
    text. Files hold vocabulary and merges alone and are checked before the library sees them: it panics on broken ones.
    """

    kind = "bpe"

    def __init__(self, vocabulary: list[str], merges: list[list[str]], normalization: str = "none"):
        super().__init__(vocabulary, normalization)
        _check_vocabulary(vocabulary)
        self.merges = _checked_merges(merges, vocabulary)
        self._library = _byte_level(vocabulary, self.merges)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, normalization: str = "none") -> BPETokenizer:
        """Learns merges until there are `vocab_size` ids, special tokens included, or nothing left to merge."""
        import tokenizers

        library = _byte_level()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size - 3,
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        library.train_from_iterator(texts, trainer)
        model = json.loads(library.to_str())["model"]
        vocabulary = sorted(model["vocab"], key=model["vocab"].__getitem__)
        return cls(vocabulary, [list(merge) for merge in model["merges"]], normalization)

    def encode(self, text: str) -> list[int]:
        """Ids of the learned parts."""
        _utf8(text)
        return [3 + i for i in self._library.encode(text, add_special_tokens=False).ids]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the parts; bytes that are no UTF-8 become U+FFFD."""
        return self._library.decode(list(self._entries(ids)), skip_special_tokens=False)

    def state(self) -> dict[str, Any]:
        """All that makes this tokenizer, as JSON values."""
        return super().state() | {"merges": [" ".join(merge) for merge in self.merges]}

    def _label(self, entry: int) -> str:
        return self._library.decode([entry], skip_special_tokens=False).translate(_VISIBLE)


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has a lone surrogate {text[error.start]!r} at character {error.start}, which is no valid "
            "Unicode. Read the text with its right encoding."
        ) from None


def _listed(entries: list[str], noun: str, limit: int = 10) -> str:
    shown = ", ".join(repr(entry) for entry in entries[:limit])
    more = f" and {len(entries) - limit} more" if len(entries) > limit else ""
    return f"{noun}{'s' if len(entries) > 1 else ''} {shown}{more}"


def _check_vocabulary(vocabulary: list[str]) -> None:
    if not vocabulary:
        raise ValueError("the vocabulary is empty. Give a text with something in it.")
    if twice := [entry for entry, count in Counter(vocabulary).items() if count > 1]:
        raise ValueError(f"the vocabulary holds {twice[0]!r} twice.")


def _checked_merges(merges: list[list[str]], vocabulary: list[str]) -> list[tuple[str, str]]:
    known = set(vocabulary)
    for number, merge in enumerate(merges):
        if len(merge) != 2:
            raise ValueError(f"merge {number} must be two parts, got {merge!r}.")
        for part in (*merge, "".join(merge)):
            if part not in known:
                raise ValueError(
                    f"merge {number} ({' '.join(merge)!r}) makes or takes {part!r}, not in the vocabulary."
                )
    return [(left, right) for left, right in merges]


def _byte_level(vocabulary: list[str] | None = None, merges: list[tuple[str, str]] | None = None) -> Any:
    """A pipeline of the `tokenizers` library: text -> bytes -> merges, with nothing normalized and nothing special."""
    import tokenizers

    if vocabulary is None:
        library = tokenizers.Tokenizer(tokenizers.models.BPE())
    else:
        if missing := sorted(set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) - set(vocabulary)):
            raise ValueError(f"a bpe vocabulary holds all 256 bytes, {_listed(missing, 'byte', 3)} missing.")
        try:
            model = tokenizers.models.BPE(vocab={entry: i for i, entry in enumerate(vocabulary)}, merges=merges)
        except BaseException as error:  # the library's PanicException is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise ValueError(f"the tokenizers library refuses these merges: {error}.") from error
        library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    return library


TOKENIZERS: dict[str, type[Tokenizer]] = {
    kind.kind: kind for kind in (CharTokenizer, ByteTokenizer, WordTokenizer, BPETokenizer)
}
"""tokenizers by kind"""


def build_tokenizer(
    config: TokenizerConfig, train: Iterable[str], held_out: Iterable[str] = (), normalization: str = "none"
) -> Tokenizer:
    """A tokenizer for these texts.

    A closed vocabulary (char, and word without a size) holds what any of the texts has, so that all of them can be
    written; what is learned or counted (bpe, word with a size) comes from the training texts alone.
    """
    if config.kind == "byte":
        return ByteTokenizer(normalization)
    if config.kind == "bpe":
        return BPETokenizer.train(train, config.vocab_size or DEFAULT_BPE_SIZE, normalization)
    if config.kind == "char":
        characters = set().union(*(set(text) for text in train), *(set(text) for text in held_out))
        return CharTokenizer(sorted(characters), normalization)
    words = Counter(word for text in train for word in text.split())
    if config.vocab_size is None:
        return WordTokenizer(sorted(words.keys() | {word for text in held_out for word in text.split()}), normalization)
    frequent = sorted(words, key=lambda word: (-words[word], word))[: config.vocab_size - 4]
    return WordTokenizer(frequent, normalization, unknown=True)


def load_tokenizer(directory: str | os.PathLike) -> Tokenizer:
    """The tokenizer saved in a directory alone. FileNotFoundError if there is none, ValueError if it is broken."""
    path = Path(directory) / TOKENIZER_FILE
    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer in {directory}: expected a file {path}. Name the folder save() wrote.")
    try:
        state = json.loads(path.read_bytes())
        if isinstance(state, dict) and "format" not in state and "model" in state:  # a file of the tokenizers library
            from transformer.data.pretrained_tokenizer import load_saved_alone

            return load_saved_alone(directory)
        return _from_state(state)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no valid tokenizer: {error} Restore it from a copy, or train anew.") from error


def _from_state(state: Any) -> Tokenizer:
    if not isinstance(state, dict):
        raise ValueError(f"expected a JSON object, got {type(state).__name__}.")
    if state.get("format") != FORMAT:
        raise ValueError(f"expected format {FORMAT}, got {state.get('format')!r}.")
    kind, normalization = state.get("kind"), state.get("normalization")
    if kind not in TOKENIZERS:
        raise ValueError(f"kind must be one of {', '.join(TOKENIZERS)}, got {kind!r}.{nearest(str(kind), TOKENIZERS)}")
    if not isinstance(normalization, str):
        raise ValueError(f"normalization must be a string, got {normalization!r}.")
    special = state.get("special_tokens")
    if special not in (list(SPECIAL_TOKENS[:3]), list(SPECIAL_TOKENS)) or (len(special) == 4 and kind != "word"):
        raise ValueError(f"special_tokens must be {list(SPECIAL_TOKENS[:3])} (and <unk> for words), got {special!r}.")
    if kind == "byte":
        return ByteTokenizer(normalization)
    vocabulary = _strings(state, "vocabulary")
    if kind == "char":
        return CharTokenizer(vocabulary, normalization)
    if kind == "word":
        return WordTokenizer(vocabulary, normalization, unknown=len(special) == 4)
    return BPETokenizer(vocabulary, [merge.split(" ") for merge in _strings(state, "merges")], normalization)


def _strings(state: dict, field: str) -> list[str]:
    value = state.get(field)
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise ValueError(f"{field} must be a list of strings, got {type(value).__name__}.")
    return value
