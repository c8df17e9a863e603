"""The tokenizer of a pretrained model: the `tokenizer.json` of the tokenizers library and the files next to it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformer.config._untrusted import MAX_JSON_BYTES, parse_json, read_bounded
from transformer.data._library_errors import held_stderr, library_errors
from transformer.data._tokenizer import TOKENIZER_FILE, VISIBLE, Tokenizer, utf8

# Files next to tokenizer.json that name the special tokens, or give their ids.
_NAMING = ("tokenizer_config.json", "special_tokens_map.json")
_NUMBERING = ("generation_config.json", "config.json")
_FILES = (TOKENIZER_FILE, *_NAMING, *_NUMBERING)
# Tokenizer files that are not supported here; transformers converts them.
_OTHERS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm", "vocab.json", "vocab.txt")


class PretrainedTokenizer(Tokenizer):
    """A tokenizer from `tokenizer.json` under the rule of this package: no user text can contain a special token.

    The name of a special token in a text is encoded as the tokens of its characters. (The library has an option for
    this, but it does not help if the model's own vocabulary contains the name, as that of T5 does.) Truncation and
    padding settings are turned off.

    `bos_id`, `eos_id`, `unk_id` and `mask_id` are None if the files don't define them. `eos_ids` are all tokens that
    end a text: those of generation_config.json, or else the one in the tokenizer files; `eos_id` is the first. Without
    a padding token, `pad_id` is `eos_id` or 0; padding is always masked.

    Raises:
        ValueError: a file is damaged, or does not match the others or `vocab_size`.
    """

    kind = "pretrained"
    eos_ids: tuple[int, ...]

    def __init__(self, files: Mapping[str, bytes], vocab_size: int | None = None):
        """`files` are file contents by name, including tokenizer.json; `vocab_size` is the number of embedding rows."""
        import tokenizers

        self._files = dict(files)
        self._hold = held_stderr if b'"Regex"' in files[TOKENIZER_FILE] else contextlib.nullcontext
        with library_errors(f"{TOKENIZER_FILE} is not a valid tokenizer", "Download the file again"), held_stderr():
            self._library = tokenizers.Tokenizer.from_str(files[TOKENIZER_FILE].decode("utf-8"))
            self._library.no_truncation()
            self._library.no_padding()
            self._library.encode_special_tokens = True
            ids = self._library.get_vocab(with_added_tokens=True)
            added = self._library.get_added_tokens_decoder()
        if not ids:
            raise ValueError(f"{TOKENIZER_FILE} has no tokens. Download the file again.")
        super().__init__(sorted(ids, key=ids.__getitem__))
        self._size = max(ids.values()) + 1 if vocab_size is None else vocab_size
        if beyond := [token for token in self.vocabulary if ids[token] >= self._size]:
            raise ValueError(
                f"{TOKENIZER_FILE} gives {beyond[0]!r} the id {ids[beyond[0]]}: expected ids below {self._size}, the "
                "number of embeddings. The tokenizer does not belong to this model: download its tokenizer files again."
            )
        self._check_post_processor()

        content = _object(TOKENIZER_FILE, files)
        self._is_byte_level = (content.get("decoder") or {}).get("type") == "ByteLevel"
        model = content["model"]
        _check_one_token_per_id(model["vocab"], content.get("added_tokens") or [])
        _check_added_ids(content.get("added_tokens") or [], self._library.token_to_id)
        unknown = model.get("unk_id")  # Unigram stores the id, the other models the name
        if isinstance(name := model.get("unk_token"), str):
            unknown = self._library.token_to_id(name)
        names = _SpecialTokens(files, self._library.token_to_id, self._size)
        self.bos_id, self.mask_id = names.id_of("bos"), names.id_of("mask")
        self.unk_id = unknown if (named := names.id_of("unk")) is None else named
        self.eos_ids = names.ends()
        self.eos_id = self.eos_ids[0] if self.eos_ids else None
        begin = names.begin()
        self._begin_id = self.bos_id if begin is None else begin
        padding = names.id_of("pad")
        self.pad_id = next(i for i in (padding, self.eos_id, 0) if i is not None)

        roles = {padding, self.bos_id, self.unk_id, self.mask_id, *self.eos_ids} - {None}
        self._special = roles | {i for i, token in added.items() if token.special}
        self._unknown_id = unknown
        # The model's own unknown token may occur in a text, unless it ends a text.
        self._unknown = unknown if unknown not in self.eos_ids else None
        self._reserved = self._special - {self._unknown}

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Names of the special tokens, sorted by id; unlike in other tokenizers, their ids need not be the first."""
        return tuple(str(self._library.id_to_token(i)) for i in sorted(self._special))

    @property
    def text_ids(self) -> list[int]:
        """Sorted ids of text: all ids with a token, except special tokens and those added around a text."""
        ids = set(self._library.get_vocab(with_added_tokens=True).values())
        return sorted(ids - self._special - set(self.encode_model("", "")[0]))

    @property
    def begin_id(self) -> int | None:
        """The first token of an encoder-decoder's target: from config.json, else `bos_id`."""
        return self._begin_id

    @property
    def vocab_size(self) -> int:
        """Number of ids, including embedding rows without a token."""
        return self._size

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; no special token is added or recognized. Raises ValueError if the library fails."""
        return self._encoded(text, None, special=False)[0]

    def unknown_parts(self, text: str) -> list[str]:
        """Return the parts of a text, in order, that become the unknown token, and the characters that are dropped,
        except spaces, combining characters and control characters, which many normalizers drop on purpose.
        """
        if self._is_byte_level:
            return []
        with self._library_errors():
            encoding = self._library.encode(text, add_special_tokens=False)
            dropped = [
                character
                for character in dict.fromkeys(text)
                if character.isprintable()
                and not character.isspace()
                and not unicodedata.category(character).startswith("M")
                and not self._library.encode(character, add_special_tokens=False).ids
            ]
        unknown = [
            text[start:end].strip()
            for i, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if i == self._unknown_id
        ]
        return [part for part in unknown if part] + [character for character in text if character in dropped]

    def encode_model(self, text: str, pair: str | None = None) -> tuple[list[int], list[int]]:
        """Return ids and token types of one or two texts, with the special tokens used in training ([CLS] ... [SEP]).

        Raises:
            ValueError: the library fails on the text.
        """
        return self._encoded(text, pair, special=True)

    def encode_source(self, text: str) -> list[int]:
        """Return the ids of a source or prompt, with the special tokens used in training."""
        return self.encode_model(text)[0]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without special tokens and ids without a token. Raises ValueError for an id out of
        range.
        """
        text = [i for i in self._checked(ids) if i not in self._special]
        remedy = "The tokenizer's file is damaged: download it again"
        with library_errors("the tokenizers library failed to decode", remedy), self._hold():
            return self._library.decode(text, skip_special_tokens=False)

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return one label per id, for pictures: visible spaces, names of special tokens, `<id 7>` for ids without a
        token.
        """
        return [self._label(i) for i in self._checked(ids)]

    def save(self, directory: str | os.PathLike) -> None:
        """Write the tokenizer files, unchanged, into a directory, which is created if missing. config.json belongs to
        the model and is not written.
        """
        Path(directory).mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            if name != "config.json":
                partial = Path(directory) / f"{name}.partial"
                partial.write_bytes(content)
                partial.replace(Path(directory) / name)

    def save_alone(self, directory: str | os.PathLike) -> None:
        """Write the tokenizer files, and a config.json with the tokenizer fields of the model's: the directory needs no
        model.
        """
        self.save(directory)
        given = _object("config.json", self._files)
        kept = {name: value for name, value in given.items() if name.endswith("_token_id")} | {"vocab_size": self._size}
        partial = Path(directory) / "config.json.partial"
        partial.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        partial.replace(Path(directory) / "config.json")

    def state(self) -> dict[str, Any]:
        """Return the identity of this tokenizer as JSON values: the hash of its file, and the special tokens."""
        return {
            "kind": self.kind,
            "sha256": hashlib.sha256(self._files[TOKENIZER_FILE]).hexdigest(),
            "vocab_size": self._size,
            "special_tokens": [self.pad_id, self.bos_id, self.unk_id, self.mask_id, list(self.eos_ids)],
        }

    def _encoded(self, text: str, pair: str | None, special: bool) -> tuple[list[int], list[int]]:
        for part in (text, pair or ""):
            utf8(part)
        with self._library_errors():
            encoding = self._library.encode(text, pair, add_special_tokens=special)
        ids, types = encoding.ids, encoding.type_ids
        if self._reserved.isdisjoint(ids):
            return ids, types
        written = [
            [i] if is_added or i not in self._reserved else self._spelled(i)
            for i, is_added in zip(ids, encoding.special_tokens_mask, strict=True)
        ]
        types = [kind for kind, entry in zip(types, written, strict=True) for _ in entry]
        return [i for entry in written for i in entry], types

    @contextlib.contextmanager
    def _library_errors(self) -> Iterator[None]:
        """Convert library errors about a text: a pattern of the file may exceed the library's step limit."""
        remedy = "Shorten it, or download the tokenizer's file again"
        with library_errors("the tokenizers library failed on this text", remedy), self._hold():
            yield

    def _spelled(self, special: int) -> list[int]:
        """Encode the name of a special token as the tokens of its characters."""
        name = self._library.id_to_token(special)
        ids = [self._library.token_to_id(character) for character in name]
        ids = [self._unknown if i is None or i in self._reserved else i for i in ids]
        if None in ids:
            raise ValueError(
                f"the text contains {name!r}, the name of a special token, and this tokenizer can't encode it as text. "
                "Remove it."
            )
        return ids

    def _label(self, entry: int) -> str:
        token = self._library.id_to_token(entry)
        if token is None:
            return f"<id {entry}>"
        if entry in self._special:
            return token
        token = self.decode([entry]) if self._is_byte_level else token.replace("▁", " ")
        return token.translate(VISIBLE)

    def _check_post_processor(self) -> None:
        """Check that the special tokens added to a text have a token and are within the vocabulary."""
        with library_errors(f"{TOKENIZER_FILE} has a failing post_processor", "Download the file again"), held_stderr():
            added = self._library.encode("").ids + self._library.encode("", "").ids
        for i in added:
            if self._library.id_to_token(i) is None:
                raise ValueError(
                    f"{TOKENIZER_FILE} has a post_processor that adds the id {i}, which has no token. "
                    f"Download the file again."
                )


def _check_one_token_per_id(vocabulary: dict[str, int] | list, added: list[dict[str, Any]]) -> None:
    """Raise ValueError if two tokens of a file have the same id: one of them could never be decoded."""
    tokens: dict[int, list[str]] = {}
    entries = vocabulary.items() if isinstance(vocabulary, dict) else ((e[0], i) for i, e in enumerate(vocabulary))
    for token, i in [*entries, *((entry["content"], entry["id"]) for entry in added)]:
        if token not in tokens.setdefault(i, []):
            tokens[i].append(token)
    if shared := [f"{i} is {' and '.join(f'{t!r:.40}' for t in names)}" for i, names in tokens.items() if names[1:]]:
        more = f" and {len(shared) - 5} more" if len(shared) > 5 else ""
        raise ValueError(
            f"{TOKENIZER_FILE} must give each token its own id, but id {', '.join(shared[:5])}{more}. Download the "
            "file again."
        )


def _check_added_ids(added: list[dict[str, Any]], token_to_id: Callable[[str], int | None]) -> None:
    """Raise ValueError if the library gives added tokens other ids than the file: it silently renumbers them if their
    ids don't follow those of the vocabulary.
    """
    wrong = [entry for entry in added if token_to_id(entry["content"]) != entry["id"]]
    if wrong:
        told = [f"{e['content']!r:.40} ({e['id']}, read as {token_to_id(e['content'])})" for e in wrong[:5]]
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(
            f"{TOKENIZER_FILE} has added tokens whose ids don't follow the vocabulary, so that the library changes "
            f"them: {', '.join(told)}{more}. Download the file again."
        )


class _SpecialTokens:
    """Ids of bos, eos, pad, unk and mask, from the files next to tokenizer.json."""

    def __init__(self, files: Mapping[str, bytes], token_to_id: Callable[[str], int | None], vocab_size: int):
        self._objects = {name: _object(name, files) for name in (*_NAMING, *_NUMBERING)}
        self._token_to_id, self._vocab_size = token_to_id, vocab_size

    def id_of(self, role: str) -> int | None:
        """Return the id of a role: by the token's name if a file has one (null means none), else by its id."""
        for file in _NAMING:
            if f"{role}_token" in self._objects[file]:
                return self._named(file, role)
        found = [self._numbered(file, role) for file in _NUMBERING]
        return next((ids[0] for ids in found if ids), None)

    def ends(self) -> tuple[int, ...]:
        """Return all tokens that end a text, those of generation_config.json first."""
        if ids := self._numbered("generation_config.json", "eos"):
            return ids
        if len(ids := self._numbered("config.json", "eos")) > 1:  # several, but a name identifies only one
            return ids
        end = self.id_of("eos")
        return () if end is None else (end,)

    def begin(self) -> int | None:
        """Return the token that a decoder starts with, if config.json has its id."""
        found = [self._numbered(file, "decoder_start") for file in reversed(_NUMBERING)]
        return next((ids[0] for ids in found if ids), None)

    def _named(self, file: str, role: str) -> int | None:
        value = self._objects[file][f"{role}_token"]
        name = value.get("content") if isinstance(value, dict) else value
        if name is None:
            return None
        i = self._token_to_id(name) if isinstance(name, str) else None
        if i is None:
            raise ValueError(
                f"{file} names {name!r} as {role}_token: expected a token of {TOKENIZER_FILE}. The files don't belong "
                "together: download them again."
            )
        return i

    def _numbered(self, file: str, role: str) -> tuple[int, ...]:
        value = self._objects[file].get(f"{role}_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if wrong := [i for i in ids if type(i) is not int or not 0 <= i < self._vocab_size]:
            raise ValueError(
                f"{file} has {wrong[0]!r:.40} as {role}_token_id: expected ids of 0 to {self._vocab_size - 1}. "
                "The files don't belong together: download them again."
            )
        return tuple(ids)


def load_pretrained_tokenizer(directory: str | os.PathLike, vocab_size: int | None = None) -> PretrainedTokenizer:
    """Load the tokenizer of a model directory: tokenizer.json, and special tokens from the JSON files next to it.

    Args:
        vocab_size: number of embedding rows, the upper limit of all ids; None: determined by the ids.

    Raises:
        FileNotFoundError: there is no tokenizer.json; the message says how to convert other tokenizer files.
        ValueError: a file is damaged, too large, or does not match the others or `vocab_size`.
    """
    directory = Path(directory)
    files = {}
    for name in _FILES:
        if os.path.lexists(directory / name):
            try:
                files[name] = read_bounded(directory, name, MAX_JSON_BYTES)
            except ValueError as error:
                raise ValueError(f"{directory}: {error}. Download the file again.") from None
    if TOKENIZER_FILE not in files:
        others = [name for name in _OTHERS if (directory / name).exists()]
        only = f", only {others[0]}, which is not supported" if others else ""
        raise FileNotFoundError(
            f"no {TOKENIZER_FILE} in {directory}{only}. Create it with "
            f'transformers: AutoTokenizer.from_pretrained("{directory}").save_pretrained("{directory}").'
        )
    try:
        return PretrainedTokenizer(files, vocab_size)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error


def load_saved_alone(directory: str | os.PathLike) -> PretrainedTokenizer:
    """Load what `PretrainedTokenizer.save_alone` wrote.

    Raises:
        ValueError: config.json has an impossible vocab_size, or an error of `load_pretrained_tokenizer`.
    """
    path = Path(directory) / "config.json"
    files = {"config.json": read_bounded(Path(directory), "config.json")} if os.path.lexists(path) else {}
    size = _object("config.json", files).get("vocab_size")
    if size is not None and (type(size) is not int or size < 1):
        raise ValueError(
            f"{path} has the vocab_size {size!r:.40}: expected an integer above 0. Restore it from a copy."
        )
    return load_pretrained_tokenizer(directory, size)


def _object(name: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the JSON object of a file, or {} if the file is missing."""
    try:
        value = parse_json(files.get(name, b"{}"))
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON: {error}. Download the file again.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} must contain a JSON object, got {type(value).__name__}. Get the file again.")
    return value
