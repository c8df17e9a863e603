"""Whole models: tokens in, logits out. `hidden` and `head` apart, so that a loss can avoid (B, T, V) at once."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer.axes import Array, Context, Float, Hidden, Int, Logits, Positions, Tokens
from transformer.blocks import Aux
from transformer.config import ConfigError, Execution, TransformerConfig
from transformer.layers import Embedding, Linear
from transformer.masks import Mask
from transformer.stacks import Decoder, Encoder, sum_aux


class _Model(nn.Module):
    """What the models share: embedding and head."""

    config: TransformerConfig
    execution: Execution = Execution()

    def _table(self, vocab_size: int | None, field: str = "vocab_size") -> Embedding:
        config = self.config
        if vocab_size is None:
            raise ConfigError(f"{field} is not set: a {type(self).__name__} needs to know how many tokens there are.")
        init = None if config.initializer_range is None else nn.initializers.normal(config.initializer_range)
        return Embedding(vocab_size, config.d_model, init, config.dtype, config.param_dtype)

    def _linear_head(self, features: int, *, use_bias: bool) -> Linear:
        config = self.config
        init = None if config.initializer_range is None else nn.initializers.normal(config.initializer_range)
        return Linear((features,), 1, use_bias, init, config.dtype, config.param_dtype)

    def _embed(self, table: Embedding, tokens: Tokens) -> Hidden:
        """Looks tokens up; times sqrt(d_model) where the config says so (Vaswani et al. 2017, section 3.4)."""
        _check_tokens(tokens, table.vocab_size)
        x = table(tokens)
        return x * jnp.asarray(math.sqrt(self.config.d_model), x.dtype) if self.config.scale_embeddings else x

    def with_aux(self, *inputs: Any, **options: Any) -> tuple[Logits, Aux]:
        """What a call without a cache takes -> logits (B, T, V), and aux, what the layers report to the training
        loss.
        """
        x, _, aux = self._run(*inputs, **options)
        return self.head(x), aux

    def head(self, hidden: Hidden) -> Logits:
        """Hidden states (B, T, D) -> logits (B, T, V), float32."""
        logits = self.embedding.attend(hidden) if self.config.tie_embeddings else self.output(hidden)
        logits = logits.astype(jnp.float32)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def _check_tokens(tokens: Tokens, vocab_size: int) -> None:
    """Compiled code can't raise (an id outside gives NaN there); called directly, say what is wrong."""
    if getattr(tokens, "ndim", None) != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        got = f"{tokens.dtype} of shape {tokens.shape}" if hasattr(tokens, "dtype") else type(tokens).__name__
        raise ValueError(
            f"tokens must be an array of integers, (batch, length), got {got}. A single row is jnp.asarray([ids])."
        )
    if isinstance(tokens, jax.core.Tracer) or not tokens.size:
        return
    ids = np.asarray(tokens)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"token ids must be from 0 to {vocab_size - 1} (vocab_size {vocab_size}), got {low if low < 0 else high}. "
            f"Was the text encoded by another tokenizer?"
        )


class CausalLM(_Model):
    """A decoder alone: predicts each next token from those before it (Radford et al. 2018; Vaswani et al. 2017)."""

    def setup(self):
        self.embedding = self._table(self.config.vocab_size)
        self.decoder = Decoder(self.config, execution=self.execution)
        if not self.config.tie_embeddings:
            self.output = self._linear_head(self.config.vocab_size, use_bias=False)

    def __call__(
        self,
        tokens: Tokens,
        positions: Positions | None = None,
        mask: Mask | None = None,
        cache: Any = None,
        deterministic: bool = True,
    ) -> Logits | tuple[Logits, Any]:
        """Tokens (B, T) -> logits (B, T, V) float32, or (logits, cache) when a cache is given.

        Args:
            positions: (B, T); None: 0, 1, 2, ... after what the cache holds.
            mask: beyond causality, which is always there.
            cache: of `init_cache`, or as returned by the call before.
            deterministic: False turns dropout on (rng "dropout").

        Raises:
            ValueError: ids outside the vocabulary (only where values are known: not inside jit, which gives NaN).
        """
        x, cache, _ = self._run(tokens, positions, mask, cache, deterministic)
        return self.head(x) if cache is None else (self.head(x), cache)

    def hidden(
        self,
        tokens: Tokens,
        positions: Positions | None = None,
        mask: Mask | None = None,
        cache: Any = None,
        deterministic: bool = True,
    ) -> Hidden | tuple[Hidden, Any]:
        """As a call, up to the hidden states (B, T, D) that `head` takes; a pair with the cache when one is given."""
        x, cache, _ = self._run(tokens, positions, mask, cache, deterministic)
        return x if cache is None else (x, cache)

    def _run(self, tokens, positions=None, mask=None, cache=None, deterministic=True):
        x = self._embed(self.embedding, tokens)
        return self.decoder(x, positions=positions, mask=mask, cache=cache, deterministic=deterministic)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> Any:
        """An empty cache for `batch` rows of up to `length` tokens; needs no parameters."""
        return Decoder(self.config).init_cache(batch, length)


class Seq2Seq(_Model):
    """Encoder and decoder (Vaswani et al. 2017): target tokens from a whole source and the target so far.

    One embedding table for source, target and logits, as in section 3.4; `source_vocab_size` gives the source its own.
    """

    def setup(self):
        config = self.config
        self.embedding = self._table(config.vocab_size)
        if config.source_vocab_size is not None:
            self.source_embedding = self._table(config.source_vocab_size, "source_vocab_size")
        self.encoder = Encoder(config, config.encoder_layers, execution=self.execution)
        self.decoder = Decoder(config, config.decoder_layers, cross=True, execution=self.execution)
        if not config.tie_embeddings:
            self.output = self._linear_head(config.vocab_size, use_bias=False)

    def __call__(
        self,
        source: Int[Array, "B S"] | None,
        target: Tokens,
        source_positions: Int[Array, "B S"] | None = None,
        positions: Positions | None = None,
        source_mask: Mask | None = None,
        mask: Mask | None = None,
        cache: Any = None,
        deterministic: bool = True,
    ) -> Logits | tuple[Logits, Any]:
        """Source (B, S) and target (B, T) -> logits (B, T, V) float32, or (logits, cache) when a cache is given.

        Args:
            source: None in later calls with a cache, which then holds the cross-attention's keys and values.
            source_mask: which source tokens are real: `Mask.lengths(...)`; also in later calls.
            mask: of the target, beyond causality.
        """
        x, cache, _ = self._run(source, target, source_positions, positions, source_mask, mask, cache, deterministic)
        return self.head(x) if cache is None else (self.head(x), cache)

    def hidden(
        self,
        source: Int[Array, "B S"] | None,
        target: Tokens,
        source_positions: Int[Array, "B S"] | None = None,
        positions: Positions | None = None,
        source_mask: Mask | None = None,
        mask: Mask | None = None,
        cache: Any = None,
        deterministic: bool = True,
    ) -> Hidden | tuple[Hidden, Any]:
        """As a call, up to the hidden states (B, T, D) for `head`; a pair with the cache when one is given."""
        x, cache, _ = self._run(source, target, source_positions, positions, source_mask, mask, cache, deterministic)
        return x if cache is None else (x, cache)

    def encode(
        self,
        source: Int[Array, "B S"],
        source_positions: Int[Array, "B S"] | None = None,
        source_mask: Mask | None = None,
        deterministic: bool = True,
    ) -> Context:
        """Source (B, S) -> what the decoder attends to, (B, S, D)."""
        return self._encode(source, source_positions, source_mask, deterministic)[0]

    def _encode(self, source, source_positions, source_mask, deterministic):
        table = self.embedding if self.config.source_vocab_size is None else self.source_embedding
        x = self._embed(table, source)
        x, _, aux = self.encoder(x, positions=source_positions, mask=source_mask, deterministic=deterministic)
        return x, aux

    def _run(
        self,
        source,
        target,
        source_positions=None,
        positions=None,
        source_mask=None,
        mask=None,
        cache=None,
        deterministic=True,
    ):
        context, encoder_aux = None, {}
        if source is not None:
            context, encoder_aux = self._encode(source, source_positions, source_mask, deterministic)
        x, cache, aux = self.decoder(
            self._embed(self.embedding, target),
            context,
            positions=positions,
            mask=mask,
            context_mask=source_mask,
            cache=cache,
            deterministic=deterministic,
        )
        return x, cache, sum_aux([encoder_aux, aux])

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> Any:
        """An empty cache for `batch` rows of up to `length` target tokens; needs no parameters."""
        return Decoder(self.config, self.config.decoder_layers, cross=True).init_cache(batch, length)


class Classifier(_Model):
    """An encoder whose output, pooled to one vector, is classified (Devlin et al. 2018, section 3).

    Raises:
        ConfigError: the config has no num_classes.
    """

    def setup(self):
        if self.config.num_classes is None:
            raise ConfigError("num_classes is not set: a Classifier needs to know how many classes there are.")
        self.embedding = self._table(self.config.vocab_size)
        self.encoder = Encoder(self.config, execution=self.execution)
        self.output = self._linear_head(self.config.num_classes, use_bias=True)

    def __call__(
        self,
        tokens: Tokens,
        positions: Positions | None = None,
        mask: Mask | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B C"]:
        """Tokens (B, T) -> logits of the classes (B, C), float32. Padding is told by `mask=Mask.lengths(...)`."""
        x = self.hidden(tokens, positions, mask, deterministic)
        return self.head(self.pool(x, mask))

    def hidden(
        self,
        tokens: Tokens,
        positions: Positions | None = None,
        mask: Mask | None = None,
        deterministic: bool = True,
    ) -> Hidden:
        """Tokens (B, T) -> the encoder's output (B, T, D)."""
        return self._run(tokens, positions, mask, deterministic)[0]

    def with_aux(
        self, tokens: Tokens, positions: Positions | None = None, mask: Mask | None = None, deterministic: bool = True
    ) -> tuple[Float[Array, "B C"], Aux]:
        """What a call takes -> logits of the classes (B, C), and aux, what the layers report to the training loss."""
        x, aux = self._run(tokens, positions, mask, deterministic)
        return self.head(self.pool(x, mask)), aux

    def _run(self, tokens, positions=None, mask=None, deterministic=True):
        x = self._embed(self.embedding, tokens)
        x, _, aux = self.encoder(x, positions=positions, mask=mask, deterministic=deterministic)
        return x, aux

    def pool(self, hidden: Hidden, mask: Mask | None = None) -> Float[Array, "B D"]:
        """(B, T, D) -> (B, D): mean, first or last of the real tokens."""
        batch, length, _ = hidden.shape
        lengths = jnp.full((batch,), length) if mask is None or mask.key_lengths is None else mask.key_lengths
        match self.config.pooling:
            case "first":
                return hidden[:, 0]
            case "last":
                return jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
            case _:
                real = (jnp.arange(length)[None, :] < lengths[:, None])[..., None]
                return jnp.where(real, hidden, 0.0).sum(1) / jnp.maximum(lengths, 1)[:, None].astype(hidden.dtype)

    def head(self, pooled: Float[Array, "B D"]) -> Float[Array, "B C"]:
        """Pooled vectors (B, D) -> logits (B, C), float32."""
        return self.output(pooled).astype(jnp.float32)
