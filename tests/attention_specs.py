"""Attention specs for tests, defined by the features of a call, without arrays of that size."""

import jax
import jax.numpy as jnp
import numpy as np

from transformer.nn._masks import Mask
from transformer.nn.kernels import AttentionShapes, AttentionSpec

# `jax.device_put` compiles nothing, unlike `jnp.asarray`.
MASKS = {
    "has_dense_mask": Mask.array(jax.device_put(np.ones((1, 1), bool))),
    "has_offset": Mask().shifted(jax.device_put(np.int32(0))),
    "has_segments": Mask.segments(jax.device_put(np.zeros((1, 1), np.int32))),
    "has_two_sided_window": Mask.window(3),
    "has_chunks": Mask.chunks(3),
}
FIELDS = {
    "has_bias": {"bias": jax.tree_util.Partial(lambda queries, keys: jnp.zeros(()))},
    "has_dropout": {"dropout_rate": 0.1},
    "has_softcap": {"softcap": 3.0},
    "has_sinks": {"sinks": jax.device_put(np.zeros(4, np.float32))},
}


def attention_spec(num_queries, num_keys=None, return_weights=False, **facts):
    """Return a spec with these numbers of queries and keys.

    `has_...` arguments add the features in `MASKS` and `FIELDS`; the others are fields of `AttentionShapes`.
    """
    mask, fields = Mask(), {}
    for name in [name for name in facts if name.startswith("has_")]:
        if facts.pop(name):
            mask, fields = mask & MASKS.get(name, Mask()), fields | FIELDS.get(name, {})
            assert name in MASKS or name in FIELDS, name
    keys = num_queries if num_keys is None else num_keys
    shapes = AttentionShapes(num_queries=num_queries, num_keys=keys, **facts)
    return AttentionSpec(mask=mask, return_weights=return_weights, shapes=shapes, **fields)
