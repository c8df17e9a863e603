"""Encoder of time series with independent channels, and forecasts."""

from __future__ import annotations

from typing import Any, TypeAlias

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from transformer.config._checks import ConfigError
from transformer.config._parts import Series
from transformer.nn._axes import Array, Bool, Float
from transformer.nn._blocks import Aux, kernel_init
from transformer.nn._parameter_axes import declare
from transformer.nn._stacks import Encoder
from transformer.nn.layers._layers import Linear
from transformer.nn.models._base import Model

Values: TypeAlias = Float[Array, "B T C"]
"""values of a time series: T steps, C channels"""

MaskedPatches: TypeAlias = Bool[Array, "B C p"]
"""which patches of each channel are replaced by zeros; p is P without a class token"""

SMALLEST_VARIANCE = 1e-5
"""added to the variance of the look-back window before the square root, against division by zero"""
SMALLEST_MAGNITUDE = 1e-10
"""lower limit of the mean magnitude of the look-back window, against division by zero"""


def look_back_scale(values: Values, series: Series) -> tuple[Float[Array, "B t C"], Float[Array, "B t C"]]:
    """Return shift and scale of each channel of `values` (B, steps, channels), both (B, 1, channels)."""
    # The model sees (values - shift) / scale, and its forecast y becomes y scale + shift: Reversible Instance
    # Normalization (Kim et al. 2022) without learned parameters.
    # std: mean and standard deviation of the window. mean: scale by the mean magnitude, no shift. none: 0 and 1.
    none = jnp.zeros_like(values[:, :1])
    if series.scaling == "std":
        return values.mean(1, keepdims=True), jnp.sqrt(values.var(1, keepdims=True) + SMALLEST_VARIANCE)
    if series.scaling == "mean":
        return none, jnp.maximum(jnp.abs(values).mean(1, keepdims=True), SMALLEST_MAGNITUDE)
    return none, none + 1.0


def cut_series(values: Values, series: Series) -> Float[Array, "B C P t"]:
    """Cut values (B, steps, channels) into patches (B, channels, P, patch_length), without a rest at the start."""
    # The remainder of (context_length - patch_length) / patch_stride
    first = series.context_length - series.patch_length - series.patch_stride * (series.patches - 1)
    starts = first + series.patch_stride * np.arange(series.patches)
    # (P, 1) + (1, patch_length) indices: (B, T, C) -> (B, P, patch_length, C) -> (B, C, P, patch_length).
    return values[:, starts[:, None] + np.arange(series.patch_length)[None, :]].transpose(0, 3, 1, 2)


class SeriesEncoder(Model):
    """An encoder of time-series patches without a head, and the base class of models of time series.

    This is PatchTST (Nie et al. 2022, arXiv 2211.14730, section 3.1). Each channel is a separate sequence with the same
    encoder. Parameters in addition to the encoder's: `series_embedding/kernel` (patch_length, D), or
    `channel_embedding/kernel` (channels, patch_length, D) with one map per channel; `class_token` (D,) if the config
    has one.

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
            raise ConfigError(f"input is not a series: a {type(self).__name__} needs input=Series(...).")
        features = ((config.d_model,), 1, True, kernel_init(config), config.dtype, config.parameters.dtype)
        if series.shared_embedding:
            self.series_embedding = Linear(*features)
        else:
            each = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": 1, "out_axes": 1}
            each["metadata_params"] = {nn.PARTITION_NAME: None}  # no mesh axis splits the channel axis
            # One kernel per channel: (B, C, P, t) x (C, t, D) -> (B, C, P, D)
            self.channel_embedding = nn.vmap(Linear, axis_size=series.channels, **each)(*features)
        if series.class_token:
            zeros, dtype = nn.initializers.zeros, config.parameters.dtype
            self.class_token = self.param("class_token", zeros, (config.d_model,), dtype)
        self.encoder = Encoder(config, causal=config.attention.causal, execution=self.execution)

    def __call__(
        self, values: Array, deterministic: bool = True, masked: MaskedPatches | None = None
    ) -> Float[Array, "B ..."]:
        """Apply `head` to the encoding of values (B, context_length, channels), floating-point.

        Args:
            values: the series. Each channel is normalized by its values, as the config's `scaling` says.
            deterministic: False enables dropout (rng "dropout").
            masked: (B, channels, patches), True for patches that are replaced by zeros after the normalization (Nie et
                al. 2022, section 3.2); None: no patch.

        Returns:
            The output of `head`.

        Raises:
            ValueError: the values have another shape or are not floating-point.
        """
        return self.with_aux(values, deterministic, masked)[0]

    def hidden(
        self, values: Array, deterministic: bool = True, masked: MaskedPatches | None = None
    ) -> Float[Array, "B C P D"]:
        """Encode values (B, context_length, channels) as (B, channels, patches, D); a class token comes first.

        The arguments are those of a call.
        """
        return self._run(values, deterministic, masked)[0]

    def with_aux(
        self, values: Array, deterministic: bool = True, masked: MaskedPatches | None = None
    ) -> tuple[Float[Array, "B ..."], Aux]:
        """Return the output of a call and aux, the layers' terms of the training loss; arguments as in a call."""
        x, _, aux = self._run(values, deterministic, masked)
        return self.head(x), aux

    def head(self, hidden: Float[Array, "B C P D"]) -> Float[Array, "B ..."]:
        """Return the encoding (B, channels, patches, D) unchanged: there is no head."""
        return hidden

    def pool(self, hidden: Float[Array, "B C P D"]) -> Float[Array, "B C F"]:
        """Reduce an encoding to (B, channels, F): the class token, or the patches combined as `pooling` says."""
        series = self.config.series
        if series.class_token:
            return hidden[:, :, 0]
        if series.pooling == "flatten":
            # (B, C, P, D) -> (B, C, P D): the forecast has a weight for each patch
            return hidden.reshape(*hidden.shape[:2], -1)
        return hidden.mean(2) if series.pooling == "mean" else hidden.max(2)

    def _run(
        self, values: Array, deterministic: bool, masked: Array | None = None
    ) -> tuple[Array, tuple[Array, Array], Any]:
        config, series = self.config, self.config.series
        patches, scaling = self._patches(values)
        if masked is not None:
            if masked.shape != patches.shape[:3] or masked.dtype != bool:
                raise ValueError(
                    f"masked must be boolean of shape {patches.shape[:3]}: batch, channels, patches; got "
                    f"{masked.dtype} of shape {masked.shape}."
                )
            patches = jnp.where(masked[..., None], 0.0, patches)
        x = self.series_embedding(patches) if series.shared_embedding else self.channel_embedding(patches)
        if series.class_token:
            first = jnp.broadcast_to(self.class_token.astype(x.dtype), (*x.shape[:2], 1, config.d_model))
            x = jnp.concatenate([first, x], 2)
        batch, channels = x.shape[:2]
        # Channel independence: channels become batch rows, (B C, P, D), so attention never mixes them.
        x, _, aux = self.encoder(x.reshape(batch * channels, *x.shape[2:]), deterministic=deterministic)
        # Aux is per row of the encoder, that is, per channel.
        aux = {name: one.reshape(batch, channels).sum(1) for name, one in aux.items()}
        return x.reshape(batch, channels, *x.shape[1:]), scaling, aux

    def _patches(self, values: Array) -> tuple[Array, tuple[Array, Array]]:
        """Return the normalized patches (B, channels, P, patch_length), and shift and scale of the normalization."""
        series = self.config.series
        expected = (series.context_length, series.channels)
        if values.ndim != 3 or values.shape[1:] != expected or not jnp.issubdtype(values.dtype, jnp.floating):
            raise ValueError(
                f"series must be floating-point of shape (batch, {', '.join(map(str, expected))}): batch, steps, "
                f"channels; got {values.dtype} of shape {values.shape}. For a longer series, pass the last "
                f"{series.context_length} steps; for a single series, pass values[None]."
            )
        values = values.astype(jnp.float32)  # statistics of raw values need the range and precision of float32
        shift, scale = look_back_scale(values, series)
        return cut_series((values - shift) / scale, series), (shift, scale)


class Forecaster(SeriesEncoder):
    """An encoder of time-series patches with a linear forecast head (Nie et al. 2022, arXiv 2211.14730, section 3.1).

    A call returns (B, horizon, channels), float32, in the scale of the values, which may be any. Parameters in addition
    to those of a SeriesEncoder: `output/`.

    Raises:
        ConfigError: if the config has no series, or the series no horizon.
        ValueError: (when called) if the series has another shape or is not floating-point.
    """

    def setup(self):
        super().setup()
        horizon = self._needed(self.config.series.horizon, "input.horizon", "steps to forecast")
        self._setup_head(horizon, tied=False, use_bias=True)

    def with_aux(
        self, values: Array, deterministic: bool = True, masked: MaskedPatches | None = None
    ) -> tuple[Values, Aux]:
        """Return the forecast (B, horizon, channels) and aux, the layers' terms of the training loss."""
        x, (shift, scale), aux = self._run(values, deterministic, masked)
        # Undo the normalization of the input.
        return self.head(x) * scale + shift, aux

    def head(self, hidden: Float[Array, "B C P D"]) -> Values:
        """Compute the forecast from the encoding (B, channels, patches, D), before the normalization is undone.

        Returns:
            (B, horizon, channels), float32.
        """
        # A linear map to the horizon, (B, C, F) -> (B, C, horizon) -> (B, horizon, C).
        return self.output(self._before_output(self.pool(hidden))).astype(jnp.float32).swapaxes(1, 2)
