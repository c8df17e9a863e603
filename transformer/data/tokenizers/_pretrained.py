"""The tokenizer of a pretrained model: `tokenizer.json` of the tokenizers library and related files."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer.config._checks import shortened
from transformer.config._local_paths import local_path
from transformer.config._replaced_files import replace_file
from transformer.config._untrusted import MAX_JSON_BYTES, parse_json, read_bounded
from transformer.data.tokenizers._base import TOKENIZER_FILE, VISIBLE, Tokenizer, utf8
from transformer.data.tokenizers._byte_level import byte_level_bytes
from transformer.data.tokenizers._library_errors import held_stderr, library_errors
from transformer.data.tokenizers._settings import truncation_side, with_settings

if TYPE_CHECKING:
    import tokenizers

# Files next to tokenizer.json with the names of special tokens, and with their ids.
_NAMING = ("tokenizer_config.json", "special_tokens_map.json")
_NUMBERING = ("generation_config.json", "config.json")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
"""files with templates of conversations (transformer/chat/), besides tokenizer_config.json"""
TEMPLATE_FOLDER = "additional_chat_templates"
"""folder of further templates"""
_MOST_TEMPLATES = 20
LONG_TEXT = 2000
"""number of characters from which a text is long: encoding a shorter one takes at most a few milliseconds"""
_FILES = (TOKENIZER_FILE, *_NAMING, *_NUMBERING, *TEMPLATE_FILES)
# Tokenizer files that are not supported here; transformers converts them.
_OTHERS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm", "vocab.json", "vocab.txt")
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""name of a token that is one byte of a character (byte fallback of SentencePiece)"""


class PretrainedTokenizer(Tokenizer):
    """A tokenizer from `tokenizer.json`. As in all tokenizers of this package, user text can't contain special tokens.

    The name of a special token in a text is encoded as the tokens of its characters, except by `encode_prompt`. (The
    library has an option for this, but it has no effect if the vocabulary of the model itself contains the name, as
    that of T5.) Truncation and padding settings of the file are disabled.

    `bos_id`, `eos_id`, `unk_id` and `mask_id` are None if the files don't define them. `eos_ids` are all end tokens:
    those in generation_config.json, else the one in the tokenizer files; `eos_id` is the first of them. Without a
    padding token, `pad_id` is `eos_id` or 0; this is safe because padding is always masked.

    `files` has the contents by name, including tokenizer.json; `vocab_size` is the number of rows of the embedding
    table (None: determined by the ids). Raises ValueError if a file is damaged, or does not match the others.
    """

    kind = "pretrained"
    files: Mapping[str, bytes]
    """contents of the tokenizer's files by name, including chat templates"""
    eos_ids: tuple[int, ...]

    def __init__(self, files: Mapping[str, bytes], vocab_size: int | None = None):
        self.files = dict(files)
        self._library, self._source, content, self._changed = _opened(files)
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

        self.truncation_side = truncation_side(content, _object("tokenizer_config.json", files))
        self._hold, self._hold_decoder = _holding(content, "normalizer", "pre_tokenizer"), _holding(content, "decoder")
        self._is_byte_level = (content.get("decoder") or {}).get("type") == "ByteLevel"
        self._decoders = _decoder_types(content.get("decoder"))
        model = content["model"]
        _check_one_token_per_id(model["vocab"], content.get("added_tokens") or [])
        _check_added_ids(content.get("added_tokens") or [], self._library.token_to_id)
        unknown = model.get("unk_id")  # Unigram models store the id of the unknown token, other models its name
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
        # Encoding a text may produce the unknown token of the model, unless it is also an end token. All other special
        # tokens must not result from user text.
        self._unknown = unknown if unknown not in self.eos_ids else None
        self._reserved = self._special - {self._unknown}

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._special)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Names of the special tokens, sorted by id; unlike in other tokenizers, their ids need not be the first."""
        return tuple(str(self._library.id_to_token(i)) for i in sorted(self._special))

    @property
    def text_ids(self) -> list[int]:
        """Sorted ids that represent text: those with a token, without special tokens and those added around a text."""
        ids = set(self._library.get_vocab(with_added_tokens=True).values())
        return sorted(ids - self._special - set(self.encode_model("", "")[0]))

    @property
    def begin_id(self) -> int | None:
        """Id of the first token that the decoder of an encoder-decoder reads: from config.json, else `bos_id`."""
        return self._begin_id

    @property
    def vocab_size(self) -> int:
        """Number of ids, including embedding rows without a token."""
        return self._size

    def encode(self, text: str) -> list[int]:
        return self._encoded(text, None, special=False)[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, encoded in parallel threads, without the offsets of their tokens."""
        for text in texts:
            utf8(text)
        with self._library_errors():
            found = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        # `encode` spells out the name of a special token.
        pairs = zip(texts, (one.ids for one in found), strict=True)
        return [ids if self._reserved.isdisjoint(ids) else self.encode(text) for text, ids in pairs]

    def unknown_parts(self, text: str) -> list[str]:
        """Return the parts of a text that become the unknown token, and the characters that the tokenizer omits.

        Spaces, combining characters and control characters are not reported: many normalizers remove them on purpose.
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
        """Return ids and token types of one or two texts, with the special tokens of training ([CLS] ... [SEP])."""
        return self._encoded(text, pair, special=True)

    def encode_source(self, text: str) -> list[int]:
        """Return the ids of a source or prompt, with the special tokens used in training."""
        return self.encode_model(text)[0]

    def encode_prompt(self, text: str, *, parse_special: bool = True, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text that a model continues; see `Tokenizer.encode_prompt`.

        By default, they are the ids that a tokenizer of transformers returns.
        """
        if not parse_special:
            return self._encoded(text, None, special=add_special_tokens)[0]
        utf8(text)
        with self._library_errors():
            return encode_one(self._parsing_library, text, add_special_tokens).ids

    @functools.cached_property
    def _parsing_library(self) -> tokenizers.Tokenizer:
        """The library's tokenizer that recognizes special tokens in a text."""
        with held_stderr():
            library = self.library_copy()
            known = library.get_added_tokens_decoder()
            # Roles that only other files give to tokens of the vocabulary.
            library.add_special_tokens([str(library.id_to_token(i)) for i in sorted(self._special - known.keys())])
            return library

    def library_copy(self) -> tokenizers.Tokenizer:
        """Return a new tokenizer of the library with the settings of the files, which recognizes special tokens.

        Not that of `encode`, because the option to recognize them applies to all threads that use one.
        """
        return _library_of(self._source)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without special tokens and ids without a token."""
        text = [i for i in self._checked(ids) if i not in self._special]
        remedy = "The tokenizer's file is damaged: download it again"
        with library_errors("the tokenizers library failed to decode", remedy), self._hold_decoder():
            return self._library.decode(text, skip_special_tokens=False)

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return one label per id, with visible spaces, names of special tokens, and `<id 7>` for those without one."""
        return [self._label(i) for i in self._checked(ids)]

    def token_bytes(self, i: int) -> bytes | None:
        """Return the bytes of a token of a byte-level vocabulary, or of byte fallback; None: another token."""
        token = self._library.id_to_token(i)
        if token is None or i in self._special:
            return None
        if "ByteLevel" in self._decoders:
            return byte_level_bytes(token)
        is_byte = "ByteFallback" in self._decoders and BYTE_TOKEN.fullmatch(token)
        return bytes([int(token[3:5], 16)]) if is_byte else None

    def byte_level_lengths(self) -> dict[int, int] | None:
        """Return the number of bytes of each token without the special ones; None unless the tokenizer is byte-level.

        In the vocabulary of a byte-level tokenizer, each character stands for one byte.
        """
        if not self._is_byte_level:
            return None
        added = self._library.get_added_tokens_decoder()  # spelled as they are
        ids = self._library.get_vocab(with_added_tokens=True)
        return {
            i: len(added[i].content.encode()) if i in added else len(token)
            for token, i in ids.items()
            if i not in self._special
        }

    def save(self, directory: str | os.PathLike) -> None:
        """Write the tokenizer files, unchanged, into a directory; not config.json, which belongs to the model."""
        directory = local_path(directory, "directory")
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            if name != "config.json":
                (directory / name).parent.mkdir(exist_ok=True)
                replace_file(directory / name, content)

    def save_alone(self, directory: str | os.PathLike) -> None:
        """Write the tokenizer files, and a config.json with only the tokenizer fields."""
        self.save(directory)
        given = _object("config.json", self.files)
        kept = {name: value for name, value in given.items() if name.endswith("_token_id")} | {"vocab_size": self._size}
        replace_file(Path(directory) / "config.json", json.dumps(kept, indent=1) + "\n")

    def state(self) -> dict[str, Any]:
        """Return JSON values that identify this tokenizer: the hash of its file, and the special tokens."""
        return {
            "kind": self.kind,
            "sha256": hashlib.sha256(self.files[TOKENIZER_FILE]).hexdigest(),
            "vocab_size": self._size,
            "special_tokens": [self.pad_id, self.bos_id, self.unk_id, self.mask_id, list(self.eos_ids)],
        } | ({"settings": self._changed} if self._changed else {})

    def _encoded(self, text: str, pair: str | None, special: bool) -> tuple[list[int], list[int]]:
        for part in (text, pair or ""):
            utf8(part)
        with self._library_errors():
            encoding = encode_one(self._library, text if pair is None else (text, pair), special)
        ids, types = encoding.ids, encoding.type_ids
        # Common case: no special tokens, neither added by the post-processor nor found in the text.
        if self._reserved.isdisjoint(ids):
            return ids, types
        # special_tokens_mask is 1 for tokens that the post-processor added; all other special tokens come from the
        # text.
        pieces = [
            [i] if is_added or i not in self._reserved else self._spelled(i)
            for i, is_added in zip(ids, encoding.special_tokens_mask, strict=True)
        ]
        types = [kind for kind, entry in zip(types, pieces, strict=True) for _ in entry]
        return [i for entry in pieces for i in entry], types

    @contextlib.contextmanager
    def _library_errors(self) -> Iterator[None]:
        """Convert library errors for a text: a regular expression of the file can exceed the library's step limit."""
        remedy = "Shorten it, or download the tokenizer's file again"
        with library_errors("the tokenizers library failed on this text", remedy), self._hold():
            yield

    def _spelled(self, special: int) -> list[int]:
        """Return the ids of the characters in the name of a special token."""
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
        """Raise ValueError if the post-processor adds an id without a token to a text."""
        with library_errors(f"{TOKENIZER_FILE} has a failing post_processor", "Download the file again"), held_stderr():
            added = self._library.encode("").ids + self._library.encode("", "").ids
        for i in added:
            if self._library.id_to_token(i) is None:
                raise ValueError(
                    f"{TOKENIZER_FILE} has a post_processor that adds the id {i}, which has no token. "
                    f"Download the file again."
                )


def _opened(files: Mapping[str, bytes]) -> tuple[tokenizers.Tokenizer, str, dict[str, Any], dict[str, Any]]:
    """Return the library's tokenizer, its source, the content of the source, and what tokenizer_config.json changes."""
    with library_errors(f"{TOKENIZER_FILE} is not a valid tokenizer", "Download the file again"), held_stderr():
        source = files[TOKENIZER_FILE].decode("utf-8")
        library = _library_of(source)
    given, config = _object(TOKENIZER_FILE, files), _object("tokenizer_config.json", files)
    name = config.get("tokenizer_class") or _object("config.json", files).get("tokenizer_class")
    content = with_settings(given, config, name if isinstance(name, str) else None)
    changed = {part: value for part, value in content.items() if value != given.get(part)}
    if changed:
        source = json.dumps(content)
        library = _library_of(source)
    return library, source, content, changed


def _library_of(source: str) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of a file, without truncation and padding."""
    import tokenizers

    library = tokenizers.Tokenizer.from_str(source)
    library.no_truncation()
    library.no_padding()
    return library


def _decoder_types(decoder: object) -> set[str]:
    """Return the types of a decoder of the file, and of those in a sequence."""
    if not isinstance(decoder, dict):
        return set()
    parts = decoder["decoders"] if decoder.get("type") == "Sequence" else []
    return {str(decoder.get("type"))}.union(*map(_decoder_types, parts))


def encode_one(library: tokenizers.Tokenizer, given: str | tuple[str, str], special: bool) -> tokenizers.Encoding:
    """Return the encoding of one text or of a pair, by the library.

    A long one is encoded as a batch, because only for batches does the library release Python's global lock: otherwise
    no other thread would run, for seconds.
    """
    if isinstance(given, str) and len(given) < LONG_TEXT:
        return library.encode(given, add_special_tokens=special)
    return library.encode_batch([given], add_special_tokens=special)[0]


def _holding(content: dict[str, Any], *parts: str) -> Callable[[], contextlib.AbstractContextManager]:
    """Return `held_stderr` if regular expressions in parts of the file can make the library panic on a text.

    Only then is stderr buffered for every call; otherwise return a context manager that does nothing. The parsed
    content is searched, because JSON can write the word in many ways.
    """
    has_patterns = any('"Regex"' in json.dumps(content.get(part)) for part in parts)
    return held_stderr if has_patterns else contextlib.nullcontext


def _check_one_token_per_id(vocabulary: dict[str, int] | list, added: list[dict[str, Any]]) -> None:
    """Raise ValueError if two tokens of a file have the same id: one of them could never be decoded."""
    tokens: dict[int, list[str]] = {}
    entries = vocabulary.items() if isinstance(vocabulary, dict) else ((e[0], i) for i, e in enumerate(vocabulary))
    for token, i in [*entries, *((entry["content"], entry["id"]) for entry in added)]:
        if token not in tokens.setdefault(i, []):
            tokens[i].append(token)
    if shared := [f"{i} is {' and '.join(f'{t!r:.40}' for t in names)}" for i, names in tokens.items() if names[1:]]:
        raise ValueError(
            f"{TOKENIZER_FILE} must give each token its own id, but id {shortened(shared)}. Download the file again."
        )


def _check_added_ids(added: list[dict[str, Any]], token_to_id: Callable[[str], int | None]) -> None:
    """Raise ValueError if the ids of added tokens differ between the library and the file.

    The library silently changes the ids of added tokens if they don't directly follow those of the vocabulary.
    """
    wrong = [entry for entry in added if token_to_id(entry["content"]) != entry["id"]]
    if wrong:
        changed = [f"{e['content']!r:.40} ({e['id']}, read as {token_to_id(e['content'])})" for e in wrong]
        raise ValueError(
            f"{TOKENIZER_FILE} has added tokens whose ids don't follow the vocabulary, so the library changes "
            f"them: {shortened(changed)}. Download the file again."
        )


class _SpecialTokens:
    """Ids of bos, eos, pad, unk and mask, from the files next to tokenizer.json."""

    def __init__(self, files: Mapping[str, bytes], token_to_id: Callable[[str], int | None], vocab_size: int):
        self._objects = {name: _object(name, files) for name in (*_NAMING, *_NUMBERING)}
        self._token_to_id, self._vocab_size = token_to_id, vocab_size

    def id_of(self, role: str) -> int | None:
        """Return the id of a role: from the name of its token if a file has one (null: no token), else from its id."""
        for file in _NAMING:
            if f"{role}_token" in self._objects[file]:
                return self._named(file, role)
        found = [self._numbered(file, role) for file in _NUMBERING]
        return next((ids[0] for ids in found if ids), None)

    def ends(self) -> tuple[int, ...]:
        """Return the ids of all end tokens; generation_config.json has priority over the other files."""
        if ids := self._numbered("generation_config.json", "eos"):
            return ids
        # Several end tokens: the name in other files identifies only one.
        if len(ids := self._numbered("config.json", "eos")) > 1:
            return ids
        end = self.id_of("eos")
        return () if end is None else (end,)

    def begin(self) -> int | None:
        """Return the id of the token that a decoder starts with, if a file has it; config.json has priority."""
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

    `vocab_size` is the number of rows of the embedding table (None: determined by the ids). Raises FileNotFoundError,
    or ValueError if a file is damaged or too large, or does not match the others.
    """
    directory = local_path(directory, "directory")
    files = {}
    for name in (*_FILES, *_further_templates(directory)):
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


def _further_templates(directory: Path) -> list[str]:
    """Return the names of the files in the folder of further chat templates, at most `_MOST_TEMPLATES`."""
    folder = directory / TEMPLATE_FOLDER
    if not folder.is_dir() or folder.is_symlink():
        return []
    return [f"{TEMPLATE_FOLDER}/{path.name}" for path in sorted(folder.glob("*.jinja"))[:_MOST_TEMPLATES]]


def load_saved_alone(directory: str | os.PathLike) -> PretrainedTokenizer:
    """Load a tokenizer saved by `PretrainedTokenizer.save_alone`."""
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
        raise ValueError(f"{name} must contain a JSON object, got {type(value).__name__}. Download the file again.")
    return value
