"""Plots of the studies: score scaling, position similarity, attention memory and padding."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from transformer.viz._style import BLUE, COLORS, INK, RED, dress, new_figure, save

Numbers = Sequence[int | float]
"""values along an axis"""


def scale_picture(
    sizes: Numbers, variances: Mapping[str, Numbers], gradients: Mapping[str, Numbers], png_path: str | os.PathLike
) -> None:
    """Plot the variance of the scores and the norm of the softmax gradient by d_k, one line per variant, into a PNG."""
    figure = new_figure(10, 4.4)
    left, right = figure.subplots(1, 2)
    for axes, series in ((left, variances), (right, gradients)):
        for color, (label, values) in zip((RED, BLUE), series.items(), strict=True):
            axes.plot(sizes, values, color=color, linewidth=1.8, marker="o", markersize=4, label=label)
        _numbers(axes, "x", sizes)
        axes.set_yscale("log")
        dress(axes, "", "d_k (size of queries and keys)")
        axes.legend(frameon=False)
    _numbers(left, "y", [1, 10, 100, 1_000])
    _numbers(right, "y", [0.03, 0.1, 0.3])
    right.set_ylim(0.02, 0.5)
    left.set_title("Variance of the scores q·k", loc="left", color=INK)
    left.set_ylabel("variance", color=INK)
    right.set_title("Gradient of the softmax", loc="left", color=INK)
    right.set_ylabel("Frobenius norm of the softmax Jacobian", color=INK)
    save(figure, png_path)


def positions_picture(
    panels: Mapping[str, Mapping[str, np.ndarray]],
    widths: Mapping[int, np.ndarray],
    alike: float,
    png_path: str | os.PathLike,
) -> None:
    """Plot similarity by distance into a PNG: one panel per group of schemes, and one for repetitions of sinusoids.

    A line is the mean over neighboring distances; the band around it reaches from the minimum to the maximum. `panels`
    has three titles -> scheme -> similarity at distances 0, 1, 2, ... (n,); `widths` the same by width of sinusoids.
    From `alike` on, two positions count as almost equal.
    """
    figure = new_figure(12, 8)
    grid = figure.subplots(2, 2)
    for axes, (title, curves) in zip(grid.flat, panels.items(), strict=False):
        for color, (label, curve) in zip(COLORS, curves.items(), strict=False):
            places, low, mean, high = _thinned(curve)
            axes.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)
            axes.plot(places, mean, color=color, linewidth=1.8, label=label)
        dress(axes, title, "distance (positions)", "similarity")
        axes.legend(frameon=False, fontsize=9)
    axes = grid[1, 1]
    for color, (width, curve) in zip(COLORS, widths.items(), strict=False):
        # Maximum of the similarity over this distance and all larger ones.
        beyond = np.maximum.accumulate(curve[::-1])[::-1]
        near = slice(1, len(curve) // 2)  # the maximum over the few distances near the end would be too low
        axes.plot(np.arange(len(curve))[near], beyond[near], color=color, linewidth=1.8, label=f"width {width}")
    right = axes.get_yaxis_transform()  # x in axes coordinates, y in data coordinates
    axes.axhline(alike, color=INK, linewidth=1, linestyle="--")
    axes.text(1, alike, f"almost equal: {alike} ", color=INK, fontsize=9, ha="right", va="bottom", transform=right)
    dress(axes, "Where sinusoids repeat", "distance (positions)", "maximum similarity from this distance on")
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    farthest = max(len(curve) for curve in widths.values()) - 1
    for axes in grid.flat:
        _numbers(axes, "x", [10**power for power in range(6)])
        axes.set_xlim(1, farthest)
    for axes in grid[0]:
        axes.set_ylim(-0.6, 1.05)
    for axes in grid[1]:
        axes.set_ylim(0, 1.05)
    save(figure, png_path)


def memory_picture(
    lengths: Numbers, kernels: Mapping[str, Numbers], padding: Mapping[str, float], png_path: str | os.PathLike
) -> None:
    """Plot bytes by length, one line per kernel, and fractions of padding (0 to 1) as bars, into a PNG file."""
    figure = new_figure(11, 4.4)
    left, right = figure.subplots(1, 2)
    for color, (kernel, sizes) in zip((RED, BLUE, *COLORS[2:]), kernels.items(), strict=False):
        mebibytes = np.asarray(sizes) / 2**20
        left.plot(lengths, mebibytes, color=color, linewidth=1.8, marker="o", markersize=4, label=kernel)
    _numbers(left, "x", lengths)
    left.set_yscale("log")
    sizes = [10**power for power in range(6)]
    _numbers(left, "y", sizes)
    dress(left, "Temporary memory of attention", "length (tokens)", "MiB, forward and backward pass")
    left.tick_params(axis="x", labelsize=8)
    left.legend(frameon=False)

    names, shares = list(padding), [100 * share for share in padding.values()]
    bars = right.barh(names, shares, color=BLUE, height=0.6)
    right.bar_label(bars, labels=[f"{share:.1f} %" for share in shares], padding=4, color=INK)
    right.invert_yaxis()
    right.set_xlim(0, 100)
    dress(right, "Padding", "% of positions")
    right.grid(False, axis="y")
    save(figure, png_path)


def _thinned(curve: np.ndarray, points: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Group the distances from 1 evenly on a log axis; return center, minimum, mean and maximum of each group."""
    edges = np.unique(np.geomspace(1, len(curve), points).round().astype(int))
    starts, counts = edges[:-1], np.diff(edges)
    values = curve[1:]
    sums = np.add.reduceat(values, starts - 1)
    low, high = np.minimum.reduceat(values, starts - 1), np.maximum.reduceat(values, starts - 1)
    return starts + (counts - 1) / 2, low, sums / counts, high


def _numbers(axes: Axes, which: str, ticks: Numbers) -> None:
    """Set a log axis with these ticks, formatted as plain numbers."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:,g}" if tick < 1 else f"{tick:,.0f}"))
