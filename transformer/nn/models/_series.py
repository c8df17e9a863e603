"""Classes, numbers and reconstructed patches of time series."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from transformer.nn._axes import Array, Float
from transformer.nn.models._forecaster import SeriesEncoder


class SeriesClassifier(SeriesEncoder):
    """An encoder of time-series patches with a classifier (PatchTST, Nie et al. 2022, arXiv 2211.14730).

    The pooled vectors of all channels are concatenated, so that a class may depend on several channels. Parameters in
    addition to those of a SeriesEncoder: `output/`.

    Raises:
        ConfigError: if the config has no series or no num_classes.
        ValueError: (when called) if the series has another shape or is not floating-point.
    """

    def setup(self):
        super().setup()
        classes = self._needed(self.config.output.num_classes, "output.num_classes", "classes")
        self._setup_head(classes, tied=False, use_bias=True)

    def head(self, hidden: Float[Array, "B C P D"]) -> Float[Array, "B ..."]:
        """Compute class logits (B, num_classes), float32, from the encoding (B, channels, patches, D)."""
        # (B, C, P, D) -> (B, C, F) -> (B, C F)
        pooled = self.pool(hidden).reshape(hidden.shape[0], -1)
        return self.output(self._before_output(pooled)).astype(jnp.float32)


class SeriesRegressor(SeriesEncoder):
    """An encoder of time-series patches that predicts numbers for each series, such as its age or its energy.

    The head is that of a SeriesClassifier. With `output.target_range` (low, high), a sigmoid limits the numbers to this
    range. They do not depend on the scale of the series unless `scaling` is "none". Parameters in addition to those of
    a SeriesEncoder: `output/`.

    Raises:
        ConfigError: if the config has no series or no num_targets.
        ValueError: (when called) if the series has another shape or is not floating-point.
    """

    def setup(self):
        super().setup()
        targets = self._needed(self.config.output.num_targets, "output.num_targets", "targets")
        self._setup_head(targets, tied=False, use_bias=True)

    def head(self, hidden: Float[Array, "B C P D"]) -> Float[Array, "B ..."]:
        """Compute targets (B, num_targets), float32, from the encoding (B, channels, patches, D)."""
        pooled = self.pool(hidden).reshape(hidden.shape[0], -1)
        targets = self.output(self._before_output(pooled)).astype(jnp.float32)
        if self.config.output.target_range is None:
            return targets
        low, high = self.config.output.target_range
        return low + (high - low) * jax.nn.sigmoid(targets)


class PatchReconstructor(SeriesEncoder):
    """An encoder of time-series patches that predicts masked patches, for pretraining (Nie et al. 2022, section 3.2).

    The loss is the mean squared difference from `targets` over the masked patches. Parameters in addition to those of a
    SeriesEncoder: `output/`.

    Raises:
        ConfigError: if the config has no series.
        ValueError: (when called) if the series has another shape or is not floating-point.
    """

    def setup(self):
        super().setup()
        self._setup_head(self.config.series.patch_length, tied=False, use_bias=True)

    def head(self, hidden: Float[Array, "B C P D"]) -> Float[Array, "B ..."]:
        """Compute normalized patches (B, channels, P, patch_length), float32, from the encoding of all positions."""
        hidden = hidden[:, :, int(self.config.series.class_token) :]  # the class token stands for no patch
        return self.output(self._before_output(hidden)).astype(jnp.float32)

    def targets(self, values: Array) -> Float[Array, "B ..."]:
        """Return the normalized patches (B, channels, P, patch_length) of values (B, context_length, channels)."""
        return self._patches(values)[0]
