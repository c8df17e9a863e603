"""Bit masks of allowed tokens."""

import jax
import numpy as np
import pytest

from transformer.generate._constraints import only_allowed, packed


@pytest.mark.parametrize("size", [31, 32, 33, 301])
def test_only_allowed_tokens_keep_their_logits(size):
    rng = np.random.default_rng(size)
    logits, kept = rng.normal(size=(2, size)).astype(np.float32), rng.random(size) < 0.3
    kept[[0, -1]] = True, False
    mask = packed(np.flatnonzero(kept), size)
    assert mask.shape == (-(-size // 32),)
    assert mask.dtype == np.uint32
    np.testing.assert_array_equal(jax.jit(only_allowed)(logits, mask), np.where(kept, logits, -np.inf))
    assert [bool(mask[i // 32] >> (i % 32) & 1) for i in range(size)] == kept.tolist()
