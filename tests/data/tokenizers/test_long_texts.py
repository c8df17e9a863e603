"""Texts that are much too long are refused after a part of them; texts that fit never are."""

import random

import pytest
from chat_parts import tokenizer as family_tokenizer

from transformer.data.tokenizers import _long_texts
from transformer.data.tokenizers._bpe import BPETokenizer
from transformer.data.tokenizers._export import as_pretrained
from transformer.data.tokenizers._long_texts import MOST_PART, TooManyTokensError, check_length
from transformer.data.tokenizers._pretrained import LONG_TEXT, encode_one
from transformer.data.tokenizers._vocabularies import ByteTokenizer

TOKENIZERS = {
    "byte": ByteTokenizer(),
    "bpe": BPETokenizer.train(["the quick brown fox " * 9 + " " * 99], 300),
    "library": family_tokenizer("smollm"),
}


class Counting:
    """A tokenizer that counts the characters that it encodes."""

    def __init__(self, tokenizer):
        self._tokenizer, self.characters = tokenizer, 0

    def encode_all(self, texts):
        self.characters += sum(map(len, texts))
        return self._tokenizer.encode_all(texts)


def drawn(rng):
    """A text of words, long runs of spaces and other characters."""
    parts = ["the quick brown fox ", " " * rng.randint(1, 300), "é漢", "x" * rng.randint(1, 200), "\n", "<|im_end|>"]
    return "".join(rng.choices(parts, k=rng.randint(1, 60)))


@pytest.fixture
def small_parts(monkeypatch):
    """Check texts from 1 character on, in parts of 500."""
    monkeypatch.setattr(_long_texts, "MOST_PART", 500)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_that_fits_is_never_refused(name):
    tokenizer, checked = TOKENIZERS[name], 0
    for seed in range(60):
        text = drawn(random.Random(seed)) + "x" * 501
        most = len(tokenizer.encode(text))
        counting = Counting(tokenizer)
        check_length(counting, [text], most)
        check_length(counting, [text], most, usual=0)
        check_length(counting, [text, text], 2 * most, usual=0)
        checked += counting.characters > 0
    assert checked == 60


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("begin", ["", " " * 5000])
def test_a_much_too_long_text_is_rejected_after_its_first_part(name, begin):
    counting, most = Counting(TOKENIZERS[name]), 100
    text = begin + "a quick fox " * 100_000
    with pytest.raises(TooManyTokensError, match=f"has {len(text)} characters and more than 100 tokens"):
        check_length(counting, [text], most)
    assert counting.characters < len(begin) + 3 * _long_texts.MOST_PART
    counting = Counting(TOKENIZERS[name])
    with pytest.raises(TooManyTokensError):
        check_length(counting, [text[:300]] * 1000, most)
    assert counting.characters < len(begin) + 3 * _long_texts.MOST_PART


def test_parts_have_a_bounded_length(monkeypatch):
    sizes = []
    monkeypatch.setattr(Counting, "encode_all", lambda self, texts: [sizes.extend(map(len, texts)) or []])
    check_length(Counting(None), ["a" * (20 * MOST_PART)], MOST_PART)
    assert sizes == [MOST_PART] * 20


class Library:
    """Records which of the two methods of the library is called."""

    def encode(self, given, add_special_tokens):
        return "with the lock"

    def encode_batch(self, given, add_special_tokens):
        return ["without the lock"]


def test_long_texts_are_encoded_without_the_global_lock():
    """The library holds Python's global lock in `encode`: a server would not answer any request for seconds."""
    assert encode_one(Library(), "a" * LONG_TEXT, special=False) == "without the lock"
    assert encode_one(Library(), "a", special=False) == "with the lock"


@pytest.mark.parametrize("special", [False, True])
def test_tokens_of_a_long_text_are_its_joined_parts(special):
    tokenizer = as_pretrained(TOKENIZERS["library"])
    line = "the quick é漢 fox <|im_end|>\n"
    text = line * (LONG_TEXT // len(line) + 1)
    encode = tokenizer.encode_source if special else tokenizer.encode
    short = tokenizer._library.encode(text, add_special_tokens=special)
    long = encode_one(tokenizer._library, text, special)
    assert (long.ids, long.offsets, long.special_tokens_mask) == (short.ids, short.offsets, short.special_tokens_mask)
    assert tokenizer.decode(encode(text)) == text
