"""Export tokenizers of this package to the `tokenizer.json` of the tokenizers library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformer.data.tokenizers._base import SPECIAL_TOKENS, TOKENIZER_FILE, Tokenizer
from transformer.data.tokenizers._bpe import BPETokenizer
from transformer.data.tokenizers._byte_level import byte_level_characters
from transformer.data.tokenizers._pretrained import PretrainedTokenizer
from transformer.data.tokenizers._vocabularies import ByteTokenizer, CharTokenizer, WordTokenizer

if TYPE_CHECKING:
    import tokenizers

UNKNOWN = SPECIAL_TOKENS[3]


def as_pretrained(
    tokenizer: Tokenizer, markers: Sequence[str] = (), template: str | None = None
) -> PretrainedTokenizer:
    """Convert a tokenizer to one of the tokenizers library with the same ids for every text.

    `markers` are special tokens to add after all others, for a chat template. With markers or a template, a tokenizer
    of characters or words also gets an unknown token: people write to the model what its data does not contain. Raises
    ValueError if the library has no equivalent, or a word of the vocabulary is the name of a special token.
    """
    import tokenizers

    if isinstance(tokenizer, PretrainedTokenizer):
        return tokenizer
    if tokenizer.normalization != "none":
        raise ValueError(
            f"this tokenizer normalizes prompts with {tokenizer.normalization!r}, which {TOKENIZER_FILE} can't "
            "represent."
        )
    settings = _settings(tokenizer)
    chats = bool(markers) or template is not None
    if chats and settings["unk_token"] is None and not isinstance(tokenizer, BPETokenizer | ByteTokenizer):
        settings["unk_token"] = UNKNOWN
        markers = [UNKNOWN, *markers]
    if template is not None:
        settings["chat_template"] = template
    special = [*tokenizer.special_tokens, *markers]
    library = _pipeline(tokenizer, _ids(tokenizer, markers), settings["unk_token"])
    library.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    files = {TOKENIZER_FILE: library.to_str(), "tokenizer_config.json": json.dumps(settings)}
    size = tokenizer.vocab_size + len(markers)
    return PretrainedTokenizer({name: text.encode() for name, text in files.items()}, size)


def _ids(tokenizer: Tokenizer, markers: Sequence[str]) -> dict[str, int]:
    """Return the ids of all vocabulary entries and special tokens. Raises ValueError if an entry is the name of one."""
    special = tokenizer.special_tokens
    # Bytes are represented by characters, as in the library.
    entries = byte_level_characters() if isinstance(tokenizer, ByteTokenizer) else tokenizer.vocabulary
    ids = {entry: len(special) + i for i, entry in enumerate(entries)}
    if twice := [token for token in (*special, *markers) if token in ids]:
        raise ValueError(
            f"the vocabulary has the word {twice[0]}, which is also the name of a special token: in {TOKENIZER_FILE}, "
            f"the word would become that token."
        )
    ids |= {token: i for i, token in enumerate(special)}
    return ids | {token: tokenizer.vocab_size + i for i, token in enumerate(markers)}


def _pipeline(tokenizer: Tokenizer, ids: dict[str, int], unknown_token: str | None) -> tokenizers.Tokenizer:
    """Return a pipeline of the library (model, pre-tokenizer and decoder) that is equivalent to `tokenizer`."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    unknown = {} if unknown_token is None else {"unk_token": unknown_token}
    model: models.Model
    before: pre_tokenizers.PreTokenizer
    after: decoders.Decoder | None
    match tokenizer:
        case BPETokenizer():
            model = models.BPE(vocab=ids, merges=tokenizer.merges)
            before, after = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        case ByteTokenizer():
            # Without merges, each byte remains one token; without the regex, text is not split into words before.
            model = models.BPE(vocab=ids, merges=[])
            before, after = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
        case CharTokenizer():
            model = models.WordLevel(ids, **unknown)
            before, after = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
        case WordTokenizer():
            model = models.WordLevel(ids, **unknown)
            before, after = pre_tokenizers.WhitespaceSplit(), None
        case _:
            raise ValueError(f"{TOKENIZER_FILE} can't represent a tokenizer of the kind {tokenizer.kind!r}.")
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = before
    if after is not None:
        library.decoder = after
    return library


def _settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of tokenizer_config.json: the special token of each role."""
    special = tokenizer.special_tokens
    unknown = None if tokenizer.unk_id is None else special[tokenizer.unk_id]
    names = {"pad_token": special[0], "bos_token": special[1], "eos_token": special[2], "unk_token": unknown}
    names |= {} if tokenizer.mask_id is None else {"mask_token": special[tokenizer.mask_id]}
    return names | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
