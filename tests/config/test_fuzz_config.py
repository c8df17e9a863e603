"""Fuzz tests of config.json and related files: they give a model or a helpful error, never an internal error."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jaxtyping
import pytest
from fuzz_parts import NAMES, ODD, Fuzz, files_of, fuzz, written
from golden import case as golden_case
from golden import ours
from hypothesis import strategies as st

from transformer.inference import open_model
from transformer.nn.models import Seq2Seq
from transformer.zoo import _pretrained as pretrained
from transformer.zoo.weights._quantized import FIELD

__all__ = ["fuzz"]  # a fixture

RECORDS = {
    (family, name): record
    for family in golden_case.families()
    for name, record in golden_case.golden(family).items()
    if isinstance(record, dict)
}
"""tiny models, one or several for each family"""
WORDS = sorted({field for record in RECORDS.values() for field in record["config"]} | {FIELD, "architectures"})
"""all fields that occur in their config.json files"""
VALUES = st.sampled_from(
    [{"rope_type": "yarn", "factor": 2.0}, {"rope_type": "llama3"}, {"type": "linear", "factor": 0}]
)
VALUES |= st.sampled_from(
    [{"quant_method": "fp8"}, {"quant_method": "mxfp4"}, ["full_attention"], ["sliding_attention"]]
)
VALUES |= st.sampled_from(
    ["gelu", "silu", "relu", "fp8", "LlamaModel", ["GPT2LMHeadModel"], ["BertModel"], "0.1", 1e-5]
)
MORE = st.dictionaries(st.sampled_from(WORDS), ODD | VALUES, max_size=2)
TOKENS = {"eos_token_id": [2, 1], "suppress_tokens": [3], "bad_words_ids": [[1], [2, 3]], "forced_bos_token_id": 1}


def configs(keys: list) -> st.SearchStrategy:
    """Return a strategy for (record key, content of config.json), with fields of any family or arbitrary changes."""
    picked = st.sampled_from(keys)

    def contents(key: tuple[str, str]) -> st.SearchStrategy:
        config = RECORDS[key]["config"]
        named = st.builds(lambda more: written(config | more), MORE)
        return st.tuples(st.just(key), named | files_of([config]))

    return picked.flatmap(contents)


@pytest.fixture
def put() -> Iterator[Callable[[Path, tuple], None]]:
    """A function that writes the tensors of a record (once), and config.json and generation_config.json of a case.

    The type checker of the tests is disabled here, as for users.
    """
    jaxtyping.config.update("jaxtyping_disable", True)
    jax.random.key(0).block_until_ready()  # JAX starts threads on first use, which reserve much of the address space

    def write(folder: Path, value: tuple) -> None:
        (family, name), config, *generation = value
        place = folder / f"{family}-{name}"
        if not place.exists():
            ours.write(place, RECORDS[family, name])
        (place / "config.json").write_bytes(config)
        for content in generation:
            (place / "generation_config.json").write_bytes(content)

    yield write
    jaxtyping.config.update("jaxtyping_disable", False)


def look(folder: Path, value: tuple) -> None:
    """Open the directory, and check all properties that its JSON files determine."""
    (family, name), *_ = value
    opened = open_model(folder / f"{family}-{name}")
    assert opened.context is None or opened.context > 0
    assert all(isinstance(label, str) for label in opened.labels)
    if opened.model.config.vocab_size is not None:
        assert all(0 <= i < opened.model.config.vocab_size for i in opened.suppressed)
    if isinstance(opened.model, Seq2Seq) and opened.bos_id is not None:
        assert opened.target_start
    assert json.dumps(opened.place())


def test_fuzzed_model_configs(fuzz: Fuzz, put, monkeypatch: pytest.MonkeyPatch):
    """Test everything except reading the tensors, which is part of `test_fuzzed_model_directories`."""
    monkeypatch.setattr(pretrained, "_read_params", lambda *arguments: None)
    fuzz("config.json", 15_000, configs(list(RECORDS)), look, put=put)


GENERATION = files_of([TOKENS])
GENERATION |= st.dictionaries(st.sampled_from([*TOKENS, *NAMES]), ODD, max_size=2).map(
    lambda more: written(TOKENS | more)
)


def test_fuzzed_generation_configs(fuzz: Fuzz, put, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pretrained, "_read_params", lambda *arguments: None)
    keys = st.sampled_from([("bart", "lm"), ("llama", "lm"), ("t5", "lm")])
    config = keys.map(lambda key: (key, written(RECORDS[key]["config"])))
    inputs = st.builds(lambda config, generation: (*config, generation), config, GENERATION)
    fuzz("config.json", 4400, inputs, look, put=put)


def test_fuzzed_model_directories(fuzz: Fuzz, put):
    """Some of the changed config.json files still fit the tensors, which are then read."""
    keys = [key for key in RECORDS if key[0] in ("llama", "gpt2", "bert", "t5", "vit")]
    fuzz("config.json", 600, configs(keys), look, put=put)
