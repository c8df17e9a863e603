"""Speech encoders that read the samples of a recording: wav2vec 2.0 and HuBERT, and recognition with CTC."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer.config._checks import ConfigError
from transformer.config._model import TransformerConfig
from transformer.config._options import Audio
from transformer.nn._axes import Array, DType, Float, Hidden, Lengths, Logits
from transformer.nn._blocks import Aux, kernel_init, make_norm
from transformer.nn._masks import Mask
from transformer.nn._parameter_axes import declare
from transformer.nn._stacks import Encoder
from transformer.nn.layers._layers import ACTIVATIONS, Linear
from transformer.nn.layers._norms import FrozenBatchNorm, LayerNorm
from transformer.nn.models._base import Model
from transformer.nn.models._speech import Convolution, convolve

EPSILON = 1e-5
"""Epsilon of the norms of the convolutions, the same in all models."""


class FrameNorm(nn.Module):
    """gamma x + beta for each feature, normalized over the real frames of its recording, in float32.

    This is GroupNorm with one group per feature (Wu & He 2018, arXiv 1803.08494).
    """

    parameter_axes = declare({"scale": "norm", "bias": "norm"})

    dtype: DType = jnp.float32
    param_dtype: DType = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B T M"], counts: Lengths | None = None) -> Float[Array, "B T M"]:
        """Normalize (B, T, M); `counts` (B,) is the number of frames of each row, None: all."""
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:], self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:], self.param_dtype)
        x = x.astype(jnp.float32)
        real = jnp.ones((1, x.shape[1], 1), bool)
        if counts is not None:
            real = (jnp.arange(x.shape[1])[None, :] < counts[:, None])[..., None]
        count = jnp.maximum(real.sum(1, keepdims=True), 1)
        # where and not a product with 0: NaN or infinity in padding would survive a product.
        x = jnp.where(real, x, 0.0)
        x = jnp.where(real, x - x.sum(1, keepdims=True) / count, 0.0)
        y = x * jax.lax.rsqrt(jnp.square(x).sum(1, keepdims=True) / count + EPSILON)
        return (y * scale.astype(jnp.float32)[None, None] + bias.astype(jnp.float32)[None, None]).astype(self.dtype)


class FeatureEncoder(nn.Module):
    """Convolutions `conv_i/` with `norm_i/`, then `projection_norm/` and `projection/` to d_model (wav2vec 2.0)."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, samples: Float[Array, "B A"], lengths: Lengths | None = None) -> Hidden:
        """Map samples (B, A) to frames (B, T, D); `lengths` (B,) is the number of samples of each row."""
        config, audio = self.config, self.config.audio
        types = {"dtype": config.dtype, "param_dtype": config.parameters.dtype}
        x = samples[..., None]  # one channel
        for i, features in enumerate(audio.features):
            size, stride = audio.kernel_sizes[i], audio.strides[i]
            options = {"kernel_size": size, "padding": (0, 0), "use_bias": audio.use_bias}
            init = nn.initializers.he_normal()
            x = Convolution(features, stride, init, **options, **types, name=f"conv_{i}")(x)
            if lengths is not None:
                lengths = (lengths - size) // stride + 1  # frames of a convolution without padding
            if audio.norm == "layer":
                x = LayerNorm(EPSILON, **types, name=f"norm_{i}")(x)
            elif i == 0:
                x = FrameNorm(**types, name=f"norm_{i}")(x, lengths)
            x = ACTIVATIONS[audio.activation](x)
        if audio.projection_norm:
            x = make_norm(config, "projection_norm")(x)
        return Linear((config.d_model,), kernel_init=kernel_init(config), **types, name="projection")(x)


class PositionConvolution(nn.Module):
    """x + activation(convolution(x)): a wide, grouped convolution adds relative positions (wav2vec 2.0, section 4.2).

    Parameters: `kernel` (R, D / groups, D) and `bias` (D,); with the position_norm "weight" also `scale` (R,), the norm
    of the kernel at each of its R positions, otherwise `norm/`.
    """

    parameter_axes = declare({"position_convolution/kernel": "_ _ -> embed"}, role="input")

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: Hidden) -> Hidden:
        """Add positions to frames (B, T, D)."""
        config, audio = self.config, self.config.audio
        size, width = audio.position_kernel_size, x.shape[-1]
        shape = (size, width // audio.position_groups, width)
        # The standard deviation of the reference. With g groups an output is a sum of R D / g products, so its variance
        # is 4 / g times that of the input.
        init = nn.initializers.normal(2 * (size * width) ** -0.5)
        kernel = self.param("kernel", init, shape, config.parameters.dtype)
        bias = self.param("bias", nn.initializers.zeros, (width,), config.parameters.dtype)
        y = x
        if audio.position_norm == "weight":
            # Weight normalization separates the direction of a kernel from its norm, here at each position k:
            # W_k = scale_k V_k / |V_k|. In float32, since |V_k| is a sum of many squares.
            direction = kernel.astype(jnp.float32)
            norms = jnp.sqrt(jnp.square(direction).sum((1, 2), keepdims=True))
            # Initially scale_k = |V_k|, so W = V.
            scale = self.param("scale", lambda *_: norms[:, 0, 0].astype(config.parameters.dtype))
            kernel = (direction / norms * scale.astype(jnp.float32)[:, None, None]).astype(config.parameters.dtype)
        else:
            y = FrozenBatchNorm(EPSILON, config.dtype, config.parameters.dtype, name="norm")(y)
        # The frames t - R // 2 to t - R // 2 + R - 1 add to frame t: an even kernel reads one frame more of the past.
        padding = (size // 2, size - 1 - size // 2)
        y, kernel, bias = nn.dtypes.promote_dtype(y, kernel, bias, dtype=config.dtype)
        y = convolve(y, kernel, padding=padding, groups=audio.position_groups) + bias[None, None]
        return x + ACTIVATIONS[audio.activation](y)


def check_samples(audio: Audio, samples: Array, lengths: Array | None) -> None:
    """Raise ValueError unless samples (batch, samples) are floating-point and long enough, and lengths are integers."""
    shape = samples.shape
    if len(shape) != 2 or not jnp.issubdtype(samples.dtype, jnp.floating) or shape[1] < audio.shortest:
        raise ValueError(
            f"samples must be floating-point of shape (batch, samples) with at least {audio.shortest} samples; got "
            f"{samples.dtype} of shape {shape}. For a single recording, pass samples[None]; pad a short one with zeros."
        )
    if lengths is not None and (lengths.shape != shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer)):
        raise ValueError(
            f"lengths must be integers of shape ({shape[0]},), the number of samples of each recording; got "
            f"{lengths.dtype} of shape {lengths.shape}."
        )


class SpeechEncoder(Model):
    """An encoder of recordings (wav2vec 2.0, Baevski et al. 2020; HuBERT, Hsu et al. 2021, arXiv 2106.07447).

    Samples are (B, A), floating-point, at the sampling rate and with the normalization of the training. The config's
    `Audio` input describes how they become T = `input.frames(A)` frames. Padding is at the end of a row: pass the
    number of samples of each row as `lengths` (B,). Padding then changes nothing, except that frames at the end of the
    result belong to it.

    Parameters: `feature_encoder/`, `position_convolution/` and `encoder/`.

    Raises:
        ConfigError: if the config's input is not `Audio`, or the config has another kind of positions.
        ValueError: (when called) if samples or lengths have another shape or dtype.
    """

    def setup(self):
        config = self.config
        if config.audio is None:
            raise ConfigError(f"input is not audio: a {type(self).__name__} needs input=Audio(...).")
        if config.position is not None:
            raise ConfigError(
                f"position is {config.position}, but a {type(self).__name__} adds positions by a convolution of its "
                f"frames. Set position=None."
            )
        self.feature_encoder = FeatureEncoder(config)
        self.position_convolution = PositionConvolution(config)
        self.encoder = Encoder(config, causal=config.attention.causal, execution=self.execution)

    def __call__(
        self, samples: Array, lengths: Array | None = None, deterministic: bool = True
    ) -> Float[Array, "B T D"]:
        """Encode samples (B, A) as (B, T, D), float32; arguments are those of `run_stacks`."""
        return self.hidden(samples, lengths, deterministic).astype(jnp.float32)

    def run_stacks(
        self, samples: Array, lengths: Array | None = None, deterministic: bool = True
    ) -> tuple[Hidden, None, Aux]:
        """Return hidden states (B, T, D), None for the cache, and aux, the layers' terms of the training loss.

        Args:
            samples: (B, A).
            lengths: (B,), the number of samples of each row, at least `input.shortest`; None: all.
            deterministic: False enables dropout (rng "dropout").
        """
        audio = self.config.audio
        check_samples(audio, samples, lengths)
        x, mask = self.feature_encoder(samples, lengths), None
        if lengths is not None:
            counts = audio.frames(lengths)
            mask = Mask.lengths(counts)
            # Otherwise the convolution of the positions would read the padding.
            x = jnp.where((jnp.arange(x.shape[1])[None, :] < counts[:, None])[..., None], x, 0.0)
        return self.encoder(self.position_convolution(x), mask=mask, deterministic=deterministic)


class SpeechRecognizer(SpeechEncoder):
    """A speech encoder with logits over characters for each frame, trained with CTC.

    CTC is connectionist temporal classification (Graves et al. 2006, doi 10.1145/1143844.1143891): one of the
    characters is the blank, and a text is what remains if repeated characters are merged and blanks are removed.
    Parameters in addition to those of a SpeechEncoder: `output/`.

    Raises:
        ConfigError: as a SpeechEncoder, or if the config has no vocab_size.
    """

    def setup(self):
        characters = self._needed(self.config.vocab_size, "vocab_size", "characters")
        super().setup()
        self._setup_head(characters, tied=False, use_bias=True)

    def __call__(self, samples: Array, lengths: Array | None = None, deterministic: bool = True) -> Logits:
        """Compute logits (B, T, V), float32, from samples (B, A); arguments are those of `run_stacks`."""
        return self.head(self.hidden(samples, lengths, deterministic))

    def head(self, hidden: Hidden) -> Logits:
        """Compute logits (B, T, V), float32, from hidden states (B, T, D)."""
        return self.output(self._before_output(hidden)).astype(jnp.float32)
