"""Masks: each kind as a matrix, combinations, and blocks."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.nn._masks import Mask


def picture(mask: Mask, num_queries: int, num_keys: int) -> list[str]:
    """Draw the mask of the first batch row and head: x for visible, . for hidden."""
    return ["".join(".x"[int(cell)] for cell in row) for row in np.asarray(mask.dense(num_queries, num_keys))[0, 0]]


@pytest.mark.parametrize(
    ("mask", "rows"),
    [
        (Mask(), ["xxxx", "xxxx", "xxxx", "xxxx"]),
        (Mask.causal(), ["x...", "xx..", "xxx.", "xxxx"]),
        (Mask.window(2), ["xx..", "xxx.", ".xxx", "..xx"]),
        (Mask.causal() & Mask.window(2), ["x...", "xx..", ".xx.", "..xx"]),
        (Mask.chunks(3), ["xxx.", "xxx.", "xxx.", "...x"]),
        (Mask.causal() & Mask.chunks(2), ["x...", "xx..", "..x.", "..xx"]),
        (Mask.causal() & Mask.chunks(3) & Mask.window(2), ["x...", "xx..", ".xx.", "...x"]),
        (
            Mask.places(jnp.array([[4, 5, 6, 7]]), jnp.array([[7, 4, 5, 6]])) & Mask.chunks(2),
            [".xx."] * 2 + ["x..x"] * 2,
        ),
        (Mask.lengths(jnp.array([3])), ["xxx."] * 4),
        (Mask.lengths(jnp.array([3])) & Mask.lengths(jnp.array([2])), ["xx.."] * 4),
        (Mask.segments(jnp.array([[7, 7, 2, 2]])), ["xx..", "xx..", "..xx", "..xx"]),
        (Mask.segments(jnp.array([[7, 7, 2, 2]])) & Mask.causal(), ["x...", "xx..", "..x.", "..xx"]),
        (Mask.segments(jnp.array([[1, 1, 2, 2]]), jnp.array([[2, 1, 1, 3]])), [".xx.", ".xx.", "x...", "x..."]),
        (Mask.array(jnp.eye(4, dtype=bool)), ["x...", ".x..", "..x.", "...x"]),
        (Mask.array(jnp.eye(4, dtype=bool)) & Mask.lengths(jnp.array([2])), ["x...", ".x..", "....", "...."]),
        (Mask.groups(jnp.array([[0, 0, -1, -1]])) & Mask.causal(), ["xx..", "xx..", "xxx.", "xxxx"]),
        (Mask.groups(jnp.array([[-1, 5, 5, 5]])) & Mask.causal() & Mask.window(2), ["x...", "xxxx", ".xxx", ".xxx"]),
        (Mask.groups(jnp.array([[0] * 4])) & Mask.causal() & Mask.lengths(jnp.array([3])), ["xxx."] * 4),
    ],
)
def test_each_kind_is_this_matrix(mask, rows):
    assert picture(mask, 4, 4) == rows


def test_an_offset_places_the_queries_among_the_keys():
    assert picture(Mask.causal().shifted(2), 2, 5) == ["xxx..", "xxxx."]
    rows = Mask.causal().shifted(jnp.array([0, 3])).dense(1, 4)
    assert np.asarray(rows)[:, 0, 0].tolist() == [[True, False, False, False], [True] * 4]


def test_groups_are_those_of_the_new_tokens_in_a_cache():
    mask = Mask.causal() & Mask.groups(jnp.array([[-1, 0, 0]]))
    assert picture(mask.shifted(2), 3, 6) == ["xxx...", "xxxxx.", "xxxxx."]
    rows = mask.shifted(jnp.array([0, 2])).dense(3, 6)
    assert np.asarray(rows)[:, 0, 1].sum(-1).tolist() == [3, 5]


KINDS = {
    "none": Mask(),
    "groups": Mask.groups(jnp.array([[-1, 0, 0, 0, -1, 1, 1, 1, 1, -1, -1], [0] * 9 + [-1] * 2]))
    & Mask.causal()
    & Mask.window(2),
    "causal": Mask.causal(),
    "window": Mask.window(3),
    "chunks": Mask.chunks(4) & Mask.causal(),
    "causal window": Mask.causal() & Mask.window(4),
    "offset": (Mask.causal() & Mask.window(4)).shifted(jnp.array([2, 0])),
    "lengths": Mask.lengths(jnp.array([5, 0])),
    "segments": Mask.segments(jnp.array([[0] * 4 + [1] * 7, [5] * 9 + [0] * 2])) & Mask.causal(),
    "segments both ways": Mask.segments(jnp.array([[0] * 4 + [1] * 7, [5] * 4 + [7] * 7])),
    "array": Mask.array(jax.random.bernoulli(jax.random.key(0), 0.1, (2, 3, 11, 11))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_cuts_of_the_whole_and_an_invisible_one_is_all_hidden(kind):
    mask, size = KINDS[kind], 3
    whole = np.asarray(mask.dense(11, 11))
    block = jax.jit(lambda mask, q, k: (mask.block(q, k), mask.block_visible(q, k)))
    hidden = ruled_out = 0
    for i, j in itertools.product(range(9), repeat=2):
        cut, visible = block(mask, i + jnp.arange(size), j + jnp.arange(size))
        np.testing.assert_array_equal(cut, whole[:, :, i : i + size, j : j + size])
        ruled_out += not visible
        hidden += not np.asarray(cut).any()
        if not visible:
            assert not np.asarray(cut).any()
    if kind == "segments":  # causality and segments each hide a part of this block, and only together all of it
        assert 0 < ruled_out <= hidden
    else:
        assert ruled_out == hidden


def test_a_mask_goes_through_jit_with_its_facts_static():
    seen = []

    @jax.jit
    def rows(mask):
        seen.append((mask.is_causal, mask.window_size))
        return mask.dense(2, 2)

    rows(Mask.causal() & Mask.lengths(jnp.array([2])))
    rows(Mask.causal() & Mask.lengths(jnp.array([1])))
    assert seen == [(True, None)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mask.window(0), "at least 1 position, got 0"),
        (lambda: Mask.chunks(0), "a chunk must contain at least 1 position, got 0"),
        (lambda: Mask.chunks(2) & Mask.chunks(3), "both masks set chunks, of 2 and 3 positions: use one size"),
        (lambda: Mask.array(jnp.zeros((2, 2))), "must be boolean .* got float32 .* pass it as bias="),
        (lambda: Mask.causal().shifted(1) & Mask().shifted(2), "both masks set offset: merge the two"),
        (
            lambda: Mask.lengths(jnp.array([1, 2, 3])).check(2, 1, 4, 4),
            r"key_lengths has shape \(3,\).*requires \(2,\)",
        ),
        (lambda: Mask.segments(jnp.zeros((2, 3), int)).check(2, 1, 4, 4), r"query_segments has shape \(2, 3\)"),
    ],
)
def test_a_mask_that_does_not_fit_says_so(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("start", [0, 1, 5, 8])
def test_chunks_of_segments_count_the_keys_of_a_cache(start):
    """The chunks of the last queries of a row are those of the whole row: packed texts, and padding on the left."""
    segments = jnp.array([[1, 1, 1, 1, 2, 2, 2, 2, 2], [0, 0, 1, 1, 1, 1, 1, 1, 1]])
    positions = jnp.array([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 0, 0, 1, 2, 3, 4, 5, 6]])
    whole = (Mask.segments(segments) & Mask.causal()).with_chunks_of_segments(3, positions).dense(9, 9)
    same = segments[:, :, None] == segments[:, None, :]
    chunk = positions[:, :, None] // 3 == positions[:, None, :] // 3
    expected = np.asarray(same & (chunk | (segments[:, :, None] == 0))) & np.tri(9, dtype=bool)
    np.testing.assert_array_equal(np.asarray(whole)[:, 0], expected)
    mask = (Mask.segments(segments[:, start:], segments) & Mask.causal()).shifted(start)
    cached = mask.with_chunks_of_segments(3, positions[:, start:])
    np.testing.assert_array_equal(np.asarray(cached.dense(9 - start, 9))[:, 0], expected[:, start:])
