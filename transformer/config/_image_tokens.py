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
