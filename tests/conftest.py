"""Strict by default: eight simulated devices, shapes checked, rank promotion refused, our own warnings are errors."""

import os
import pathlib

# Before JAX starts: a CPU that looks like eight devices, as few threads as a shared machine bears.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    # Level 0 halves the time that compiling takes, which is most of the time here.
    flags = " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + flags

from jaxtyping import install_import_hook

# Arrays are what the types are checked for. Where a user's own values arrive, the code's message is the check.
NUMERICS = ["attention", "blocks", "kernels", "layers", "masks", "mla", "models", "moe"]
NUMERICS += ["partitioning", "positions", "stacks"]
NUMERICS += ["generate", "training.losses", "training.optimizers", "training.state", "training.step", "viz"]
_hook = install_import_hook([f"transformer.{name}" for name in NUMERICS], "beartype.beartype")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def test_data() -> pathlib.Path:
    """Folder with real data, named by TRANSFORMER_TEST_DATA; tests that need it say aloud that they were skipped."""
    folder = os.environ.get("TRANSFORMER_TEST_DATA")
    if not folder:
        pytest.skip("TRANSFORMER_TEST_DATA names no folder with real data (docs: CONTRIBUTING.md, 'Tests')")
    return pathlib.Path(folder)
