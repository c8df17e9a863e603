"""The plan of a server against arithmetic by hand."""

import dataclasses
import json

import pytest
from plan_recipes import PAIRS, TEXT, parallel

from transformer.__main__ import main
from transformer.config import ConfigError, LayerKind, MoE, StackOptions
from transformer.training.plan import make_serve_plan, parse_topology

ONE, EIGHT = parse_topology("v5e:1x1"), parse_topology("v5e:2x4")
GIB = 2**30
# Llama 3 8B: 32 layers of width 4096 with 32 heads and 8 key/value heads of 128, d_ff 14336, 128,256 tokens.
LAYER = 4096 * 128 * (32 + 8 + 8 + 32) + 3 * 4096 * 14336
TABLE = 128256 * 4096
NORMS = (2 * 32 + 1) * 4096


def planned(capsys, *words):
    code = main(["plan", "serve", "llama3_8b", "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def test_plans_a_model_sharded_over_eight_chips(capsys):
    code, plan = planned(capsys, "--topology", "v5e:2x4", "--length", "4096", "--parallel.tensor", "8")
    weights = 2 * (32 * LAYER + 2 * TABLE) // 8 + 2 * NORMS  # bfloat16; norms are on every chip
    assert (code, plan["num_parameters"]) == (0, 32 * LAYER + 2 * TABLE + NORMS)
    assert plan["weight_bytes"] == weights
    assert plan["page_bytes"] == 32 * 16 * 2 * 8 * 128 * 2 // 8  # layers, tokens, keys and values, heads
    assert plan["available_bytes"] == int(0.9 * 16 * GIB)
    assert plan["pages"] == (int(0.9 * 16 * GIB) - weights) // 2**18
    assert plan["slots"] == plan["pages"] // 256
    read = weights - 2 * TABLE // 8 + plan["slots"] * 256 * 2**18  # not the table of the inputs
    flops = 2 * (32 * LAYER + TABLE)
    assert plan["memory_seconds"] == pytest.approx(read / 819e9)
    assert plan["compute_seconds"] == pytest.approx(plan["slots"] * flops / (8 * 197e12))
    assert plan["tokens_per_second"] == pytest.approx(plan["slots"] / (read / 819e9))
    assert plan["prompt_flops"] == 2 * 32 * LAYER
    assert plan["prompt_tokens_per_second"] == pytest.approx(8 * 197e12 / (2 * 32 * LAYER))


def test_quantization_makes_a_large_model_fit(capsys):
    assert main(["plan", "serve", "llama3_8b", "--topology", "v5e:1x1"]) == 1
    assert "does not fit: the weights and one text of 2,048 tokens need 15.21 GiB per chip" in capsys.readouterr().out
    found = {bits: planned(capsys, "--topology", "v5e:1x1", "--quantize", f"int{bits}") for bits in (8, 4)}
    assert [code for code, _ in found.values()] == [0, 0]
    # 8 bits: one byte a weight. 4 bits: half a byte, and a scale of two bytes for 32 weights; tables have 8 bits.
    assert found[8][1]["weight_bytes"] == pytest.approx(32 * LAYER + 2 * TABLE, rel=0.002)
    assert found[4][1]["weight_bytes"] == pytest.approx(32 * LAYER * (0.5 + 2 / 32) + 2 * TABLE, rel=0.002)
    assert main(["plan", "serve", "llama_1b", "--topology", "v5e:1x1"]) == 0
    printed = capsys.readouterr().out
    assert "pages of 16 tokens in bfloat16: 24,776, each 512 KiB per chip" in printed
    assert "fits: 193 texts of 2,048 tokens (--slots 193 --max-tokens 2048)" in printed


def test_a_step_reads_the_experts_selected_by_its_tokens():
    moe = StackOptions(period=(LayerKind(moe=MoE(num_experts=8, top_k=2)),))
    recipe = dataclasses.replace(TEXT, model=TEXT.model.replace(stack=moe, **{"parameters.use_bias": False}))
    plan = make_serve_plan(recipe, 24, ONE)
    kernels = 4 * 3 * 2 * 32 * 64  # bytes of one expert of each of three layers
    page = 3 * 16 * 2 * 2 * 128 * 4  # keys and values of two heads of 8 numbers, which a TPU pads to 128
    whole = plan.memory_seconds * 819e9 - plan.slots * 2 * page
    alone = 819e9 / plan.single_tokens_per_second - 2 * page
    assert whole - alone == pytest.approx(6 * kernels, rel=1e-3)
    split = make_serve_plan(parallel(recipe, tensor=2, expert=4), 24, EIGHT)
    assert split.weight_bytes < plan.weight_bytes / 4


def test_unsupported_models_are_one_line_errors(capsys):
    for words, message in (
        (("--length", "many"), "--length must be the number of tokens of a text, such as 2048, got 'many'"),
        (("--quantize", "int2"), "--quantize must be int8 or int4, got 'int2'"),
        (("--candidates", "3"), "unknown option --candidates"),
    ):
        assert main(["plan", "serve", "llama_1b", "--topology", "v5e:1x1", *words]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ConfigError, match="must multiply to the 8 devices of v5e:2x4, got tensor 1 and expert 1"):
        make_serve_plan(TEXT, 24, EIGHT)
    with pytest.raises(ConfigError, match=r"got 8.*--quantize int4"):
        make_serve_plan(parallel(TEXT, tensor=4, expert=2), 24, EIGHT, 4)
    with pytest.raises(ConfigError, match="Seq2Seq"):
        make_serve_plan(PAIRS, 24, ONE)
