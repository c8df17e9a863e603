"""Training speed: FLOP/s of the model, and model FLOPs utilization (MFU), its fraction of the devices' peak."""

from __future__ import annotations

import math

import jax
from jaxtyping import PyTree

from transformer.training._chips import peak_flops
from transformer.training._flops import Shapes, step_flops
from transformer.training._parallel import Placement
from transformer.training._recipe import Recipe


class Speed:
    """Count the FLOPs of training steps, and compute FLOP/s and MFU.

    MFU = FLOPs of the model in a step / (seconds per step x peak FLOP/s of all devices), with the FLOPs of `step_flops`
    and the peak of `training.chips` (Chowdhery et al. 2022, arXiv 2204.02311, appendix B). Recomputation in the
    backward pass does not count as FLOPs of the model.
    """

    def __init__(self, recipe: Recipe, params: PyTree, placement: Placement):
        """Prepare the counter; `params` is the tree of the model's parameters, or of their shapes."""
        self._recipe, self._params, self._placement = recipe, params, placement
        self._counted: dict[tuple, int] = {}
        self._kind, self._devices = jax.devices()[0].device_kind, math.prod(placement.sizes.values())
        peak = peak_flops(self._kind)
        self._peak = None if peak is None else peak * self._devices

    def flops(self, batch: Shapes) -> int:
        """Return the FLOPs of a step of all processes, given the rows (B, ...) of this process."""
        shapes = tuple((name, batch[name].shape) for name in sorted(batch))
        if shapes not in self._counted:
            rows = len(batch["weights"])
            own = step_flops(self._recipe, batch, self._params).total
            # FLOPs are proportional to the number of rows: scale from this process's rows to the whole batch.
            self._counted[shapes] = own * self._placement.whole_rows(rows) // rows
        return self._counted[shapes]

    def measures(self, flops: int, seconds: float) -> dict[str, float]:
        """Return the metrics of steps with `flops` FLOPs in total that took `seconds`, for metrics.jsonl."""
        values = {"perf/flops_per_s": flops / seconds}
        return values if self._peak is None else values | {"perf/mfu": flops / seconds / self._peak}

    def __str__(self):
        """Return a line with the peak that MFU is relative to, or the reason why MFU is unavailable."""
        if self._peak is None:
            return f"MFU is unavailable: the peak of {self._kind} is unknown; logging FLOP/s only"
        each = "" if self._devices == 1 else f" x {self._devices} devices"
        peak = f"{self._peak / self._devices / 1e12:,.0f} TFLOP/s{each}"
        return f"MFU: FLOP/s of the model as a fraction of {peak}, the bfloat16 peak of {self._kind}"
