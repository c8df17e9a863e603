"""Token encoders: logits per token, or one vector per sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from transformer.config._checks import ConfigError
from transformer.config._options import Pooling
from transformer.nn._axes import Array, Float, Hidden, Int, Positions, Tokens
from transformer.nn._blocks import Aux
from transformer.nn._masks import Mask, real_tokens
from transformer.nn._parameter_axes import declare
from transformer.nn.models._base import HeadMap, TokenEncoder


class MaskedLM(TokenEncoder):
    """An encoder that predicts masked tokens (Devlin et al. 2018, section 3.1): logits (B, T, V), float32.

    Mark padding with `mask=Mask.lengths(...)` or `Mask.segments(...)`.
    """

    def setup(self):
        self._setup_encoder()
        self._setup_head(self.config.vocab_size, tied=self.config.embedding.tie)


class PooledEncoder(TokenEncoder):
    """An encoder whose output is pooled to one vector per sequence (Devlin et al. 2018, section 3.2).

    Mark padding with `mask=Mask.lengths(...)` or `Mask.segments(...)`. In segments, id 0 is padding, on either side;
    the tokens of all other segments are pooled together.
    """

    def with_aux(
        self,
        tokens: Tokens,
        positions: Positions | None = None,
        mask: Mask | None = None,
        deterministic: bool = True,
        token_types: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B ..."], Aux]:
        """Return the output of a call and aux, the layers' terms of the training loss; arguments as in a call."""
        x, _, aux = self.run_stacks(tokens, positions, mask, deterministic, token_types)
        return self.head(self.pool(x, mask)), aux

    def _setup_pooling(self) -> None:
        """Check that the pooling is one of tokens."""
        if (pooling := self.config.output.pooling) in ("first_and_mean", "attention"):
            raise ConfigError(
                f"output.pooling={pooling!r} is for images. Set it to 'mean', 'first' or 'last' for a "
                f"{type(self).__name__}."
            )

    def pool(self, hidden: Hidden, mask: Mask | None = None) -> Float[Array, "B D"]:
        """Pool hidden states (B, T, D) to (B, D): mean, first or last of the non-padding tokens."""
        return pool(hidden, mask, self.config.output.pooling)


class Classifier(PooledEncoder):
    """An encoder with a classifier on its pooled output (Devlin et al. 2018, section 3).

    Raises:
        ConfigError: if the config has no num_classes.
    """

    def setup(self):
        classes = self._needed(self.config.output.num_classes, "output.num_classes", "classes")
        self._setup_pooling()
        self._setup_encoder()
        self._setup_head(classes, tied=False, use_bias=True)

    def head(self, pooled: Float[Array, "B D"]) -> Float[Array, "B C"]:
        """Compute class logits (B, C), float32, from pooled vectors (B, D)."""
        return self.output(self._before_output(pooled)).astype(jnp.float32)


class Embedder(PooledEncoder):
    """An encoder whose pooled output is an embedding of the sequence (Reimers & Gurevych 2019, arXiv 1908.10084).

    The config's `head_transform`, if set, is applied to the pooled vector; `output.normalize` scales it to length 1.
    `output.pooler` adds a second vector, which only `pooler_output` returns; its parameters are `pooler/`.
    """

    parameter_axes = declare({"pooler/dense/kernel": "embed -> _"}, role="output")

    def setup(self):
        self._setup_pooling()
        self._setup_encoder()
        self._setup_transform()
        if self.config.output.pooler is not None:
            self.pooler = HeadMap(self.config, self.config.output.pooler)

    def pool(self, hidden: Hidden, mask: Mask | None = None) -> Float[Array, "B D"]:
        """Pool hidden states (B, T, D) to (B, D): mean, first or last of the non-padding tokens."""
        if self.config.output.pooler is not None and self.is_initializing():
            self.pooler_output(hidden, mask)  # so that all parameters are created
        return super().pool(hidden, mask)

    def pooler_output(self, hidden: Hidden, mask: Mask | None = None) -> Float[Array, "B D"]:
        """Apply the pooler to the first non-padding token of hidden states (B, T, D) (Devlin et al. 2018, section 3.1).

        BERT was pretrained to predict from this vector whether the second sentence follows the first.

        Returns:
            (B, D), float32, in (-1, 1) for the tanh of BERT.

        Raises:
            ConfigError: the model has no pooler.
        """
        if self.config.output.pooler is None:
            raise ConfigError(
                "this Embedder has no pooler: output.pooler is not set. Load a checkpoint with pooler.dense, or call "
                "the model for the pooled hidden states."
            )
        return self.pooler(pool(hidden, mask, "first")).astype(jnp.float32)

    def head(self, pooled: Float[Array, "B D"]) -> Float[Array, "B D"]:
        """Compute embeddings (B, D), float32, from pooled vectors (B, D)."""
        vectors = self._transformed(pooled).astype(jnp.float32)
        return normalized(vectors) if self.config.output.normalize else vectors


def normalized(vectors: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """Scale vectors (B, D) to length 1."""
    # v / max(|v|, 1e-12), the usual definition, so that a zero vector stays zero. The maximum is taken of the squares,
    # because the derivative of sqrt at 0 is infinite.
    return vectors * jax.lax.rsqrt(jnp.maximum(jnp.square(vectors).sum(-1, keepdims=True), 1e-24))


def pool(hidden: Hidden, mask: Mask | None, pooling: Pooling) -> Float[Array, "B D"]:
    """Pool the real tokens of each sequence; a row of padding gives zeros for the mean, else its first position."""
    real = real_tokens(Mask() if mask is None else mask, hidden.shape[:2])
    if pooling == "mean":
        count = jnp.maximum(real.sum(1), 1)[:, None]
        # Sum in float32: a sum can exceed the range of float16 even if the mean does not, and bfloat16 can't represent
        # all integers above 256.
        # where and not a product with 0: NaN or infinity in padding would survive a product. (B, T, D) -> (B, D)
        total = jnp.where(real[..., None], hidden, 0.0).sum(1, dtype=jnp.float32)
        return (total / count).astype(hidden.dtype)
    indices = jnp.arange(hidden.shape[1])[None, :]
    # argmax of booleans is the index of the first True. Last: the largest index of a real token; 0 if all are padding.
    index = jnp.argmax(real, 1) if pooling == "first" else jnp.where(real, indices, 0).max(1)
    return jnp.take_along_axis(hidden, index[:, None, None], axis=1)[:, 0]
