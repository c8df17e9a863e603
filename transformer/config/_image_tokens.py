"""Images between the tokens of a decoder: their encoder, and the map to the decoder's width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformer.config._checks import ConfigError, check_choices, check_flags, check_positive, check_whole
from transformer.config._parts import Activation, Patches

Projector = Literal["linear", "mlp", "normalized"]
ImageAttention = Literal["causal", "image", "prefix"]


@dataclass(frozen=True, kw_only=True)
class ImageTokens:
    """Images as tokens of a VisionLanguageModel, and the encoder that reads them (LLaVA, Liu et al. 2023, arXiv
    2304.08485; Gemma 3, arXiv 2503.19786, section 2.1).

    The other fields of the model config describe the decoder. An image takes the place of `count` tokens with the id
    `token_id`. The encoder has pre-norm, learned positions and biases, and its class token is left out.

    Raises:
        ConfigError: a number out of range, or pooling that does not divide the rows and columns of patches.
    """

    token_id: int | None = None
    """id of the tokens whose embeddings the features of an image replace; None: training sets it from the tokenizer"""
    patches: Patches
    """size of the images and of their patches"""
    d_model: int
    """width of the encoder's residual stream"""
    num_layers: int
    """number of layers of the encoder"""
    num_heads: int
    """number of heads of the encoder"""
    d_ff: int
    """inner width of the encoder's feed-forward layers"""
    activation: Activation
    """activation of the encoder's feed-forward layers"""
    norm_epsilon: float = 1e-6
    """added to the variance before the square root"""
    embedding_norm: bool = False
    """normalize the sum of patch and position embeddings (CLIP)"""
    unused_layers: int | None = None
    """number of last layers that are not computed; their parameters are kept, and those of the final norm;
    None: all layers and the final norm are computed"""
    pool: int = 1
    """replace each square of pool x pool patches by its mean"""
    projector: Projector = "linear"
    """map to the decoder's width:
    linear: with bias (PaliGemma);
    mlp: two linear layers with bias, GELU between them (LLaVA 1.5);
    normalized: a zero-centered RMSNorm, then a linear layer without bias (Gemma 3)"""
    attention: ImageAttention = "causal"
    """which tokens attend to later ones, too:
    causal: none;
    image: the tokens of an image, to those of the same image (Gemma 3);
    prefix: the tokens of a prompt, to the whole prompt (PaliGemma)"""

    def __post_init__(self):
        check_whole(self, "d_model", "num_layers", "num_heads", "d_ff", "pool")
        check_whole(self, "token_id", "unused_layers", least=0)
        check_positive(self, "norm_epsilon")
        check_flags(self, "embedding_norm")
        check_choices(self, activation=Activation, projector=Projector, attention=ImageAttention)
        if self.unused_layers is not None and self.unused_layers >= self.num_layers:
            raise ConfigError(
                f"unused_layers ({self.unused_layers}) must be below num_layers ({self.num_layers}). Change one."
            )
        if any(side % self.pool for side in self.grid):
            raise ConfigError(
                f"pool ({self.pool}) must divide the {self.grid[0]} rows and {self.grid[1]} columns of patches. Change "
                f"it, or the sizes in patches."
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        size = self.patches.patch_size
        return self.patches.image_height // size, self.patches.image_width // size

    @property
    def count(self) -> int:
        """Number of tokens per image."""
        return self.patches.count // self.pool**2


@dataclass(frozen=True, kw_only=True)
class DynamicImageTokens:
    """Images of any size as tokens of a VisionLanguageModel, and the encoder that reads them (Qwen2-VL, Wang et al.
    2024, arXiv 2409.12191, section 2.1; Qwen2.5-VL, Bai et al. 2025, arXiv 2502.13923, section 2.1).

    The other fields of the model config describe the decoder. An image of R x C patches takes the place of
    R C / `merge`^2 tokens with the id `token_id`. The encoder is pre-norm with biases, and rotates the heads by the row
    and the column of a patch. Two linear layers map each square of `merge` x `merge` patches to one token.

    Raises:
        ConfigError: a number out of range, a head size that is not a multiple of 4, or a window or layers that don't
            fit.
    """

    token_id: int
    """id of the tokens whose embeddings the features of an image replace"""
    patch_size: int = 14
    """pixels per side of a patch"""
    channels: int = 3
    """channels of the images"""
    frames: int = 2
    """frames that a patch covers: the encoder is trained with videos too, and an image is all frames of one patch"""
    merge: int = 2
    """patches per side of the square that becomes one token"""
    d_model: int
    """width of the encoder's residual stream"""
    num_layers: int
    """number of layers of the encoder"""
    num_heads: int
    """number of heads of the encoder"""
    d_ff: int
    """inner width of the encoder's feed-forward layers"""
    activation: Activation
    """activation of the encoder's feed-forward layers"""
    gated: bool = False
    """gated feed-forward layers in the encoder"""
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    """normalization layers of the encoder"""
    norm_epsilon: float = 1e-6
    """added to the variance before the square root"""
    window_size: int | None = None
    """side in pixels of the square windows of patches that attend to one another; None: all patches of an image do"""
    full_attention_layers: tuple[int, ...] = ()
    """indices of the layers of the encoder without windows, counted from 0"""

    def __post_init__(self):
        check_whole(self, "patch_size", "channels", "frames", "merge", "d_model", "num_layers", "num_heads", "d_ff")
        check_whole(self, "window_size")
        check_whole(self, "token_id", least=0)
        check_positive(self, "norm_epsilon")
        check_flags(self, "gated")
        check_choices(self, activation=Activation, norm=Literal["layer_norm", "rms_norm"])
        if self.d_model % (4 * self.num_heads):
            raise ConfigError(
                f"d_model of DynamicImageTokens ({self.d_model}) must be a multiple of 4 num_heads "
                f"({4 * self.num_heads}): half of the pairs of a head are rotated by the row. Change one of them."
            )
        if self.window_size is not None and self.window_size < self.multiple:
            raise ConfigError(
                f"window_size ({self.window_size}) must be at least patch_size x merge ({self.multiple}), the side of "
                f"one token. Change it."
            )
        layers = self.full_attention_layers
        if not isinstance(layers, tuple) or not all(type(n) is int and 0 <= n < self.num_layers for n in layers):
            raise ConfigError(
                f"full_attention_layers must be a tuple of indices from 0 to {self.num_layers - 1}, got "
                f"{layers!r:.80}. Correct it."
            )
        if layers and self.window_size is None:
            raise ConfigError("full_attention_layers are exceptions from windows. Set window_size, or remove them.")

    @property
    def multiple(self) -> int:
        """Pixels per side of a token: height and width of an image are multiples of it."""
        return self.patch_size * self.merge

    def count(self, height: int, width: int) -> int:
        """Return the number of tokens of an image of `height` x `width` pixels."""
        return height // self.multiple * (width // self.multiple)
