"""Encoders of tokens: one vector of logits a token, or one vector a sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from transformer.config._checks import ConfigError
from transformer.config._options import Pooling
from transformer.nn._axes import Array, Bool, Float, Hidden, Int, Logits, Positions, Tokens
from transformer.nn._blocks import Aux
from transformer.nn._masks import Mask
from transformer.nn.models._base import TokenEncoder


class MaskedLM(TokenEncoder):
    """An encoder that predicts the tokens that were hidden from it (Devlin et al. 2018, section 3.1)."""

    def setup(self):
        self._setup_encoder()
        self._setup_head(self.config.vocab_size, tied=self.config.embedding.tie)

    def __call__(
        self,
        tokens: Tokens,
        positions: Positions | None = None,
        mask: Mask | None = None,
        deterministic: bool = True,
        token_types: Int[Array, "B T"] | None = None,
    ) -> Logits:
        """Tokens (B, T) -> logits (B, T, V), float32; arguments as those of `hidden`, where padding is told by
        `mask=Mask.lengths(...)`, or by `Mask.segments(...)`.
        """
        return self.head(self.hidden(tokens, positions, mask, deterministic, token_types))


class PooledEncoder(TokenEncoder):
    """An encoder whose output is pooled to one vector a sequence (Devlin et al. 2018, section 3.2).

    Padding is told by `mask=Mask.lengths(...)`, or by `Mask.segments(...)`: segment 0 is padding, on either side, and
    all the others together are what is pooled.
    """

    def __call__(
        self,
        tokens: Tokens,
        positions: Positions | None = None,
        mask: Mask | None = None,
        deterministic: bool = True,
        token_types: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B ..."]:
        """Tokens (B, T) -> what `head` makes of the pooled vectors: (B, C) or (B, D), float32; see `hidden`."""
        return self.head(self.pool(self.hidden(tokens, positions, mask, deterministic, token_types), mask))

    def with_aux(
        self,
        tokens: Tokens,
        positions: Positions | None = None,
        mask: Mask | None = None,
        deterministic: bool = True,
        token_types: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B ..."], Aux]:
        """What a call takes -> what it gives, and aux, what the layers report to the training loss."""
        x, _, aux = self.run_stacks(tokens, positions, mask, deterministic, token_types)
        return self.head(self.pool(x, mask)), aux

    def pool(self, hidden: Hidden, mask: Mask | None = None) -> Float[Array, "B D"]:
        """(B, T, D) -> (B, D): mean, first or last of the real tokens."""
        return pool(hidden, mask, self.config.output.pooling)


class Classifier(PooledEncoder):
    """An encoder whose output, pooled to one vector, is classified (Devlin et al. 2018, section 3).

    Raises:
        ConfigError: the config has no num_classes.
    """

    def setup(self):
        if self.config.output.num_classes is None:
            raise ConfigError("output.num_classes is not set: a Classifier needs to know how many classes there are.")
        self._setup_encoder()
        self._setup_head(self.config.output.num_classes, tied=False, use_bias=True)

    def head(self, pooled: Float[Array, "B D"]) -> Float[Array, "B C"]:
        """Pooled vectors (B, D) -> logits (B, C), float32."""
        return self.output(self._before_output(pooled)).astype(jnp.float32)


class Embedder(PooledEncoder):
    """An encoder whose output, pooled to one vector, stands for the sequence (Reimers & Gurevych 2019, arXiv
    1908.10084); through the config's `head_transform` where it has one, and of length 1 with `normalize_embeddings`.
    """

    def setup(self):
        self._setup_encoder()
        self._setup_transform()

    def head(self, pooled: Float[Array, "B D"]) -> Float[Array, "B D"]:
        """Pooled vectors (B, D) -> vectors (B, D), float32."""
        vectors = self._transformed(pooled).astype(jnp.float32)
        if not self.config.output.normalize:
            return vectors
        # A vector of zeros stays one, as where it is usually normalized: by the larger of its length and 1e-12.
        return vectors * jax.lax.rsqrt(jnp.maximum(jnp.square(vectors).sum(-1, keepdims=True), 1e-24))


def pool(hidden: Hidden, mask: Mask | None, pooling: Pooling) -> Float[Array, "B D"]:
    """(B, T, D) -> (B, D): mean, first or last of the tokens that are no padding (Reimers & Gurevych 2019, section 3);
    of a row of padding zeros, or its first one.
    """
    real = _real_tokens(mask, *hidden.shape[:2])
    if pooling == "mean":
        count = jnp.maximum(real.sum(1), 1)[:, None]
        # In float32: a sum may be more than float16 holds where the mean is not, and a count more than bfloat16 tells.
        total = jnp.where(real[..., None], hidden, 0.0).sum(1, dtype=jnp.float32)
        return (total / count).astype(hidden.dtype)
    places = jnp.arange(hidden.shape[1])[None, :]
    place = jnp.argmax(real, 1) if pooling == "first" else jnp.where(real, places, 0).max(1)
    return jnp.take_along_axis(hidden, place[:, None, None], axis=1)[:, 0]


def _real_tokens(mask: Mask | None, batch: int, length: int) -> Bool[Array, "B T"]:
    """By the mask's lengths, and by its segments, of which 0 is padding."""
    real = jnp.ones((batch, length), bool)
    if mask is not None and mask.key_lengths is not None:
        real = real & (jnp.arange(length)[None, :] < mask.key_lengths[:, None])
    if mask is not None and mask.query_segments is not None:
        real = real & (mask.query_segments != 0)
    return real
