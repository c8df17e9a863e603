"""Decoding steps and attention as the GPU compiler compiles them, for an H100 that is not there."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_compiler import GPU_COMPILER
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer import CausalLM
from transformer.config import (
    AttentionOptions,
    FeedForwardOptions,
    NormOptions,
    ParameterOptions,
    RotaryOptions,
    TransformerConfig,
)
from transformer.data import TextFile
from transformer.generate._layers import decoding_params
from transformer.nn import Mask as AttentionMask
from transformer.nn import dot_product_attention
from transformer.training import Recipe
from transformer.training.plan import make_decode_plan, parse_generation, parse_topology, topology_devices

H100 = "h100:1x1"


def recipe(layers, **parameters):
    model = TransformerConfig(
        vocab_size=512,
        d_model=512,
        num_layers=layers,
        num_heads=8,
        attention=AttentionOptions(num_kv_heads=2),
        norm=NormOptions(kind="rms_norm"),
        feed_forward=FeedForwardOptions(d_ff=2048, activation="silu", gated=True),
        parameters=ParameterOptions(use_bias=False, **parameters),
        position=RotaryOptions(),
        dtype="bfloat16",
    )
    return Recipe(name="gpu", model=model, data=TextFile(path="none", sequence_length=256, batch_size=8))


@functools.cache
def plan(layers, rows, **parameters):
    one, topology = recipe(layers, **parameters), parse_topology(H100)
    return make_decode_plan(one, parse_generation(f"{rows}:64:64", one), topology, topology_devices(topology))


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", jnp.bfloat16), ("float32", jnp.float32)])
def test_a_gpu_decodes_with_kernels_in_the_dtype_of_the_computation(monkeypatch, dtype, expected):
    """Norms stay in float32; the table of embeddings, which is also the output layer, is a kernel."""
    monkeypatch.setattr("transformer.generate._layers.platform", lambda: "gpu")
    model = CausalLM(recipe(2).model.replace(dtype=dtype))
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"])
    found = jax.eval_shape(lambda params: decoding_params(model, params), params)
    layer = found["decoder"]["prefix_1"]
    assert layer["self_attention"]["query"]["kernel"].dtype == expected
    assert found["embedding"]["embedding"].dtype == expected
    assert layer["attention_norm"]["scale"].dtype == jnp.float32


class TestGpuCompiler:
    pytestmark = GPU_COMPILER

    @pytest.mark.parametrize("rows", [1, 8])
    def test_a_layer_of_a_decoding_step_has_at_most_twelve_kernels(self, rows):
        assert plan(4, rows, dtype="bfloat16").launches - plan(3, rows, dtype="bfloat16").launches <= 12

    def test_a_step_reads_little_more_than_parameters_and_cache(self):
        one = plan(3, 1, dtype="bfloat16")
        assert one.token_bytes <= 1.1 * one.least_token_bytes

    def test_float32_parameters_are_converted_once_and_not_for_each_token(self):
        assert plan(3, 1).token_bytes <= 1.1 * plan(3, 1, dtype="bfloat16").token_bytes

    @pytest.mark.parametrize(("mask", "kernel"), [("causal", "cudnn"), ("packed", "triton")])
    def test_attention_stores_no_matrix_of_scores(self, mask, kernel):
        mesh = Mesh(np.array(topology_devices(parse_topology(H100))), ("data",), axis_types=(AxisType.Auto,))
        whole, length = NamedSharding(mesh, PartitionSpec()), 2048

        def loss(query, key, value, segments):
            own = AttentionMask.causal()
            own = own & AttentionMask.segments(segments) if mask == "packed" else own
            return dot_product_attention(query, key, value, mask=own).astype(jnp.float32).sum()

        heads = jax.ShapeDtypeStruct((1, length, 4, 64), jnp.bfloat16, sharding=whole)
        segments = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=whole)
        with jax.set_mesh(mesh):
            lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(heads, heads, heads, segments)
            text = lowered.compile().as_text()
        assert re.search(rf'custom_call_target="[^"]*{kernel}', text)
        assert f"{length},{length}" not in text
