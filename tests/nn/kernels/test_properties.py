"""Every kernel equals the reference kernel on random calls that it supports."""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from attention_specs import attention_spec
from hypothesis import strategies as st
from jax.sharding import AxisType
from kernel_parts import ints, numbers, put
from property_parts import assert_close, often

from transformer.nn._attention import dot_product_attention
from transformer.nn._masks import Mask
from transformer.nn.kernels import ALL_KERNELS, GPU_KERNELS, SPLIT_KERNELS
from transformer.nn.kernels._splash import SplashBlocks

BLOCKS = {"blockwise": 5, "ring": 3}
"""block sizes for the tests: small, so that short sequences have several blocks"""
SMALL_SPLASH_BLOCKS = SplashBlocks(forward=(128, 128), backward_keys=(128, 128), backward_queries=(128, 128))
FACTS = {
    "bias": {"has_bias": True},
    "array": {"has_dense_mask": True},
    "places": {"has_dense_mask": True},
    "offset": {"has_offset": True},
    "segments": {"has_segments": True},
    "softcap": {"has_softcap": True},
    "sinks": {"has_sinks": True},
}
"""option -> arguments of `attention_spec` that request it"""


@dataclasses.dataclass(frozen=True)
class Call:
    """An attention call: its sizes, its options, and the random seed of its arrays."""

    kernel: str
    queries: int
    keys: int
    kv_heads: int
    groups: int
    head_size: int
    value_size: int
    causal: bool
    window: int | None
    lengths: bool
    asked: frozenset[str]
    scale: float | None
    seed: int


@contextlib.contextmanager
def made_for_tests(kernel: str):
    """Use the kernel with small blocks, on its devices or on CPU devices in their place."""
    sizes = {"data": 2, "context": 4} if kernel in SPLIT_KERNELS else {"data": 1}
    devices = jax.devices()[: np.prod(list(sizes.values()))]
    axis_types = (AxisType.Auto,) * len(sizes)
    changed = ALL_KERNELS[kernel]
    if kernel in BLOCKS:
        changed = dataclasses.replace(changed, run=functools.partial(changed.run, block=BLOCKS[kernel]))
    with (
        mock.patch("transformer.nn.kernels._query_chunked.CHUNK_SIZE", 6),
        mock.patch("transformer.nn.kernels._splash.SMALL_BLOCKS", SMALL_SPLASH_BLOCKS),
        mock.patch("transformer.nn.kernels._cudnn.LIBRARY", "xla"),
        mock.patch.dict(ALL_KERNELS, {kernel: changed}),
        jax.set_mesh(jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=axis_types, devices=devices)),
    ):
        yield


def refused(kernel: str, request: dict) -> bool:
    with mock.patch("transformer.nn.kernels._cudnn.LIBRARY", "xla"):
        return ALL_KERNELS[kernel].unsupported(attention_spec(**request)) is not None


@st.composite
def calls(draw, *kernels: str) -> Call:
    """Generate calls that one of these kernels supports."""
    kernel = draw(st.sampled_from(kernels))
    split = kernel in SPLIT_KERNELS
    longest = 300 if kernel == "splash" else 19
    lengths = st.sampled_from([8, 16, 24]) if split else st.integers(1, longest)
    queries = draw(lengths)
    keys = draw(st.one_of(st.just(queries), lengths))
    if kernel == "ring":
        keys = queries
    head_size = 8 if kernel == "cudnn" else draw(st.integers(1, 9))
    causal, window = draw(st.booleans()), draw(st.none() | st.integers(1, longest))
    value_size = draw(st.integers(1, 9))
    request = {
        "num_queries": queries,
        "num_keys": keys,
        "dtype": jnp.bfloat16 if kernel in GPU_KERNELS else jnp.float32,
        "length_shards": 4 if split else 1,
        "head_dim": head_size,
        "value_dim": head_size,
    }
    if refused(kernel, request | {"value_dim": value_size}):
        value_size = head_size
    if window is not None and not causal and refused(kernel, request | {"has_two_sided_window": True}):
        window = None
    asked = set()
    for name, fact in FACTS.items():
        if not refused(kernel, request | fact) and draw(st.booleans()):
            asked.add(name)
    return Call(
        kernel=kernel,
        queries=queries,
        keys=keys,
        kv_heads=draw(st.integers(1, 3)),
        groups=draw(st.integers(1, 3)),
        head_size=head_size,
        value_size=value_size,
        causal=causal,
        window=window,
        lengths=draw(st.booleans()),
        asked=frozenset(asked),
        scale=draw(st.sampled_from([None, 1.0])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def arguments(call: Call, dtype) -> tuple[dict, Mask]:
    """Return the differentiable arrays of a call, and its mask."""
    random = np.random.default_rng(call.seed)

    def normal(*shape):
        return random.normal(size=shape).astype(np.float32)

    def whole(low, high, *shape):
        return ints(random.integers(low, high, shape))

    heads, rows, queries, keys = call.kv_heads * call.groups, 2, call.queries, call.keys
    arrays = {
        "query": normal(rows, queries, heads, call.head_size).astype(dtype),
        "key": normal(rows, keys, call.kv_heads, call.head_size).astype(dtype),
        "value": normal(rows, keys, call.kv_heads, call.value_size).astype(dtype),
    }
    if "sinks" in call.asked:
        arrays["sinks"] = normal(heads)
    if "bias" in call.asked:
        arrays["table"] = normal(heads, queries + keys)
    mask = Mask(is_causal=call.causal, window_size=call.window)
    if call.lengths:
        mask = mask & Mask.lengths(whole(0, keys + 1, rows))
    if "segments" in call.asked:
        of = [ints(np.sort(random.integers(0, 3, (rows, length)))) for length in (queries, keys)]
        mask = mask & Mask.segments(of[0], of[0] if queries == keys else of[1])
    if "array" in call.asked:
        mask = mask & Mask.array(put(random.random((rows, random.choice([1, heads]), queries, keys)) < 0.6))
    if "places" in call.asked:
        mask = mask & Mask.places(whole(0, keys, rows, queries), whole(0, keys, rows, keys))
    if "offset" in call.asked:
        mask = mask.shifted(whole(-2, keys, rows))
    return arrays, mask


def values_and_gradients(call: Call, arrays: dict, mask: Mask, kernel: str):
    random = np.random.default_rng(call.seed + 1)
    by = random.normal(size=(*arrays["query"].shape[:3], call.value_size)).astype(np.float32)

    def loss(arrays, mask):
        given, bias = dict(arrays), None
        if "table" in given:
            table = given.pop("table")

            def bias(queries, keys):
                return table[:, queries[:, None] - keys[None, :] + call.keys - 1][None]

        softcap = 2.0 if "softcap" in call.asked else None
        out = dot_product_attention(
            **given, mask=mask, bias=bias, scale=call.scale, softcap=softcap, implementation=kernel
        )
        return (out.astype(jnp.float32) * by).sum(), out

    gradients, out = jax.jit(jax.grad(loss, has_aux=True))(arrays, mask)
    return numbers((out, gradients))


def check(call: Call) -> None:
    dtype = jnp.bfloat16 if call.kernel in GPU_KERNELS else jnp.float32
    arrays, mask = arguments(call, dtype)
    exact = {name: array.astype(np.float32) for name, array in arrays.items()}
    expected = values_and_gradients(call, exact, mask, "reference")
    with made_for_tests(call.kernel):
        got = values_and_gradients(call, arrays, mask, call.kernel)
    assert_close(got, expected, 1e-5 if dtype == jnp.float32 else 0.03)


@often(3, 15, calls("blockwise", "query_chunked"))
def test_kernels_for_any_device_equal_the_reference(call):
    check(call)


@often(0, 10, calls("ring", "all_gather_kv"))
def test_kernels_for_a_split_length_equal_the_reference(call):
    check(call)


@often(0, 10, calls("splash"))
def test_splash_equals_the_reference(call):
    check(call)


@often(0, 10, calls("cudnn"))
def test_the_cudnn_call_equals_the_reference(call):
    check(call)
