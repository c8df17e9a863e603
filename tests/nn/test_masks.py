"""Masks: each kind as a matrix, combinations, and blocks."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.nn._masks import Mask


def picture(make, num_queries: int, num_keys: int) -> list[str]:
    """Draw a mask, made in one program, of the first batch row and head: x for visible, . for hidden."""
    cells = np.asarray(jax.jit(lambda: make().dense(num_queries, num_keys))())[0, 0]
    return ["".join(".x"[int(cell)] for cell in row) for row in cells]


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (lambda: Mask(), ["xxxx", "xxxx", "xxxx", "xxxx"]),
        (lambda: Mask.causal(), ["x...", "xx..", "xxx.", "xxxx"]),
        (lambda: Mask.window(2), ["xx..", "xxx.", ".xxx", "..xx"]),
        (lambda: Mask.causal() & Mask.window(2), ["x...", "xx..", ".xx.", "..xx"]),
        (lambda: Mask.chunks(3), ["xxx.", "xxx.", "xxx.", "...x"]),
        (lambda: Mask.causal() & Mask.chunks(2), ["x...", "xx..", "..x.", "..xx"]),
        (lambda: Mask.causal() & Mask.chunks(3) & Mask.window(2), ["x...", "xx..", ".xx.", "...x"]),
        (
            lambda: Mask.places(jnp.array([[4, 5, 6, 7]]), jnp.array([[7, 4, 5, 6]])) & Mask.chunks(2),
            [".xx."] * 2 + ["x..x"] * 2,
        ),
        (lambda: Mask.lengths(jnp.array([3])), ["xxx."] * 4),
        (lambda: Mask.lengths(jnp.array([3])) & Mask.lengths(jnp.array([2])), ["xx.."] * 4),
        (lambda: Mask.segments(jnp.array([[7, 7, 2, 2]])), ["xx..", "xx..", "..xx", "..xx"]),
        (lambda: Mask.segments(jnp.array([[7, 7, 2, 2]])) & Mask.causal(), ["x...", "xx..", "..x.", "..xx"]),
        (lambda: Mask.segments(jnp.array([[1, 1, 2, 2]]), jnp.array([[2, 1, 1, 3]])), [".xx.", ".xx.", "x...", "x..."]),
        (lambda: Mask.array(jnp.eye(4, dtype=bool)), ["x...", ".x..", "..x.", "...x"]),
        (lambda: Mask.array(jnp.eye(4, dtype=bool)) & Mask.lengths(jnp.array([2])), ["x...", ".x..", "....", "...."]),
        (lambda: Mask.groups(jnp.array([[0, 0, -1, -1]])) & Mask.causal(), ["xx..", "xx..", "xxx.", "xxxx"]),
        (
            lambda: Mask.groups(jnp.array([[-1, 5, 5, 5]])) & Mask.causal() & Mask.window(2),
            ["x...", "xxxx", ".xxx", ".xxx"],
        ),
        (lambda: Mask.groups(jnp.array([[0] * 4])) & Mask.causal() & Mask.lengths(jnp.array([3])), ["xxx."] * 4),
    ],
)
def test_each_mask_kind_equals_its_matrix(make, rows):
    assert picture(make, 4, 4) == rows


def test_an_offset_places_the_queries_among_the_keys():
    assert picture(lambda: Mask.causal().shifted(2), 2, 5) == ["xxx..", "xxxx."]
    rows = jax.jit(lambda: Mask.causal().shifted(jnp.array([0, 3])).dense(1, 4))()
    assert np.asarray(rows)[:, 0, 0].tolist() == [[True, False, False, False], [True] * 4]


def test_groups_apply_to_new_tokens_in_a_cache():
    def shifted(offset):
        return (Mask.causal() & Mask.groups(jnp.array([[-1, 0, 0]]))).shifted(offset)

    assert picture(lambda: shifted(2), 3, 6) == ["xxx...", "xxxxx.", "xxxxx."]
    rows = jax.jit(lambda: shifted(jnp.array([0, 2])).dense(3, 6))()
    assert np.asarray(rows)[:, 0, 1].sum(-1).tolist() == [3, 5]


KINDS = {
    "none": lambda: Mask(),
    "groups": lambda: (
        Mask.groups(jnp.array([[-1, 0, 0, 0, -1, 1, 1, 1, 1, -1, -1], [0] * 9 + [-1] * 2]))
        & Mask.causal()
        & Mask.window(2)
    ),
    "causal": lambda: Mask.causal(),
    "window": lambda: Mask.window(3),
    "chunks": lambda: Mask.chunks(4) & Mask.causal(),
    "causal window": lambda: Mask.causal() & Mask.window(4),
    "offset": lambda: (Mask.causal() & Mask.window(4)).shifted(jnp.array([2, 0])),
    "lengths": lambda: Mask.lengths(jnp.array([5, 0])),
    "segments": lambda: Mask.segments(jnp.array([[0] * 4 + [1] * 7, [5] * 9 + [0] * 2])) & Mask.causal(),
    "segments both ways": lambda: Mask.segments(jnp.array([[0] * 4 + [1] * 7, [5] * 4 + [7] * 7])),
    "array": lambda: Mask.array(jnp.asarray(np.random.default_rng(0).random((2, 3, 11, 11)) < 0.1)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_slices_of_the_mask_and_skipped_blocks_are_fully_masked(kind):
    size = 3
    mask, whole = jax.jit(lambda: ((mask := KINDS[kind]()), mask.dense(11, 11)))()
    whole = np.asarray(whole)
    block = jax.jit(lambda mask, q, k: (mask.block(q, k), mask.block_visible(q, k)))
    hidden = ruled_out = 0
    for i, j in itertools.product(range(9), repeat=2):
        cut, visible = block(mask, *(start + np.arange(size, dtype=np.int32) for start in (i, j)))
        np.testing.assert_array_equal(cut, whole[:, :, i : i + size, j : j + size])
        ruled_out += not visible
        hidden += not np.asarray(cut).any()
        if not visible:
            assert not np.asarray(cut).any()
    if kind == "segments":  # causality and segments each hide a part of this block, and only together all of it
        assert 0 < ruled_out <= hidden
    else:
        assert ruled_out == hidden


def test_a_mask_passes_through_jit_with_static_structure():
    seen = []

    @jax.jit
    def rows(mask):
        seen.append((mask.is_causal, mask.window_size))
        return mask.dense(2, 2)

    rows(Mask.causal() & Mask.lengths(jax.device_put(np.array([2]))))
    rows(Mask.causal() & Mask.lengths(jax.device_put(np.array([1]))))
    assert seen == [(True, None)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mask.window(0), "at least 1 position, got 0"),
        (lambda: Mask.chunks(0), r"chunk.*1.*got 0"),
        (lambda: Mask.chunks(2) & Mask.chunks(3), "both masks set chunks, of 2 and 3 positions: use one size"),
        (
            lambda: Mask.array(jax.device_put(np.zeros((2, 2), np.float32))),
            r"got float32.*bias=",
        ),
        (lambda: Mask.causal().shifted(1) & Mask().shifted(2), "both masks set offset: merge the two"),
        (
            lambda: Mask.lengths(jax.device_put(np.array([1, 2, 3]))).check(2, 1, 4, 4),
            r"key_lengths.*\(3,\).*\(2,\)",
        ),
        (
            lambda: Mask.segments(jax.device_put(np.zeros((2, 3), int))).check(2, 1, 4, 4),
            r"query_segments.*\(2.*3\)",
        ),
    ],
)
def test_rejects_a_mask_that_does_not_fit(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("start", [0, 1, 5, 8])
def test_chunks_of_segments_count_the_keys_of_a_cache(start):
    """The chunks of the last queries of a row are those of the whole row: packed texts, and padding on the left."""
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2], [0, 0, 1, 1, 1, 1, 1, 1, 1]], np.int32)
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 0, 0, 1, 2, 3, 4, 5, 6]], np.int32)

    @jax.jit
    def run(segments, positions):
        whole = (Mask.segments(segments) & Mask.causal()).with_chunks_of_segments(3, positions)
        mask = (Mask.segments(segments[:, start:], segments) & Mask.causal()).shifted(start)
        cached = mask.with_chunks_of_segments(3, positions[:, start:])
        return whole.dense(9, 9)[:, 0], cached.dense(9 - start, 9)[:, 0]

    whole, cached = run(segments, positions)
    same = segments[:, :, None] == segments[:, None, :]
    chunk = positions[:, :, None] // 3 == positions[:, None, :] // 3
    expected = same & (chunk | (segments[:, :, None] == 0)) & np.tri(9, dtype=bool)
    np.testing.assert_array_equal(whole, expected)
    np.testing.assert_array_equal(cached, expected[:, start:])
