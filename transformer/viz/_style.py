"""What all plots have in common: colors, dress, and how they get into a file."""

from __future__ import annotations

import os
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from transformer.viz._output_files import PNG_METADATA

BLUE, RED, GREEN, AMBER, VIOLET, INK = "#3b6fb6", "#d1495b", "#3f8f5f", "#e0912f", "#7a5ba6", "#333333"
COLORS = (BLUE, RED, GREEN, AMBER, VIOLET, "#7f7f7f", "#5bb5c9", "#a0522d")
"""of lines that need telling apart, in this order"""


def new_figure(width: float | int, height: float | int, dpi: int = 130) -> Figure:
    """An empty figure, sizes in inches, without pyplot: no state that others share."""
    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def dress(axes: Axes, title: str, x: str, y: str = "") -> None:
    """Title and labels, a faint grid below the data, no box."""
    axes.set_title(title, loc="left", color=INK)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)


def save(figure: Figure, png_path: str | os.PathLike) -> None:
    """Writes a PNG, whose metadata name this program; makes the folder if it is not there."""
    Path(png_path).parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(os.fspath(png_path), metadata=PNG_METADATA)
