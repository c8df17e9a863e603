"""Shared by the tests of attention kernels: comparison of trees, and the splash kernels of a training step."""

import collections
import re

import jax
import numpy as np

from transformer.training._parallel import MeshPlacement
from transformer.training.plan import batch_shapes


def put(array, dtype=None):
    """Return a JAX array with the numbers of a NumPy array; this compiles nothing, unlike `jnp.asarray`."""
    return jax.device_put(np.asarray(array, dtype))


def ints(values):
    return put(values, np.int32)


def normal(seed, *shape, dtype=np.float32):
    return put(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def numbers(tree):
    """Return the arrays of a tree in NumPy, bfloat16 as float32."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), tree)


def assert_close(got, expected, tolerance=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, expected)


def splash_kernels(recipe, devices):
    """Count the kernels of splash in the traced training step, by the end of their names: fwd, dq and dkv."""
    text = MeshPlacement(recipe, devices).lower(batch_shapes(recipe)).as_text()
    return collections.Counter(re.findall(r'kernel_name = "splash_mha_(\w+?)_', text))


def compiled_kernels(recipe, devices):
    """Count the calls of Pallas kernels in the compiled training step for TPUs."""
    text = MeshPlacement(recipe, devices).lower(batch_shapes(recipe)).compile().as_text()
    return len(re.findall(r'custom_call_target="tpu_custom_call"', text))
