"""What a run gets out of its devices: FLOP/s of the model, and their share of what the devices could do (MFU)."""

from __future__ import annotations

import math
from typing import Any

import jax

from transformer.training._chips import peak_flops
from transformer.training._flops import Shapes, step_flops
from transformer.training._parallel import Placement
from transformer.training._recipe import Recipe


class Speed:
    """Counts the FLOPs of steps, and tells what a run makes of its devices.

    MFU, model FLOPs utilization, is FLOPs of the model in a step / (seconds of a step x peak of all its devices), with
    the FLOPs of `step_flops` and the peak of `training.chips` (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
    """

    def __init__(self, recipe: Recipe, params: Any, placement: Placement):
        """`params` is the tree of the model's parameters, or of their shapes."""
        self._recipe, self._params, self._placement = recipe, params, placement
        self._counted: dict[tuple, int] = {}
        self._kind, self._devices = jax.devices()[0].device_kind, math.prod(placement.sizes.values())
        peak = peak_flops(self._kind)
        self._peak = None if peak is None else peak * self._devices

    def flops(self, batch: Shapes) -> int:
        """FLOPs of a step of all processes, of whose batch (B, ...) this process has its rows."""
        shapes = tuple((name, batch[name].shape) for name in sorted(batch))
        if shapes not in self._counted:
            rows = len(batch["weights"])
            own = step_flops(self._recipe, batch, self._params).total
            self._counted[shapes] = own * self._placement.whole_rows(rows) // rows
        return self._counted[shapes]

    def measures(self, flops: int, seconds: float) -> dict[str, float]:
        """What metrics.jsonl gets of steps that took so many seconds."""
        told = {"perf/flops_per_s": flops / seconds}
        return told if self._peak is None else told | {"perf/mfu": flops / seconds / self._peak}

    def __str__(self):
        """One line: what MFU is a share of, or why there is none."""
        if self._peak is None:
            return f"MFU: the peak of {self._kind} is not known, so metrics tell FLOP/s alone"
        each = "" if self._devices == 1 else f" x {self._devices} devices"
        peak = f"{self._peak / self._devices / 1e12:,.0f} TFLOP/s{each}"
        return f"MFU: FLOP/s of the model as a share of {peak}, the peak of {self._kind} in bfloat16"
