"""Marks of tests that compile with XLA's GPU compiler, which needs no GPU (`.ci/gpu` runs them)."""

import importlib.util

import jax
import pytest

INSTALLED = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
GPU_COMPILER = [
    pytest.mark.slow,
    pytest.mark.skipif(not INSTALLED, reason=f'no GPU compiler: pip install "jax[cuda13]=={jax.__version__}"'),
    # Our kernels use it as long as it exists; Python hides this warning, and pytest shows it.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
