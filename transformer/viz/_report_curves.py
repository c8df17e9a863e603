"""Plots of the metrics of one or several runs, as SVG for a page and as PNG."""

from __future__ import annotations

import html
import math
import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformer.viz._curves import falls_by_decades, log_axis, log_limits, log_ticks, smooth
from transformer.viz._style import COLORS, dress, new_figure, save

WIDTH, HEIGHT = 640, 300
"""size of a plot in SVG units"""
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 10, 34
"""margins of a plot in SVG units"""
MOST_POINTS = 1000
"""approximate maximum number of points per line; a longer line is reduced to the extrema of its sections"""


@dataclass(frozen=True)
class Chart:
    """A plot of one or more metrics by step."""

    name: str
    """suffix of the name of the PNG file"""
    title: str
    metrics: tuple[str, ...]
    """metrics, one line each: the first one solid, the others dashed with dots"""
    unit: str = ""
    """unit of the values; "" if they have none"""
    scale: float | int = 1.0
    """factor applied to the values"""
    from_zero: bool = True
    """the value axis starts at 0; otherwise it fits the values, and is logarithmic if `falls_by_decades` of them"""


CHARTS = (
    Chart("loss", "Loss", ("train/loss", "eval/loss"), "nats per target", from_zero=False),
    Chart("accuracy", "Held-out accuracy", ("eval/accuracy",), "%", scale=100),
    Chart("exact-match", "Held-out exact match", ("eval/exact_match",), "%", scale=100),
    Chart("reward", "Reward", ("train/reward", "eval/reward")),
    Chart("kl", "KL divergence from the initial model", ("train/kl",), "nats per token"),
    Chart("entropy", "Entropy of the next token", ("train/entropy",), "nats per token"),
    Chart(
        "completion-length", "Length of completions", ("train/completion_length", "eval/completion_length"), "tokens"
    ),
    Chart("truncated", "Truncated completions", ("train/truncated",), "%", scale=100),
    Chart("equal-rewards", "Groups with equal rewards", ("train/equal_rewards",), "% of groups", scale=100),
    Chart("reward-margin", "Margin between chosen and rejected rewards", ("train/reward_margin", "eval/reward_margin")),
    Chart(
        "prefers-chosen",
        "Held-out pairs whose chosen response is more probable",
        ("eval/prefers_chosen",),
        "%",
        scale=100,
    ),
    Chart("bits-per-byte", "Held-out bits per byte", ("eval/bits_per_byte",), from_zero=False),
    Chart("mae", "Held-out mean absolute error", ("eval/mae",), from_zero=False),
    Chart("learning-rate", "Learning rate", ("train/learning_rate",)),
    Chart("gradient-norm", "Gradient norm", ("train/grad_norm",)),
    Chart("router-loss", "Router loss", ("train/router_loss",), "nats per target"),
    Chart("skipped", "Skipped batches (total)", ("train/skipped",)),
    Chart("spikes", "Loss spikes (total)", ("train/spikes",)),
    Chart("speed", "Throughput", ("perf/tokens_per_s",), "targets/s"),
    Chart("mfu", "MFU", ("perf/mfu",), "% of peak FLOP/s", scale=100),
    Chart("flops", "Model FLOP/s", ("perf/flops_per_s",), "GFLOP/s", scale=1e-9),
    Chart("memory", "Peak memory", ("perf/peak_memory_bytes",), "GiB", scale=2**-30),
    Chart("padding", "Padding", ("data/padding",), "% of positions", scale=100),
    Chart("data-wait", "Waiting for data", ("perf/data_wait",), "% of time", scale=100),
)
"""plots of a report, in order; a plot without values is omitted"""


@dataclass(frozen=True)
class Line:
    """One metric of one run: `steps` (n,), ascending, and `values` (n,), which may be NaN or infinite.

    `label` is "" if the plot has only one line. `dots` marks metrics of held-out data.
    """

    label: str
    color: int  # index of the run, which selects the color
    dots: bool
    steps: np.ndarray
    values: np.ndarray

    @property
    def not_finite(self) -> np.ndarray:
        """Steps whose value is not finite and can't be drawn."""
        return self.steps[~np.isfinite(self.values)]


def lines_of(chart: Chart, runs: Mapping[str, Iterable[Mapping[str, Any]]]) -> list[Line]:
    """Return the lines of a chart that have values, for the records of runs (`read_metrics`) by name."""
    found = []
    for color, (name, records) in enumerate(runs.items()):
        for place, metric in enumerate(chart.metrics):
            # A resumed run may log a step twice; the later record replaces the earlier one.
            points = {record["step"]: record[metric] for record in records if _is_number(record.get(metric))}
            if points:
                label = metric.rpartition("/")[0] if len(chart.metrics) > 1 else ""
                label = ", ".join(part for part in (name if len(runs) > 1 else "", label) if part)
                steps = np.array(sorted(points), np.int64)
                values = np.array([points[step] for step in steps.tolist()], np.float64) * chart.scale
                found.append(Line(label, color, place > 0, steps, values))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Frame:
    """Visible range of a plot: steps from 0 to `right`, values from `low` to `high`, on a logarithmic axis or not."""

    right: float
    low: float
    high: float
    logarithmic: bool = False

    def x(self, step: float | int | np.integer) -> float:
        """Return the x coordinate of a step in SVG units."""
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self.right

    def y(self, value: float | int | np.floating) -> float:
        """Return the y coordinate of a value in SVG units; on a logarithmic axis, 0 is on the bottom edge."""
        if self.logarithmic:
            share = math.log(self.high / max(value, self.low)) / math.log(self.high / self.low)
        else:
            share = (self.high - value) / (self.high - self.low)
        return TOP + (HEIGHT - TOP - BOTTOM) * share

    @property
    def ticks(self) -> list[float]:
        """The values that the axis names."""
        return log_ticks(self.low, self.high) if self.logarithmic else ticks(self.low, self.high)


def frame_of(chart: Chart, lines: Sequence[Line]) -> Frame | None:
    """Return the visible range of all lines; None if no value is finite."""
    finite = [line.values[np.isfinite(line.values)] for line in lines]
    finite = [values for values in finite if len(values)]
    if not finite:
        return None
    values, right = np.concatenate(finite), float(max(1, *(line.steps[-1] for line in lines)))
    if not chart.from_zero and falls_by_decades(values):
        return Frame(right, *log_limits(values), logarithmic=True)
    low, high = values.min(), values.max()
    low = min(0.0, low) if chart.from_zero else low
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    low = low if chart.from_zero and low == 0.0 else low - margin
    return Frame(right, float(low), float(high + margin))


def _visible(chart: Chart, lines: Sequence[Line]) -> Frame:
    if (frame := frame_of(chart, lines)) is None:
        raise ValueError(f"{chart.title} has no finite value to plot. Remove the chart.")
    return frame


def unit_of(chart: Chart, frame: Frame) -> str:
    """Return the label of the value axis: the unit, and whether the axis is logarithmic."""
    return ", ".join(part for part in (chart.unit, "log scale" * frame.logarithmic) if part)


def svg(chart: Chart, lines: Sequence[Line], key: str) -> str:
    """Return a plot as an SVG element, colored by the style sheet; `key` is the unique id of its clip path."""
    frame = _visible(chart, lines)
    title = escaped(f"{chart.title}: {'; '.join(map(last_value, lines))}")
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">',
        f'<clipPath id="{key}"><rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" '
        f'height="{HEIGHT - TOP - BOTTOM}"/></clipPath>',
    ]
    for value in frame.ticks:
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{short(value)}</text>')
    for step in ticks(0, frame.right):
        if step == int(step):
            parts.append(f'<text class="middle" x="{frame.x(step):.1f}" y="{HEIGHT - 14}">{short(step)}</text>')
    parts.append(f'<text class="end" x="{WIDTH - RIGHT}" y="{HEIGHT - 3}">step</text><g clip-path="url(#{key})">')
    for line in lines:
        parts += _drawn(line, frame)
    return "".join([*parts, '</g><line class="cursor" y1="10" y2="266" hidden=""/></svg>'])


def escaped(value: object) -> str:
    """Escape a value as HTML text; control characters other than line ends and tabs are replaced."""
    bad = {c for c in str(value) if unicodedata.category(c) in ("Cc", "Cs")} - {"\n", "\t"}
    return html.escape(str(value).translate({ord(c): "\ufffd" for c in bad}))


def _drawn(line: Line, frame: Frame) -> list[str]:
    name = f"run{line.color % len(COLORS)}"
    window = len(line.steps) // 40
    if line.dots or window < 2 or len(line.not_finite):
        drawn = [f'<path class="{name}{" dashed" * line.dots}" d="{_path(line.steps, line.values, frame)}"/>']
    else:
        drawn = [f'<path class="{name} faint" d="{_path(line.steps, line.values, frame)}"/>']
        drawn.append(f'<path class="{name}" d="{_path(line.steps, smooth(line.values, window), frame)}"/>')
    dotted = len(line.steps) <= (60 if line.dots else 1)
    for step, value in zip(line.steps.tolist(), line.values.tolist(), strict=True) if dotted else ():
        if math.isfinite(value):
            drawn.append(f'<circle class="{name}" cx="{frame.x(step):.1f}" cy="{frame.y(value):.1f}" r="3"/>')
    for step in line.not_finite[:50].tolist():
        x, y = frame.x(step), HEIGHT - BOTTOM
        drawn.append(f'<path class="lost" d="M{x - 4:.1f} {y - 8}l8 8m0 -8l-8 8"/>')
    return drawn


def _path(steps: np.ndarray, values: np.ndarray, frame: Frame) -> str:
    parts, pen = [], "M"
    for place in kept_points(values):
        if np.isfinite(values[place]):
            parts.append(f"{pen}{frame.x(steps[place]):.1f} {frame.y(values[place]):.1f}")
        pen = "L" if np.isfinite(values[place]) else "M"
    return "".join(parts)


def kept_points(values: np.ndarray, most: int = MOST_POINTS) -> list[int]:
    """Return indices of at most about `most` of the points of `values` (n,) to draw."""
    # Each section of a longer line keeps its extrema and the first value that is not finite: no spike disappears.
    count = len(values)
    if count <= most:
        return list(range(count))
    kept = {0, count - 1}
    for part in np.array_split(np.arange(count), most // 2):
        finite = part[np.isfinite(values[part])]
        kept |= set(part[~np.isfinite(values[part])][:1].tolist())
        if len(finite):
            kept |= {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])}
    return sorted(kept)


def ticks(low: float | int, high: float | int, wanted: int = 5) -> list[float]:
    """Return about `wanted` round numbers from `low` to `high`."""
    # The smallest of 1, 2, 5 and 10 times a power of ten that gives at most `wanted` intervals.
    rough = (high - low) / wanted
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def short(value: float | int) -> str:
    """Format a number with few characters: 1,200, 0.25, 2e-05, 3.1e+09."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if 1e3 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e3 else f"{value:.3g}"


def last_value(line: Line) -> str:
    """Return the label and the last finite value of a line."""
    finite = line.values[np.isfinite(line.values)]
    last = short(float(finite[-1])) if len(finite) else "no finite value"
    return f"{line.label or 'last'} {last}"


def save_png(chart: Chart, lines: Sequence[Line], png_path: str | os.PathLike) -> None:
    """Plot the lines into a PNG file; raise ValueError if no value is finite."""
    frame = _visible(chart, lines)
    figure = new_figure(8, 4.2, dpi=130)
    axes = figure.add_subplot()
    dress(axes, chart.title, "step", unit_of(chart, frame))
    for line in lines:
        color, window = COLORS[line.color % len(COLORS)], len(line.steps) // 40
        style: dict[str, Any] = {"color": color, "linewidth": 1.8, "label": last_value(line)}
        if line.dots or len(line.steps) == 1:
            style |= {"marker": "o", "markersize": 4, "linestyle": (0, (5, 2))}
        if line.dots or window < 2 or len(line.not_finite):
            axes.plot(line.steps, line.values, **style)
        else:
            axes.plot(line.steps, line.values, color=color, alpha=0.25, linewidth=0.8)
            axes.plot(line.steps, smooth(line.values, window), **style)
    axes.set_xlim(0, frame.right)
    if frame.logarithmic:
        log_axis(axes, np.concatenate([line.values for line in lines]))
    else:
        axes.set_ylim(frame.low, frame.high)
    axes.legend(frameon=False)
    save(figure, png_path)
