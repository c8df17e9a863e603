"""8-bit and 4-bit parameters: a model computes with the dequantized values, and the report states the true error."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numeric_parts import random_params

from transformer.config import MLA, Execution, LayerKind, MoE, RotaryOptions, TransformerConfig
from transformer.generate import Sampling, generate
from transformer.nn._parameter_axes import axes_of
from transformer.nn.models import CausalLM, Seq2Seq
from transformer.nn.quantization._adapted import Encoded
from transformer.nn.quantization._int8 import Int4, Int8, Rule, quantize, quantized, quantized_int4, quantized_shapes

SIZES = {
    "vocab_size": 40,
    "d_model": 16,
    "num_layers": 2,
    "num_heads": 4,
    "attention.num_kv_heads": 2,
    "feed_forward.d_ff": 24,
}
TOKENS = jax.device_put(np.random.default_rng(1).integers(0, 40, (2, 7)).astype(np.int32))


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def dequantized(params):
    return jax.tree.map(
        lambda node: node.array() if isinstance(node, Encoded) else node,
        params,
        is_leaf=lambda node: isinstance(node, Encoded),
    )


def test_int8_rounds_to_the_nearest_of_255_values():
    array = normal(3, 5, 4)
    array[:, :, 1] = 0.0

    @jax.jit
    def run(array):
        kept = quantized(array, (-3, -2))
        return kept, kept.array()

    kept, found = run(array)
    assert (kept.values.dtype, kept.shape, kept.scale.shape) == (jnp.int8, array.shape, (1, 1, 4))
    found, scale = np.asarray(found), np.asarray(kept.scale)
    assert (np.abs(found - array) <= scale / 2 + 1e-7).all()
    assert (found[:, :, 1] == 0).all()
    np.testing.assert_allclose(np.abs(found).max((0, 1)), np.abs(array).max((0, 1)), rtol=1e-6)


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("axis", [-1, -2, -3])
@pytest.mark.parametrize(("size", "group"), [(128, 32), (128, 128), (96, 64), (48, 32), (7, 32)])
def test_int4_rounds_to_the_nearest_of_16_values(axis, size, group):
    """By hand, group by group: the weight of largest magnitude is -8 times the scale; the bytes hold two weights."""
    shape = [3, 2, 4]
    shape[axis] = size
    array = normal(*shape)
    array[0] = 0.0

    @jax.jit
    def run(array):
        kept = quantized_int4(array, axis, group)
        return kept, kept.array()

    kept, whole = run(array)
    whole = np.asarray(whole)
    assert (kept.shape, kept.codes.dtype, kept.scale.dtype) == (array.shape, jnp.uint8, jnp.bfloat16)
    assert kept.codes.size == array.size // size * ((size + 1) // 2)
    even = size + size % 2
    length = max(length for length in range(2, group + 1, 2) if even % length == 0)
    found, rows = np.moveaxis(whole, axis, -1), np.moveaxis(array, axis, -1)
    for index in np.ndindex(rows.shape[:-1]):
        for start in range(0, size, length):
            weights, got = rows[index][start : start + length], found[index][start : start + length]
            scale = abs(np.float32(ml_dtypes.bfloat16(np.abs(weights).max() / 8)))
            extreme = weights[np.abs(weights).argmax()]
            sign = -1.0 if extreme > 0 else 1.0
            codes = np.clip(np.round(weights / (sign * scale)), -8, 7) if scale else np.zeros(len(weights))
            np.testing.assert_allclose(got, codes * sign * scale, rtol=1e-6)
            assert (np.abs(got - weights) <= scale * 1.04).all()
    assert (whole[0] == 0).all()


def test_quantization_is_idempotent():

    @jax.jit
    def run(array):
        once = quantized_int4(array, -2)
        return once, quantized_int4(once.array(), -2)

    once, again = run(normal(4, 64, 6))
    jax.tree.map(np.testing.assert_array_equal, again, once)


MODELS = {
    "tied": (CausalLM, {}),
    "own output, gated, biases": (
        CausalLM,
        {"embedding.tie": False, "feed_forward.gated": True, "parameters.use_bias": True},
    ),
    "bfloat16": (CausalLM, {"dtype": "bfloat16"}),
    "routed": (CausalLM, {"stack.period": (LayerKind(moe=MoE(num_experts=3, top_k=2, shared_experts=1)),)}),
    "encoder and decoder": (Seq2Seq, {}),
    "latents": (
        CausalLM,
        {
            "attention.num_kv_heads": None,
            "attention.mla": MLA(kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
            "position": RotaryOptions(),
        },
    ),
}


@pytest.mark.programs(190, reason="quantize computes each shape of a parameter outside of jit")
@pytest.mark.default_cases(5)
@pytest.mark.parametrize(("scan", "bits"), [(True, 8), (False, 8), (True, 4)])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_computes_with_dequantized_values(kind, scan, bits):
    cls, fields = MODELS[kind]
    model = cls(TransformerConfig(**(SIZES | fields)), Execution(scan=scan))
    inputs = (TOKENS,) * (2 if cls is Seq2Seq else 1)
    params = random_params(model, *inputs)["params"]
    small, report = quantize(params, bits=bits)
    assert jax.tree.map(lambda leaf: leaf.shape, small) == jax.tree.map(
        lambda leaf: leaf.shape, quantized_shapes(jax.eval_shape(lambda: params), bits, 32)
    )
    call = jax.jit(lambda params: model.apply({"params": params}, *inputs))
    values = jax.jit(dequantized)(small)
    found, expected, whole = (np.asarray(call(one), np.float32) for one in (small, values, params))
    tolerance = 0.1 if kind == "bfloat16" else 1e-5
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    assert 1e-4 < np.abs(found - whole).max() < (0.15 if bits == 8 else 1.0) * np.abs(whole).max()
    integers = (jnp.int8, jnp.uint8)
    paths = [jax.tree_util.keystr(path) for path, leaf in jax.tree.leaves_with_path(small) if leaf.dtype in integers]
    assert not [path for path in paths if "experts" in path or "router" in path or "norm" in path or "bias" in path]
    assert len(paths) == sum(row.arrays for row in report)
    assert len(paths) == len(intended(params))
    if bits == 4:  # the kernels of the layers in 4 bits, the embeddings and the output in 8
        kinds = [type(node) for node in jax.tree.leaves(small, is_leaf=lambda node: isinstance(node, Encoded))]
        assert kinds.count(Int8) == sum("embedding" in path or "'output'" in path for path in paths)
        assert kinds.count(Int4) == len(paths) - kinds.count(Int8) > 0
    if kind == "routed":
        assert [path for path in paths if "shared" in path]


def intended(params):
    """Return the paths of the parameters that should be quantized: matrices whose modules support it."""
    named = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree.leaves_with_path(params)
    }
    axes = {path: axes_of(path, leaf.ndim) for path, leaf in named.items()}
    return [path for path, one in axes.items() if one is not None and one.int8 and one.inputs]


@pytest.mark.slow
def test_a_quantized_model_generates_text():
    model = CausalLM(TransformerConfig(**SIZES), Execution(scan=False))
    params = jax.jit(model.init)(jax.random.key(0), TOKENS)["params"]
    small, _ = quantize(params)
    options = {"max_new_tokens": 6, "sampling": Sampling(temperature=0.0)}
    expected = generate(model, dequantized(small), [[1, 2], [3]], **options)
    assert generate(model, small, [[1, 2], [3]], **options) == expected
    assert generate(model, small, [[1, 2], [3]], **options, slots=1) == expected


@pytest.mark.programs(20, reason="quantize computes outside of jit")
def test_reports_the_bytes_saved_and_the_error():
    params = {"embedding": {"embedding": jax.device_put(normal(64, 32))}, "other": np.ones(3, np.float32)}
    small, (row,) = quantize(params)
    assert (row.arrays, row.bytes_before, row.bytes_after) == (1, 4 * 64 * 32, 64 * 32 + 4 * 64)
    values = np.asarray(jax.jit(dequantized)(small)["embedding"]["embedding"])
    lost = values - params["embedding"]["embedding"]
    expected = np.linalg.norm(lost) / np.linalg.norm(params["embedding"]["embedding"])
    assert row.relative_error == pytest.approx(expected, rel=1e-5)
    assert 0 < row.relative_error < 0.01
    assert str(row).startswith("*embedding/embedding: 1 arrays, 0.0 MiB -> 0.0 MiB, relative error 0.")
    assert small["other"] is params["other"]


@pytest.mark.programs(20, reason="quantize computes outside of jit")
def test_accepts_custom_rules():
    params = {name: {"kernel": jax.device_put(np.ones((2, 3), np.float32))} for name in "ab"}
    small, _ = quantize(params, [Rule(pattern="b/kernel", inputs=(-1,))])
    assert isinstance(small["b"]["kernel"], Int8)
    assert small["b"]["kernel"].scale.shape == (2, 1)
    assert small["a"]["kernel"] is params["a"]["kernel"]


@pytest.mark.programs(20, reason="quantize computes outside of jit")
def test_rejects_unsupported_parameters():
    params = {"embedding": {"embedding": jax.device_put(np.ones((2, 2), np.float32))}}
    for bits, quantize_one in (
        (8, lambda array: quantized(array, (-1,))),
        (4, lambda array: quantized_int4(array, -1)),
    ):
        small = jax.jit(lambda params, one=quantize_one: jax.tree.map(one, params))(params)
        with pytest.raises(ValueError, match=rf"embedding/embedding.*{bits}"):
            quantize(small)
    with pytest.raises(ValueError, match="x/kernel"):
        quantize(params, [Rule(pattern="x/kernel", inputs=(-1,)), Rule(pattern="embedding", inputs=(-1,))])
    with pytest.raises(ValueError, match=r"bits.*4.*8.*group_size.*32.*64.*128.*got 4.*16"):
        quantize(params, bits=4, group_size=16)
