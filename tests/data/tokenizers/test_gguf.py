"""Tokenizers in the metadata of GGUF files: the same ids as those from which they were made, and damaged metadata."""

import itertools
import json
import random

import numpy as np
import pytest
from gguf_parts import gguf
from library_tokenizers import TEXTS, byte_level
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Library

from transformer.data.tokenizers._gguf import UnsupportedTokenizer, tokenizer_files
from transformer.data.tokenizers._pretrained import PretrainedTokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
WORDS = ["to be or not to be", "¿qué pasa? el niño", "a  b\n\nc\t1234567 x's", "<|end|> and <tag>", "日本 🙂", ""]


def metadata_of(library, pre="llama-bpe", **more):
    """Return the metadata for a byte-level tokenizer of the library, with control, user-defined and unused tokens."""
    state = json.loads(library.to_str())
    ids = library.get_vocab(with_added_tokens=True)
    special = {entry["content"]: entry["special"] for entry in state["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    types = [NORMAL if token not in special else CONTROL if special[token] else USER for token in tokens]
    merges = [" ".join(merge) for merge in state["model"]["merges"]]
    found = {"model": "gpt2", "pre": pre, "tokens": [*tokens, "[PAD0]"], "merges": merges}
    found["token_type"] = np.array([*types, UNUSED], np.int32)
    return {f"tokenizer.ggml.{key}": value for key, value in (found | more).items()}


def tokenizer_of(metadata):
    return PretrainedTokenizer(tokenizer_files(metadata))


def trained():
    library = byte_level()
    library.add_special_tokens([AddedToken("<|end|>"), AddedToken("<|begin|>")])
    library.add_tokens(["<tag>"])
    return library


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_byte_level_tokens_equal_the_library(pre):
    """Division of texts as in the published files of these models: GPT-2, Llama 3, Qwen 2, SmolLM."""
    library = trained()
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        library.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    ids = library.get_vocab(with_added_tokens=True)
    found = tokenizer_of(metadata_of(library, pre, bos_token_id=ids["<|begin|>"], eos_token_id=ids["<|end|>"]))
    assert (found.bos_id, found.eos_id, found.vocab_size) == (ids["<|begin|>"], ids["<|end|>"], len(ids))
    library.no_truncation()
    library.no_padding()
    for text in (*WORDS, *TEXTS):
        assert found.decode(found.encode(text)) == text
        if pre in ("gpt-2", "smollm") and "<" not in text:
            library.encode_special_tokens = True
            assert found.encode(text) == library.encode(text, add_special_tokens=False).ids
    assert ids["<|end|>"] not in found.encode("<|end|>")
    begin = [ids["<|begin|>"]] if pre == "llama-bpe" else []
    assert found.encode_model("to") == (begin + found.encode("to"), [0] * (len(begin) + len(found.encode("to"))))


@pytest.mark.parametrize(("pre", "pieces"), [("llama-bpe", ["123", "456", "7"]), ("qwen2", list("1234567"))])
def test_digits_are_split_as_in_each_family(pre, pieces):
    content = tokenizer_files(metadata_of(trained(), pre))["tokenizer.json"].decode()
    divided = Library.from_str(content).pre_tokenizer.pre_tokenize_str("x's 1234567!\n\n")
    assert [piece for piece, _ in divided] == ["x", "'s", "Ġ", *pieces, "!ĊĊ"]


PIECES = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "ca", "cab", "aa", "ba", "▁b"]
PRIORITIES = [-float(i) for i in range(len(PIECES))]
"""scores with which shorter pieces are merged first"""


def pieces_of(seed=0, **more):
    """Return the metadata of a SentencePiece model with random scores."""
    scores = random.Random(seed).sample(range(100), len(PIECES))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *PIECES]
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": np.array([0.0] * 259 + [-float(score) for score in scores], np.float32),
        "token_type": np.array([UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES)], np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (values | more).items()}


def best_first(text, metadata):
    """Encode as SentencePiece: merge the neighbors that form the piece with the best score, leftmost first."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(tokens)}
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ids]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found = []
    for part in parts:
        found += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_scores_determine_the_merge_order(seed):
    metadata = pieces_of(seed)
    found, choose = tokenizer_of(metadata), random.Random(seed)
    for _ in range(60):
        text = "".join(choose.choice("abc ") for _ in range(choose.randrange(9))) + choose.choice(["", "é", "日"])
        if not text:
            continue
        assert found.encode(text) == best_first(text, metadata), text
        assert found.decode(found.encode(text)) == text
    assert found.encode_model("ab")[0] == [1, *found.encode("ab")]
    assert (found.bos_id, found.eos_id, found.unk_id) == (1, 2, 0)


def test_reads_flags_templates_and_end_tokens():
    metadata = pieces_of(add_bos_token=False, add_eos_token=True, add_space_prefix=False, eot_token_id=261)
    files = tokenizer_files(metadata | {"tokenizer.chat_template": "{{ messages }}"})
    found = PretrainedTokenizer(files)
    assert found.encode_model("ab")[0] == [*found.encode("ab"), 2]
    assert found.encode("ab") == [metadata["tokenizer.ggml.tokens"].index("ab")]
    assert found.eos_ids == (2, 261)
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(("architecture", "pieces"), [("llama", ["▁ab", "▁", "cab"]), ("gemma", ["ab", "▁", "cab"])])
def test_without_the_flag_a_gemma_text_has_no_leading_space(architecture, pieces):
    """Older files of Gemma lack `add_space_prefix`; a flag of the file has priority."""
    general = {"general.architecture": architecture}
    metadata = general | pieces_of(scores=np.array([0.0] * 259 + PRIORITIES, np.float32))
    found = tokenizer_of(metadata)
    assert [token.replace("␣", "▁") for token in found.tokens(found.encode("ab cab"))] == pieces
    assert found.decode(found.encode("ab cab")) == "ab cab"
    for flag in (True, False):
        found = tokenizer_of(metadata | {"tokenizer.ggml.add_space_prefix": flag})
        assert found.encode("ab")[0] == metadata["tokenizer.ggml.tokens"].index("▁ab" if flag else "ab")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, r"'bert' \(supported.*gpt2.*llama\)"),
        ({"model": "none"}, r"have no tokenizer"),
        ({"model": "gpt2", "pre": "tekken"}, r"'tekken'"),
    ],
)
def test_unsupported_tokenizer_kinds_are_named(changes, message):
    with pytest.raises(UnsupportedTokenizer, match=message):
        tokenizer_files(pieces_of(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": ["a", 3]}, r"tokens must be a list of texts"),
        ({"tokens": ["a", "a"]}, r"tokens must be different from each other"),
        (
            {"tokens": ["a" * 300, "b"], "token_type": np.ones(2, np.int32)},
            r"256 characters.*got 300",
        ),
        ({"scores": np.array([1.0], np.float32)}, r"scores.*273.*got 1"),
        ({"scores": np.full(273, np.nan, np.float32)}, r"scores.*273"),
        ({"token_type": "x"}, r"token_type.*273.*got 'x'"),
        ({"bos_token_id": 999}, r"bos_token_id.*0.*272.*got 999"),
        ({"unknown_token_id": "a"}, r"unknown_token_id.*0.*272.*got 'a'"),
        ({"add_bos_token": 3}, r"add_bos_token.*got 3"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["a b c"]}, r"merges must be a list of two tokens"),
        ({"model": "gpt2", "pre": "gpt-2"}, r"merges must be a list of two tokens"),
    ],
)
def test_damaged_metadata_are_one_line_errors(changes, message):
    if "tokens" in changes and "unknown_token_id" not in changes:
        changes = changes | {"bos_token_id": 0, "eos_token_id": 0}
    with pytest.raises(ValueError, match=message):
        tokenizer_files(pieces_of(**changes))


@pytest.mark.parity
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen2"])
def test_tokens_equal_transformers(tmp_path, architecture):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    if architecture == "qwen2":
        metadata = metadata_of(trained(), "gpt-2", bos_token_id=0, eos_token_id=0)
    else:  # the reference orders the pieces of Gemma as the file, not by their scores
        metadata = pieces_of(scores=np.array([0.0] * 259 + PRIORITIES, np.float32))
    general = {"general.architecture": architecture, "general.name": "test"}
    (tmp_path / "a.gguf").write_bytes(gguf(general | metadata, {}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    found = tokenizer_of(general | metadata)
    for text in ("ab cab", "abc a bb", "cabba é", "ba 日"):
        assert found.encode(text) == theirs.encode(text, add_special_tokens=False), text
