"""Tokenizers of pretrained models: same ids as the library, no special tokens from user text, and damaged files."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from library_tokenizers import BERT, GPT, T5, byte_level, changed, save, unigram, word_piece
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from transformer.data.tokenizers._library_errors import held_stderr
from transformer.data.tokenizers._pretrained import PretrainedTokenizer, load_pretrained_tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, PretrainedTokenizer]:
    base = tmp_path_factory.mktemp("made")
    return {
        "gpt": load_pretrained_tokenizer(save(base / "gpt", byte_level(), **GPT)),
        "bert": load_pretrained_tokenizer(save(base / "bert", word_piece(), **BERT)),
        "t5": load_pretrained_tokenizer(save(base / "t5", unigram(), **T5)),
    }


def test_special_tokens_are_read_from_every_file(made):
    gpt, bert, t5 = made["gpt"], made["bert"], made["t5"]
    assert (gpt.eos_id, gpt.eos_ids, gpt.bos_id, gpt.pad_id, gpt.mask_id) == (0, (0,), None, 0, None)
    assert (bert.pad_id, bert.unk_id, bert.mask_id, bert.eos_id, bert.eos_ids) == (0, 1, 4, None, ())
    assert (t5.pad_id, t5.eos_id, t5.unk_id, t5.vocab_size) == (0, 1, 2, 9)
    assert bert.special_tokens == ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def test_several_tokens_may_end_a_text(tmp_path):
    both = save(tmp_path, byte_level(), generation_config={"eos_token_id": [7, 0], "bos_token_id": 5}, **GPT)
    tokenizer = load_pretrained_tokenizer(both)
    assert (tokenizer.eos_ids, tokenizer.eos_id) == ((7, 0), 7)
    assert tokenizer.bos_id is None, "null in tokenizer_config.json: there is no begin token"


@pytest.mark.parametrize(("kind", "make"), [("gpt", byte_level), ("bert", word_piece), ("t5", unigram)])
def test_ids_equal_the_library(made, kind, make):
    library = make()
    library.no_truncation()
    library.no_padding()
    for text in ("to be not", "a be  a", ""):
        assert made[kind].encode(text) == library.encode(text, add_special_tokens=False).ids
        one, two = library.encode(text), library.encode(text, "to be")
        assert made[kind].encode_model(text) == (one.ids, one.type_ids)
        assert made[kind].encode_model(text, "to be") == (two.ids, two.type_ids)
        assert made[kind].encode_source(text) == one.ids, "with the special tokens used in training"
        assert made[kind].decode(two.ids) == library.decode(two.ids)


def test_special_tokens_and_types_are_added_for_the_model(made):
    assert made["bert"].encode_model("to be", "not") == ([2, 5, 6, 3, 7, 3], [0, 0, 0, 0, 1, 1])
    assert made["bert"].decode([2, 5, 6, 3, 0]) == "to be"
    assert made["t5"].encode_model("a") == ([3, 4, 1], [0, 0, 0])


@pytest.mark.parametrize(
    ("kind", "reserved", "text", "back"),
    [
        ("gpt", {0}, "<eos>", "<eos>"),
        ("gpt", {0}, "to <eos> be<eos><think>", "to <eos> be<eos><think>"),
        ("gpt", {0}, "to <mask>", "to <mask>"),
        ("bert", {0, 2, 3, 4}, "to [CLS] be", "to [ ] be"),
        ("t5", {0, 1}, "a</s>", "a</s"),  # ">" is not in its vocabulary
        ("t5", {0, 1}, "<pad></s>", "<a</s"),
    ],
)
def test_text_never_becomes_a_special_token(made, kind, reserved, text, back):
    """This holds even if the vocabulary of the model contains the name, where the option of the library has no
    effect.
    """
    ids = made[kind].encode(text)
    assert ids
    assert reserved.isdisjoint(ids)
    assert made[kind].decode(ids) == back
    assert made[kind].encode_all([text, "a", text]) == [ids, made[kind].encode("a"), ids]
    added, types = made[kind].encode_model(text)
    assert added == {"gpt": ids, "bert": [2, *ids, 3], "t5": [*ids, 1]}[kind]
    assert len(added) == len(types)


@pytest.mark.parametrize(("kind", "make"), [("gpt", byte_level), ("bert", word_piece), ("t5", unigram)])
def test_special_tokens_of_a_prompt_are_tokens(made, kind, make):
    """As the library encodes them, unless the caller switches this off; other texts are never parsed."""
    library, tokenizer = make(), made[kind]
    library.no_truncation()
    library.no_padding()
    for text in ("to <eos> be<eos><think>", "[CLS] to be [SEP]not", "a</s> be", "to <mask>", "a", ""):
        for added in (True, False):
            parsed = tokenizer.encode_prompt(text, add_special_tokens=added)
            assert parsed == library.encode(text, add_special_tokens=added).ids
            unparsed = tokenizer.encode_prompt(text, add_special_tokens=added, parse_special=False)
            assert unparsed == (tokenizer.encode_source(text) if added else tokenizer.encode(text))
    assert tokenizer.encode_prompt("<eos>[CLS]</s>") != tokenizer.encode_source("<eos>[CLS]</s>")
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode_prompt("\ud800")


@given(st.text())
@settings(max_examples=100, deadline=None)
def test_every_text_survives_a_round_trip(made, text):
    assert made["gpt"].decode(made["gpt"].encode(text)) == text


@pytest.mark.parametrize("name", ["<end>", "$"])
def test_reports_a_token_that_cannot_be_encoded(tmp_path, name):
    library = Library(models.WordLevel({"a": 0, name: 1}, unk_token=name))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = load_pretrained_tokenizer(save(tmp_path, library, tokenizer_config={"eos_token": name}))
    with pytest.raises(ValueError, match=r"text.*'.*'") as caught:
        tokenizer.encode(f"a {name}")
    assert repr(name) in str(caught.value)


def test_labels_for_pictures_show_invisible_characters(made):
    gpt = made["gpt"]
    assert "".join(gpt.tokens(gpt.encode("to be\n"))) == "to␣be\\n"
    assert gpt.tokens([0]) == ["<eos>"]
    assert made["t5"].tokens([5, 1]) == ["␣be", "</s>"]
    assert made["bert"].tokens([2, 8]) == ["[CLS]", "##t"]


def test_reports_vocabulary_rows_without_a_token(tmp_path):
    """Embedding tables are often padded to a round number of rows."""
    tokenizer = load_pretrained_tokenizer(save(tmp_path, unigram(), **T5), vocab_size=16)
    assert tokenizer.vocab_size == 16
    assert tokenizer.decode([4, 15, 4]) == "aa"
    assert tokenizer.tokens([15]) == ["<id 15>"]
    with pytest.raises(ValueError, match="token id 16 at position 1 is outside the vocabulary"):
        tokenizer.decode([4, 16])
    with pytest.raises(ValueError, match=r"gives 's' the id 8: expected ids below 8, the number of embeddings"):
        load_pretrained_tokenizer(tmp_path, vocab_size=8)


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_a_saved_tokenizer_loads_unchanged(made, kind, tmp_path):
    made[kind].save(tmp_path / "copy")
    again = load_pretrained_tokenizer(tmp_path / "copy")
    assert again.state() == made[kind].state()
    assert json.loads(json.dumps(again.state())) == again.state()
    assert again.encode("to be") == made[kind].encode("to be")
    assert again.state() != made["t5"].state()


def model(**parts: object) -> str:
    return json.dumps({"version": "1.0", "model": parts})


OUTSIDE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "x", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"x": {"id": "x", "ids": [999], "tokens": ["x"]}},
}
BROKEN = {
    "cut": (unigram().to_str()[:200], "is not a valid tokenizer: EOF"),
    "empty": ("", "is not a valid tokenizer"),
    "list": ("[]", "is not a valid tokenizer: invalid type"),
    "deep": ("[" * 100_000, "is not a valid tokenizer"),
    "merge": (model(type="BPE", vocab={"a": 0}, merges=[["a", "b"]]), "is not a valid tokenizer: Token `b` out"),
    "minus": (model(type="BPE", vocab={"a": -1}, merges=[]), "is not a valid tokenizer: invalid value: integer `-1`"),
    "words": (model(type="BPE", vocab=["a"], merges="a"), "is not a valid tokenizer"),
    "kind": (model(type="Pickle", vocab={}), "is not a valid tokenizer"),
    "none": (
        model(type="WordPiece", vocab={}, unk_token="x", continuing_subword_prefix="", max_input_chars_per_word=9),
        "has no tokens",
    ),
    "regex": (
        changed(
            unigram(),
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
        ),
        "not a valid t",
    ),
    "template": (changed(unigram(), post_processor=OUTSIDE), "post_processor that adds the id 999, which has no token"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_reports_a_broken_file(tmp_path, case):
    text, message = BROKEN[case]
    with pytest.raises(ValueError, match=message) as caught:
        load_pretrained_tokenizer(save(tmp_path, text))
    assert "tokenizer.json" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "Download the file again" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config", "{", r"tokenizer_config\.json.*JSON"),
        ("special_tokens_map", "[]", r"special_tokens_map\.json.*JSON"),
        ("config", "[" * 100_000, r"config\.json.*JSON"),
        (
            "tokenizer_config",
            {"bos_token": "<bos>"},
            r"tokenizer_config\.json.*'<bos>'.*bos_token",
        ),
        ("tokenizer_config", {"eos_token": {"content": [1]}}, r"\[1\].*eos_token"),
        ("generation_config", {"eos_token_id": [1, 9]}, r"9.*eos_token_id.*0.*8"),
        ("config", {"pad_token_id": -1}, r"config\.json.*-1.*pad_token_id"),
        ("config", {"eos_token_id": True}, r"config\.json.*eos_token_id"),
    ],
)
def test_reports_a_broken_companion_file(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message):
        load_pretrained_tokenizer(save(tmp_path, unigram(), **{name: content}))


def with_ids(vocabulary: dict[str, int], *added: tuple[str, int]) -> str:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    entries = [{"content": token, "id": i, "special": True} | flags for token, i in added]
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}
    return json.dumps({"version": "1.0", "model": model, "added_tokens": entries})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (with_ids({"a": 0, "b": 1, "c": 1}), "its own id, but id 1 is 'b' and 'c'. Download"),
        (
            with_ids({"a": 0} | {f"{kind}{i}": i for i in range(1, 8) for kind in "xy"}),
            "but id 1 is 'x1' and 'y1', 2 is .*, 5 is 'x5' and 'y5' and 2 more. Download",
        ),
        (with_ids({"a": 0, "b": 1}, ("<x>", 1)), "id 1 is 'b' and '<x>'"),
        (with_ids({"a": 0, "b": 1}, ("<x>", 2), ("<y>", 2)), "id 2 is '<x>' and '<y>'"),
        (with_ids({"a": 0, "b": 1}, ("<x>", 7)), r"so the library changes them: '<x>' \(7, read as 2\). Download"),
        (with_ids({"a": 0, "b": 1}, ("a", 2)), r"'a' \(2, read as 0\)"),
        (
            '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "a": 1}, "unk_token": "a"}}',
            "duplicate key 'a'",
        ),
    ],
)
def test_rejects_ids_that_do_not_match_one_token_each(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        load_pretrained_tokenizer(save(tmp_path, text))


def test_an_added_token_may_be_in_the_vocabulary(tmp_path):
    tokenizer = load_pretrained_tokenizer(save(tmp_path, with_ids({"a": 0, "<x>": 1}, ("<x>", 1), ("<y>", 2))))
    assert tokenizer.vocab_size == 3


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("gpt", "año 😀 \x00", []),
        ("bert", "to niño be 😀\x00\u200d not", ["niño", "😀"]),
        ("bert", "to be", []),
        ("t5", "a bexa 😀 be", ["x", "😀"]),
    ],
)
def test_text_that_becomes_unknown_tokens_is_found(made, kind, text, expected):
    assert made[kind].unknown_parts(text) == expected


def test_dropped_characters_are_found(tmp_path):
    """BPE without an unknown token omits characters that are not in the vocabulary."""
    library = Library(models.BPE({"a": 0, "b": 1}, []))
    tokenizer = load_pretrained_tokenizer(save(tmp_path, library))
    assert tokenizer.encode("abcéb c") == [0, 1, 1]
    assert tokenizer.unknown_parts("abcéb c") == ["c", "é", "c"]


@pytest.mark.filterwarnings("ignore")
def test_a_hostile_pattern_ends_in_an_error(tmp_path, capfd):
    """The regex engine stops at a maximum number of steps, with a panic that is not an Exception."""
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    tokenizer = load_pretrained_tokenizer(save(tmp_path, changed(unigram(), pre_tokenizer=split)))
    for encode in (tokenizer.encode, tokenizer.encode_model):
        with pytest.raises(ValueError, match=r"the tokenizers library failed on this text: .*retry-limit.* Shorten it"):
            encode("x" * 30)
        with pytest.raises(ValueError, match="failed on this text"):
            tokenizer.unknown_parts("x" * 30)
    assert capfd.readouterr() == ("", ""), "the output of the panic must be discarded"
    assert tokenizer.encode("a") == [4], "the tokenizer must still work"
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode("a\ud800")


def test_only_output_printed_with_an_error_is_dropped(capfd):
    with held_stderr():
        os.write(2, b"native warning\n")
    assert capfd.readouterr().err == "native warning\n"
    with pytest.raises(TypeError), held_stderr():
        [os.write(2, b"native panic\n"), *None]
    assert capfd.readouterr().err == ""


PANIC = b"\nthread '<unnamed>' (12) panicked at src/lib.rs:1:2:\nthe text\nof a prompt\n"


@pytest.mark.parametrize("end", [b"", b"note: run with `RUST_BACKTRACE=1` for a backtrace\n"])
def test_threads_share_the_buffer_and_only_the_panic_is_dropped(capfd, end):
    """Blocks of two threads overlap; in one of them the library panics, while a third one prints a traceback."""
    inside, failed = threading.Barrier(2, timeout=20), threading.Event()

    def panic():
        with held_stderr():
            inside.wait()
            os.write(2, PANIC + end)
            raise TypeError

    def fail():
        with pytest.raises(TypeError):
            panic()
        failed.set()

    def succeed():
        with held_stderr():
            inside.wait()
            assert failed.wait(20)
            os.write(2, b"traceback\n")

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(fail), pool.submit(succeed)]:
            done.result()
    expected = "traceback\n" if end else ""  # without its last line, the report has no visible end
    assert capfd.readouterr().err == expected
    os.write(2, b"later\n")
    assert capfd.readouterr().err == "later\n"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [30, 3000])
def test_the_panic_in_a_thread_prints_nothing(tmp_path, capfd, size):
    """As in the threads of a server; long texts are encoded in the threads of the library."""
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    tokenizer = load_pretrained_tokenizer(save(tmp_path, changed(unigram(), pre_tokenizer=split)))
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(tokenizer.encode, "x" * size) for _ in range(4)]:
            with pytest.raises(ValueError, match=r"retry-limit"):
                done.result()
    assert capfd.readouterr() == ("", "")


def test_a_missing_tokenizer_file_explains_how_to_create_it(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json.*AutoTokenizer\.from_pretrained\("):
        load_pretrained_tokenizer(tmp_path)
    (tmp_path / "vocab.json").touch()
    with pytest.raises(FileNotFoundError, match=r"vocab\.json"):
        load_pretrained_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_pretrained_tokenizer(tmp_path)
    monkeypatch.setattr("transformer.data.tokenizers._pretrained.MAX_JSON_BYTES", 20)
    with pytest.raises(ValueError, match="at most 20 bytes"):
        load_pretrained_tokenizer(save(tmp_path / "large", unigram()))
