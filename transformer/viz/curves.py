"""The loss over the steps."""

from __future__ import annotations

import os


def loss_curve(metrics_path: str | os.PathLike, png_path: str | os.PathLike, title: str = "Loss") -> None:
    """Draws train/loss and eval/loss of a metrics.jsonl over the steps into a PNG; ValueError if it holds neither."""
