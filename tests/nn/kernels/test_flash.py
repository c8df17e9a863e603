"""Flash attention for GPUs, in Pallas' interpreter elsewhere: many blocks, and blocks that are skipped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.nn import _few_rows as few_rows
from transformer.nn._masks import Mask
from transformer.nn.kernels import AttentionSpec, flash_attention, reference_attention
from transformer.nn.kernels._flash import Shown, _range

T, S, N, K, H, HV = 150, 200, 4, 2, 16, 24


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(few_rows, "INTERPRET", jax.default_backend() != "gpu")


def normal(seed, *shape):
    return np.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def ints(values):
    return jnp.asarray(values, jnp.int32)


def segments(*sizes):
    return ints(np.repeat(np.arange(len(sizes)), sizes)[None])


MASKS = {
    "causal from an offset": (Mask.causal()).shifted(ints([40, 0])) & Mask.lengths(ints([190, 170])),
    "segments": Mask.causal() & Mask.segments(segments(70, 10, 70), segments(70, 10, 120)),
    "window on both sides": Mask.window(30),
    "chunks": Mask.causal() & Mask.chunks(48),
}


def error(got, expected):
    got, expected = (np.asarray(array, np.float64) for array in (got, expected))
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", MASKS)
def test_values_and_gradients_over_several_blocks_equal_the_reference(name):
    arrays = normal(0, 2, T, N, H), normal(1, 2, S, K, H), normal(2, 2, S, K, HV)
    sinks, weights = jnp.asarray([0.5, -1.0, 2.0, 0.0]), normal(3, 2, T, N, HV).astype(np.float32)

    def loss(kernel, query, key, value, sinks):
        spec = AttentionSpec(mask=MASKS[name], scale=0.25, softcap=3.0, sinks=sinks)
        out, _ = kernel(query, key, value, spec)
        return (out.astype(jnp.float32) * weights).sum(), out

    def run(kernel, *given):
        return jax.jit(jax.grad(lambda *a: loss(kernel, *a), argnums=(0, 1, 2, 3), has_aux=True))(*given, sinks)

    gradients, out = run(flash_attention, *arrays)
    expected, exact = run(reference_attention, *(array.astype(np.float32) for array in arrays))
    # Rounded to bfloat16 (2^-8): the inputs of each product and the results.
    assert error(out, exact) < 2 * 2**-8
    for got, wanted in zip(gradients, expected, strict=True):
        assert error(got, wanted) < 4 * 2**-8


@pytest.mark.parametrize("name", MASKS)
def test_no_visible_pair_is_in_a_skipped_block(name):
    @jax.jit
    def both():
        return Shown.of(AttentionSpec(mask=MASKS[name]), 2, S, N).blocks(T, S), MASKS[name].dense(T, S)

    blocks, dense = map(np.asarray, both())
    dense = np.broadcast_to(dense, (2, 1, T, S))[:, 0]
    padded = np.pad(dense, ((0, 0), (0, -T % 64), (0, -S % 64)))
    visible = padded.reshape(2, -1, 64, padded.shape[2] // 64, 64).any((2, 4))
    assert (blocks | ~visible).all()
    assert not blocks.all()  # some are skipped


def test_a_range_of_blocks_contains_all_visible_ones():
    blocks = jnp.asarray([[[False, True, False, True], [False] * 4, [True] * 4]])
    first, last = _range(blocks)
    assert first.tolist() == [[1, 0, 0]]
    assert last.tolist() == [[4, 0, 4]]
