"""Kernels for the few rows of a decoding step on a GPU, compared with float64; elsewhere in Pallas' interpreter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer import CausalLM
from transformer.config import FeedForwardOptions, NormOptions, ParameterOptions, RotaryOptions, TransformerConfig
from transformer.generate import Sampling, generate
from transformer.nn import _few_rows as few_rows
from transformer.nn._caches import KVCache, with_shared_places
from transformer.nn._masks import Mask
from transformer.nn.kernels import AttentionSpec, choose, flash_decode_attention, reference_attention
from transformer.nn.kernels import _flash_decode as flash_decode
from transformer.nn.kernels._contract import AttentionShapes
from transformer.nn.quantization._int8 import quantized

ROUNDING = 2**-8
"""relative error of a number that was rounded to bfloat16"""


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(few_rows, "INTERPRET", jax.default_backend() != "gpu")


def normal(seed, *shape):
    return np.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def error(got, expected):
    got, expected = (np.asarray(array, np.float64) for array in (got, expected))
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(1, 256, (128, 64)), (3, 200, (100, 70)), (16, 1024, (192,)), (5, 4096, (64,))],
    ids=["one row", "sizes that are no multiples", "split inputs", "many splits"],
)
def test_products_equal_those_in_float64(interpreted, rows, inputs, outputs):
    x, kernels = normal(0, rows, inputs), tuple(normal(i + 1, inputs, size) for i, size in enumerate(outputs))
    for got, kernel in zip(jax.jit(few_rows.products)(x, kernels), kernels, strict=True):
        assert got.dtype == jnp.bfloat16
        assert error(got, x.astype(np.float64) @ kernel.astype(np.float64)) < ROUNDING


@pytest.mark.parametrize("sizes", [(128, 64), (100, 70)])
def test_int8_kernels_are_read_as_integers(interpreted, sizes):
    kernel = jax.jit(lambda array: quantized(array, (0,)))(normal(1, *sizes).astype(np.float32))
    x = normal(0, 3, sizes[0])

    def product(x):
        y = kernel.product(x)
        return y.astype(jnp.float32).sum(), y

    (slope, got) = jax.jit(jax.grad(product, has_aux=True))(x)
    wide = np.asarray(kernel.values, np.float64) * np.asarray(kernel.scale)
    assert error(got, x.astype(np.float64) @ wide) < 2 * ROUNDING
    assert error(slope, np.broadcast_to(wide.sum(1), x.shape)) < 2 * ROUNDING


def test_gated_product_equals_that_in_float64(interpreted):
    x, gate, up = normal(0, 3, 200), normal(1, 200, 130), normal(2, 200, 130)
    got = jax.jit(lambda *arrays: few_rows.gated_product(*arrays, lambda a, b: jax.nn.relu(a) * b))(x, gate, up)
    wide = x.astype(np.float64)
    expected = np.maximum(wide @ gate.astype(np.float64), 0) * (wide @ up.astype(np.float64))
    assert error(got, expected) < ROUNDING


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_rms_norm_equals_that_in_float64(interpreted, shift):
    x, scale = normal(0, 3, 200), np.random.default_rng(1).normal(size=200).astype(np.float32)
    got = jax.jit(lambda *arrays: few_rows.rms_norm(*arrays, 1e-6, shift, jnp.bfloat16))(x, scale)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * (shift + scale)
    assert error(got, expected) < ROUNDING


def test_gradients_are_those_of_the_formulas(interpreted):
    x, kernel, other, scale = normal(0, 2, 128), normal(1, 128, 64), normal(2, 128, 64), normal(3, 128)

    def loss(products, norm, x, kernel, other, scale):
        y = norm(x, scale)
        return sum(part.astype(jnp.float32).sum() for part in products(y, kernel, other))

    def of_kernels(y, kernel, other):
        (product,) = few_rows.products(y, (kernel,))
        return product, few_rows.gated_product(y, kernel, other, lambda a, b: jax.nn.silu(a) * b)

    def of_formulas(y, kernel, other):
        return y @ kernel, jax.nn.silu(y @ kernel) * (y @ other)

    def normalized(x, scale):
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6) * scale[None]).astype(x.dtype)

    def gradients(*functions):
        return jax.jit(jax.grad(lambda *arrays: loss(*functions, *arrays), argnums=(0, 1, 2, 3)))

    got = gradients(of_kernels, lambda x, scale: few_rows.rms_norm(x, scale, 1e-6, 0.0, x.dtype))
    for ours, theirs in zip(
        got(x, kernel, other, scale), gradients(of_formulas, normalized)(x, kernel, other, scale), strict=True
    ):
        assert error(ours, theirs) < 4 * ROUNDING  # each side rounds the norm, its product and the gradient


CALLS = {
    "grouped heads": ((2, 160, 8, 2, 64, 64), {}),
    "softcap and sizes that are no powers of two": ((1, 96, 4, 4, 24, 40), {"softcap": 5.0}),
    "window": ((3, 96, 6, 1, 32, 32), {"window": 20}),
    "sinks and a split cache": ((1, 1024, 4, 2, 32, 32), {"sinks": True}),
    "an empty row": ((2, 64, 2, 2, 16, 16), {"empty": True}),
}


@pytest.mark.parametrize("call", CALLS)
def test_attention_of_one_query_equals_the_reference(interpreted, call):
    (rows, slots, heads, kv_heads, head, value), options = CALLS[call]
    query, key = normal(0, rows, 1, heads, head), normal(1, rows, slots, kv_heads, head)
    values = normal(2, rows, slots, kv_heads, value)
    lengths = np.random.default_rng(3).integers(slots // 2, slots + 1, rows, dtype=np.int32)
    lengths[0] = 0 if "empty" in options else lengths[0]
    mask = Mask.causal().shifted(jnp.asarray(lengths - 1)) & Mask.lengths(jnp.asarray(lengths))
    mask = mask & Mask.window(options["window"]) if "window" in options else mask
    # The largest sink is above all scores.
    sinks = jnp.linspace(-2.0, 9.0, heads) if "sinks" in options else None
    spec = AttentionSpec(mask=mask, scale=head**-0.5, softcap=options.get("softcap"), sinks=sinks)
    got = jax.jit(lambda *arrays: flash_decode_attention(*arrays, spec)[0])(query, key, values)
    wide = [array.astype(np.float32) for array in (query, key, values)]
    expected = jax.jit(lambda *arrays: reference_attention(*arrays, spec)[0])(*wide)
    assert error(got, expected) < ROUNDING
    if "empty" in options:
        assert (np.asarray(got, np.float32)[0] == 0).all()


def test_a_long_cache_is_split_among_programs():
    assert flash_decode._splits(programs=8, slots=160) == 1
    assert flash_decode._splits(programs=8, slots=8192) == 32
    assert flash_decode._splits(programs=512, slots=8192) == 1


@pytest.mark.cpu_only("a GPU has the kernel")
def test_the_kernel_for_decoding_refuses_several_queries_and_other_devices():
    shapes = AttentionShapes(num_queries=2, num_keys=8, dtype=jnp.bfloat16)
    assert "NVIDIA" in flash_decode.flash_decode_limits(AttentionSpec(shapes=shapes))
    with pytest.raises(ValueError, match=r"flash_decode.*NVIDIA"):
        choose("flash_decode", AttentionSpec(shapes=shapes))


def test_several_queries_are_refused(interpreted):
    shapes = AttentionShapes(num_queries=2, num_keys=8, dtype=jnp.bfloat16)
    assert "2 queries" in flash_decode.flash_decode_limits(AttentionSpec(shapes=shapes))


def small_model(**options):
    config = TransformerConfig(
        vocab_size=64,
        d_model=64,
        num_layers=2,
        num_heads=4,
        norm=NormOptions(kind="rms_norm"),
        feed_forward=FeedForwardOptions(d_ff=128, activation="silu", gated=True),
        parameters=ParameterOptions(use_bias=False, dtype="bfloat16"),
        position=RotaryOptions(),
        dtype="bfloat16",
        **options,
    )
    return CausalLM(config)


@pytest.mark.cpu_only("compares with a device without the kernels")
@pytest.mark.programs(20, reason="two generations, with and without the kernels")
def test_generation_with_the_kernels_gives_the_same_logits(monkeypatch):
    model = small_model()
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 1), np.int32))["params"]

    def step(params, tokens, cache):
        return model.apply({"params": params}, tokens, cache=cache)

    cache = model.init_cache(2, 16)
    tokens = np.array([[5], [9]], np.int32)
    expected, _ = jax.jit(step)(params, tokens, cache)
    monkeypatch.setattr(few_rows, "INTERPRET", True)
    launched = []
    original = few_rows.launch
    monkeypatch.setattr(few_rows, "launch", lambda *a, **k: launched.append(a) or original(*a, **k))
    got, _ = jax.jit(lambda *arrays: step(*arrays))(params, tokens, cache)
    assert launched
    assert error(got, expected) < 4 * ROUNDING  # two layers, each of which rounds its residual


def test_generated_tokens_do_not_depend_on_shared_places():
    """Layers share lengths and positions in the loop; a row that is longer than another keeps its own."""
    model = small_model()
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 1), np.int32))["params"]
    prompts = [[3, 4, 5, 6, 7], [9]]
    together = generate(model, params, prompts, max_new_tokens=4, sampling=Sampling(temperature=0.0))
    for row, prompt in enumerate(prompts):
        alone = generate(model, params, [prompt], max_new_tokens=4, sampling=Sampling(temperature=0.0))
        assert alone[0] == together[row]


def test_positions_are_shared_from_a_layer_that_has_keys():
    counting, own = (KVCache.create(2, 8, heads, 4, 4, jnp.float32) for heads in (0, 1))
    own = dataclasses.replace(own, positions=np.arange(16).reshape(2, 8), length=np.array([3, 5]))
    shared = with_shared_places({"a": counting, "b": own, "c": own})
    assert all(node.positions is own.positions and node.length is own.length for node in shared.values())


@pytest.mark.cpu_only("replaces the platform")
def test_no_kernel_for_float32_for_many_rows_or_for_a_compiler_that_rejects_it(monkeypatch):
    half = jnp.zeros((1, 8), jnp.bfloat16)
    assert not few_rows.apply_to(half, 1)  # this device is a CPU
    monkeypatch.setattr(few_rows, "platform", lambda: "gpu")
    monkeypatch.setattr(few_rows, "on_one_device", lambda: True)
    monkeypatch.setattr(few_rows, "compiler_error", lambda *_: None)
    assert few_rows.apply_to(half, 16)
    assert not few_rows.apply_to(half, 17)
    assert not few_rows.apply_to(half.astype(jnp.float32), 1)
    monkeypatch.setattr(few_rows, "compiler_error", lambda *_: "no Triton")
    assert not few_rows.apply_to(half, 1)
