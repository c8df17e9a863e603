"""What a command would train: the complete recipe, the data, the parameters, the memory and the first batch."""

from __future__ import annotations

import os
from collections.abc import Callable

import jax
import numpy as np

from transformer.data._dataset import Batch, Dataset
from transformer.nn.models._base import count_parameters
from transformer.training._loop import placed
from transformer.training._memory import Need, device_bytes, gib, shard_bytes
from transformer.training._recipe import Recipe
from transformer.training._serial import flatten
from transformer.training._settings import schedule_warning
from transformer.training._start import Start
from transformer.training.workdir._runs import open_run

MOST_CHARACTERS = 1000
"""maximum number of characters that are shown of a row of the first batch"""


def dry_run(
    recipe: Recipe,
    workdir: str | os.PathLike,
    *,
    start: Start | None = None,
    teacher: Start | None = None,
    restart: bool = False,
    check_memory: bool = True,
    allow_change: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Check a run and report what it would train. Trains nothing, and writes nothing to the workdir.

    The data is prepared as for a run, so that a data set may be downloaded or tokenized into its cache. The arguments
    are those of `train`. ValueError for an invalid recipe or data, or if the workdir contains another run;
    OutOfMemoryError if state, gradients or batch can't fit into memory.
    """
    recipe, dataset = open_run(recipe, workdir, say, start, restart, teacher, allow_change)
    if warning := schedule_warning(recipe.optimizer, recipe.training.steps):
        say(f"warning: {warning}")
    say("recipe:\n" + "\n".join(f"  {name}: {value}" for name, value in flatten(recipe).items()))
    say(f"data: {dataset.describe()}")
    placement = placed(recipe, dataset, check_memory)
    state = placement.abstract_state()
    say(f"model: {recipe.task}, {count_parameters(state.params):,} trained parameters")
    need = Need(state=shard_bytes(state), gradients=shard_bytes(state.params), activations=0)
    available = gib(device_bytes(recipe.parallel.choose(jax.devices())))
    say(
        f"memory per device: {gib(need.state)} for parameters, optimizer state and averages, {gib(need.gradients)} for "
        f"gradients, and activations on top; JAX can use {available}"
    )
    say(_first_batch(dataset, next(iter(dataset.train_batches(recipe.training.seed, placement.rows)))))
    say(f"nothing was trained, and nothing was written to {workdir}")


def _first_batch(dataset: Dataset, batch: Batch) -> str:
    """Return the shapes of a batch, and the text of its first row."""
    arrays = {name: np.asarray(array) for name, array in dict(batch).items()}
    shapes = ", ".join(f"{name} {array.dtype}[{','.join(map(str, array.shape))}]" for name, array in arrays.items())
    lines = [f"first batch: {shapes}"]
    tokenizer = getattr(dataset, "tokenizer", None)
    for name in ("source", "tokens", "prompts", "targets"):
        row = arrays[name][0] if name in arrays and arrays[name].ndim > 1 else None
        if tokenizer is None or row is None or row.ndim != 1 or not np.issubdtype(row.dtype, np.integer):
            continue
        ids = [int(i) for i in row if i != tokenizer.pad_id]
        lines.append(f"  {name}, first row: {tokenizer.decode(ids)!r:.{MOST_CHARACTERS}}")
    return "\n".join(lines)
