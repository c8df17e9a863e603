"""Plot of forecasts of a time series with the actual values."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from transformer.nn._axes import Float
from transformer.viz._style import BLUE, INK, RED, dress, new_figure, save


def forecast_picture(
    past: Float[np.ndarray, "W S C"],
    future: Float[np.ndarray, "W T C"],
    forecast: Float[np.ndarray, "W T C"],
    columns: Sequence[str],
    png_path: str | os.PathLike,
    title: str = "Forecasts",
    names: Sequence[str] = (),
) -> None:
    """Plot windows of a time series into a PNG file, with one column per window and one row per channel.

    `columns` names the channels, `names` the windows; (): "window 1 of 2", and so on. A ValueError if the shapes of the
    arrays do not match, or there is not one name per window.
    """
    windows, steps, channels = past.shape
    if future.shape != forecast.shape or future.shape[::2] != (windows, channels) or len(columns) != channels:
        raise ValueError(
            f"forecast and future must have the same shape, with as many windows and channels as the past "
            f"{past.shape}, and columns one name per channel, got {forecast.shape}, {future.shape} and {len(columns)} "
            f"names. Check the shapes."
        )
    names = names or [f"window {window + 1} of {windows}" for window in range(windows)]
    if len(names) != windows:
        raise ValueError(f"expected one name for each of the {windows} windows, got {len(names)}. Check names=.")
    figure = new_figure(5 * windows, 1.5 * channels + 1.1, dpi=110)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=13)
    grid = figure.subplots(channels, windows, sharex=True, squeeze=False)
    horizon = np.arange(1, future.shape[1] + 1)
    for window in range(windows):
        for channel in range(channels):
            axes = grid[channel, window]
            last = channel == channels - 1
            dress(axes, names[window] if channel == 0 else "", "steps from now" if last else "", columns[channel])
            now = past[window, -1:, channel]
            axes.plot(np.arange(1 - steps, 1), past[window, :, channel], color=INK, linewidth=0.9)
            for values, color, name in ((future, BLUE, "actual"), (forecast, RED, "forecast")):
                line = np.concatenate([now, values[window, :, channel]])
                axes.plot([0, *horizon], line, color=color, linewidth=1.3, label=name)
    grid[0, 0].legend(frameon=False, fontsize=8)
    save(figure, png_path)
