"""A decoder alone."""

from __future__ import annotations

from typing import Any

import flax.linen as nn

from transformer.nn._axes import Hidden, Logits, Positions, Tokens
from transformer.nn._blocks import Aux
from transformer.nn._masks import Mask
from transformer.nn._stacks import Decoder
from transformer.nn.models._base import Model


class CausalLM(Model):
    """A decoder alone: predicts each next token from those before it (Radford et al. 2018; Vaswani et al. 2017)."""

    def setup(self):
        self.embedding = self._table(self.config.vocab_size)
        self.decoder = Decoder(self.config, execution=self.execution)
        self._setup_head(self.config.vocab_size, tied=self.config.embedding.tie)

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
        x, cache, _ = self.run_stacks(tokens, positions, mask, cache, deterministic)
        return self.head(x) if cache is None else (self.head(x), cache)

    def run_stacks(
        self,
        tokens: Tokens,
        positions: Positions | None = None,
        mask: Mask | None = None,
        cache: Any = None,
        deterministic: bool = True,
    ) -> tuple[Hidden, Any, Aux]:
        """Return hidden states (B, T, D), the cache, and aux, the layers' terms of the training loss."""
        x = self._embed(self.embedding, tokens)
        return self.decoder(x, positions=positions, mask=mask, cache=cache, deterministic=deterministic)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> Any:
        """An empty cache for `batch` rows of up to `length` tokens; needs no parameters."""
        return Decoder(self.config).init_cache(batch, length)
