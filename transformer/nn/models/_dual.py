"""Two encoders, of texts and of images, that map to one space."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from transformer.config._checks import ConfigError
from transformer.config._execution import Execution
from transformer.config._model import TransformerConfig
from transformer.nn._axes import Array, Float, Int
from transformer.nn._blocks import Aux, kernel_init
from transformer.nn._masks import Mask
from transformer.nn._parameter_axes import declare
from transformer.nn.layers._layers import Linear
from transformer.nn.models._dynamic_images import AnyImages
from transformer.nn.models._encoders import Embedder, normalized
from transformer.nn.models._vision import VisionEmbedder


@flax.struct.dataclass
class PairLogits:
    """Logits of all pairs of an image and a text, for training."""

    values: Float[Array, "B C"]  # (B, C), float32
    similarity: str = flax.struct.field(pytree_node=False)  # what they are trained for, `Images.similarity`


class DualEncoder(nn.Module):
    """Encoders of texts and images that are trained together, so that matching pairs have similar vectors.

    These are CLIP (Radford et al. 2021, arXiv 2103.00020) and SigLIP (Zhai et al. 2023, arXiv 2303.15343). The config
    describes the encoder of texts, and its `input` (`Images`) that of images.

    Parameters: `text/` (an Embedder), `image/` (a VisionEmbedder), `text_projection/`, `image_projection/` (not with
    projections="text"), the logarithm of the factor on the logits `logit_scale` (1,), and `logit_bias` (1,) with
    similarity="sigmoid".

    Raises:
        ConfigError: if the config's input is not `Images`, or it has an output transform or normalization.
    """

    parameter_axes = declare(
        {"*_projection/kernel": "embed -> _", "*_projection/bias": "_", "logit_scale": "_", "logit_bias": "_"},
        role="output",
    )

    config: TransformerConfig
    execution: Execution = Execution()

    def setup(self):
        config, image = self.config, self.config.image_encoder
        if config.output.transform is not None or config.output.normalize:
            raise ConfigError("a DualEncoder has no output.transform and no output.normalize. Remove them.")
        self.text = Embedder(config, self.execution)
        self.image = VisionEmbedder(image, self.execution)
        both, types = config.images.projections == "both", (config.dtype, config.parameters.dtype)
        self.text_projection = Linear((config.images.features,), 1, not both, kernel_init(config), *types)
        if both:
            self.image_projection = Linear((config.images.features,), 1, False, kernel_init(image), *types)
        sigmoid = config.images.similarity == "sigmoid"
        # Initial values of the papers: 1 / 0.07 for softmax, 10 and -10 for the sigmoid of mostly non-matching pairs.
        # The sigmoid logits then start at 10 cos - 10, from -20 to 0: all pairs begin as unlikely, as most of them are.
        scale = math.log(10.0) if sigmoid else math.log(1 / 0.07)
        self.logit_scale = self.param("logit_scale", nn.initializers.constant(scale), (1,), config.parameters.dtype)
        if sigmoid:
            self.logit_bias = self.param("logit_bias", nn.initializers.constant(-10.0), (1,), config.parameters.dtype)

    def __call__(
        self, tokens: Int[Array, "C T"], images: AnyImages, mask: Mask | None = None, deterministic: bool = True
    ) -> Float[Array, "B C"]:
        """Compute the logits of all pairs of an image and a text.

        Args:
            tokens: (C, T), C texts; the vector of a text is that of its last non-padding token. Without a mask, a
                causal encoder of texts (CLIP) takes the first token with the largest id of the vocabulary, which ends
                a text (Radford et al. 2021, section 2.4), if there is one.
            images: (B, height, width, channels), floating-point; or `ImagePatches` with `Patches.resize_positions`.
            mask: marks the padding of the texts, `Mask.lengths(...)`.
            deterministic: False enables dropout (rng "dropout").

        Returns:
            (B, C), float32. Row i of softmax is the probability of each text given image i, if one of them matches;
            entry (i, j) of sigmoid is the probability that text j matches image i.
        """
        texts = self.embed_texts(tokens, mask, deterministic)
        return self.logits(self.embed_images(images, deterministic), texts)

    def with_aux(
        self, tokens: Int[Array, "C T"], images: AnyImages, mask: Mask | None = None, deterministic: bool = True
    ) -> tuple[PairLogits, Aux]:
        """Return the output of a call and aux, the text layers' terms of the training loss; arguments as in a call."""
        hidden, _, aux = self.text.run_stacks(tokens, None, mask, deterministic)
        texts = self._project_texts(self.text.pool(hidden, self._ends(tokens, mask)))
        logits = self.logits(self.embed_images(images, deterministic), texts)
        return PairLogits(logits, self.config.images.similarity), aux

    def embed_texts(
        self, tokens: Int[Array, "C T"], mask: Mask | None = None, deterministic: bool = True
    ) -> Float[Array, "C Do"]:
        """Return the vectors (C, features) of texts (C, T), float32, of length 1; arguments as in a call."""
        hidden = self.text.hidden(tokens, None, mask, deterministic)
        return self._project_texts(self.text.pool(hidden, self._ends(tokens, mask)))

    @nn.nowrap
    def _ends(self, tokens: Int[Array, "C T"], mask: Mask | None) -> Mask | None:
        """Return the mask with which texts are pooled: without one, up to the first end token of a causal encoder."""
        # The end token has the largest id; files of CLIP pad with it too, and a causal encoder reads nothing after it.
        if mask is not None or not self.config.attention.causal:
            return mask
        ends = tokens == self.config.vocab_size - 1  # (C, T)
        # argmax of booleans is the index of the first True.
        return Mask.lengths(jnp.where(ends.any(1), jnp.argmax(ends, axis=1) + 1, tokens.shape[1]))

    def _project_texts(self, pooled: Float[Array, "C D"]) -> Float[Array, "C Do"]:
        # (C, D) -> (C, Do), scaled to length 1 in float32
        return normalized(self.text_projection(pooled).astype(jnp.float32))

    def embed_images(self, images: AnyImages, deterministic: bool = True) -> Float[Array, "B Do"]:
        """Return the vectors (B, features) of images (B, height, width, channels), float32, of length 1."""
        pooled = self.image.pooled(images, deterministic)
        projected = pooled if self.config.images.projections == "text" else self.image_projection(pooled)
        return normalized(projected.astype(jnp.float32))

    def logits(self, images: Float[Array, "B Do"], texts: Float[Array, "C Do"]) -> Float[Array, "B C"]:
        """Return exp(logit_scale) v . w, plus logit_bias if there is one, for all pairs of vectors: (B, C)."""
        # HIGHEST: accelerators would otherwise round the vectors to fewer bits, and the factor is up to 100.
        # Vectors of length 1: v . w is the cosine of their angle. (B, Do) x (Do, C) -> (B, C)
        similarities = jnp.matmul(images, texts.T, precision=jax.lax.Precision.HIGHEST)
        # The logarithm is learned, which keeps the factor positive.
        scores = jnp.exp(self.logit_scale.astype(jnp.float32))[None] * similarities
        bias = self.config.images.similarity == "sigmoid"
        return scores + self.logit_bias.astype(jnp.float32)[None] if bias else scores

    def hidden(
        self, tokens: Int[Array, "C T"], images: AnyImages, mask: Mask | None = None, deterministic: bool = True
    ) -> tuple[Float[Array, "C T D"], Float[Array, "B S Dc"]]:
        """Return the hidden states of texts (C, T, D) and of images (B, S, Dc); arguments as in a call."""
        return self.text.hidden(tokens, None, mask, deterministic), self.image.hidden(images, deterministic)

    @nn.nowrap
    def head_parameters(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a parameter tree that maps vectors to logits."""
        names = ("text_projection", "image_projection", "logit_scale", "logit_bias")
        return {name: params[name] for name in names if name in params}
