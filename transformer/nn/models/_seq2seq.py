"""Encoder and decoder."""

from __future__ import annotations

from typing import Any

import flax.linen as nn

from transformer.nn._axes import Array, Context, Hidden, Int, Logits, Positions, Tokens
from transformer.nn._blocks import Aux
from transformer.nn._masks import Mask
from transformer.nn._stacks import Decoder, Encoder, sum_aux
from transformer.nn.models._base import Model


class Seq2Seq(Model):
    """Encoder and decoder (Vaswani et al. 2017): target tokens from a whole source and the target so far.

    One embedding table for source, target and logits, as in section 3.4; `source_vocab_size` gives the source its own.
    """

    def setup(self):
        config = self.config
        self.embedding = self._table(config.vocab_size)
        self._setup_source()
        source = config.replace(max_length=config.longest_source)
        self.encoder = Encoder(source, config.encoder_layers, execution=self.execution)
        self.decoder = Decoder(config, config.decoder_layers, cross=True, execution=self.execution)
        self._setup_head(config.vocab_size, tied=config.embedding.tie)

    def _setup_source(self) -> None:
        """Makes what `_embed_source` needs."""
        if self.config.embedding.source_vocab_size is not None:
            self.source_embedding = self._table(self.config.embedding.source_vocab_size, "source_vocab_size")

    def _embed_source(self, source):
        shared = self.config.embedding.source_vocab_size is None
        return self._embed(self.embedding if shared else self.source_embedding, source)

    def __call__(
        self,
        source: Array | None,
        target: Tokens,
        source_positions: Int[Array, "B S"] | None = None,
        positions: Positions | None = None,
        source_mask: Mask | None = None,
        mask: Mask | None = None,
        cache: Any = None,
        deterministic: bool = True,
        context_mask: Mask | None = None,
    ) -> Logits | tuple[Logits, Any]:
        """Source (B, S) and target (B, T) -> logits (B, T, V) float32, or (logits, cache) when a cache is given.

        Args:
            source: token ids; None in later calls with a cache, which then holds the cross-attention's keys and values.
            source_mask: which source tokens are real: `Mask.lengths(...)`; also in later calls.
            mask: of the target, beyond causality.
            context_mask: which source tokens a target token may attend to; None: as `source_mask` says.
        """
        x, cache, _ = self.run_stacks(
            source, target, source_positions, positions, source_mask, mask, cache, deterministic, context_mask
        )
        return self.head(x) if cache is None else (self.head(x), cache)

    def encode(
        self,
        source: Array,
        source_positions: Int[Array, "B S"] | None = None,
        source_mask: Mask | None = None,
        deterministic: bool = True,
    ) -> Context:
        """Source (B, S) -> what the decoder attends to, (B, S, D)."""
        return self._encode(source, source_positions, source_mask, deterministic)[0]

    def _encode(self, source, source_positions, source_mask, deterministic):
        x = self._embed_source(source)
        x, _, aux = self.encoder(x, positions=source_positions, mask=source_mask, deterministic=deterministic)
        return x, aux

    def run_stacks(
        self,
        source: Array | None,
        target: Tokens,
        source_positions: Int[Array, "B S"] | None = None,
        positions: Positions | None = None,
        source_mask: Mask | None = None,
        mask: Mask | None = None,
        cache: Any = None,
        deterministic: bool = True,
        context_mask: Mask | None = None,
    ) -> tuple[Hidden, Any, Aux]:
        """Return hidden states (B, T, D), the cache, and aux, the layers' terms of the training loss.

        Raises:
            ValueError: a source mask with segments, without a context mask.
        """
        if context_mask is None and isinstance(source_mask, Mask) and source_mask.query_segments is not None:
            raise ValueError(
                "source_mask has segments, and says of the source alone which positions are of one. Say which of the "
                "target belong to them: context_mask=Mask.segments(of_target, of_source)."
            )
        context, encoder_aux = None, {}
        if source is not None:
            context, encoder_aux = self._encode(source, source_positions, source_mask, deterministic)
        x, cache, aux = self.decoder(
            self._embed(self.embedding, target),
            context,
            positions=positions,
            mask=mask,
            context_mask=source_mask if context_mask is None else context_mask,
            cache=cache,
            deterministic=deterministic,
        )
        return x, cache, sum_aux([encoder_aux, aux])

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> Any:
        """An empty cache for `batch` rows of up to `length` target tokens; needs no parameters."""
        return Decoder(self.config, self.config.decoder_layers, cross=True).init_cache(batch, length)
