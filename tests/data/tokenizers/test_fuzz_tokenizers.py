"""Fuzz tests of tokenizers: arbitrary files and texts give valid results, or a ValueError."""

import json
import os
from pathlib import Path

import pytest
from fuzz_parts import NAMES, ODD, Fuzz, cleared, damaged, files_of, fuzz, written
from hypothesis import strategies as st
from library_tokenizers import BERT, GPT, T5, byte_level, changed, unigram, word_piece

from transformer.data import Tokenizer, TokenizerConfig, load_tokenizer
from transformer.data.tokenizers._kinds import build_tokenizer
from transformer.data.tokenizers._pretrained import load_pretrained_tokenizer

__all__ = ["fuzz"]  # a fixture

TEXT = "to be or not to be, that is the question: ¿qué pasa, niño? " * 3
PROMPTS = st.one_of(
    st.sampled_from(
        ["", " ", "\0", "\ud800", "a\udfff", "\x1b[2J", "<eos>", "<pad> <|endoftext|></s>[CLS]", "﷽" * 300]
    ),
    st.sampled_from(["to be", "a" * 20_000, "\n" * 3000, "\u202e\u200d\ufeff", "e\u0301" * 99, "🏳️‍🌈" * 50, "\r\n\t\v"]),
    st.text(max_size=30),
    st.text(alphabet="to be<>/|[]sep▁Ġ\ud800\0", max_size=30),
)
IDS = st.lists(st.integers(-2, 320) | st.sampled_from([-(2**70), 2**31, 2**63, 2**64]), max_size=9)
KINDS = {
    "char": (TokenizerConfig(kind="char"), "none"),
    "byte": (TokenizerConfig(kind="byte"), "none"),
    "word": (TokenizerConfig(kind="word"), "english_number_words"),
    "common words": (TokenizerConfig(kind="word", vocab_size=9), "number_words"),
    "bpe": (TokenizerConfig(kind="bpe", vocab_size=270), "portuguese_number_words"),
}


def ours(kind: str, masked: bool = False) -> Tokenizer:
    config, normalization = KINDS[kind]
    return build_tokenizer(config, [TEXT], normalization=normalization, masked=masked)


def use(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    """Call everything that handles texts and ids; invalid input must raise ValueError."""
    encoded = tokenizer.encode_source(text)
    assert all(0 <= i < tokenizer.vocab_size for i in encoded)
    assert tokenizer.encode_sources([text]) == [encoded]
    assert isinstance(tokenizer.decode(encoded), str)
    assert len(tokenizer.tokens(encoded)) == len(encoded)
    assert isinstance(tokenizer.decode(ids), str)


STATES = [ours(kind, masked).state() for kind in KINDS for masked in (False, True)]
OWN = files_of(STATES) | st.builds(
    lambda state, more: written(state | more),
    st.sampled_from(STATES),
    st.dictionaries(st.sampled_from([*STATES[-1], "merges", "model", *NAMES]), ODD, max_size=2),
)


def test_fuzzed_tokenizers_of_this_package(fuzz: Fuzz):
    def put(folder: Path, value: tuple) -> None:
        (folder / "tokenizer.json").write_bytes(value[0])

    def read(folder: Path, value: tuple) -> None:
        use(load_tokenizer(folder), *value[1:])

    fuzz("tokenizer file", 9000, st.tuples(OWN, PROMPTS, st.just([3, 4])), read, put=put)


LIBRARIES = [json.loads(make().to_str()) for make in (byte_level, word_piece, unigram)]
SPLIT = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
LIBRARIES += [json.loads(changed(unigram(), pre_tokenizer=SPLIT))]
BESIDE = {"tokenizer_config": GPT["tokenizer_config"], **BERT, **T5, "generation_config": {"eos_token_id": [1, 0]}}
NEIGHBORS = st.dictionaries(
    st.sampled_from(sorted(BESIDE)),
    st.sampled_from(sorted(BESIDE.values(), key=str)).flatmap(lambda tree: files_of([tree])),
)


def test_fuzzed_tokenizers_of_other_libraries(fuzz: Fuzz):
    def put(folder: Path, value: tuple) -> None:
        cleared(folder)
        (folder / "tokenizer.json").write_bytes(value[0])
        for name, content in value[1].items():
            (folder / f"{name}.json").write_bytes(content)

    def read(folder: Path, value: tuple) -> None:
        size, load = value[2], load_pretrained_tokenizer if value[2] else load_tokenizer
        use(load(folder, size) if size else load(folder), *value[3:])

    sizes = st.sampled_from([None, 400, 9, 1])
    inputs = st.tuples(files_of(LIBRARIES), NEIGHBORS, sizes, PROMPTS, st.just([3, 4]))
    fuzz("tokenizer file", 9000, inputs, read, put=put)


PLACES = st.sampled_from(["out", "loop", "pipe", "folder", "gone", "nothing"])


def test_fuzzed_files_in_place_of_a_tokenizer(fuzz: Fuzz, tmp_path: Path):
    """Links to files outside of the directory are not followed, and pipes do not block."""
    good = {"tokenizer.json": json.dumps(LIBRARIES[2]), "tokenizer_config.json": "{}", "config.json": "{}"}
    outside = tmp_path / "outside"
    outside.mkdir()
    for name, content in good.items():
        (outside / name).write_text(content)

    def put(folder: Path, value: tuple) -> None:
        cleared(folder)
        for name, kind in value[0].items():
            path = folder / name
            match kind:
                case "good":
                    path.write_text(good[name])
                case "out":
                    path.symlink_to(outside / name)
                case "loop":
                    path.symlink_to(name)
                case "gone":
                    path.symlink_to("nowhere")
                case "pipe":
                    os.mkfifo(path)
                case "folder":
                    path.mkdir()

    def read(folder: Path, value: tuple) -> None:
        use(value[1](folder), "a", [1])

    kinds = st.fixed_dictionaries(dict.fromkeys(good, st.just("good") | PLACES))
    inputs = st.tuples(kinds, st.sampled_from([load_tokenizer, load_pretrained_tokenizer]))
    fuzz("tokenizer file", 1000, inputs, read, put=put)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    """Every tokenizer of this package, and three of other models."""
    made = [ours(kind, masked) for kind in KINDS for masked in (False, True)]
    for library in LIBRARIES:
        folder = tmp_path_factory.mktemp("library")
        (folder / "tokenizer.json").write_bytes(written(library))
        made.append(load_pretrained_tokenizer(folder))
    return made


def test_fuzzed_prompts_and_ids(fuzz: Fuzz, tokenizers: list[Tokenizer]):
    def read(folder: Path, value: tuple) -> None:
        use(tokenizers[value[0] % len(tokenizers)], *value[1:])

    bytes_of = st.binary(max_size=20).map(lambda raw: damaged(raw, []).decode("utf-8", errors="surrogateescape"))
    inputs = st.tuples(st.integers(0, 99), PROMPTS | bytes_of, st.just([]) | IDS)
    fuzz("prompt", 8000, inputs, read)
