"""Text from speech: an encoder of log-mel frames, a decoder of tokens."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer.config._checks import ConfigError
from transformer.config._model import TransformerConfig
from transformer.nn._axes import Array, DType, Float, Hidden
from transformer.nn._blocks import kernel_init
from transformer.nn._layers import ACTIVATIONS, Initializer, glorot_uniform
from transformer.nn._parameter_axes import declare
from transformer.nn.models._seq2seq import Seq2Seq

FRAMES_A_POSITION = 2
"""frames that become one position of the encoder: the stride of the second convolution"""


def check_frames(config: TransformerConfig, frames: Any) -> None:
    """Raises ValueError unless `frames`, an array, is floating and (batch, frames, mel_bins), with learned positions as
    many as the encoder's table has rows for: it was trained on just so many.
    """
    rows = config.longest_source if config.position == "learned" else None
    shape, count = frames.shape, "any" if rows is None else FRAMES_A_POSITION * rows
    mel_bins = config.speech.mel_bins
    fits = len(shape) == 3 and 0 not in shape and shape[2] == mel_bins and (rows is None or shape[1] == count)
    if not fits or not jnp.issubdtype(frames.dtype, jnp.floating):
        raise ValueError(
            f"frames must be floating numbers of shape (batch, {count}, {mel_bins}): batch, frames, mel bins; "
            f"got {frames.dtype} of shape {shape}. Pad the sound with silence before its frames are made; where bins "
            f"come before frames, swap the two axes; a single piece of speech is frames[None]."
        )


class Convolution(nn.Module):
    """A convolution over the length: each of every `stride`-th position from the three around it, zeros beyond the
    ends. Parameters `kernel` (3, M, D) and `bias` (D,), D `features`. `kernel_init` None: Glorot uniform.
    """

    parameter_axes = declare({"conv_*/kernel": "_ _ -> embed"}, role="input")

    features: int
    stride: int = 1
    kernel_init: Initializer | None = None
    dtype: DType = jnp.float32
    param_dtype: DType = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B t D"]:
        """(B, n, M) -> (B, ceil(n / stride), D)."""
        init = self.kernel_init or glorot_uniform(2)
        kernel = self.param("kernel", init, (3, x.shape[-1], self.features), self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), self.param_dtype)
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        axes = ("NWC", "WIO", "NWC")
        y = jax.lax.conv_general_dilated(x, kernel, (self.stride,), ((1, 1),), dimension_numbers=axes)
        return y + bias[None, None]


class SpeechToText(Seq2Seq):
    """A Seq2Seq whose source is log-mel frames (B, F, M), floating; M is the config's `input.mel_bins` (Whisper;
    Radford et al. 2022, arXiv 2212.04356, section 2.2). Two convolutions over three frames, each followed by GELU, the
    second with stride 2, give S = ceil(F / 2) positions, which `source_mask` and `source_positions` refer to.

    Parameters beside those of a Seq2Seq: `conv_0/` and `conv_1/`, instead of a table for the source. With learned
    positions F must be twice `source_max_length`: shorter speech ends in silence, as the model was trained.

    Raises:
        ConfigError: the input of the config is not `Speech`, or it has a source_vocab_size.
        ValueError: (its calls) frames of another shape, or not of floating numbers.
    """

    def _setup_source(self) -> None:
        config = self.config
        if config.speech is None:
            raise ConfigError("input is not speech: a SpeechToText needs input=Speech(mel_bins=...).")
        if config.embedding.source_vocab_size is not None:
            raise ConfigError("source_vocab_size is for sources of tokens, but a SpeechToText reads frames. Drop it.")
        types = {"kernel_init": kernel_init(config), "dtype": config.dtype, "param_dtype": config.param_dtype}
        self.conv_0 = Convolution(config.d_model, **types)
        self.conv_1 = Convolution(config.d_model, stride=FRAMES_A_POSITION, **types)

    def _embed_source(self, source: Array) -> Hidden:
        check_frames(self.config, source)
        gelu = ACTIVATIONS["gelu_erf"]
        return gelu(self.conv_1(gelu(self.conv_0(source))))
