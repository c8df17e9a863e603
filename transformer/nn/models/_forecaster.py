"""Forecasts of time series, each channel for itself."""

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
"""of a time series: T steps, C channels"""

SMALLEST_VARIANCE = 1e-5
"""added to the variance of a look-back"""
SMALLEST_MAGNITUDE = 1e-10
"""of a look-back"""


def look_back_scale(values: Values, series: Series) -> tuple[Float[Array, "B t C"], Float[Array, "B t C"]]:
    """Shift and scale of each channel of `values` (B, steps, channels), (B, 1, channels) each: a model sees (values -
    shift) / scale, and its forecast is scaled back (Kim et al. 2022, Reversible Instance Normalization, without its
    learnt part).
    """
    none = jnp.zeros_like(values[:, :1])
    if series.scaling == "std":
        return values.mean(1, keepdims=True), jnp.sqrt(values.var(1, keepdims=True) + SMALLEST_VARIANCE)
    if series.scaling == "mean":
        return none, jnp.maximum(jnp.abs(values).mean(1, keepdims=True), SMALLEST_MAGNITUDE)
    return none, none + 1.0


def cut_series(values: Values, series: Series) -> Float[Array, "B C P t"]:
    """Values (B, steps, channels) -> patches (B, channels, P, patch_length). The last one ends with the look-back; what
    no patch reaches is at its beginning.
    """
    first = series.context_length - series.patch_length - series.patch_stride * (series.patches - 1)
    starts = first + series.patch_stride * np.arange(series.patches)
    return values[:, starts[:, None] + np.arange(series.patch_length)[None, :]].transpose(0, 3, 1, 2)


class Forecaster(Model):
    """An encoder over the patches of a time series, each channel a sequence of its own, and a linear map from there to
    the future (PatchTST; Nie et al. 2022, arXiv 2211.14730, section 3.1).

    Parameters beside the encoder's: `series_embedding/kernel` (patch_length, D), or one for each channel,
    `channel_embedding/kernel` (channels, patch_length, D); `class_token` (D,) where there is one; `output/`.

    Raises:
        ConfigError: the config has no series.
        ValueError: (its calls) series of another shape, or not of floating numbers.
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
            each["metadata_params"] = {nn.PARTITION_NAME: None}  # the axis of channels in boxed parameters has no name
            self.channel_embedding = nn.vmap(Linear, axis_size=series.channels, **each)(*features)
        if series.class_token:
            self.class_token = self.param("class_token", nn.initializers.zeros, (config.d_model,), config.param_dtype)
        self.encoder = Encoder(config, causal=config.attention.causal, execution=self.execution)
        self._setup_head(series.horizon, tied=False, use_bias=True)

    def __call__(self, values: Array, deterministic: bool = True) -> Values:
        """Values (B, context_length, channels), floating, on whatever scale -> the forecast (B, horizon, channels) on
        the same, float32.
        """
        return self.with_aux(values, deterministic)[0]

    def hidden(self, values: Array, deterministic: bool = True) -> Float[Array, "B C P D"]:
        """Values (B, context_length, channels) -> the encoder's output (B, channels, patches, D), a class token
        first.
        """
        return self._run(values, deterministic)[0]

    def with_aux(self, values: Array, deterministic: bool = True) -> tuple[Values, Aux]:
        """What a call takes -> the forecast (B, horizon, channels), and aux, what the layers report to the training
        loss.
        """
        x, (shift, scale), aux = self._run(values, deterministic)
        return self.head(x) * scale + shift, aux

    def _run(self, values: Array, deterministic: bool) -> tuple[Array, tuple[Array, Array], Any]:
        config, series = self.config, self.config.series
        expected = (series.context_length, series.channels)
        if values.ndim != 3 or values.shape[1:] != expected or not jnp.issubdtype(values.dtype, jnp.floating):
            raise ValueError(
                f"series must be floating numbers of shape (batch, {', '.join(map(str, expected))}): batch, steps, "
                f"channels; got {values.dtype} of shape {values.shape}. Of a longer series give the last "
                f"{series.context_length} steps; a single one is values[None]."
            )
        values = values.astype(jnp.float32)
        shift, scale = look_back_scale(values, series)
        patches = cut_series((values - shift) / scale, series)
        x = self.series_embedding(patches) if series.shared_embedding else self.channel_embedding(patches)
        if series.class_token:
            first = jnp.broadcast_to(self.class_token.astype(x.dtype), (*x.shape[:2], 1, config.d_model))
            x = jnp.concatenate([first, x], 2)
        batch, channels = x.shape[:2]
        x, _, aux = self.encoder(x.reshape(batch * channels, *x.shape[2:]), deterministic=deterministic)
        aux = {name: one.reshape(batch, channels).sum(1) for name, one in aux.items()}
        return x.reshape(batch, channels, *x.shape[1:]), (shift, scale), aux

    def head(self, hidden: Float[Array, "B C P D"]) -> Values:
        """The encoder's output (B, channels, patches, D) -> the forecast before it is scaled back (B, horizon,
        channels), float32.
        """
        series = self.config.series
        if series.class_token:
            x = hidden[:, :, 0]
        elif series.pooling == "flatten":
            x = hidden.reshape(*hidden.shape[:2], -1)
        else:
            x = hidden.mean(2) if series.pooling == "mean" else hidden.max(2)
        return self.output(self._before_output(x)).astype(jnp.float32).swapaxes(1, 2)
