"""Lower a recipe's training step for devices that may not be present, without running it and without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import PyTree

from transformer.nn._sharding import mesh_sizes
from transformer.training._memory import shard_bytes
from transformer.training._parallel import MeshPlacement, PmapPlacement, placed_shapes
from transformer.training._recipe import Recipe
from transformer.training._state import TrainState, merged_params

Shapes = Mapping[str, jax.ShapeDtypeStruct]
"""shapes of a batch, by name"""


@dataclass(frozen=True, kw_only=True)
class StepProgram:
    """A lowered training step, before compilation."""

    lowered: jax.stages.Lowered
    devices: list[Any]
    """devices that it runs on"""
    sizes: Mapping[str, int]
    """sizes of the mesh axes"""
    described: str
    """mesh axes larger than 1; "" on one device"""
    params: PyTree
    """shapes of the model's parameters; with LoRA, of the merged ones"""
    held: dict[str, int]
    """bytes per device of the state and the batch, by kind"""


def program(recipe: Recipe, devices: Sequence[Any], batch: Shapes) -> StepProgram:
    """Lower the training step of a recipe for these devices and a batch of shapes; ConfigError if the recipe does not
    fit.
    """
    return {"mesh": _mesh, "pmap": _pmap}[recipe.parallel.kind](recipe, devices, batch)


def _mesh(recipe: Recipe, devices: Sequence[Any], batch: Shapes) -> StepProgram:
    placement = MeshPlacement(recipe, devices)
    state = placement.abstract_state()
    return StepProgram(
        lowered=placement.lower(batch),
        devices=list(placement.mesh.devices.flat),
        sizes=placement.mesh.shape,
        described=placement.describe(),
        params=_model_params(recipe, state),
        held=_held(state, placed_shapes(batch, placement.mesh)),
    )


def _pmap(recipe: Recipe, devices: Sequence[Any], batch: Shapes) -> StepProgram:
    placement = PmapPlacement(recipe, devices)
    devices = recipe.parallel.choose(devices)
    count, state = len(devices), placement.abstract_state()
    own = {name: shape.update(shape=(shape.shape[0] // count, *shape.shape[1:])) for name, shape in batch.items()}
    return StepProgram(
        lowered=placement.lower(batch),
        devices=devices,
        sizes=mesh_sizes({"data": count}, count),
        described=placement.describe(),
        params=_model_params(recipe, state),
        held=_held(state, own),
    )


def _model_params(recipe: Recipe, state: TrainState) -> PyTree:
    return jax.eval_shape(lambda one: merged_params(recipe, one.params, one.base), state)


def _held(state: TrainState, batch: Shapes) -> dict[str, int]:
    return {
        "trained parameters (LoRA)" if "updates" in state.params else "parameters": shard_bytes(state.params),
        "frozen parameters": shard_bytes(state.base) + shard_bytes(state.teacher),
        "optimizer state": shard_bytes(state.opt_state),
        "averaged parameters": shard_bytes(state.ema),
        "batch": shard_bytes(batch),
    }
