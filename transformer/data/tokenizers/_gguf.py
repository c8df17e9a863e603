"""Conversion of the tokenizer in the metadata of a GGUF file to the files of a tokenizer directory.

Two kinds are supported: byte-level BPE (`gpt2`, Radford et al. 2019), and the BPE of SentencePiece (`llama`, Kudo and
Richardson 2018, arXiv 1808.06226), which has a score for each piece instead of a list of merges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from transformer.data.tokenizers._base import TOKENIZER_FILE

PREFIX = "tokenizer.ggml."
MAX_PIECE = 256
"""Maximum number of characters of a piece of SentencePiece, because every way to divide it is tried."""

# Types of tokens; bytes (6) and unknown (2) need no treatment of their own.
_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split_words(digits: str) -> dict[str, Any]:
    pattern = {"type": "Split", "pattern": {"Regex": _WORDS % digits}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [pattern, _BYTES | {"use_regex": False}]}


_SINGLE_DIGITS = {"type": "Digits", "individual_digits": True}
_LLAMA3 = {"pre_tokenizer": _split_words("{1,3}"), "ignore_merges": True, "bos": True}
_GPT2 = {"pre_tokenizer": _BYTES | {"use_regex": True}}
_BPE_KINDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gpt-2", "gpt2"), _GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    "qwen2": {"pre_tokenizer": _split_words(""), "normalizer": {"type": "NFC"}},
    "smollm": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [_SINGLE_DIGITS, _BYTES | {"use_regex": True}]}},
}
"""How texts are divided before the merges, by the name in `tokenizer.ggml.pre`."""


class UnsupportedTokenizer(ValueError):
    """Raised for a kind of tokenizer that is not supported, or metadata without a tokenizer."""


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the contents of tokenizer.json and tokenizer_config.json for the metadata of a GGUF file.

    Raises UnsupportedTokenizer, or ValueError if the metadata are damaged.
    """
    kind = metadata.get(f"{PREFIX}model")
    if kind not in ("gpt2", "llama"):
        what = "no tokenizer" if kind in (None, "none", "no_vocab") else f"a tokenizer of the kind {kind!r:.40}"
        raise UnsupportedTokenizer(f"its metadata have {what} (supported: gpt2, llama)")
    tokens = metadata.get(f"{PREFIX}tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ValueError(f"{PREFIX}tokens must be a list of texts, got {tokens!r:.80}")
    if len(set(tokens)) != len(tokens):
        raise ValueError(f"{PREFIX}tokens must be different from each other")
    types = _numbers(metadata, "token_type", len(tokens), default=_NORMAL)
    settings = _settings(metadata, tokens)
    content = _bpe(metadata, tokens, types) if kind == "gpt2" else _sentencepiece(metadata, tokens, types)
    content["post_processor"] = _around(content.pop("around"), tokens, settings)
    files = {TOKENIZER_FILE: content, "tokenizer_config.json": settings}
    ends = [metadata[key] for key in (f"{PREFIX}eos_token_id", f"{PREFIX}eot_token_id") if key in metadata]
    if ends:
        files["generation_config.json"] = {"eos_token_id": list(dict.fromkeys(ends))}
    return {name: json.dumps(value, ensure_ascii=False).encode() for name, value in files.items()}


def _bpe(metadata: Mapping[str, Any], tokens: Sequence[str], types: np.ndarray) -> dict[str, Any]:
    """Return the content of tokenizer.json for byte-level BPE."""
    name = metadata.get(f"{PREFIX}pre")
    if not isinstance(name, str) or name not in _BPE_KINDS:
        raise UnsupportedTokenizer(
            f"its tokenizer divides texts by the rule {name!r:.40} (tokenizer.ggml.pre; supported: "
            f"{', '.join(_BPE_KINDS)})"
        )
    kind = _BPE_KINDS[name]
    merges = metadata.get(f"{PREFIX}merges")
    pairs = [merge.split(" ") for merge in merges] if isinstance(merges, list) else None
    if pairs is None or not all(len(pair) == 2 for pair in pairs):
        raise ValueError(f"{PREFIX}merges must be a list of two tokens with a space between them")
    model = {"type": "BPE", "merges": pairs, "ignore_merges": kind.get("ignore_merges", False)}
    return _content(model, tokens, types) | {
        "normalizer": kind.get("normalizer"),
        "pre_tokenizer": kind["pre_tokenizer"],
        "decoder": _BYTES | {"use_regex": True},
        "around": [_flag(metadata, "add_bos_token", kind.get("bos", False)), _flag(metadata, "add_eos_token", False)],
    }


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: np.ndarray) -> dict[str, Any]:
    """Return the content of tokenizer.json for the BPE of SentencePiece with bytes as a fallback."""
    if (longest := max(map(len, tokens))) > MAX_PIECE:
        raise ValueError(f"{PREFIX}tokens must have at most {MAX_PIECE} characters, got {longest}")
    scores = _numbers(metadata, "scores", len(tokens), default=None)
    unknown = metadata.get(f"{PREFIX}unknown_token_id", 0)
    # Older files of Gemma lack the flag; all tokenizers of Gemma have no prefix.
    is_gemma = str(metadata.get("general.architecture", "")).startswith("gemma")
    prefix = _flag(metadata, "add_space_prefix", not is_gemma)
    before = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    behind = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    plain = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    model = {
        "type": "BPE",
        "merges": _merges(tokens, types, scores),
        "byte_fallback": True,
        "fuse_unk": True,
        "unk_token": tokens[_checked("unknown_token_id", unknown, tokens)],
    }
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    return _content(model, tokens, types) | {
        "normalizer": {"type": "Sequence", "normalizers": [*before, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [plain, {"type": "ByteFallback"}, {"type": "Fuse"}, *behind]},
        "around": [_flag(metadata, "add_bos_token", True), _flag(metadata, "add_eos_token", False)],
    }


def _merges(tokens: Sequence[str], types: np.ndarray, scores: np.ndarray) -> list[list[str]]:
    """Return the merges that are equivalent to the scores: pairs of pieces that form a piece, best score first."""
    ids = {token: i for i, token in enumerate(tokens) if types[i] in (_NORMAL, _USER)}
    found = []
    for token, i in ids.items():
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in ids and right in ids:
                found.append((-float(scores[i]), ids[left], ids[right], left, right))
    return [[left, right] for *_, left, right in sorted(found)]


def _content(model: dict[str, Any], tokens: Sequence[str], types: np.ndarray) -> dict[str, Any]:
    """Return the vocabulary and the added tokens as in tokenizer.json.

    Added tokens at the end are not in the vocabulary of the model, as in published files: no text is encoded as one of
    them. Unused tokens behind the last used one only fill the embedding table, and are omitted.
    """
    is_added = (types == _CONTROL) | (types == _USER)
    last = len(tokens) - int(np.argmax((types != _UNUSED)[::-1])) if (types != _UNUSED).any() else 0
    plain = last - int(np.argmax(~is_added[:last][::-1])) if not is_added[:last].all() else 0
    options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "model": model | {"vocab": {token: i for i, token in enumerate(tokens[:plain])}},
        "added_tokens": [
            {"id": int(i), "content": tokens[i], "special": bool(types[i] == _CONTROL)} | options
            for i in np.flatnonzero(is_added[:last])
        ],
    }


def _around(flags: Sequence[bool], tokens: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the post-processor that adds the first and the last token of a text, if the flags say so."""
    names = [settings.get(f"{role}_token") if flag else None for role, flag in zip(("bos", "eos"), flags, strict=True)]
    if not any(names):
        return None

    def sequence(name: str, kind: int) -> list[dict[str, Any]]:
        inside = {"Sequence": {"id": name, "type_id": kind}}
        first, last = ([{"SpecialToken": {"id": token, "type_id": kind}}] if token else [] for token in names)
        return [*first, inside, *last]

    special = {name: {"id": name, "ids": [tokens.index(name)], "tokens": [name]} for name in names if name}
    pair = sequence("A", 0) + sequence("B", 1)
    return {"type": "TemplateProcessing", "single": sequence("A", 0), "pair": pair, "special_tokens": special}


def _settings(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """Return the content of tokenizer_config.json: names of special tokens, and the chat template."""
    settings: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    for role, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "mask": "mask"}.items():
        if (i := metadata.get(f"{PREFIX}{key}_token_id")) is not None:
            settings[f"{role}_token"] = tokens[_checked(f"{key}_token_id", i, tokens)]
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"tokenizer.chat_template must be a text, got {type(template).__name__}")
    return settings if template is None else settings | {"chat_template": template}


def _checked(key: str, i: object, tokens: Sequence[str]) -> int:
    if type(i) is not int or not 0 <= i < len(tokens):
        raise ValueError(f"{PREFIX}{key} must be an id from 0 to {len(tokens) - 1}, got {i!r:.40}")
    return i


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(f"{PREFIX}{key}", default)
    if type(value) is not bool:
        raise ValueError(f"{PREFIX}{key} must be true or false, got {value!r:.40}")
    return value


def _numbers(metadata: Mapping[str, Any], key: str, count: int, default: float | None) -> np.ndarray:
    """Return an array with one finite number per token."""
    value = metadata.get(f"{PREFIX}{key}")
    if value is None and default is not None:
        return np.full(count, default)
    if not isinstance(value, np.ndarray) or value.shape != (count,) or not np.isfinite(value).all():
        got = f"{len(value)} values" if isinstance(value, np.ndarray | list) else repr(value)[:40]
        raise ValueError(f"{PREFIX}{key} must be {count} finite numbers, one per token, got {got}")
    return value
