"""The requests of the HTTP benchmark, and its servers; nothing is measured."""

import json
import sys
from pathlib import Path

import gguf_parts
import numpy as np
import pytest

from benchmarks.llama_cpp_model import name_in_gguf, tensors
from benchmarks.serving_http import (
    ANSWER_TOKENS,
    OURS,
    PROMPT_TOKENS,
    asks,
    free_port,
    server,
    table_row,
    write_model,
)
from benchmarks.serving_prefix import SUFFIX, prompts
from transformer.chat import ChatPrompts
from transformer.generate import Sampling, generate
from transformer.inference import open_model

ROOT = Path(__file__).resolve().parents[2]


def test_lengths_follow_the_sharegpt_distribution():
    """Their means, if nothing is cut; the same seed gives the same requests."""
    many = asks(20_000, 100_000)
    assert np.mean([len(one.prompt) for one in many]) == pytest.approx(PROMPT_TOKENS, rel=0.05)
    assert np.mean([one.tokens for one in many]) == pytest.approx(ANSWER_TOKENS, rel=0.05)
    assert asks(9, 512) == asks(9, 512)
    assert asks(9, 512) != asks(9, 512, seed=1)
    assert all(len(one.prompt) >= 4 and len(one.prompt) + one.tokens < 512 for one in asks(1_000, 512))


@pytest.mark.programs(8, reason="the package computes single operations outside of jit")
def test_a_character_is_a_token(tmp_path):
    write_model(tmp_path / "model", small=True, longest=512)
    opened = open_model(tmp_path / "model")
    for one in asks(20, 512):
        found = ChatPrompts(opened.tokenizer).encode([{"role": "user", "content": one.prompt}])
        assert len(found.ids) == len(one.prompt)
    assert opened.context == 512


def test_a_server_that_exits_is_reported():
    with (
        pytest.raises(RuntimeError, match=r"does not run: install the extra serving$"),
        server([sys.executable, "-c", "print('one'); print('install the extra serving')"], free_port()),
    ):
        pytest.fail("it does not answer")


@pytest.mark.programs(10, reason="the package computes single operations outside of jit")
def test_every_new_token_is_a_visible_character(tmp_path):
    """So each is a part of a stream, and llama.cpp's server never waits for the rest of a character."""
    write_model(tmp_path / "model", small=True, longest=512)
    opened = open_model(tmp_path / "model")
    rows = [list(opened.tokenizer.encode_source(one.prompt)) for one in asks(8, 128)]
    for row in generate(opened.model, opened.params, rows, max_new_tokens=30, sampling=Sampling(temperature=0.0)):
        text = opened.tokenizer.decode(row)
        assert len(text) == len(row) == 30
        assert text.isascii()
        assert text.isprintable()


@pytest.mark.programs(8, reason="the package computes single operations outside of jit")
def test_tensors_for_llama_cpp_are_all_named(tmp_path):
    write_model(tmp_path / "model", small=True, longest=512)
    found = tensors(tmp_path / "model" / "model.safetensors")
    assert {name: name_in_gguf(name) for name in found} == {
        name: gguf_parts.name_in_gguf(name, "llama") for name in found
    }
    assert found["model.embed_tokens.weight"].shape == (257, 64)
    assert len(found) == 3 + 2 * 9


@pytest.mark.programs(8, reason="the package computes single operations outside of jit")
def test_tensors_in_bfloat16(tmp_path):
    write_model(tmp_path / "model", small=True, longest=512, kv_heads=1, dtype="bfloat16")
    found = tensors(tmp_path / "model" / "model.safetensors")
    assert {array.dtype.name for array in found.values()} == {"uint16"}
    assert found["model.layers.0.self_attn.k_proj.weight"].shape == (32, 64)
    assert (found["model.norm.weight"] == 0x3F80).all()  # 1 in bfloat16


def test_prompts_share_their_prefix_only_if_asked():
    together, apart = (prompts(5, 40, 259, common, seed=3) for common in (True, False))
    assert {len(row) for row in [*together, *apart]} == {40 + SUFFIX}
    assert len({tuple(row[:40]) for row in together}) == 1
    assert len({tuple(row[:16]) for row in apart}) == 5
    assert len({tuple(row[40:]) for row in together}) == 5


def test_the_tables_of_the_page_match_the_stored_results():
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    kept = json.loads((ROOT / "docs" / "serving.json").read_text(encoding="utf-8"))
    for run in kept["http"]:
        for name, found in run["all"].items():
            for concurrent, one in found.items():
                assert table_row(name, concurrent, one) in text
        for peer, ratios in run["ratios"].items():
            assert ratios == {
                concurrent: pytest.approx(
                    run["all"][OURS][concurrent]["tokens_per_second"] / found["tokens_per_second"], rel=1e-3
                )
                for concurrent, found in run["all"][peer].items()
            }
    prefix = kept["prefix"]
    assert prefix["ratio"] == pytest.approx(prefix["ours"] / prefix["peer"], rel=1e-3)
    assert f"takes {prefix['ratio']:.3f} of the time" in text
