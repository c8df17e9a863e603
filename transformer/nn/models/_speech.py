"""Speech recognition: an encoder of log-mel frames and a decoder of tokens."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer.config._checks import ConfigError
from transformer.config._model import TransformerConfig
from transformer.nn._axes import Array, DType, Float, Hidden
from transformer.nn._blocks import kernel_init
from transformer.nn._parameter_axes import declare
from transformer.nn.layers._layers import ACTIVATIONS, Initializer, glorot_uniform
from transformer.nn.models._seq2seq import Seq2Seq

FRAMES_A_POSITION = 2
"""number of frames per encoder position: the stride of the second convolution"""


def check_frames(config: TransformerConfig, frames: Array | np.ndarray) -> None:
    """Check that `frames` is a floating-point array of shape (batch, frames, mel_bins), or raise ValueError."""
    # With learned positions the number of frames must match the encoder's position table, since the model was trained
    # with that number only.
    rows = config.longest_source
    shape, count = frames.shape, "any" if rows is None else FRAMES_A_POSITION * rows
    mel_bins = config.speech.mel_bins
    fits = len(shape) == 3 and 0 not in shape and shape[2] == mel_bins and (rows is None or shape[1] == count)
    if not fits or not jnp.issubdtype(frames.dtype, jnp.floating):
        raise ValueError(
            f"frames must be floating-point of shape (batch, {count}, {mel_bins}): batch, frames, mel bins; "
            f"got {frames.dtype} of shape {shape}. Pad the audio with silence before you compute its frames; if bins "
            f"come before frames, swap the two axes; for a single recording, pass frames[None]."
        )


def convolve(
    x: Float[Array, "B T M"],
    kernel: Float[Array, "R m D"],
    stride: int = 1,
    padding: tuple[int, int] = (0, 0),
    groups: int = 1,
) -> Float[Array, "B t D"]:
    """Convolve over the length: y_t = sum_k W_k x_(stride t + k - padding[0]); a group reads M / groups features."""
    # N rows, W positions, C features; kernels are (positions, inputs, outputs). XLA does not flip the kernel: this is a
    # cross-correlation, as in PyTorch.
    axes = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (stride,), (padding,), dimension_numbers=axes, feature_group_count=groups
    )


class Convolution(nn.Module):
    """A 1-D convolution over the length; by default with kernel size 3 and zero padding that keeps the length.

    Parameters: `kernel` (R, M, D) and `bias` (D,), where D is `features` and R `kernel_size`. The output has every
    `stride`-th position. `kernel_init` None means Glorot uniform.
    """

    parameter_axes = declare({"conv_*/kernel": "_ _ -> embed"}, role="input")

    features: int
    stride: int = 1
    kernel_init: Initializer | None = None
    kernel_size: int = 3
    padding: tuple[int, int] = (1, 1)
    use_bias: bool = True
    dtype: DType = jnp.float32
    param_dtype: DType = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B t D"]:
        """Convolve (B, n, M) to (B, m, D), with m = (n + sum(padding) - R) // stride + 1."""
        # An output sums over R positions of M features: the first two axes are inputs.
        init = self.kernel_init or glorot_uniform(2)
        kernel = self.param("kernel", init, (self.kernel_size, x.shape[-1], self.features), self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), self.param_dtype) if self.use_bias else None
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        y = convolve(x, kernel, self.stride, self.padding)
        return y if bias is None else y + bias[None, None]


class SpeechToText(Seq2Seq):
    """An encoder-decoder model whose source is log-mel frames.

    This is Whisper (Radford et al. 2022, arXiv 2212.04356, section 2.2). Frames are (B, F, M), floating-point, with M
    the config's `input.mel_bins`. Two convolutions with kernel size 3, each followed by GELU, the second with stride 2,
    give S = ceil(F / 2) encoder positions. `source_mask` and `source_positions` refer to these positions.

    Parameters in addition to those of a Seq2Seq: `conv_0/` and `conv_1/`, which replace the embedding table of the
    source. With learned positions F must be twice `source_max_length`; pad shorter recordings with silence, as in
    training.

    Raises:
        ConfigError: if the config's input is not `Speech`, or if it has a source_vocab_size.
        ValueError: (when called) if the frames have another shape or are not floating-point.
    """

    def _setup_source(self) -> None:
        config = self.config
        if config.speech is None:
            raise ConfigError("input is not speech: a SpeechToText needs input=Speech(mel_bins=...).")
        if config.embedding.source_vocab_size is not None:
            raise ConfigError("source_vocab_size is for sources of tokens, but a SpeechToText reads frames. Remove it.")
        types = {"kernel_init": kernel_init(config), "dtype": config.dtype, "param_dtype": config.parameters.dtype}
        self.conv_0 = Convolution(config.d_model, **types)
        self.conv_1 = Convolution(config.d_model, stride=FRAMES_A_POSITION, **types)

    def _embed_source(self, source: Array) -> Hidden:
        check_frames(self.config, source)
        gelu = ACTIVATIONS["gelu_erf"]
        # (B, F, M) -> (B, F, D) -> (B, (F - 1) // 2 + 1, D), and (F - 1) // 2 + 1 = ceil(F / 2)
        return gelu(self.conv_1(gelu(self.conv_0(source))))
