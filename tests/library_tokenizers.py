"""Small tokenizers built with the tokenizers library, of the same kinds as those of published models."""

import json

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

TEXTS = ["to be or not to be", "that is the question", "¿qué pasa? el niño <eos>", "[CLS] </s>"] * 3


def byte_level() -> Library:
    """Byte-level BPE like GPT-2 and Llama 3, with an end token; whole words are looked up before merges are applied."""
    library = Library(models.BPE(ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False),
    )
    library.post_processor = processors.ByteLevel()
    library.add_tokens(["<think>"])
    library.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    library.enable_truncation(3)
    library.enable_padding(length=5)
    return library


def word_piece() -> Library:
    """WordPiece like BERT."""
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "to",
        "be",
        "not",
        "##t",
        "##s",
        "n",
        "[",
        "]",
        "c",
        "l",
        "s",
    ]
    library = Library(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=False)
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.decoder = decoders.WordPiece()
    library.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    library.add_special_tokens(words[:5])
    return library


def unigram() -> Library:
    """Unigram like T5: the special tokens are also pieces of the model."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", "a", "▁be", "<", "/", "s"]
    library = Library(models.Unigram([(piece, -float(i > 2)) for i, piece in enumerate(pieces)], unk_id=2))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B:1 </s>:1", special_tokens=[("</s>", 1)]
    )
    library.add_special_tokens(pieces[:3])
    return library


def save(directory, library: Library | str, **others: object):
    directory.mkdir(exist_ok=True)
    text = library if isinstance(library, str) else library.to_str()
    (directory / "tokenizer.json").write_text(text)
    for name, content in others.items():
        (directory / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


GPT = {"tokenizer_config": {"eos_token": {"content": "<eos>"}, "unk_token": "<eos>", "bos_token": None}}


BERT = {
    "tokenizer_config": {"unk_token": "[UNK]", "mask_token": "[MASK]"},
    "special_tokens_map": {"pad_token": "[PAD]"},
}


T5 = {"config": {"eos_token_id": 1, "pad_token_id": 0}}


def changed(library: Library, **parts: object) -> str:
    return json.dumps(json.loads(library.to_str()) | parts)
