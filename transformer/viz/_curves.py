"""Loss curves of one run, or of several runs."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from transformer.viz._records import read_metrics
from transformer.viz._style import BLUE, COLORS, INK, RED, dress, new_figure, save


def loss_curve(
    metrics_path: str | os.PathLike, png_path: str | os.PathLike, title: str = "Loss", unit: str = "nats per token"
) -> None:
    """Plot train/loss and eval/loss of a metrics.jsonl file by step into a PNG file.

    The loss axis is logarithmic if `falls_by_decades` of all losses; its label then says so. A ValueError if there is
    no finite loss.
    """
    records = read_metrics(metrics_path)
    train, evaluation = _series(records, "train/loss"), _series(records, "eval/loss")
    if not len(train[0]) and not len(evaluation[0]):
        raise ValueError(
            f"{metrics_path} contains no finite train/loss or eval/loss. Train for at least one logged step."
        )
    figure = new_figure(8, 4.8, dpi=150)
    values = np.concatenate([train[1], evaluation[1]])
    logarithmic = falls_by_decades(values)
    axes = _axes(figure, title, f"{unit}, log scale" if logarithmic else unit)
    steps, losses = train
    if len(steps):
        window = len(steps) // 40
        if window > 1:  # with many points, draw a running mean over the noisy curve
            axes.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=0.8)
            axes.plot(steps, smooth(losses, window), color=BLUE, linewidth=1.8, label=f"train, mean of {window} points")
        else:
            axes.plot(steps, losses, color=BLUE, linewidth=1.8, label="train", marker="." if len(steps) < 20 else None)
    steps, losses = evaluation
    if len(steps):
        lowest = int(np.argmin(losses))
        label = f"evaluation, lowest {losses[lowest]:.4g} at step {steps[lowest]:,}"
        axes.plot(steps, losses, color=RED, linewidth=1.8, marker="o", markersize=4, label=label)
    if logarithmic:
        log_axis(axes, values)
    elif values.min() >= 0.0:
        axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
    axes.legend(frameon=False)
    save(figure, png_path)


def falls_by_decades(values: np.ndarray) -> bool:
    """Return whether an axis for values (n,) should be logarithmic: none is negative, positive ones differ tenfold."""
    # On a linear axis, the lower values would be one flat line on the bottom edge.
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0]
    return len(positive) > 0 and bool(finite.min() >= 0 and positive.max() >= 10 * positive.min())


def log_limits(values: np.ndarray) -> tuple[float, float]:
    """Return limits of a logarithmic axis for values (n,), with a margin around the positive finite ones."""
    positive = values[np.isfinite(values) & (values > 0)]
    low, high = float(positive.min()), float(positive.max())
    margin = (high / low) ** 0.05
    return low / margin, high * margin


def log_ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten between two positive limits; with fewer than three decades, 2 and 5 times them too."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    stride = max(1, len(decades) // 8)
    factors = (1, 2, 5) if math.log10(high / low) < 3 else (1,)
    ticks = [factor * 10.0**power for power in decades if power % stride == 0 for factor in factors]
    return [tick for tick in ticks if low <= tick <= high]


def log_axis(axes: Axes, values: np.ndarray) -> None:
    """Make the y axis logarithmic, with plain numbers at its ticks; a line to 0 ends on the bottom edge."""
    axes.set_yscale("log", nonpositive="clip")
    axes.set_ylim(*log_limits(values))
    axes.yaxis.set_major_locator(FixedLocator(log_ticks(*axes.get_ylim())))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:,.10g}"))


def compare_losses(
    runs: Mapping[str, Sequence[Sequence[float | int]]],
    png_path: str | os.PathLike,
    *,
    bounds: Mapping[str, float] | None = None,
    title: str = "Loss",
) -> None:
    """Plot the losses of several runs, lists of (step, loss in nats per token) by name, into a PNG file.

    `bounds` are horizontal lines by name. A ValueError if there is no run, or a run has no points.
    """
    for name, points in runs.items():
        if not len(points):
            raise ValueError(
                f"the run {name!r} has no losses: expected at least one pair (step, loss). Remove the run, or log its "
                f"losses."
            )
    if not runs:
        raise ValueError("there are no runs to plot: expected at least one. Pass runs=.")
    figure = new_figure(8, 4.8, dpi=150)
    axes = _axes(figure, title)
    for (name, points), color in zip(runs.items(), itertools.cycle(COLORS), strict=False):
        steps, losses = np.asarray(points, np.float64).T
        axes.plot(steps, losses, color=color, linewidth=1.8, label=f"{name}: {losses[-1]:.3f}")
    right = max(points[-1][0] for points in runs.values())
    for name, value in (bounds or {}).items():
        axes.axhline(value, color=INK, linewidth=1.0, linestyle=(0, (5, 3)))
        text = {"textcoords": "offset points", "ha": "right", "va": "top", "color": INK}
        axes.annotate(f"{name}: {value:.3f}", (right, value), (0, -4), **text)
    axes.set_ylim(*_limits(runs, bounds or {}))
    axes.legend(frameon=False, title="last value", title_fontsize=9)
    save(figure, png_path)


def _limits(runs: Mapping[str, Sequence[Sequence[float | int]]], bounds: Mapping[str, float]) -> tuple[float, float]:
    """Return limits of the loss axis: from below the lowest value to above the highest one after a tenth of them."""
    # The first losses are nearly equal in all runs, but so high that the differences would not be visible.
    low = min([*bounds.values(), *(loss for points in runs.values() for _, loss in points)])
    high = max([*bounds.values(), *(points[min(len(points) // 10, len(points) - 1)][1] for points in runs.values())])
    return low - 0.08 * (high - low), high + 0.05 * (high - low)


def _axes(figure: Figure, title: str, unit: str = "nats per token") -> Axes:
    axes = figure.add_subplot()
    dress(axes, title, "step", f"loss ({unit})")
    axes.title.set_fontsize(13)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    return axes


def _series(records: list[dict], name: str) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(record["step"], record[name]) for record in records if math.isfinite(record.get(name, math.nan))]
    steps, values = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(steps, np.int64), np.array(values, np.float64)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Return the running mean over the `window` values around each value, by cumulative sums; fewer at the ends."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    centers = np.arange(len(values))
    low = np.maximum(centers - window // 2, 0)
    high = np.minimum(centers + (window + 1) // 2, len(values))
    return (sums[high] - sums[low]) / (high - low)
