"""The encoder-decoder model."""

from __future__ import annotations

import flax.linen as nn

from transformer.config._checks import ConfigError
from transformer.nn._axes import Array, Context, Hidden, Int, Logits, Positions, PyTree, Tokens
from transformer.nn._blocks import Aux
from transformer.nn._masks import Mask
from transformer.nn._stacks import Decoder, Encoder, sum_aux
from transformer.nn.models._base import Model


class Seq2Seq(Model):
    """An encoder-decoder model (Vaswani et al. 2017).

    It predicts each target token from the source and the previous target tokens. Source, target and logits share one
    embedding table, as in section 3.4. With `source_vocab_size` the source has a separate table.

    Raises:
        ConfigError: if the config has an `embedding.width`.
    """

    def setup(self):
        config = self.config
        if config.embedding.width is not None:
            raise ConfigError(
                f"embedding.width is {config.embedding.width}, but the embeddings of a {type(self).__name__} have the "
                f"width d_model. Remove it."
            )
        self.embedding = self._table(config.vocab_size)
        self._setup_source()
        self.encoder = Encoder(config.source_encoder, config.encoder_layers, execution=self.execution)
        self.decoder = Decoder(config, config.decoder_layers, cross=True, execution=self.execution)
        self._setup_head(config.vocab_size, tied=config.embedding.tie)

    def _setup_source(self) -> None:
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
        cache: PyTree | None = None,
        deterministic: bool = True,
        context_mask: Mask | None = None,
    ) -> Logits | tuple[Logits, PyTree]:
        """Compute the logits of the next target token at each position.

        Args:
            source: (B, S), token ids; None in later calls with a cache, which then holds the keys and values of the
                cross-attention.
            target: (B, T), token ids.
            source_positions: (B, S); None: 0, 1, 2, ...
            positions: (B, T), of the target; None: 0, 1, 2, ..., continued after the tokens in the cache.
            source_mask: which source tokens are not padding, `Mask.lengths(...)`; also needed in later calls.
            mask: restrictions for the target in addition to the causal mask.
            cache: a KV cache from `init_cache` or from the previous call.
            deterministic: False: training, with dropout (rng "dropout") and a capacity of experts, if any.
            context_mask: which source tokens a target token may attend to; None: those of `source_mask`.

        Returns:
            Logits (B, T, V), float32; with a cache, (logits, cache).
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
        """Encode the source (B, S) as the context (B, S, D) that the decoder attends to."""
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
        cache: PyTree | None = None,
        deterministic: bool = True,
        context_mask: Mask | None = None,
    ) -> tuple[Hidden, PyTree | None, Aux]:
        """Return hidden states (B, T, D), the cache, and aux, the layers' terms of the training loss.

        Raises:
            ValueError: if the source mask has segments and there is no context mask.
        """
        if context_mask is None and isinstance(source_mask, Mask) and source_mask.query_segments is not None:
            raise ValueError(
                "source_mask has segments, which describe the source only: the segments of the target are missing. "
                "Pass context_mask=Mask.segments(target_segments, source_segments)."
            )
        # With a cache, only the first call encodes the source: later steps read the cached cross-attention keys and
        # values.
        context, encoder_aux = None, {}
        if source is not None:
            context, encoder_aux = self._encode(source, source_positions, source_mask, deterministic)
        x, cache, aux = self.decoder(
            self._embed(self.embedding, target),
            context,
            positions=positions,
            mask=mask,
            # Lengths hide keys for all queries alike, so the mask of the source also serves queries of the target.
            context_mask=source_mask if context_mask is None else context_mask,
            cache=cache,
            deterministic=deterministic,
        )
        return x, cache, sum_aux([encoder_aux, aux])

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> PyTree:
        """Return an empty KV cache for `batch` rows of up to `length` target tokens; needs no parameters."""
        return Decoder(self.config, self.config.decoder_layers, cross=True).init_cache(batch, length)
