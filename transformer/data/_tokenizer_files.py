"""Tokenizers of this package as the `tokenizer.json` that other programs read."""

from __future__ import annotations

import json
from typing import Any

from transformer.data._bpe import BPETokenizer
from transformer.data._pretrained_tokenizer import PretrainedTokenizer
from transformer.data._tokenizer import TOKENIZER_FILE, Tokenizer
from transformer.data._vocabularies import ByteTokenizer, CharTokenizer, WordTokenizer


def as_pretrained(tokenizer: Tokenizer) -> PretrainedTokenizer:
    """The same tokenizer as one of the tokenizers library: the same ids for every text.

    Raises:
        ValueError: one whose normalization of prompts the library has no word for, or with a special token's name among
            its words.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    if isinstance(tokenizer, PretrainedTokenizer):
        return tokenizer
    if tokenizer.normalization != "none":
        raise ValueError(
            f"prompts are normalized by {tokenizer.normalization!r} before this tokenizer reads them, which a "
            f"{TOKENIZER_FILE} can't say."
        )
    special = tokenizer.special_tokens
    unknown = None if tokenizer.unk_id is None else special[tokenizer.unk_id]
    ids = {entry: len(special) + i for i, entry in enumerate(_entries(tokenizer))}
    if twice := [token for token in special if token in ids]:
        raise ValueError(
            f"its vocabulary has the word {twice[0]}, which is also the name of a special token: in a {TOKENIZER_FILE} "
            f"the word would become that token."
        )
    ids |= {token: i for i, token in enumerate(special)}
    before: Any
    after: Any
    match tokenizer:
        case BPETokenizer():
            model: Any = models.BPE(vocab=ids, merges=tokenizer.merges)
            before, after = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        case ByteTokenizer():
            model = models.BPE(vocab=ids, merges=[])
            before, after = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
        case CharTokenizer():
            model = models.WordLevel(ids, **({} if unknown is None else {"unk_token": unknown}))
            before, after = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
        case WordTokenizer():
            model = models.WordLevel(ids, **({} if unknown is None else {"unk_token": unknown}))
            before, after = pre_tokenizers.WhitespaceSplit(), None
        case _:
            raise ValueError(f"a tokenizer of the kind {tokenizer.kind!r} has no form in a {TOKENIZER_FILE}.")
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = before
    if after is not None:
        library.decoder = after
    library.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    names = {"pad_token": special[0], "bos_token": special[1], "eos_token": special[2], "unk_token": unknown}
    names |= {} if tokenizer.mask_id is None else {"mask_token": special[tokenizer.mask_id]}
    names |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    files = {TOKENIZER_FILE: library.to_str(), "tokenizer_config.json": json.dumps(names)}
    return PretrainedTokenizer({name: text.encode() for name, text in files.items()}, tokenizer.vocab_size)


def _entries(tokenizer: Tokenizer) -> list[str]:
    """The vocabulary in the order of its ids; bytes as the characters that the library writes them with."""
    if not isinstance(tokenizer, ByteTokenizer):
        return tokenizer.vocabulary
    # Radford et al. 2019 (GPT-2): printable bytes stand for themselves, the others for characters from 256 on.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
    return [characters[byte] for byte in range(256)]
