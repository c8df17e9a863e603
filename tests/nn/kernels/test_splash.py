"""Splash attention in interpret mode: equals the reference, also over meshes, skips blocks, and compiles for TPU.

tests/nn/kernels/test_kernels.py checks the supported options, with values and gradients, against the documented table.
"""

import dataclasses
import functools
import re

import abstract_meshes
import jax
import jax.export
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from attention_specs import attention_spec
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from kernel_parts import assert_close, compiled_kernels, ints, normal, numbers, put, splash_kernels
from numeric_parts import random_params
from placements import mesh
from training_recipes import change, tiny_recipe

from transformer.config import ConfigError, Execution, LayerKind, RotaryOptions, StackOptions, TransformerConfig
from transformer.data import TextFile
from transformer.nn._attention import dot_product_attention
from transformer.nn._masks import Mask
from transformer.nn._partitioning import shard_map
from transformer.nn.kernels import AttentionSpec, choose, reference_attention, splash_attention
from transformer.nn.kernels import _splash as splash
from transformer.nn.models import CausalLM
from transformer.training._chips import DEVICE_KINDS
from transformer.training.plan import make_plan, parse_topology, topology_devices

pytestmark = pytest.mark.cpu_only("a kernel for TPUs")

PLAIN = {"scale": 0.7}


def arrays(batch, queries, keys, heads, kv_heads, head_dim=5, value_dim=7):
    shapes = (batch, queries, heads, head_dim), (batch, keys, kv_heads, head_dim), (batch, keys, kv_heads, value_dim)
    return [normal(seed, *shape) for seed, shape in enumerate(shapes)]


def value_and_grads(kernel, given, mask, softcap=None):
    """Return the output and the gradients for query, key, value and sinks."""
    sinks = normal(3, given[0].shape[2])
    out_grad = normal(4, *given[0].shape[:3], given[2].shape[3])

    def loss(query, key, value, sinks):
        extras = PLAIN | {"softcap": softcap, "sinks": sinks}
        out, _ = kernel(query, key, value, AttentionSpec(mask=mask, **extras))
        return (out * out_grad).sum(), out

    grads, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*given, sinks)
    return out, grads


def third_segments(length, other=None):
    queries, keys = (ints(np.arange(size)[None] * 3 // size) for size in (length, other or length))
    return Mask.segments(queries, keys)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize(
    ("queries", "keys", "mask"),
    [
        (601, 601, Mask.causal() & Mask.window(101) & third_segments(601)),
        (521, 130, Mask.lengths(ints([127])) & third_segments(521, 130)),
        (130, 521, Mask.window(30)),
        (257, 257, Mask.causal() & Mask.lengths(ints([0]))),
        (521, 521, Mask.causal() & Mask.chunks(200)),
        (385, 385, Mask.causal() & Mask.chunks(300) & Mask.window(101) & third_segments(385)),
    ],
    ids=["two blocks of each", "more queries", "more keys", "nothing to see", "chunks", "chunks and a window"],
)
def test_supports_lengths_that_are_not_multiples_of_a_block(queries, keys, mask):
    given = arrays(1, queries, keys, 2, 1)
    assert_close(
        value_and_grads(splash_attention, given, mask, 3.0), value_and_grads(reference_attention, given, mask, 3.0)
    )


LIMITS = splash.SplashBlocks(forward=(1024, 512), backward_keys=(512, 2048), backward_queries=(1024, 1024))


def sizes_of(blocks, axis):
    return [sizes[axis] for sizes in (blocks.forward, blocks.backward_keys, blocks.backward_queries)]


def test_blocks_have_equal_size_and_little_padding():
    for length in range(1, 5000, 7):
        blocks = LIMITS.fitted(length, length)
        for axis, unit in enumerate(blocks.padding_units()):
            padded = length + -length % unit
            assert padded - length < 128 * -(-length // 512)
            for size, most in zip(sizes_of(blocks, axis), sizes_of(LIMITS, axis), strict=True):
                assert size % splash.LANES == padded % size == 0
                assert size <= most
    sizes = [splash.SMALL_BLOCKS.fitted(n, n).forward[0] for n in (1, 128, 129, 512, 640, 1024)]
    assert sizes == [128, 128, 256, 512, 384, 512]
    assert LIMITS.fitted(4096, 8192) == LIMITS
    assert LIMITS.fitted(1536, 1536).forward == (512, 512)  # three blocks do not pair up


def test_blocks_that_divide_need_no_padding():
    for length in range(128, 9000, 128):
        for axis in (0, 1):
            for size, most in zip(sizes_of(LIMITS.dividing(length), axis), sizes_of(LIMITS, axis), strict=True):
                assert length % size == size % splash.LANES == 0
                assert size <= most
    assert LIMITS.dividing(4096) == LIMITS
    assert LIMITS.dividing(1536).forward == (768, 512)


def test_segment_ids_hide_keys_behind_the_end_of_a_row():
    assert splash.segment_ids(Mask.causal(), 2, (4, 4), (4, 4)) == ()
    rows = jax.jit(lambda lengths: splash.segment_ids(Mask.lengths(lengths), 2, (4, 4), (4, 4)))
    queries, keys = jax.device_get(rows(np.array([1, 3])))
    seen = np.arange(4) < np.array([[1], [3]])
    np.testing.assert_array_equal(queries[:, :, None] == keys[:, None, :], np.repeat(seen[:, None], 4, axis=1))


def test_rejects_blocks_that_are_not_multiples_of_the_lanes():
    with pytest.raises(ConfigError, match=r"128.*got forward=\(512.*300\).*256.*384.*300"):
        splash.SplashBlocks(forward=(512, 300))
    with pytest.raises(ConfigError, match=r"got backward_keys=\(0.*512\).*128.*0"):
        splash.SplashBlocks(backward_keys=(0, 512))


def test_each_chip_has_its_own_block_sizes():
    for kind, blocks in splash.BLOCKS.items():
        assert kind in DEVICE_KINDS
        with computing_on("tpu", kind):
            assert splash.block_limits(256, jnp.bfloat16) == splash.block_limits(128, jnp.float32) == blocks
            assert splash.block_limits(256, jnp.float32) == splash.SMALL_BLOCKS
    with computing_on("tpu", "TPU v4"):
        assert splash.block_limits(128, jnp.bfloat16) == splash.SMALL_BLOCKS
    assert splash.block_limits(128, jnp.bfloat16) == splash.SMALL_BLOCKS


def test_block_sizes_do_not_change_results():
    given, mask = arrays(1, 300, 400, 2, 1), Mask.causal()
    blocks = splash.SplashBlocks(forward=(128, 256), backward_keys=(256, 128), backward_queries=(384, 128))
    run = functools.partial(splash_attention, blocks=blocks)
    assert_close(value_and_grads(run, given, mask), value_and_grads(reference_attention, given, mask))


# If the length is sharded, gradients of keys and values are summed over devices with different queries.
MESHES = {
    "rows and heads": ({"data": 2, "tensor": 4}, Mask.causal() & third_segments(140), 4),
    "key heads that do not divide": ({"fsdp": 4, "tensor": 2}, Mask.causal() & Mask.window(9), 3),
    "length": ({"data": 2, "context": 2, "tensor": 2}, Mask.causal() & third_segments(140), 2),
    "length, nothing hidden": ({"data": 4, "context": 2}, Mask(), 2),
    "rows that do not divide": ({"data": 8}, Mask.lengths(ints([20, 0, 3, 1])), 2),
}


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("case", MESHES)
def test_over_a_mesh_equals_reference_in_values_and_gradients(case):
    sizes, mask, kv_heads = MESHES[case]
    given = arrays(4, 140, 140, 2 * kv_heads, kv_heads)
    expected = value_and_grads(reference_attention, given, mask)
    with jax.set_mesh(mesh(**sizes)):
        assert_close(value_and_grads(splash_attention, given, mask), expected)


def test_indivisible_key_heads_keep_query_heads_sharded(monkeypatch):
    """Six query heads over two devices: each device has three, and each of these gets a separate key head."""
    seen = []

    def recorded(function, *names):
        return shard_map(lambda query, *rest: (seen.append(query.shape), function(query, *rest))[1], *names)

    monkeypatch.setattr(splash, "shard_map", recorded)
    with jax.set_mesh(mesh(data=2, tensor=2)):
        jax.eval_shape(
            lambda *given: splash_attention(*given, AttentionSpec(mask=Mask(), **PLAIN)), *arrays(2, 128, 128, 6, 3)
        )
    assert seen == [(1, 128, 3, 1, 5)]


def test_rows_and_heads_stay_on_their_devices():
    """No communication between devices: without the mesh the compiled program would gather all arrays."""
    split = mesh(data=2, tensor=2)
    place = NamedSharding(split, PartitionSpec("data", None, "tensor"))
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in arrays(2, 128, 128, 4, 2)]

    def loss(*arrays):
        return splash_attention(*arrays, AttentionSpec(mask=Mask.causal() & third_segments(128), **PLAIN))[0].sum()

    with jax.set_mesh(split):
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), out_shardings=(place,) * 3).lower(*given).compile()
    assert not re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())


@pytest.mark.parametrize(
    ("mask", "hidden"),
    [(Mask.causal(), slice(512, None)), (Mask.window(200), slice(1024, None))],
    ids=["causal", "window"],
)
def test_fully_masked_blocks_are_not_computed(mask, hidden):
    """NaN times a weight of zero is NaN, so NaN values in a block would appear if the block were computed."""
    query, key, value = arrays(1, 512, 1536, 1, 1)
    poisoned = np.array(value)
    poisoned[:, hidden] = np.nan

    def program(kernel):
        return jax.jit(lambda value: kernel(query, key, value, AttentionSpec(mask=mask, **PLAIN))[0])

    assert np.isnan(program(reference_attention)(poisoned)).any()
    splash_program = program(splash_attention)
    np.testing.assert_array_equal(splash_program(poisoned), splash_program(value))


def test_bfloat16_with_a_fully_masked_row():
    given = arrays(2, 130, 130, 4, 2)
    mask = Mask.causal() & Mask.lengths(ints([130, 0]))
    expected, expected_grads = value_and_grads(reference_attention, given, mask)
    out, grads = value_and_grads(splash_attention, [np.asarray(x).astype(jnp.bfloat16) for x in given], mask)
    assert {x.dtype for x in (out, *grads[:3])} == {jnp.dtype(jnp.bfloat16)}
    assert grads[3].dtype == jnp.float32
    got = numbers([out, *grads])
    assert all((x[1] == 0).all() for x in got[:4])
    assert_close(got, [expected, *expected_grads], 0.1)


@pytest.mark.slow
def test_a_whole_model_equals_the_reference():
    """Packed rows, layers with and without a window, scan and rematerialization, over rows and heads."""
    period = (LayerKind(), LayerKind(window=5))
    sizes = {
        "d_model": 16,
        "num_layers": 2,
        "num_heads": 4,
        "attention.num_kv_heads": 2,
        "feed_forward.d_ff": 8,
        "attention.softcap": 5.0,
    }
    config = TransformerConfig(vocab_size=11, position=RotaryOptions(), stack=StackOptions(period=period), **sizes)
    tokens = np.random.default_rng(5).integers(0, 11, (4, 16)).astype(np.int32)
    segments = ints(np.arange(16)[None] // np.array([5, 16, 7, 11])[:, None])
    params = random_params(CausalLM(config), tokens)

    def value_and_grad(attention):
        model = CausalLM(config, Execution(attention=attention, remat="full"))

        def loss(params, tokens):
            logits = model.apply(params, tokens, mask=Mask.segments(segments))
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1).mean()

        return jax.jit(jax.value_and_grad(loss))(params, tokens)

    expected = value_and_grad("reference")
    with jax.set_mesh(mesh(data=2, tensor=2)):
        assert_close(value_and_grad("splash"), expected)


def request(queries=2048, keys=None, **facts):
    return attention_spec(queries, keys, **facts)


REFUSED = {
    "weights": (request(return_weights=True), r"return attention weights: .* Use reference"),
    "bias": (request(has_bias=True), r"add a bias: scores never leave the kernel\. Use reference or query_chunked"),
    "dropout": (request(has_dropout=True), r"drop attention weights: it does not generate random numbers\. Use"),
    "array": (request(has_dense_mask=True), r"apply a mask array: it would store the whole array\."),
    "offset": (request(has_offset=True), r"start at an offset \(a cache\): .*\. Use reference or query_chunked"),
    "heads": (
        request(head_dim=257),
        r"use a head size of 257: blocks with more than 256 .*\. Use reference or query_chunked",
    ),
    "float16": (request(dtype=jnp.float16), r"compute in float16: it supports float32 and bfloat16\. Use"),
    "float64": (request(dtype=np.dtype("float64")), r"compute in float64: it supports float32 and bfloat16\. Use"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_splash_features_name_supported_kernels(case):
    asked, message = REFUSED[case]
    with pytest.raises(ConfigError, match=rf"{message}.*,"):
        choose("splash", asked)
    with computing_on("tpu"):
        assert choose("auto", asked) in ("reference", "blockwise")


@pytest.mark.parametrize(("head_dim", "value_dim"), [(257, 8), (8, 257)])
def test_the_larger_head_size_determines_the_blocks(head_dim, value_dim):
    query, value = (put(np.zeros((1, 3, 1, size), np.float32)) for size in (head_dim, value_dim))
    with pytest.raises(ConfigError, match="use a head size of 257"):
        dot_product_attention(query, query, value, implementation="splash")


def test_rejects_a_symbolic_length(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # it has no type for symbolic lengths
    (length,) = jax.export.symbolic_shape("length")
    with pytest.raises(ConfigError, match=r"splash .* can't handle a symbolic length: .* Use reference"):
        choose("splash", request(length))


def computing_on(platform, kind=None):
    return abstract_meshes.computing_on(
        platform, kind or {"tpu": "TPU of some kind", "gpu": "GPU of some kind"}[platform]
    )


def test_auto_uses_splash_only_on_a_tpu():
    with computing_on("tpu"):
        assert choose("auto", request(2048)) == "splash"
        assert choose("auto", request(1500, 2048, dtype=jnp.bfloat16)) == "splash"
        assert choose("auto", request(512)) == "splash"
        assert choose("auto", request(511)) == "reference"
        assert choose("auto", request(1024, has_bias=True)) == "reference"
        assert choose("auto", request(2048, length_shards=4)) == "ring"
        assert choose("auto", request(2048, 24_000, length_shards=4)) == "splash"
        assert choose("auto", request(4096, length_shards=4, has_bias=True)) == "all_gather_kv"
        with pytest.raises(ConfigError, match=r"8.*all_gather_kv"):
            choose("ring", request(8, 16, length_shards=4))
    with computing_on("tpu", "TPU v3"):
        assert choose("auto", request(2048)) == "splash"
        assert choose("auto", request(2048, dtype=jnp.bfloat16)) == "blockwise"
        with pytest.raises(ConfigError, match=r"bfloat16.*TPU v3"):
            choose("splash", request(2048, dtype=jnp.bfloat16))
    assert choose("auto", request(2048)) == "blockwise"
    assert choose("splash", request(2048)) == "splash"
    with computing_on("gpu"):
        assert choose("auto", request(2048)) == "blockwise"
        with pytest.raises(ConfigError, match="query_chunked"):
            choose("splash", request(2048))


def tiny(length, **groups):
    recipe = change(
        tiny_recipe(
            model={
                "d_model": 16,
                "num_heads": 4,
                "attention.num_kv_heads": 2,
                "feed_forward.d_ff": 8,
                "position": RotaryOptions(),
            }
        ),
        **groups,
    )
    return dataclasses.replace(recipe, data=TextFile(path="t.txt", sequence_length=length, batch_size=4))


@pytest.mark.slow
class TestCompiler:
    """The TPU compiler accepts the kernels; it also checks block sizes and memory, which interpret mode does not."""

    @pytest.fixture
    def devices(self, tpu_compiler):
        return topology_devices(parse_topology("v5e:2x2"))

    @pytest.mark.parametrize("parallel", [{"tensor": 2}, {"fsdp": 2, "context": 2}], ids=["tensor", "context"])
    def test_a_train_step_runs(self, devices, parallel):
        recipe = tiny(256, execution={"attention": "splash"}, parallel={"devices": None} | parallel)
        plan = make_plan(recipe, parse_topology("v5e:2x2"), devices)
        assert plan.fits
        assert splash_kernels(recipe, devices) == {"fwd": 1, "dq": 1, "dkv": 1}

    def test_auto_selects_splash(self, devices):
        recipe = tiny(2048, parallel={"devices": None})
        assert splash_kernels(recipe, devices) == {"fwd": 1, "dq": 1, "dkv": 1}

    @pytest.mark.parametrize(("remat", "kernels"), [("none", 3), ("full", 4), ("dots", 3), ("names", 3)])
    def test_the_forward_kernel_reruns_only_with_full_rematerialization(self, devices, remat, kernels):
        """Per layer of the loop: the forward kernel and the kernels of dQ and of dK and dV, and one more if repeated.

        Counted in the compiled program: the traced one still contains the repeated kernel, whose results are unused.
        """
        recipe = tiny(256, execution={"attention": "splash", "remat": remat}, parallel={"devices": None})
        assert compiled_kernels(recipe, devices) == kernels

    @pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
    @pytest.mark.parametrize(("dtype", "size"), [(jnp.float32, 128), (jnp.bfloat16, 256)], ids=str)
    def test_supports_many_rows_with_large_blocks(self, tpu_compiler, topology, dtype, size):
        """Many rows need more fast memory than a few: their segment ids are copied to it block by block."""
        devices = topology_devices(parse_topology(topology))
        query, key = (jax.ShapeDtypeStruct((64, 2048, heads, size), dtype) for heads in (4, 1))

        def loss(*arrays):
            mask = Mask.causal() & Mask.segments(*[jnp.arange(2048)[None] // jnp.arange(500, 564)[:, None]] * 2)
            return (
                splash_attention(*arrays, AttentionSpec(mask=mask, softcap=3.0, **PLAIN))[0].astype(jnp.float32).sum()
            )

        one = jax.sharding.Mesh(np.array(devices[:1]), ("data",), axis_types=(AxisType.Auto,))
        with jax.set_mesh(one):
            compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(query, key, key).compile()
        assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
    def test_supports_the_largest_heads_with_all_features(self, devices, dtype):
        shapes = (2, 1100, 4, 256), (2, 1700, 2, 256), (2, 1700, 2, 256)
        shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        mask = Mask.causal() & Mask.window(300) & Mask.lengths(ints([9, 0])) & third_segments(1100, 1700)

        def loss(*arrays):
            extras = PLAIN | {"softcap": 3.0, "sinks": jnp.zeros(4)}
            return splash_attention(*arrays, AttentionSpec(mask=mask, **extras))[0].astype(jnp.float32).sum()

        two = jax.sharding.Mesh(np.array(devices[:2]), ("data",), axis_types=(AxisType.Auto,))
        with jax.set_mesh(two):
            compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()
        assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3
