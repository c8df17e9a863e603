"""The decoder-only language model."""

from __future__ import annotations

import math

import flax.linen as nn
import jax.numpy as jnp

from transformer.nn._axes import Array, Float, Hidden, Logits, Positions, PyTree, Tokens
from transformer.nn._blocks import Aux, make_linear
from transformer.nn._masks import Mask
from transformer.nn._parameter_axes import declare
from transformer.nn._stacks import Decoder
from transformer.nn.layers._norms import NORMS
from transformer.nn.models._base import Model, check_tokens


class CausalLM(Model):
    """A decoder that predicts each token from the previous ones (Radford et al. 2018; Vaswani et al. 2017)."""

    parameter_axes = declare({"layer_embedding_projection/kernel": "embed -> _ _"})

    def setup(self):
        self._setup_embedding()
        if self.config.embedding.per_layer_width is not None:
            self._setup_layer_embeddings(self.config.embedding.per_layer_width)
        self.decoder = Decoder(self.config, execution=self.execution)
        self._setup_head(self.config.vocab_size, tied=self.config.embedding.tie)

    def __call__(
        self,
        tokens: Tokens,
        positions: Positions | None = None,
        mask: Mask | None = None,
        cache: PyTree | None = None,
        deterministic: bool = True,
    ) -> Logits | tuple[Logits, PyTree]:
        """Compute the logits of the next token at each position.

        Args:
            tokens: (B, T), token ids.
            positions: (B, T); None: 0, 1, 2, ..., continued after the tokens in the cache.
            mask: restrictions in addition to the causal mask, which always applies.
            cache: a KV cache from `init_cache` or from the previous call.
            deterministic: False: training, with dropout (rng "dropout") and a capacity of experts, if any.

        Returns:
            Logits (B, T, V), float32; with a cache, (logits, cache).

        Raises:
            ValueError: if ids are outside the vocabulary, or tokens don't fit the cache (only for concrete values:
                under jit the result is NaN instead).
        """
        x, cache, _ = self.run_stacks(tokens, positions, mask, cache, deterministic)
        return self.head(x) if cache is None else (self.head(x), cache)

    def run_stacks(
        self,
        tokens: Tokens,
        positions: Positions | None = None,
        mask: Mask | None = None,
        cache: PyTree | None = None,
        deterministic: bool = True,
    ) -> tuple[Hidden, PyTree | None, Aux]:
        """Return hidden states, the cache, and aux, the layers' terms of the training loss.

        Hidden states are (B, T, D), or have the width of the embeddings if the config gives them their own.
        """
        x = self._embed_in(tokens)
        given = {"positions": positions, "mask": mask, "cache": cache, "deterministic": deterministic}
        if self.config.embedding.per_layer_width is not None:
            given["layer_embeddings"] = self._embed_per_layer(tokens, x)
        x, cache, aux = self.decoder(x, **given)
        return self._embed_out(x), cache, aux

    def _setup_layer_embeddings(self, width: int) -> None:
        config = self.config
        rows, layers = config.embedding.per_layer_vocab_size or config.vocab_size, config.num_layers
        self.layer_embedding = self._table(rows, width=layers * width)
        self.layer_embedding_projection = make_linear(config, (layers, width), use_bias=False)
        self.layer_embedding_norm = NORMS[config.norm.kind](config.norm.epsilon, config.dtype, config.parameters.dtype)

    def _embed_per_layer(self, tokens: Tokens, x: Hidden) -> Float[Array, "L B T P"]:
        """Return the embeddings of tokens (B, T) for each layer: sqrt(P) times a row of the table, plus a normalized
        projection of the token embedding x (B, T, D), divided by sqrt(2) (Gemma 4).
        """
        config, width = self.config, self.config.embedding.per_layer_width
        check_tokens(tokens, self.layer_embedding.vocab_size, "embedding.per_layer_vocab_size")
        # (B, T) -> (B, T, L P) -> (B, T, L, P): one table of width L P serves all layers
        table = self.layer_embedding(tokens).reshape(*tokens.shape, config.num_layers, width)
        table = table * jnp.asarray(math.sqrt(width), table.dtype)
        # (B, T, D) -> (B, T, L, P). The norm below cancels the factor 1 / sqrt(D), except relative to its epsilon.
        projected = self.layer_embedding_projection(x) * jnp.asarray(config.d_model**-0.5, x.dtype)
        # If both terms have variance 1, so has the result.
        both = (self.layer_embedding_norm(projected) + table) * jnp.asarray(math.sqrt(0.5), table.dtype)
        return both.transpose(2, 0, 1, 3)  # (B, T, L, P) -> (L, B, T, P), to scan over layers

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> PyTree:
        """Return an empty KV cache for `batch` rows of up to `length` tokens; needs no parameters."""
        return Decoder(self.config).init_cache(batch, length)
