"""Attention kernels: each supports its documented features; the blockwise kernel skips blocks and is linear."""

import dataclasses
import functools
import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_specs import attention_spec
from jax.sharding import AxisType
from kernel_parts import assert_close, ints, normal, numbers, put

from transformer.config import ConfigError
from transformer.nn._attention import dot_product_attention
from transformer.nn._masks import Mask
from transformer.nn.kernels import (
    ALL_KERNELS,
    DECODE_KERNELS,
    GPU_KERNELS,
    PAGED_KERNELS,
    SPLIT_KERNELS,
    AttentionSpec,
    _query_chunked,
    blockwise_attention,
    choose,
    reference_attention,
)

B, T, S, N, K, H, HV = 2, 19, 23, 6, 3, 5, 7
QUERY = normal(0, B, T, N, H)
KEY = normal(1, B, S, K, H)
VALUE = normal(2, B, S, K, HV)
TABLE = normal(3, N, T + S)
SINKS = normal(4, N)
OUT_GRAD = normal(5, B, T, N, HV)
SEGMENTS = Mask.segments(ints(np.repeat([0, 1, 2], [7, 7, 5])[None]), ints(np.repeat([0, 1], 12)[None, :S]))

MASKS = {
    "none": Mask(),
    "causal": Mask.causal(),
    "causal window": Mask.causal() & Mask.window(5),
    "window": Mask.window(4),
    "chunks": Mask.causal() & Mask.chunks(5),
    "chunks from an offset": (Mask.causal() & Mask.chunks(4)).shifted(ints([3, 0])),
    "offset": (Mask.causal() & Mask.window(9)).shifted(ints([4, 0])),
    "lengths": Mask.lengths(ints([20, 0])),
    "segments": SEGMENTS & Mask.causal(),
    "array": Mask.array(put(np.random.default_rng(6).random((B, N, T, S)) < 0.3)),
    "groups": Mask.causal() & Mask.window(3) & Mask.groups(ints([[-1] * 3 + [0] * 7 + [1] * 9, [0] * 12 + [-1] * 7])),
    "all": SEGMENTS & Mask.causal() & Mask.window(6) & Mask.lengths(ints([20, 9])),
}


def relative_bias(table):
    """Return a learned bias by distance as a function of indices, as position schemes pass it."""
    return lambda queries, keys: table[:, queries[:, None] - keys[None, :] + S - 1][None]


def value_and_grads(kernel, mask, softcap, **options):
    def loss(query, key, value, table, sinks):
        spec = AttentionSpec(mask=mask, bias=relative_bias(table), scale=0.7, softcap=softcap, sinks=sinks)
        out, _ = kernel(query, key, value, spec, **options)
        return (out * OUT_GRAD).sum(), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True))(QUERY, KEY, VALUE, TABLE, SINKS)


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("kind", MASKS)
def test_chunked_equals_reference_in_values_and_gradients(kind):
    expected = value_and_grads(reference_attention, MASKS[kind], 3.0)
    got = value_and_grads(blockwise_attention, MASKS[kind], 3.0, block=8)
    assert_close(got, expected)


PLAIN = {"scale": 0.7}


def test_chunked_without_extras_and_in_bfloat16():
    @jax.jit
    def run(*arrays):
        half, spec = [x.astype(jnp.bfloat16) for x in arrays], AttentionSpec(mask=Mask.causal(), **PLAIN)
        return blockwise_attention(*half, spec, block=8)[0], reference_attention(*arrays, spec)[0]

    got, expected = run(QUERY, KEY, VALUE)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(numbers(got), expected, atol=0.03)


def test_a_fully_masked_row_gives_zeros_and_no_gradient():
    mask = Mask.lengths(ints([S, 0]))
    for kernel in (reference_attention, blockwise_attention):

        def loss(query, key, value, kernel=kernel):
            out = kernel(query, key, value, AttentionSpec(mask=mask, **PLAIN))[0]
            return out.sum(), out

        grads, out = numbers(jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(QUERY, KEY, VALUE))
        assert (out[1] == 0).all()
        assert np.abs(out[0]).min() > 0
        for grad in grads:
            assert np.isfinite(grad).all()
            assert (grad[1] == 0).all()


@pytest.mark.parametrize(
    ("mask", "hidden"),
    [
        (Mask.causal().shifted(ints(8)), slice(16, None)),
        ((Mask.causal() & Mask.window(2)).shifted(ints(9)), slice(0, 8)),
        (Mask.lengths(ints([8, 8])), slice(8, None)),
        (Mask.segments(ints(np.ones((1, 8))), ints(np.repeat([[0, 1, 2]], 8, axis=1))), slice(16, None)),
        (Mask.array(put(np.tile(np.arange(24) < 16, (8, 1)))), slice(16, None)),
    ],
    ids=["causal", "window", "lengths", "segments", "array"],
)
def test_fully_masked_blocks_are_not_computed(mask, hidden):
    """NaN times a weight of zero is NaN, so NaN values in a block would appear if the block were computed."""
    query, key, value = (np.asarray(normal(0, 2, length, 1, 4)) for length in (8, 24, 24))
    poisoned = value.copy()
    poisoned[:, hidden] = np.nan

    def gradient(kernel, **options):
        def loss(q, k, v):
            return kernel(q, k, v, AttentionSpec(mask=mask, **PLAIN), **options)[0].sum()

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))

    assert np.isnan(gradient(reference_attention)(query, key, poisoned)[0])
    blockwise = gradient(blockwise_attention, block=8)
    jax.tree.map(np.testing.assert_array_equal, blockwise(query, key, poisoned), blockwise(query, key, value))


def test_blockwise_memory_does_not_grow_with_the_attention_matrix():
    def compiled(kernel, length):
        shapes = [jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)] * 3

        def loss(q, k, v):
            return kernel(q, k, v, AttentionSpec(mask=Mask.causal() & Mask.window(1000), **PLAIN))[0].sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes)

    short, long = compiled(blockwise_attention, 2048), compiled(blockwise_attention, 8192)
    assert long.as_text().count("\n") == short.as_text().count("\n")
    sizes = [lowered.compile().memory_analysis().temp_size_in_bytes for lowered in (short, long)]
    scores = 8192 * 8192 * 2 * 4
    assert sizes[1] < 4.5 * sizes[0]
    assert sizes[1] < scores / 20


@pytest.mark.parametrize(("kernel", "options"), [(reference_attention, {}), (blockwise_attention, {"block": 8})])
def test_dropout_has_its_rate_and_a_matching_gradient(kernel, options):
    def run(query, key):
        extras = PLAIN | {"dropout_rate": 0.25, "dropout_key": key}
        return kernel(query, KEY, VALUE, AttentionSpec(mask=Mask.causal(), **extras), **options)[0]

    @jax.jit
    def repeated(query):
        keys = jax.random.split(jax.random.key(7), 600)
        expected, _ = reference_attention(query, KEY, VALUE, AttentionSpec(mask=Mask.causal(), **PLAIN))
        return expected, jax.lax.map(lambda key: run(query, key), keys)

    @jax.jit
    def slopes(query, direction, out_grad):
        """Return the derivative along a direction, from the gradient and from a central difference."""
        key, step = jax.random.key(8), 1e-2
        (gradient,) = jax.vjp(lambda query: run(query, key), query)[1](out_grad)
        change = run(query + step * direction, key) - run(query - step * direction, key)
        return jnp.vdot(gradient, direction), jnp.vdot(change, out_grad) / (2 * step)

    expected, many = numbers(repeated(QUERY))
    np.testing.assert_allclose(many.mean(0), expected, atol=0.25)
    # The first query sees only one key: its output is the value times 1 / (1 - rate), or zero.
    first, whole = many[:, :, 0], expected[None, :, 0]
    np.testing.assert_allclose(first, np.where(first == 0, 0, whole / 0.75), rtol=1e-5)
    assert (first == 0).mean() == pytest.approx(0.25, abs=0.02)
    np.testing.assert_allclose(*slopes(QUERY, normal(8, *QUERY.shape), OUT_GRAD), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("num_keys", [4, 11])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("size", "make"), [(11, Mask.window), (3, Mask.window), (3, Mask.chunks)])
def test_a_query_chunk_reads_only_keys_within_its_mask(num_keys, causal, size, make):
    """Exactly these keys, or the last one if there are none, so that no part of the scores is computed in vain."""
    mask = dataclasses.replace(make(size), is_causal=causal)
    queries, keys = np.arange(11)[:, None], np.arange(num_keys)
    near = queries // size == keys // size if make == Mask.chunks else np.abs(queries - keys) < size
    seen = near & (keys <= queries) if causal else near
    for start in range(11):
        for stop in range(start + 1, 12):
            (found,) = np.nonzero(seen[start:stop].any(0))
            expected = (found[0], found[-1] + 1) if found.size else (num_keys - 1, num_keys)
            assert _query_chunked._key_range(mask, start, stop, num_keys) == expected, (start, stop)


@pytest.mark.cpu_only("the choice depends on the device")
def test_auto_chooses_by_length_and_features():
    def request(queries, keys, weights=False):
        return attention_spec(queries, keys, weights)

    assert choose("auto", request(64, 64)) == "reference"
    assert choose("auto", request(256, 256)) == "query_chunked"
    assert choose("auto", request(2048, 2048)) == "blockwise"
    assert choose("auto", request(1, 1_000_000)) == "reference"
    assert choose("auto", request(4096, 4096, weights=True)) == "reference"
    assert choose("blockwise", request(2, 2)) == "blockwise"


@pytest.mark.cpu_only("the choice depends on the device")
def test_the_automatic_choice_is_logged_once_per_size(caplog):
    caplog.set_level(logging.INFO, "transformer.nn.kernels")
    for length in (331, 331, 337):
        for implementation in ("auto", "blockwise"):
            choose(implementation, attention_spec(length, 4001))
    assert caplog.messages == [f"{n} x 4001 scores per head on cpu: auto selects blockwise" for n in (331, 337)]


def test_auto_uses_the_fused_kernel_on_a_gpu_where_supported(monkeypatch):
    for module in ("", "._cudnn", "._flash", "._splash"):
        monkeypatch.setattr(f"transformer.nn.kernels{module}.platform", lambda: "gpu")

    def chosen(length, **facts):
        return choose("auto", attention_spec(length, **({"dtype": jnp.bfloat16} | facts)))

    assert chosen(1024) == "cudnn"
    assert chosen(128) == "reference"
    assert chosen(1024, dtype=jnp.float32) == "reference"
    assert chosen(4096, has_segments=True) == "flash"
    assert chosen(4096, has_segments=True, dtype=jnp.float32) == "blockwise"


@pytest.mark.cpu_only("the choice depends on the device")
def test_a_cpu_cannot_run_cudnn():
    request = attention_spec(8, dtype=jnp.bfloat16)
    with pytest.raises(ConfigError, match=r"NVIDIA GPUs.*query_chunked"):
        choose("cudnn", request)


def test_an_unsupported_kernel_names_supported_ones():
    with pytest.raises(ConfigError, match=r"blockwise .* can't return attention weights: .* Use reference, or auto"):
        choose("blockwise", attention_spec(2, return_weights=True))
    with pytest.raises(
        ConfigError,
        match=r"query_chunked.*got 'block'.*'blockwise'",
    ):
        choose("block", attention_spec(2))


L = 16
Q, KV, VALUES = normal(0, 2, L, 4, 8), normal(1, 2, L, 2, 8), normal(2, 2, L, 2, 8)
THIRDS = ints(np.repeat([0, 1, 2], [7, 4, 5])[None])
# Options of calls with queries (2, 16, 4, 8), keys and values (2, 16, 2, 8): one row each in docs/architecture.md.
ASKED = {
    "causal mask": {"mask": Mask.causal()},
    "padding": {"mask": Mask.lengths(ints([11, 5]))},
    "packed segments": {"mask": Mask.causal() & Mask.segments(THIRDS)},
    "causal window": {"mask": Mask.causal() & Mask.window(5)},
    "two-sided window": {"mask": Mask.window(3)},
    "causal chunks": {"mask": Mask.causal() & Mask.chunks(5)},
    "fully masked row": {"mask": Mask.causal() & Mask.lengths(ints([9, 0]))},
    "window past the last key": {"mask": Mask.causal() & Mask.window(3) & Mask.lengths(ints([9, 0]))},
    "mask array": {"mask": Mask.array(put(np.random.default_rng(6).random((2, 4, L, L)) < 0.4))},
    "cache offset": {"mask": Mask.causal().shifted(ints([4, 0]))},
    "key length differs from query length": {"key": normal(1, 2, 12, 2, 8), "value": normal(2, 2, 12, 2, 8)},
    "single query": {"query": normal(0, 2, 1, 4, 8)},
    "grouped heads": {"key": normal(1, 2, L, 1, 8), "value": normal(2, 2, L, 1, 8)},
    "value size differs from key size": {"value": normal(2, 2, L, 2, 3)},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": put([0.3, -2.0, 1.0, 0.0], np.float32)},
    "bias": {"table": normal(3, 4, 2 * L)},
    "dropout": {"mask": Mask.window(1), "dropout_rate": 0.25},
    "weights returned": {"return_weights": True},
    "float32": {"dtype": jnp.float32},
    "bfloat16": {"dtype": jnp.bfloat16},
    "float16": {"dtype": jnp.float16},
}


def documented_cells():
    """Return {(option, kernel): whether the kernel supports it} from docs/architecture.md."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "architecture.md").read_text()
    section = text.partition("\n## Attention kernels\n")[2].partition("\n## ")[0]
    head, _, *rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\|.*$", section, re.M)]
    kernels = [name.strip("`") for name in head[1:]]
    return {
        (asked, kernel): {"yes": True, "no": False}[c]
        for asked, *cells in rows
        for kernel, c in zip(kernels, cells, strict=True)
    }


def attend(kernel, asked):
    """Return output and weights, and gradients with respect to all floating-point arguments."""
    options = {"query": Q, "key": KV, "value": VALUES} | ASKED[asked]
    dtype = options.pop("dtype", jnp.bfloat16 if kernel in GPU_KERNELS else jnp.float32)
    if "dropout_rate" in options:
        options["dropout_key"] = jax.random.key(4)
    floats = {name: options.pop(name) for name in ("query", "key", "value", "sinks", "table") if name in options}

    def loss(floats):
        arrays = {name: array if name in ("sinks", "table") else array.astype(dtype) for name, array in floats.items()}
        if "table" in arrays:
            table = arrays.pop("table")
            arrays["bias"] = lambda queries, keys: table[:, queries[:, None] - keys[None, :] + L][None]
        out = dot_product_attention(**arrays, **options, implementation=kernel)
        first = out[0] if isinstance(out, tuple) else out
        return (first * jnp.cos(jnp.arange(first.size)).reshape(first.shape)).sum(), out

    return jax.jit(jax.grad(loss, has_aux=True))(floats)


expected = functools.cache(functools.partial(attend, "reference"))


def test_the_documented_table_has_a_cell_for_every_tested_feature():
    kernels = ALL_KERNELS.keys() - {*PAGED_KERNELS, *DECODE_KERNELS}
    assert documented_cells().keys() == {(asked, kernel) for asked in ASKED for kernel in kernels}
    assert all(serves for (_, kernel), serves in documented_cells().items() if kernel == "reference")


@pytest.mark.cpu_only("needs eight devices, or a TPU", cases=r"splash|ring|all_gather|ragged_paged")
@pytest.mark.default_cases(13)
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("kernel", sorted(ALL_KERNELS.keys() - {*PAGED_KERNELS, *DECODE_KERNELS, "reference"}))
def test_each_kernel_matches_the_documented_table(kernel, asked, monkeypatch):
    if kernel == "cudnn" and jax.default_backend() != "gpu":  # the same call, computed by XLA
        monkeypatch.setattr("transformer.nn.kernels._cudnn.LIBRARY", "xla")
        if asked == "float16":
            pytest.skip("the XLA implementation of the call supports no float16 matrix multiplication on CPU")
    if kernel == "flash" and jax.default_backend() != "gpu":
        monkeypatch.setattr("transformer.nn._few_rows.INTERPRET", True)
    sizes = {"data": 2, "context": 4} if kernel in SPLIT_KERNELS else {"data": 1}
    devices = jax.devices()[: np.prod(list(sizes.values()))]
    axis_types = (AxisType.Auto,) * len(sizes)
    with jax.set_mesh(jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=axis_types, devices=devices)):
        if not documented_cells()[asked, kernel]:
            with pytest.raises(ConfigError, match=rf"{kernel}.*\..*,"):
                attend(kernel, asked)
            return
        grads, out = attend(kernel, asked)
    if asked == "dropout":  # each query sees only itself: its value times 1 / (1 - rate), or zero
        alone, out = np.repeat(VALUES, 2, axis=2), numbers(out)
        np.testing.assert_allclose(out, np.where(out == 0, 0, alone / 0.75), rtol=1e-5)
        assert (out == 0).mean() == pytest.approx(0.25, abs=0.15)
        return
    exact = kernel not in GPU_KERNELS and ASKED[asked].get("dtype", jnp.float32) == jnp.float32
    tolerance = 2e-5 if exact else 0.05
    assert out.dtype == (
        expected(asked)[1].dtype if kernel not in GPU_KERNELS else ASKED[asked].get("dtype", jnp.bfloat16)
    )
    assert_close(numbers((grads, out)), numbers(expected(asked)), tolerance)
