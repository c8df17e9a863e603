"""What is minimized: cross-entropy as a sum and a weight, so that any split of a batch adds up to the same number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer.axes import Array, Float, Int, PRNGKey
from transformer.masks import Mask

Scalar: TypeAlias = Float[Array, ""]
Batch: TypeAlias = Mapping[str, Any]
"""arrays by name: tokens (B, T), targets and weights (B, T) or (B,), and what the task's model reads besides"""
Forward: TypeAlias = Callable[..., Any]
"""(model, variables, batch, **arguments) -> logits, or (logits, aux) with method=with_aux"""


def cross_entropy(
    logits: Float[Array, "*batch V"],
    targets: Int[Array, "*batch"],
    weights: Float[Array, "*batch"],
    label_smoothing: float = 0.0,
) -> tuple[Scalar, Scalar]:
    """(sum of weighted losses in nats, sum of weights), in float32 whatever the logits are.

    With label smoothing e the target's distribution is (1 - e) onehot + e / V (Szegedy et al. 2016, arXiv 1512.00567,
    section 7; the paper's 5.4). Where the weight is 0 the target may be anything, -100 included. Elsewhere a target
    outside the vocabulary gives NaN: compiled code can't raise, and clamping would give a plausible number.
    """
    logits = logits.astype(jnp.float32)
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    # A comparison instead of a gather: its derivative is fused, a gather's is a scatter.
    chosen = jnp.where(vocabulary == targets[..., None], logits, 0.0).sum(-1)
    loss = jax.nn.logsumexp(logits, axis=-1) - (1.0 - label_smoothing) * chosen
    if label_smoothing:
        loss = loss - label_smoothing * logits.mean(-1)
    known = (targets >= 0) & (targets < logits.shape[-1])
    loss = jnp.where(known, loss, jnp.nan)
    return jnp.where(weights > 0, loss * weights, 0.0).sum(), weights.astype(jnp.float32).sum()


def correct(logits: Float[Array, "*batch V"], targets: Int[Array, "*batch"], weights: Float[Array, "*batch"]) -> Scalar:
    """Weighted count of targets that have the highest logit."""
    return ((logits.argmax(-1) == targets) * weights).astype(jnp.float32).sum()


def _causal_lm(model: nn.Module, variables: Any, batch: Batch, **kwargs) -> Any:
    mask = Mask.segments(batch["segment_ids"]) if "segment_ids" in batch else None
    return model.apply(variables, batch["tokens"], positions=batch.get("positions"), mask=mask, **kwargs)


def _seq2seq(model: nn.Module, variables: Any, batch: Batch, **kwargs) -> Any:
    source_mask = Mask.lengths(batch["source_lengths"])
    return model.apply(variables, batch["source"], batch["tokens"], source_mask=source_mask, **kwargs)


def _classifier(model: nn.Module, variables: Any, batch: Batch, **kwargs) -> Any:
    types = None if model.config.token_types is None else batch.get("token_types")
    mask = Mask.lengths(batch["lengths"])
    return model.apply(variables, batch["tokens"], mask=mask, token_types=types, **kwargs)


FORWARD: dict[str, Forward] = {"causal_lm": _causal_lm, "seq2seq": _seq2seq, "classifier": _classifier}
"""How the model of each task reads a batch."""


def batch_logits(
    task: str, model: nn.Module, params: Any, batch: Batch, dropout_key: PRNGKey | None = None
) -> Float[Array, "*batch V"]:
    """Logits of a batch, (B, T, V) or (B, C); with dropout when a key is given."""
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    return FORWARD[task](model, {"params": params}, batch, deterministic=dropout_key is None, rngs=rngs)


def logits_and_router_loss(
    task: str, model: nn.Module, params: Any, batch: Batch, dropout_key: PRNGKey | None = None
) -> tuple[Float[Array, "*batch V"], Scalar | None]:
    """`batch_logits` (with a tree of parameters), and what routed layers add to the training loss: a sum over tokens,
    as `cross_entropy`'s, in nats (Fedus et al. 2021, arXiv 2101.03961, section 2.2); None without such layers. Rows of
    weight 0 add nothing.
    """
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    logits, aux = FORWARD[task](
        model, {"params": params}, batch, deterministic=dropout_key is None, rngs=rngs, method=type(model).with_aux
    )
    if not aux:
        return logits, None
    weights = batch["weights"]
    counts = (weights > 0).any(tuple(range(1, weights.ndim)))
    return logits, jnp.where(counts, sum(aux.values()), 0.0).sum()
