"""Forecasts of time series; channels are independent."""

from __future__ import annotations

from typing import Any, TypeAlias

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from transformer.config._checks import ConfigError
from transformer.config._parts import Series
from transformer.nn._axes import Array, Float
from transformer.nn._blocks import Aux, kernel_init
from transformer.nn._layers import Linear
from transformer.nn._parameter_axes import declare
from transformer.nn._stacks import Encoder
from transformer.nn.models._base import Model

Values: TypeAlias = Float[Array, "B T C"]
"""values of a time series: T steps, C channels"""

SMALLEST_VARIANCE = 1e-5
"""added to the variance of the look-back window before the square root, against division by zero"""
SMALLEST_MAGNITUDE = 1e-10
"""lower limit of the mean magnitude of the look-back window, against division by zero"""


def look_back_scale(values: Values, series: Series) -> tuple[Float[Array, "B t C"], Float[Array, "B t C"]]:
    """Return shift and scale of each channel of `values` (B, steps, channels), both (B, 1, channels).

    The model sees (values - shift) / scale, and its forecast y becomes y scale + shift. This is Reversible Instance
    Normalization (Kim et al. 2022) without its learned parameters.
    """
    # std: mean and standard deviation of the window. mean: scale by the mean magnitude, no shift. none: 0 and 1.
    none = jnp.zeros_like(values[:, :1])
    if series.scaling == "std":
        return values.mean(1, keepdims=True), jnp.sqrt(values.var(1, keepdims=True) + SMALLEST_VARIANCE)
    if series.scaling == "mean":
        return none, jnp.maximum(jnp.abs(values).mean(1, keepdims=True), SMALLEST_MAGNITUDE)
    return none, none + 1.0


def cut_series(values: Values, series: Series) -> Float[Array, "B C P t"]:
    """Cut values (B, steps, channels) into patches (B, channels, P, patch_length).

    The last patch ends at the last step. Steps that do not fill a patch are dropped at the start of the series.
    """
    first = series.context_length - series.patch_length - series.patch_stride * (series.patches - 1)
    starts = first + series.patch_stride * np.arange(series.patches)
    # (P, 1) + (1, patch_length) indices: (B, T, C) -> (B, P, patch_length, C) -> (B, C, P, patch_length).
    return values[:, starts[:, None] + np.arange(series.patch_length)[None, :]].transpose(0, 3, 1, 2)


class Forecaster(Model):
    """An encoder of time-series patches with a linear forecast head.

    This is PatchTST (Nie et al. 2022, arXiv 2211.14730, section 3.1). Each channel is a separate sequence with the same
    encoder. Parameters in addition to the encoder's: `series_embedding/kernel` (patch_length, D), or
    `channel_embedding/kernel` (channels, patch_length, D) with one map per channel; `class_token` (D,) if the config
    has one; `output/`.

    Raises:
        ConfigError: if the config has no series.
        ValueError: (when called) if the series has another shape or is not floating-point.
    """

    parameter_axes = declare(
        {
            "series_embedding/kernel": "_ -> embed",
            "channel_embedding/kernel": "_: _ -> embed",
            "channel_embedding/bias": "_ embed",
            "class_token": "embed",
        },
        role="input",
    )

    def setup(self):
        config, series = self.config, self.config.series
        if series is None:
            raise ConfigError("input is not a series: a Forecaster needs input=Series(...).")
        features = ((config.d_model,), 1, True, kernel_init(config), config.dtype, config.param_dtype)
        if series.shared_embedding:
            self.series_embedding = Linear(*features)
        else:
            each = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": 1, "out_axes": 1}
            each["metadata_params"] = {nn.PARTITION_NAME: None}  # no mesh axis splits the channel axis
            self.channel_embedding = nn.vmap(Linear, axis_size=series.channels, **each)(*features)
        if series.class_token:
            self.class_token = self.param("class_token", nn.initializers.zeros, (config.d_model,), config.param_dtype)
        self.encoder = Encoder(config, causal=config.attention.causal, execution=self.execution)
        self._setup_head(series.horizon, tied=False, use_bias=True)

    def __call__(self, values: Array, deterministic: bool = True) -> Values:
        """Forecast (B, horizon, channels), float32, from values (B, context_length, channels), floating-point.

        The forecast has the scale of the values, which may be any.
        """
        return self.with_aux(values, deterministic)[0]

    def hidden(self, values: Array, deterministic: bool = True) -> Float[Array, "B C P D"]:
        """Encode values (B, context_length, channels) as (B, channels, patches, D); a class token comes first."""
        return self._run(values, deterministic)[0]

    def with_aux(self, values: Array, deterministic: bool = True) -> tuple[Values, Aux]:
        """Return the forecast (B, horizon, channels) and aux, the layers' terms of the training loss."""
        x, (shift, scale), aux = self._run(values, deterministic)
        # Undo the normalization of the input.
        return self.head(x) * scale + shift, aux

    def _run(self, values: Array, deterministic: bool) -> tuple[Array, tuple[Array, Array], Any]:
        config, series = self.config, self.config.series
        expected = (series.context_length, series.channels)
        if values.ndim != 3 or values.shape[1:] != expected or not jnp.issubdtype(values.dtype, jnp.floating):
            raise ValueError(
                f"series must be floating-point of shape (batch, {', '.join(map(str, expected))}): batch, steps, "
                f"channels; got {values.dtype} of shape {values.shape}. For a longer series, pass the last "
                f"{series.context_length} steps; for a single series, pass values[None]."
            )
        values = values.astype(jnp.float32)  # statistics of raw values need the range and precision of float32
        shift, scale = look_back_scale(values, series)
        # (B, C, P, patch_length) -> (B, C, P, D)
        patches = cut_series((values - shift) / scale, series)
        x = self.series_embedding(patches) if series.shared_embedding else self.channel_embedding(patches)
        if series.class_token:
            first = jnp.broadcast_to(self.class_token.astype(x.dtype), (*x.shape[:2], 1, config.d_model))
            x = jnp.concatenate([first, x], 2)
        batch, channels = x.shape[:2]
        # Channel independence: channels become batch rows, (B C, P, D), so attention never mixes them.
        x, _, aux = self.encoder(x.reshape(batch * channels, *x.shape[2:]), deterministic=deterministic)
        aux = {name: one.reshape(batch, channels).sum(1) for name, one in aux.items()}
        return x.reshape(batch, channels, *x.shape[1:]), (shift, scale), aux

    def head(self, hidden: Float[Array, "B C P D"]) -> Values:
        """Compute the forecast from the encoding (B, channels, patches, D), before the normalization is undone.

        Returns:
            (B, horizon, channels), float32.
        """
        series = self.config.series
        # (B, C, P, D) -> (B, C, F): class token, all patches concatenated, or pooled over patches; then a linear map to
        # the horizon, (B, C, horizon) -> (B, horizon, C).
        if series.class_token:
            x = hidden[:, :, 0]
        elif series.pooling == "flatten":
            x = hidden.reshape(*hidden.shape[:2], -1)
        else:
            x = hidden.mean(2) if series.pooling == "mean" else hidden.max(2)
        return self.output(self._before_output(x)).astype(jnp.float32).swapaxes(1, 2)
