"""Tokenizers: round trips, special tokens without a spelling, saving and loading, and damaged files."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer.data import TokenizerConfig, load_tokenizer
from transformer.data.tokenizers._bpe import BPETokenizer
from transformer.data.tokenizers._kinds import build_tokenizer
from transformer.data.tokenizers._vocabularies import ByteTokenizer, CharTokenizer, WordTokenizer

TEXTS = ["to be or not to be", "that is the question", "¿qué pasa? <eos> el niño", "siebenhundertzweiundvierzig"] * 3
KINDS = ("char", "byte", "word", "bpe")


def make(kind: str, vocab_size: int | None = None, normalization: str = "none"):
    return build_tokenizer(TokenizerConfig(kind=kind, vocab_size=vocab_size), TEXTS, ["held out!"], normalization)


@pytest.fixture(scope="module")
def bpe():
    return make("bpe", 300)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_survive_a_round_trip_with_known_ids(kind):
    tokenizer = make(kind)
    assert (tokenizer.kind, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (kind, 0, 1, 2)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert len(tokenizer.tokens(ids)) == len(ids)
        assert all(3 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_a_text_stay_text(kind):
    tokenizer = build_tokenizer(TokenizerConfig(kind=kind), ["<pad> <bos> <eos> <unk> a"])
    text = "<eos> a <pad> <unk> <bos>"
    ids = tokenizer.encode(text)
    assert {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id}.isdisjoint(ids)
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.pad_id]) == text
    assert tokenizer.tokens([0, 1, 2]) == ["<pad>", "<bos>", "<eos>"]


@given(st.text())
@settings(max_examples=150, deadline=None)
def test_bytes_and_bpe_encode_every_text(bpe, text):
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text
    assert bpe.decode(bpe.encode(text)) == text


def test_a_closed_vocabulary_names_unknown_characters():
    with pytest.raises(ValueError, match=r"text.*'X'.*'я'"):
        make("char").encode("to я X be")
    with pytest.raises(ValueError, match=r"text.*'questoin'.*'question'\?"):
        make("word").encode("the questoin")
    with pytest.raises(ValueError, match="lone surrogate"):
        make("byte").encode("a\ud800")
    with pytest.raises(ValueError, match="lone surrogate"):
        make("bpe", 300).encode("a\ud800")
    assert make("char").decode(make("char").encode("held out!")) == "held out!", "held-out texts can be decoded, too"


def test_a_sized_vocabulary_of_words_has_an_unknown_word():
    tokenizer = make("word", 6)
    assert tokenizer.vocab_size == 6
    assert tokenizer.unk_id == 3
    assert tokenizer.encode("to be or not") == [5, 4, 3, 3]
    assert tokenizer.decode([5, 3, 4]) == "to be"
    assert tokenizer.tokens([3, 4]) == ["<unk>", "be"]


def test_words_that_become_the_unknown_token_are_found():
    tokenizer = make("word", 6)
    known = tokenizer.vocabulary[0]
    text = f"{known} xylophone {known} 😀 xylophone"
    assert tokenizer.unknown_parts(text) == ["xylophone", "😀", "xylophone"]
    assert tokenizer.encode(text).count(tokenizer.unk_id) == 3
    assert tokenizer.unknown_parts("") == []
    assert make("word").unknown_parts(text) == [], "encode raises an error instead"


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_the_byte_tokenizer_has_no_unknown_token(kind):
    assert make(kind, 280 if kind == "bpe" else None).unknown_parts("xylophone 😀\x00") == []


def test_bpe_learns_subwords_deterministically(bpe):
    assert bpe.vocab_size == 300
    assert len(bpe.encode("to be or not to be")) < len("to be or not to be") / 2
    assert bpe.state() == make("bpe", 300).state()
    assert "siebenhundertzwei" in bpe.decode(bpe.encode("siebenhundertzwei")), (
        "unseen words are composed of known parts"
    )


def test_labels_show_invisible_characters():
    tokenizer = build_tokenizer(TokenizerConfig(kind="char"), ["a b\nc"])
    assert tokenizer.tokens(tokenizer.encode("a b\nc")) == ["a", "␣", "b", "\\n", "c"]
    assert ByteTokenizer().tokens(ByteTokenizer().encode("a é")) == ["a", "␣", "c3", "a9"]
    bpe = build_tokenizer(TokenizerConfig(kind="bpe", vocab_size=265), ["be to be to be"])
    assert "␣be" in bpe.tokens(bpe.encode("to be"))


@pytest.mark.parametrize("kind", KINDS)
def test_rejects_ids_outside_the_vocabulary(kind):
    tokenizer = make(kind)
    for wrong in (tokenizer.vocab_size, -1):
        with pytest.raises(ValueError, match=rf"{wrong}.*1.*0"):
            tokenizer.decode([3, wrong])
        with pytest.raises(ValueError, match="outside the vocabulary"):
            tokenizer.tokens([wrong])


@pytest.mark.parametrize(("kind", "size"), [("char", None), ("byte", None), ("word", None), ("word", 9), ("bpe", 290)])
def test_a_saved_tokenizer_loads_unchanged(tmp_path, kind, size):
    tokenizer = make(kind, size, normalization="english_number_words")
    tokenizer.save(tmp_path / "tokenizer")
    loaded = load_tokenizer(tmp_path / "tokenizer")
    assert type(loaded) is type(tokenizer)
    assert loaded.state() == tokenizer.state()
    assert loaded.vocab_size == tokenizer.vocab_size
    assert loaded.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    assert loaded.normalize("Not to-be, and") == "not to be"
    assert loaded.encode_source("To-Be and") == tokenizer.encode("to be")
    assert [path.name for path in (tmp_path / "tokenizer").iterdir()] == ["tokenizer.json"]
    assert "\\u" not in (tmp_path / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"), "readable"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("char", {"format": 2}, "expected format 1, got 2"),
        ("char", {"kind": "chars"}, r"kind.*got 'chars'.*'char'\?"),
        ("char", {"vocabulary": "abc"}, "vocabulary must be a list of strings"),
        ("char", {"vocabulary": []}, "the vocabulary is empty"),
        ("char", {"vocabulary": ["a", "a"]}, "contains the token 'a' more than once"),
        ("char", {"vocabulary": [*"abcdefgabcdefg"]}, "the tokens 'a', 'b', 'c', 'd', 'e' and 2 more more than once"),
        ("char", {"vocabulary": ["ab"]}, "single characters, got 'ab'"),
        ("char", {"special_tokens": ["<pad>", "<bos>", "<eos>", "<unk>"]}, r"special_tokens"),
        ("char", {"normalization": "number_word"}, r"normalization.*'number_words'"),
        ("char", {"normalization": ["none"]}, "normalization must be a string"),
        ("word", {"vocabulary": ["a b"]}, "words without spaces, got 'a b'"),
        ("word", {"special_tokens": ["<eos>"]}, r"special_tokens"),
        ("bpe", {"vocabulary": ["a"], "merges": []}, "contain all 256 bytes"),
        ("bpe", {"merges": ["q zzz"]}, r"0.*'zzz'"),
        ("bpe", {"merges": ["a b c"]}, "merge 0 must have two parts"),
        ("bpe", {"merges": None}, "merges must be a list of strings"),
    ],
)
def test_a_broken_file_is_an_error_that_names_it(tmp_path, kind, change, message):
    make(kind, 280 if kind == "bpe" else None).save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8")
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(tmp_path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"format": 1'])
def test_rejects_a_file_that_is_not_a_tokenizer(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_reports_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokenizer in"):
        load_tokenizer(tmp_path)


def test_a_panic_of_the_library_is_an_ordinary_error(monkeypatch, bpe):
    """The library's PanicException derives from BaseException: `except Exception` would let it end the program."""
    import tokenizers

    class PanicException(BaseException):
        pass

    def panic(**_):
        raise PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr(tokenizers.models, "BPE", panic)
    with pytest.raises(ValueError, match="rejects these merges: called"):
        BPETokenizer(bpe.vocabulary, [])

    def interrupt(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizers.models, "BPE", interrupt)
    with pytest.raises(KeyboardInterrupt):
        BPETokenizer(bpe.vocabulary, [])


def test_rejects_empty_training_text():
    with pytest.raises(ValueError, match="the vocabulary is empty"):
        CharTokenizer([])
    with pytest.raises(ValueError, match="the vocabulary is empty"):
        WordTokenizer([])
