"""Colors, axis style and file output shared by all plots."""

from __future__ import annotations

import os

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from transformer.config._local_paths import local_path
from transformer.viz._output_files import PNG_METADATA

BLUE, RED, GREEN, AMBER, VIOLET, INK = "#3b6fb6", "#d1495b", "#3f8f5f", "#e0912f", "#7a5ba6", "#333333"
COLORS = (BLUE, RED, GREEN, AMBER, VIOLET, "#7f7f7f", "#5bb5c9", "#a0522d")
"""colors of lines, in this order"""


def new_figure(width: float | int, height: float | int, dpi: int = 130) -> Figure:
    """Return an empty figure; sizes in inches. pyplot is not used, because it has global state."""
    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def dress(axes: Axes, title: str, x: str, y: str = "") -> None:
    """Set title and labels, a light grid behind the data, and no frame."""
    axes.set_title(title, loc="left", color=INK)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)


def save(figure: Figure, png_path: str | os.PathLike) -> None:
    """Write a PNG file with this program's name in its metadata; a missing directory is created."""
    local_path(png_path, "png_path").parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(os.fspath(png_path), metadata=PNG_METADATA)
