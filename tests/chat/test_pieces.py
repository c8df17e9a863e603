"""Decoding in pieces: joined, the pieces are the text of all tokens, and no piece has to be taken back."""

import pytest
from chat_parts import library
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from library_tokenizers import byte_level, unigram, word_piece

from transformer.chat import Detokenizer, StopStrings
from transformer.config import ConfigError
from transformer.data import TokenizerConfig
from transformer.data.tokenizers._kinds import build_tokenizer
from transformer.data.tokenizers._pretrained import PretrainedTokenizer

TEXT = "to be or not to be: that is the question, ¿qué pasa, niño? 你好 🙂"
LIBRARIES = {
    "byte level": byte_level,
    "byte fallback": lambda: library("pieces", ["<s>", "</s>"]),
    "word pieces": word_piece,
    "unigram": unigram,
}
KINDS = ["char", "byte", "word", "bpe"]
QUIET = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


def build(name):
    if name in LIBRARIES:
        return PretrainedTokenizer({"tokenizer.json": LIBRARIES[name]().to_str().encode()})
    config = TokenizerConfig(kind=name, vocab_size=300) if name == "bpe" else TokenizerConfig(kind=name)
    return build_tokenizer(config, [TEXT], normalization="none", masked=False)


@pytest.mark.parametrize("name", [*LIBRARIES, *KINDS])
def test_joined_pieces_are_the_whole_text(name):
    """For random tokens, given one by one or several at once: half characters, invalid bytes, special tokens."""
    tokenizer = build(name)
    texts = [
        tokenizer.encode(part)
        for part in ("to be", "you 🙂", "你好", "é", "not")
        if name in ("bpe", "byte", *LIBRARIES)
    ]
    token = st.integers(0, tokenizer.vocab_size - 1)
    ids = st.lists(token.map(lambda i: [i]) | st.sampled_from(texts or [[0]]), max_size=12)

    @settings(max_examples=60, **QUIET)
    @given(ids)
    def check(parts):
        whole = tokenizer.decode([i for part in parts for i in part])
        pieces, got = Detokenizer(tokenizer), ""
        for part in parts:
            got += pieces.add(part)
            assert whole.startswith(got)  # so no piece has a replacement character that the text lacks
        assert got + pieces.finish() == whole

    check()


@pytest.mark.parametrize("name", ["byte level", "byte fallback", "unigram", "bpe", "char"])
def test_decodes_text_after_a_prompt(name):
    tokenizer = build(name)
    prompt = tokenizer.encode("to be ")
    ids = tokenizer.encode("or not to be" if name != "unigram" else "be a")
    pieces = Detokenizer(tokenizer, prompt)
    got = "".join(pieces.add([i]) for i in ids) + pieces.finish()
    assert tokenizer.decode(prompt) + got == tokenizer.decode([*prompt, *ids])


@pytest.mark.parametrize("name", ["byte level", "byte fallback", "byte"])
def test_text_after_an_incomplete_character_is_streamed_immediately(name):
    """Token ids can divide a character between the prompt and the text, whose first bytes are invalid then."""
    tokenizer = build(name)
    prompt, ids = tokenizer.encode("to 🙂"), tokenizer.encode("you are")
    pieces = Detokenizer(tokenizer, prompt[:-2])
    got = "".join(pieces.add([i]) for i in [*prompt[-2:], *ids])
    assert got.startswith("\ufffd\ufffd")
    assert got[2:].strip() == "you are"
    assert pieces.finish() == ""


def test_characters_arrive_as_soon_as_they_are_complete():
    tokenizer = build("byte")
    pieces = Detokenizer(tokenizer)
    assert [pieces.add([i]) for i in tokenizer.encode("a🙂é")] == ["a", "", "", "", "🙂", "", "é"]
    assert pieces.finish() == ""


def test_bytes_that_may_become_invalid_are_held_back():
    """A run of byte-fallback tokens is decoded as a whole: an invalid byte later changes the bytes before it."""
    tokenizer = build("byte fallback")
    run = tokenizer.encode("é🙂")
    pieces = Detokenizer(tokenizer)
    assert "".join(pieces.add([i]) for i in run).strip() == ""
    assert pieces.add(tokenizer.encode("you")).endswith("you")
    broken = Detokenizer(tokenizer)
    assert "".join(broken.add([i]) for i in [*run, run[-1]]).strip() == ""
    assert broken.finish() == tokenizer.decode([*run, run[-1]])


def test_the_time_per_token_does_not_grow():
    """Only the last tokens are decoded again."""
    tokenizer = build("byte level")
    longest, decode = [], tokenizer.decode
    tokenizer.decode = lambda ids: (longest.append(len(ids)), decode(ids))[1]
    pieces = Detokenizer(tokenizer)
    for i in tokenizer.encode(TEXT) * 20:
        pieces.add([i])
    assert max(longest) < 20


@settings(max_examples=200, **QUIET)
@given(st.lists(st.text("ab#", max_size=4), max_size=8), st.lists(st.text("ab#", min_size=1, max_size=3), max_size=3))
def test_stop_strings_end_a_stream(pieces, stop):
    """The text ends before the first complete stop string, for any ends of the pieces."""
    whole = "".join(pieces)
    begun = (whole[:end] for end in range(len(whole) + 1))
    starts = next((found for text in begun if (found := [text.find(one) for one in stop if one in text])), [])
    strings = StopStrings(stop)
    got = "".join(strings.add(piece) for piece in pieces)
    assert strings.stopped == bool(starts)
    assert got + strings.finish() == (whole[: min(starts)] if starts else whole)


@pytest.mark.parametrize("pieces", [["abc"], ["ab", "c"], ["a", "bc"], ["a", "b", "c"]])
def test_the_stop_string_that_completes_first_wins(pieces):
    """A step can generate several tokens (speculative decoding), and the text must stay the same."""
    strings = StopStrings(["abc", "b"])
    assert "".join(strings.add(piece) for piece in pieces) + strings.finish() == "a"


def test_text_that_cannot_become_a_stop_string_is_not_held_back():
    strings = StopStrings(["###", "\n\n"])
    assert [strings.add(piece) for piece in ("a#", "b\n", "c", "##", "#d", "e")] == ["a", "#b", "\nc", "", "", ""]


@pytest.mark.parametrize("stop", [[""], [3]])
def test_an_empty_stop_string_is_refused(stop):
    with pytest.raises(ConfigError, match="a stop string must be a text of at least one character"):
        StopStrings(stop)
