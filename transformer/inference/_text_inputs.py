"""Token ids of texts, and the functions of a model that reads text, computed in batches."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from transformer.config._checks import ConfigError
from transformer.data.tokenizers._settings import truncated
from transformer.generate._prompts import decoding_model
from transformer.inference._loaded_model import LoadedModel, Params
from transformer.inference._text_batches import Batch, Columns, run_batches
from transformer.nn._partitioning import platform
from transformer.nn.models._kinds import kind_of

FULL_MATRIX_SCORES = 512
"""Maximum row length for full attention matrices on CPU. Up to this length, the forward pass of an encoder is faster
with the full attention matrix than with the query-chunked kernel (docs/benchmarks.md). For longer rows it needs
too much memory."""


def text_model(opened: LoadedModel) -> nn.Module:
    """Return the model for inference, with a kernel for any length; raise ConfigError if it does not read text."""
    model = opened.model
    reads, classifies = opened.kind.reads, opened.kind.classifies
    if reads and "text" not in reads:
        option = " On the command line, use `classify image` or `embed image`." if reads == ("images",) else ""
        option = " In Python, classify_series classifies them." if classifies == "series" else option
        what = f"{opened.directory} contains a {type(model).__name__}"
        raise ConfigError(f"{what}, which reads {reads[0]}, not text.{option}")
    return decoding_model(model)


def encode_texts(
    opened: LoadedModel, texts: Sequence[str], limit: int | None = None, *, truncate: bool = True
) -> list[Columns]:
    """Return token ids and token types of each text; with `truncate`, at most the context length and `limit`."""
    tokenizer = opened.tokenizer
    context = opened.model.config.longest_source if opened.kind.source else opened.context
    limit = min(n for n in (limit, context, 2**30) if n is not None)
    encoded = []
    for number, text in enumerate(texts):
        both = getattr(tokenizer, "encode_model", None)
        ids, types = both(text) if both else (tokenizer.encode_source(text), [])
        types = types or [0] * len(ids)
        known = opened.model.config.embedding.token_types
        if known is not None and max(types, default=0) >= known:
            raise ValueError(
                f"text {number} has the token type {max(types)}, but the model has only {known} types: tokenizer.json "
                f"belongs to another model. Download both again."
            )
        if not ids:
            raise ValueError(f"text {number} is empty ({text!r}). Pass at least one word or character.")
        if truncate and len(ids) > limit:
            warnings.warn(f"text {number} has {len(ids)} tokens and is truncated to {limit}.", stacklevel=3)
            body = tokenizer.encode(text) if both else ids
            ids, types = truncated(ids, body, limit, tokenizer.truncation_side), types[:limit]
        encoded.append((ids, types))
    return encoded


def run_texts(
    opened: LoadedModel,
    texts: Sequence[Columns],
    compute: Callable[[Batch], jax.Array],
    numbers: Sequence[int] | None = None,
    **options: Any,
) -> list[np.ndarray]:
    """Call `run_batches`, with its options `each_token` and `most`, and raise ValueError if a result is not finite.

    `numbers` are the numbers of the texts in the error message, for entries that are parts of texts.
    """
    longest = opened.model.config.longest_source  # equals max_length for a model without an encoder
    run = functools.partial(run_batches, compute=compute, longest=longest, **options)
    rows = run(texts)
    for number, row in enumerate(rows):
        if not np.isfinite(row).all():
            # Possibly caused by another text in the same row, so compute this text alone.
            (alone,) = run(texts[number : number + 1])
            rows[number] = opened.finite(number if numbers is None else numbers[number], alone)
    return rows


def hidden_states(model: nn.Module, params: Params, batch: Batch) -> jax.Array:
    """Return the hidden states (R, T, D) of a batch (of the encoder, for a Seq2Seq)."""
    tokens, types = batch.columns
    model, kind = _with_full_attention_matrix(model, tokens.shape[1]), kind_of(model)
    places = {"positions": batch.positions, "mask": batch.mask}
    if kind.source:
        places = {"source_positions": batch.positions, "source_mask": batch.mask}
        return model.apply({"params": params}, tokens, **places, method=type(model).encode)
    if model.config.embedding.token_types is not None and kind.writes is None:
        places["token_types"] = types
    return model.apply({"params": params}, tokens, **places, method=type(model).hidden)


def _with_full_attention_matrix(model: nn.Module, slots: int) -> nn.Module:
    """Return the model with the fastest attention kernel for a forward pass over rows of this length.

    On CPU, `auto` uses the query-chunked kernel from 96 slots. It is faster in training and for causal models, where it
    skips masked keys, but slower for the forward pass of encoders with short rows.
    """
    kind = kind_of(model)
    causal = kind.writes == "continuation" or (kind.writes is None and model.config.attention.causal)
    if causal or model.execution.attention != "auto" or platform() != "cpu" or slots > FULL_MATRIX_SCORES:
        return model
    return model.clone(execution=dataclasses.replace(model.execution, attention="reference"))
