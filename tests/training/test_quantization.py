"""Quantized training: checked before compilation, equal on a mesh, and it learns."""

import contextlib
import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from transformer.config import (
    ConfigError,
    Execution,
    FeedForwardOptions,
    LayerKind,
    MoE,
    RotaryOptions,
    TransformerConfig,
)
from transformer.data import TinyShakespeare
from transformer.nn._sharding import ParallelConfig
from transformer.training import OptimizerConfig, Recipe, TrainingConfig
from transformer.training import _parallel as checks
from transformer.training._parallel import check_quantization, place, quantizable
from transformer.training.plan._measurement import made_up_batch

pytest.importorskip("qwix")

CONFIG = TransformerConfig(
    vocab_size=40,
    d_model=16,
    num_layers=2,
    num_heads=4,
    feed_forward=FeedForwardOptions(d_ff=32),
    position=RotaryOptions(),
    **{"stack.period": (LayerKind(), LayerKind(moe=MoE(num_experts=4, top_k=2)))},
)


def recipe_for(parallel=ParallelConfig(devices=1), **execution):
    return Recipe(
        name="quantized",
        model=CONFIG,
        data=TinyShakespeare(sequence_length=16, batch_size=8),
        execution=Execution(**execution),
        parallel=parallel,
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
        training=TrainingConfig(steps=20),
    )


def losses(recipe, steps):
    placement, batch, found = place(recipe), made_up_batch(recipe), []
    state = placement.spread(placement.new_state())
    for _ in range(steps):
        state, metrics = placement.train_step(state, batch)
        found.append(float(metrics["loss_sum"] / metrics["weight"]))
    return found


@pytest.mark.slow
def test_a_quantized_model_learns_like_the_unquantized_model():
    expected, found = losses(recipe_for(), 12), losses(recipe_for(quantization="int8_full"), 12)
    assert found != expected
    assert found[-1] < 0.7 * found[0]
    np.testing.assert_allclose(found, expected, rtol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots"])
@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(fsdp=4, expert=2), ParallelConfig(fsdp=2, tensor=4), ParallelConfig(kind="pmap")],
    ids=["experts", "tensor", "pmap"],
)
def test_every_placement_trains(parallel, remat):
    expected = losses(recipe_for(quantization="int8_full"), 4)
    # The gradient of a kernel sums over tokens with a scale for all of them, or, with pmap, for those of a device.
    found = losses(recipe_for(parallel, quantization="int8_full", remat=remat), 4)
    np.testing.assert_allclose(found, expected, rtol=5e-3)


def test_the_kernels_of_attention_feed_forward_layers_and_experts_can_be_quantized():
    paths = quantizable(recipe_for())
    ends = {"/".join(path.split("/")[-3:-1]) for path in paths}
    assert ends == {
        *(f"self_attention/{name}" for name in ("query", "key", "value", "out")),
        *("feed_forward/up", "feed_forward/down", "experts/up", "experts/down"),
    }
    assert all("/layers/slot_" in path for path in paths)


def test_a_path_that_selects_nothing_is_refused_before_anything_is_compiled(monkeypatch):
    monkeypatch.setattr(jax, "jit", None)
    recipe = recipe_for(quantization="int8", quantization_paths=("self_attention", "router"))
    message = r"no path contains 'router'\. Choose parts of: decoder/layers/slot_0/feed_forward/down/kernel, "
    with pytest.raises(ConfigError, match=message):
        place(recipe)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(checks, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"int8.*'transformer-zoo\[quantization\]'"):
        place(recipe_for(quantization="int8"))
    place(recipe_for())


@pytest.mark.parametrize(
    ("capability", "name", "refused"), [("8.0", "fp8_full", True), ("9.0", "fp8", False), ("8.0", "int8", False)]
)
def test_a_gpu_without_fp8_is_rejected_with_an_alternative(capability, name, refused):
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability=capability)
    recipe = recipe_for(quantization=name)
    message = r"but NVIDIA A100 has 8\.0\. Set execution\.quantization to int8_full\."
    with pytest.raises(ConfigError, match=message) if refused else contextlib.nullcontext():
        check_quantization(recipe, [device])


def test_a_run_resumes_with_a_different_quantization():
    from transformer.training._recipe import difference

    before, after = recipe_for(), recipe_for(quantization="int8")
    assert difference(before, after)[0] == []
    assert dataclasses.replace(after, execution=Execution()) == before
