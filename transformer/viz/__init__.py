"""Pictures made from arrays and metrics files only."""

from transformer.viz.curves import compare_losses, loss_curve
from transformer.viz.records import read_metrics

__all__ = ["compare_losses", "loss_curve", "read_metrics"]
