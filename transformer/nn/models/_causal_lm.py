"""The decoder-only language model."""

from __future__ import annotations

from typing import Any

import flax.linen as nn

from transformer.nn._axes import Hidden, Logits, Positions, Tokens
from transformer.nn._blocks import Aux
from transformer.nn._masks import Mask
from transformer.nn._stacks import Decoder
from transformer.nn.models._base import Model


class CausalLM(Model):
    """A decoder that predicts each token from the previous ones (Radford et al. 2018; Vaswani et al. 2017)."""

    def setup(self):
        self._setup_embedding()
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
        """Compute the logits of the next token at each position.

        Args:
            tokens: (B, T), token ids.
            positions: (B, T); None: 0, 1, 2, ..., continued after the tokens in the cache.
            mask: restrictions in addition to the causal mask, which always applies.
            cache: a KV cache from `init_cache` or from the previous call.
            deterministic: False enables dropout (rng "dropout").

        Returns:
            Logits (B, T, V), float32; with a cache, (logits, cache).

        Raises:
            ValueError: if ids are outside the vocabulary (only for concrete values: under jit the result is NaN
                instead).
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
        """Return hidden states, the cache, and aux, the layers' terms of the training loss.

        Hidden states are (B, T, D), or have the width of the embeddings if the config gives them their own.
        """
        x = self._embed_in(tokens)
        x, cache, aux = self.decoder(x, positions=positions, mask=mask, cache=cache, deterministic=deterministic)
        return self._embed_out(x), cache, aux

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> Any:
        """Return an empty KV cache for `batch` rows of up to `length` tokens; needs no parameters."""
        return Decoder(self.config).init_cache(batch, length)
