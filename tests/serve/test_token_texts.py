"""Bytes, names and offsets of generated tokens are those of the text, for each kind of tokenizer."""

import itertools

import pytest
import tokenizers
from chat_parts import library
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from library_tokenizers import byte_level, unigram, word_piece
from serve_parts import scripted_service
from starlette.testclient import TestClient
from tokenizers import decoders, models, normalizers

from transformer.chat import Detokenizer
from transformer.data import TokenizerConfig
from transformer.data.tokenizers._kinds import build_tokenizer
from transformer.data.tokenizers._pretrained import PretrainedTokenizer
from transformer.serve._answers import Answer
from transformer.serve._requests import Delta, Token
from transformer.serve._token_texts import TokenTexts

TEXT = "to be or not to be: that is the question, ¿qué pasa, niño? 你好 🙂"
QUIET = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


def punctuated_words():
    """WordPiece with pieces whose spaces its decoder removes."""
    made = word_piece()
    made.add_tokens(["n't", "'s", ".", ",", "?", "##.", "##é", "你", "do not", "##"])
    return made


def byte_pieces():
    """SentencePiece with byte fallback, whose byte 0x20 is a space, and added tokens."""
    made = library("pieces", ["<s>", "</s>"])
    made.add_tokens(["<think>", "a b", "▁▁", " é"])
    return made


def byte_words():
    """A byte-level tokenizer whose decoder is a sequence, with added tokens whose spelling is unchanged."""
    made = byte_level()
    made.add_tokens(["<｜a b｜>", "x y", "é", "<0x41>"])
    made.decoder = decoders.Sequence([decoders.ByteLevel()])
    return made


LIBRARIES = {
    "byte level": byte_level,
    "byte level in a sequence": byte_words,
    "byte fallback": byte_pieces,
    "word pieces": word_piece,
    "word pieces with punctuation": punctuated_words,
    "unigram": unigram,
}
KINDS = ["char", "byte", "word", "bpe"]


def build(name):
    if name in LIBRARIES:
        return PretrainedTokenizer({"tokenizer.json": LIBRARIES[name]().to_str().encode()})
    config = TokenizerConfig(kind=name, vocab_size=300) if name == "bpe" else TokenizerConfig(kind=name)
    return build_tokenizer(config, [TEXT], normalization="none", masked=False)


def text_of(tokenizer, prompt, ids):
    pieces = Detokenizer(tokenizer, prompt)
    return pieces.add(ids) + pieces.finish()


@pytest.mark.parametrize("name", [*LIBRARIES, *KINDS])
def test_joined_token_bytes_equal_the_text(name):
    """For random tokens after random prompts: half characters, invalid bytes, special tokens, spaces at the start."""
    tokenizer = build(name)
    whole = ["to be", "you 🙂", "你好", "é", "not", " ", "\n"] if name in ("bpe", "byte", *LIBRARIES) else []
    texts = st.sampled_from([tokenizer.encode(text) for text in whole] or [[]])
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1).map(lambda i: [i]) | texts, max_size=10).map(
        lambda parts: list(itertools.chain(*parts))
    )
    has_runs = name == "byte fallback"  # if one is invalid, each byte of it is a replacement character

    @settings(max_examples=150, **QUIET)
    @given(texts, ids)
    def check(prompt, tokens):
        found, parts, offsets = TokenTexts(tokenizer, prompt), [], []
        for token in tokens:
            offsets.append(found.offset)
            parts.append(found.bytes_of(token))
            found.add(token)
        text, joined = text_of(tokenizer, prompt, tokens), b"".join(parts)
        broken = "\ufffd" in text
        assert joined.decode("utf-8", "replace") == text or (broken and has_runs)
        assert offsets == sorted(offsets)
        for place, offset in enumerate(offsets):
            before = text_of(tokenizer, prompt, tokens[:place])
            if not before.endswith("\ufffd") and not (broken and has_runs and prompt):
                assert offset == len(before)
            assert offset <= len(text)

    check()


def test_offsets_handle_invalid_bytes():
    """A run of byte-fallback tokens that is not valid UTF-8 has one replacement character per byte."""
    tokenizer = build("byte fallback")
    run = [tokenizer.encode("é")[-2], *tokenizer.encode("🙂")[-4:-1]]
    found = TokenTexts(tokenizer)
    for token in [*run, *(word := tokenizer.encode("He"))]:
        found.add(token)
    assert found.offset == len(tokenizer.decode([*run, *word])) == len(run) + 3


def test_token_names_show_their_text():
    """A part of a character has a name by its bytes, a special token its own, and spaces are spaces."""
    tokenizer = build("byte fallback")
    found = TokenTexts(tokenizer)
    space, high = (tokenizer.encode(text)[-1] for text in (" ", "é"))
    special = next(i for i in tokenizer.special_ids if tokenizer.tokens([i]) == ["</s>"])
    assert [found.name_of(i, "bytes:") for i in (space, high, special)] == ["", r"bytes:\xa9", "</s>"]
    found.add(tokenizer.encode("He")[-1])
    assert [found.name_of(i) for i in (space, high, special)] == [" ", r"\xa9", "</s>"]
    assert [found.bytes_of(i) for i in (space, high, special)] == [b" ", b"\xa9", b""]


def colliding():
    """Tokens of which two have the same text at the beginning: the decoder drops a space there."""
    names = ["<unk>", "▁true", "true", "▁", "other"]
    made = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PretrainedTokenizer({"tokenizer.json": made.to_str().encode()})


@pytest.mark.parametrize("context", [(), (4,)])
def test_tokens_with_equal_text_do_not_hide_the_generated_one(context):
    tokenizer = colliding()
    tokens = [Token(2, -3.0, [(1, -0.1), (4, -3.5)]), Token(4, -2.0, [(1, -0.5), (2, -0.7)])]
    answer = Answer("m", tokenizer, is_chat=False, prompts=[1], n=1, top=3, contexts=[context])
    answer.choices[0].add(Delta("trueother", tokens, finish="stop"))
    found = answer.whole()["choices"][0]["logprobs"]
    first = {" true": -0.1} if context else {}
    assert found["top_logprobs"] == [
        {"true": -3.0, "other": -3.5} | first,
        {"other": -2.0, " true": -0.5, "true": -0.7},
    ]
    assert found["token_logprobs"] == [-3.0, -2.0]
    assert found["tokens"] == ["true", "other"]
    assert found["text_offset"] == [0, 4]


def test_the_more_probable_of_equal_texts_is_shown():
    tokens = [Token(4, -2.0, [(1, -0.5), (2, -0.7)])]
    answer = Answer("m", colliding(), is_chat=False, prompts=[1], n=1, top=2)
    answer.choices[0].add(Delta("other", tokens, finish="stop"))
    assert answer.whole()["choices"][0]["logprobs"]["top_logprobs"] == [{"other": -2.0, "true": -0.5}]


@pytest.mark.parametrize("is_chat", [False, True])
def test_stream_chunks_describe_tokens_like_the_whole_answer(is_chat):
    """Of several texts at once, whose tokens arrive in parts that divide characters."""
    tokenizer = build("byte fallback")
    rows = [tokenizer.encode("He é🙂"), tokenizer.encode("🙂 w")]
    tokens = [[Token(i, -0.5, [(i, -0.5), (i - 1, -1.0)]) for i in row] for row in rows]

    def answer():
        return Answer("m", tokenizer, is_chat=is_chat, prompts=[1], n=2, top=2, contexts=() if is_chat else [[5]])

    whole, streamed = answer(), answer()
    found = [{} for _ in rows]
    for number, row in enumerate(tokens):
        whole.choices[number].add(Delta("", row, finish="stop"))
    for place in range(0, max(map(len, rows)), 3):
        for number, row in enumerate(tokens):
            part = streamed.part(number, Delta("", row[place : place + 3]))["choices"][0]["logprobs"]
            for name, values in part.items():
                found[number].setdefault(name, []).extend(values)
    assert found == [choice["logprobs"] for choice in whole.whole()["choices"]]


@pytest.mark.parametrize("name", ["byte level", "byte fallback", "word pieces"])
def test_joined_token_names_equal_the_completion(name):
    """Each text continues its own prompt: after one of a special token alone, the first word has no space before it."""
    tokenizer = build(name)
    texts = [tokenizer.encode(text) for text in ("to be", "not", "be", "to")]
    client = TestClient(scripted_service(tokenizer, texts)[0].application(), base_url="http://localhost")
    body = {
        "prompt": [[min(tokenizer.special_ids)], tokenizer.encode("not to be")],
        "n": 2,
        "logprobs": 1,
        "max_tokens": 9,
    }
    choices = client.post("/v1/completions", json=body).json()["choices"]
    assert len(choices) == len(texts)
    for number, (ids, choice) in enumerate(zip(texts, choices, strict=True)):
        found = choice["logprobs"]
        assert "".join(found["tokens"]) == choice["text"]
        assert choice["text"].startswith(" ") == (name != "byte level" and number >= 2)
        assert found["text_offset"] == [len("".join(found["tokens"][:place])) for place in range(len(ids))]
        assert [top[token] for top, token in zip(found["top_logprobs"], found["tokens"], strict=True)] == [
            -float(place) for place in range(len(ids))
        ]
