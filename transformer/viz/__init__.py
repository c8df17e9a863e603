"""Pictures made from arrays and metrics files only."""

from transformer.viz.curves import loss_curve
from transformer.viz.records import read_metrics

__all__ = ["loss_curve", "read_metrics"]
