"""Shared by the comparisons in this folder: patch a copy of a project, import both versions, train both."""

import atexit
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax

HERE = Path(__file__).parent


def patched_copy(checkout, patch, folder):
    """Copy `folder` of a checkout into a temporary directory, apply `patch` (a file beside this one) there, and return
    the directory.
    """
    if not (Path(checkout) / folder).is_dir():
        raise SystemExit(f"{checkout} is not the expected checkout: it has no folder {folder}/.")
    copy = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, copy)
    shutil.copytree(Path(checkout) / folder, copy / folder)
    # Without the ceiling, a repository around the temporary directory would make git skip the files of the patch.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(copy.parent)}
    if subprocess.run(["git", "apply", str(HERE / patch)], cwd=copy, env=environment).returncode:
        raise SystemExit(f"{patch} does not apply to {checkout}. Check out the commit that the patch names.")
    return copy


def load(path, *names, replaced=None):
    """Import modules by name from a directory, even if modules of the same names were imported from another one.
    `replaced` holds modules to use in place of those that the project imports.
    """
    packages = {name.partition(".")[0] for name in names}
    for module in [module for module in sys.modules if module.partition(".")[0] in packages]:
        del sys.modules[module]
    sys.modules.update(replaced or {})
    sys.path.insert(0, str(path))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(path))


def train(loss, params, batches):
    """Take one AdamW step per batch. `loss` maps (params, batch) to a scalar. Returns the losses and the parameters."""
    optimizer = optax.adamw(1e-3)

    @jax.jit
    def step(params, state, batch):
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for batch in batches:
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return losses, params


def check(original, patched, tolerance):
    """Print the largest relative difference of two lists of losses. Exit with an error if it exceeds the tolerance."""
    difference = np.abs(np.array(patched) / np.array(original) - 1.0).max()
    print(f"{len(original)} steps: the loss falls from {original[0]:.3f} to {original[-1]:.3f} in both versions")
    print(f"largest relative difference between the losses: {difference:.1e} (tolerance {tolerance:.0e})")
    if not difference <= tolerance:
        raise SystemExit("The losses differ by more than the tolerance.")
