"""The GPU benchmark on a machine without a GPU: both sides with small sizes, and the FLOP count."""

import math

import jax
import pytest

from benchmarks import gpu
from transformer import CausalLM
from transformer.nn.models import count_parameters
from transformer.zoo import abstract_params


@pytest.fixture
def small(monkeypatch):
    for name in ("GPT2", "LLAMA"):
        sizes = getattr(gpu, name) | {"vocab_size": 64, "d_model": 32, "num_layers": 2, "num_heads": 4}
        smaller = {"attention.num_kv_heads": 2, "feed_forward.d_ff": 48} if name == "LLAMA" else {}
        monkeypatch.setattr(gpu, name, sizes | smaller)
    monkeypatch.setattr(gpu, "WORKS", dict.fromkeys(gpu.WORKS, (2, 16)))
    monkeypatch.setattr(gpu, "NEW", 4)


@pytest.mark.parametrize("work", gpu.WORKS)
def test_a_step_trains(small, work):
    step = gpu.ours(work)
    seen = [step() for _ in range(2)]
    losses = [float(metrics["loss_sum"] / metrics["weight"]) for metrics in seen]
    assert losses[1] != losses[0]
    assert losses[0] == pytest.approx(math.log(64), rel=0.05)


@pytest.mark.programs(7, reason="the package computes single operations outside of jit")
def test_the_counted_number_of_tokens_is_generated(small):
    (row,) = gpu.decoding("-")()
    assert len(row) == 4


@pytest.mark.parametrize("work", gpu.WORKS)
def test_flops_count_the_matrices_and_half_of_the_attention_scores(work):
    model, (rows, length) = CausalLM(gpu.config(work)), gpu.WORKS[work]
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(model))
    matrices = sum(
        leaf.size
        for path, leaf in leaves
        if leaf.ndim > 1
        and not any(word in jax.tree_util.keystr(path).lower() for word in ("embed", "position", "norm"))
    )
    tied = model.config.vocab_size * model.config.d_model  # the tied embedding table, used as the head
    scores = 12 * model.config.num_layers * length * model.config.d_model / 2
    assert gpu.flops(work) == rows * length * (6 * (matrices + tied) + scores)


def test_every_parameter_is_read_once_per_token():
    assert count_parameters(abstract_params(CausalLM(gpu.config("decode")))) == gpu.PARAMETERS
