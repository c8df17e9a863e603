"""Sharding, optimizer, LoRA, int8 and FLOP counts follow from the axes that a module declares."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from numeric_parts import random_params
from placements import mesh, specs
from training_recipes import tiny_recipe

import transformer.nn.models  # noqa: F401 - declares the axes of their parameters
from transformer.config import MLA, AttentionOptions, RotaryOptions, TransformerConfig
from transformer.nn._parameter_axes import axes_of, declare, declared, parameter_axes
from transformer.nn._partitioning import axis_rules
from transformer.nn._sharding import state_shardings, with_logical_axes
from transformer.nn.layers._layers import Linear
from transformer.nn.models import CausalLM
from transformer.nn.quantization._int8 import Int8, quantize
from transformer.training import lora
from transformer.training._flops import matrix_flops
from transformer.training._optimizers import decay_mask, muon_dimensions
from transformer.training._settings import OptimizerConfig


class Mixer(nn.Module):
    """A module of another project: a map from 8 features to 2 states of size 3, and one decay per state."""

    parameter_axes = declare({"mix_in/kernel": "embed -> state _", "mix_decay": "state"})

    @nn.compact
    def __call__(self, x):
        y = Linear((2, 3), use_bias=False, name="mix_in")(x)
        return y * self.param("mix_decay", nn.initializers.ones, (2,))[None, :, None]


PARAMS = random_params(Mixer(), np.ones((1, 8), np.float32))["params"]


@pytest.mark.cpu_only("needs eight devices")
def test_sharding_follows_a_declaration():
    shardings = state_shardings(PARAMS, mesh(x=2), [("state", "x")])
    assert specs(shardings) == {"mix_in/kernel": PartitionSpec(None, "x", None), "mix_decay": PartitionSpec("x")}
    with axis_rules([("state", "x")]):
        assert specs(state_shardings(PARAMS, mesh(x=2))) == specs(shardings)


def test_flax_reads_a_declaration():
    found = nn.get_partition_spec(with_logical_axes(PARAMS))
    assert found == {"mix_in": {"kernel": PartitionSpec("embed", "state", None)}, "mix_decay": PartitionSpec("state")}


def test_the_optimizer_follows_a_declaration():
    dimensions = muon_dimensions(PARAMS)
    assert (dimensions["mix_in"]["kernel"].reduction_axis, dimensions["mix_in"]["kernel"].output_axis) == ((0,), (1, 2))
    assert dimensions["mix_decay"] is None
    assert decay_mask(OptimizerConfig(), PARAMS) == {"mix_in": {"kernel": True}, "mix_decay": False}


def test_low_rank_updates_follow_a_declaration():
    config = lora.LoRA(rank=2, targets=("mix_in",))
    updates = jax.jit(lambda: lora.init(jax.random.key(0), PARAMS, config))()
    assert jax.tree.map(jnp.shape, updates) == {"mix_in": {"a": (8, 2), "b": (2, 6)}}
    assert not np.asarray(updates["mix_in"]["b"]).any()
    updates["mix_in"]["b"] = np.ones((2, 6), np.float32)
    expected = np.asarray(PARAMS["mix_in"]["kernel"]) + 8.0 * np.asarray(updates["mix_in"]["a"]).sum(1)[:, None, None]
    merged = jax.jit(lambda updates: lora.merge(PARAMS, updates, config))(updates)
    np.testing.assert_allclose(merged["mix_in"]["kernel"], expected, rtol=1e-5)


@pytest.mark.programs(15, reason="quantize, which users call outside of jit, computes the error of each array")
def test_int8_follows_a_declaration():
    small, (row,) = quantize(PARAMS)
    assert (row.pattern, row.arrays, small["mix_in"]["kernel"].scale.shape) == ("mix_in/kernel", 1, (1, 2, 3))
    x = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
    whole, found = jax.jit(lambda x, *both: [Mixer().apply({"params": params}, x) for params in both])(x, PARAMS, small)
    np.testing.assert_allclose(found, whole, atol=0.03)


def test_flops_follow_a_declaration():
    recipe = tiny_recipe()
    assert matrix_flops(recipe, 10, 10, PARAMS) == 2 * 10 * 8 * 6


@pytest.mark.slow
def test_muon_and_int8_cover_all_kernels_of_latent_attention():
    mla = MLA(kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4, q_lora_rank=5)
    config = TransformerConfig(
        vocab_size=9,
        d_model=8,
        num_layers=1,
        num_heads=2,
        position=RotaryOptions(),
        attention=AttentionOptions(mla=mla),
    )
    params = CausalLM(config).init(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))["params"]
    attention = params["decoder"]["layers"]["slot_0"]["self_attention"]
    names = {"query_latent", "query", "latent", "rotary_key", "key", "value", "out"}
    assert {name for name in attention if "kernel" in attention[name]} == names
    for name in names:
        path = f"decoder/layers/slot_0/self_attention/{name}/kernel"
        assert axes_of(path, attention[name]["kernel"].ndim).role == "hidden", name
    small = quantize(params)[0]["decoder"]["layers"]["slot_0"]["self_attention"]
    assert all(isinstance(small[name]["kernel"], Int8) for name in names)


def test_the_longest_matching_suffix_wins():
    assert parameter_axes("a/up/kernel", (2, 3)) == ("embed", "feed_forward")
    assert parameter_axes("a/experts/up/kernel", (4, 2, 3)) == ("expert", "embed", "feed_forward")
    assert parameter_axes("token_type_embedding/embedding", (2, 3)) == (None, "embed")
    assert parameter_axes("source_embedding/embedding", (2, 3)) == ("vocab", "embed")
    assert parameter_axes("encoder/conv_2/kernel", (3, 2, 3)) == (None, None, "embed")
    assert parameter_axes("self_attention/rotary_key/bias", (7, 4)) == ("layers", "norm")
    assert axes_of("a/up/kernel", 5) is None


@pytest.mark.parametrize("text", ["", "->", "embed ->", "a: b", ": a -> b", "-> a"])
def test_unparsable_axes_are_an_error(text):
    with pytest.raises(ValueError, match=r"axes.*'embed ->.*_'"):
        declare({"test/kernel": text})
    assert "test/kernel" not in declared()


def test_two_declarations_must_agree():
    declare({"query/kernel": "embed -> heads _"})
    with pytest.raises(ValueError, match=r"'query/kernel'.*'heads -> embed'"):
        declare({"query/kernel": "heads -> embed"})


def test_every_declaration_is_of_a_matrix_or_a_vector():
    for end, axes in declared().items():
        assert (axes.role == "vector") == (not axes.inputs), end
        with pytest.raises(ValueError, match=r"is inconsistent"):
            dataclasses.replace(axes, role="vector" if axes.inputs else "hidden")
