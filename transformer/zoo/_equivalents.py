"""Rewrites of a model into an equivalent one with another config, so that more models fit the format of a family.

Each rewrite is exact: up to rounding, the new model computes the same logits from the same inputs. `with_equivalent`
applies as few rewrites as possible.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from transformer.config._model import TransformerConfig
from transformer.config._positions import LearnedOptions, RotaryOptions, SinusoidalOptions
from transformer.nn._blocks import position_scheme
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._encoders import Classifier, Embedder, MaskedLM
from transformer.nn.models._kinds import kind_of
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.zoo._family import NoCounterpart, abstract_params
from transformer.zoo._pretrained import choose_family
from transformer.zoo.weights._rules import layer_places

POSITIONS = 512
"""Minimum number of rows of a position table that replaces sinusoidal positions."""
USUAL_EPSILON = 1e-5
"""Norm epsilon of the families whose config.json has no field for it."""

Flat = dict[str, jax.Array]
"""Parameters by path."""


@dataclass(frozen=True)
class Rewrite:
    """A change of a model's config that preserves its function, with the matching change of the parameters."""

    config: Callable[[nn.Module, int], TransformerConfig | None]
    """(model, number of positions) -> config of the new model, or None if the rewrite does not apply."""
    params: Callable[[nn.Module, nn.Module, Flat], Flat] = lambda before, after, params: params
    """(old model, new model, old parameters) -> new parameters. Parameters that are left out become zeros."""


def with_equivalent(
    model: nn.Module, params: PyTree, family: str | None = None, context: int | None = None
) -> tuple[nn.Module, PyTree]:
    """Return an equivalent model that a family can describe, and its parameters.

    If the family can describe the given model, it is returned unchanged. Otherwise the result is the equivalent model
    that takes the fewest rewrites.

    Args:
        model: the model to save.
        params: its parameters, without the outer "params".
        family: name of the family; None: any family.
        context: maximum number of tokens that the model reads, if it is limited. A position table that replaces
            sinusoidal positions gets this many rows, but at least 512.

    Raises:
        ConfigError: no family can describe the model or an equivalent one; the message names the unsupported fields
            of the closest one.
    """
    positions = max(POSITIONS, context or 0)
    refusals = []
    # All combinations of rewrites, the smallest first. There are only 2^7, and only configs are rewritten until
    # one of them fits.
    for count in range(len(REWRITES) + 1):
        for chosen in itertools.combinations(REWRITES, count):
            models = _models(model, chosen, positions)
            if models is None:
                continue
            try:
                choose_family(models[-1], family)
            except NoCounterpart as refusal:
                refusals.append(refusal)
                continue
            for rewrite, before, after in zip(chosen, models, models[1:], strict=False):
                params = _rewritten(rewrite, before, after, params)
            return models[-1], params
    raise min(refusals, key=lambda refusal: refusal.differences)


def with_plain_embeddings(model: nn.Module, params: PyTree) -> tuple[nn.Module, PyTree]:
    """Return an equivalent model whose embeddings are not multiplied by sqrt(d_model), and its parameters.

    The embedding table then holds the scaled embeddings. Tied embeddings become untied, because the output map uses the
    unscaled table. The model is returned unchanged if it does not scale its embeddings, or if it has tied embeddings
    and a bias on its logits.
    """
    models = _models(model, (_PLAIN_EMBEDDINGS,), POSITIONS)
    return (model, params) if models is None else (models[-1], _rewritten(_PLAIN_EMBEDDINGS, *models, params))


def _models(model: nn.Module, rewrites: tuple[Rewrite, ...], positions: int) -> list[nn.Module] | None:
    """Return the model before and after each rewrite, or None if one of the rewrites does not apply."""
    models = [model]
    for rewrite in rewrites:
        config = rewrite.config(models[-1], positions)
        if config is None:
            return None
        models.append(models[-1].clone(config=config))
    return models


def _rewritten(rewrite: Rewrite, before: nn.Module, after: nn.Module, params: PyTree) -> PyTree:
    given = flax.traverse_util.flatten_dict(params, sep="/")
    wanted = flax.traverse_util.flatten_dict(abstract_params(after), sep="/")
    new = rewrite.params(before, after, dict(given))
    zeros = {path: jnp.zeros(leaf.shape, leaf.dtype) for path, leaf in wanted.items() if path not in new}
    return flax.traverse_util.unflatten_dict(new | zeros, sep="/")


# Scaled embeddings: sqrt(d) E[token] = (sqrt(d) E)[token]. The logits x E^T of a tied model need the unscaled E, so the
# rewrite also unties the output map.


def _plain_embeddings_config(model: nn.Module, positions: int) -> TransformerConfig | None:
    config = model.config
    # Only these models have an output map that can be tied to the embeddings.
    tied = config.embedding.tie and kind_of(model).predicts_tokens
    if not config.embedding.scale or (tied and config.output.bias):
        return None
    return config.replace(**{"embedding.scale": False} | ({"embedding.tie": False} if tied else {}))


def _plain_embeddings(before: nn.Module, after: nn.Module, params: Flat) -> Flat:
    config = before.config
    scale = np.asarray(config.d_model**0.5, config.dtype)  # the model rounds the factor to its dtype, too
    tables = {path: params[path] for path in ("embedding/embedding", "source_embedding/embedding") if path in params}
    changed = {path: table * scale.astype(table.dtype) for path, table in tables.items()}
    if config.embedding.tie and not after.config.embedding.tie:
        changed["output/kernel"] = params["embedding/embedding"].T  # (V, D) -> (D, V), without the scale
    return params | changed


# Squared ReLU: relu(h)^2 = relu(h) h, with h = x W_up. This is a gated feed-forward layer relu(x W_gate) * (x W_up)
# with W_gate = W_up.


def _gated_config(model: nn.Module, positions: int) -> TransformerConfig | None:
    config = model.config
    if config.feed_forward.activation != "relu2" or config.feed_forward.gated or _has_experts(config):
        return None
    return config.replace(**{"feed_forward.activation": "relu", "feed_forward.gated": True})


def _gated(before: nn.Module, after: nn.Module, params: Flat) -> Flat:
    return params | {
        path.replace("/up/", "/gate/"): leaf for path, leaf in params.items() if "/feed_forward/up/" in path
    }


# Parts that the model lacks and that a family always has. Their new parameters are zeros, so they have no effect: a
# zero bias, or attention whose output map is zero.


def _norm_bias_config(model: nn.Module, positions: int) -> TransformerConfig | None:
    config = model.config
    return config.replace(**{"norm.kind": "layer_norm"}) if config.norm.kind == "layer_norm_without_bias" else None


def _output_bias_config(model: nn.Module, positions: int) -> TransformerConfig | None:
    config, kind = model.config, kind_of(model)
    if config.output.bias or not kind.predicts_tokens or kind.writes == "continuation":
        return None
    return config.replace(**{"output.bias": True})


def _attention_config(model: nn.Module, positions: int) -> TransformerConfig | None:
    """Add self-attention to layers without it. With a zero output map it adds nothing to the residual stream."""
    config = model.config
    kinds = config.kinds
    # A zero output is only neutral if no norm follows it, as in pre-norm and parallel layers.
    if all(kind.self_attention for kind in kinds) or config.norm.position not in ("pre", "parallel"):
        return None
    names = ("prefix", "period", "suffix")
    attend = {n: tuple(replace(kind, self_attention=True) for kind in getattr(config.stack, n)) for n in names}
    return config.replace(stack=replace(config.stack, **attend))


# Sinusoidal positions: a learned position table that holds their values for the first positions.


def _table_config(model: nn.Module, positions: int) -> TransformerConfig | None:
    config = model.config
    known = type(model) in (CausalLM, Classifier, Embedder, MaskedLM, Seq2Seq)
    if not known or not isinstance(config.position, SinusoidalOptions):
        return None
    return config.replace(position=LearnedOptions(max_length=positions))


def _table(before: nn.Module, after: nn.Module, params: Flat) -> Flat:
    config = after.config
    rows = jnp.arange(config.max_length)[None]  # (1, max_length)
    encoding = position_scheme(before.config, causal=False).encoding(rows, config.d_model)[0]
    stacks = {path.partition("/")[0] for path in params} & {"encoder", "decoder"}
    return params | {f"{stack}/position_table": encoding.astype(config.parameters.dtype) for stack in stacks}


# The epsilon of norms. RMSNorm (LayerNorm alike, after centering) computes norm(x; e) = x / sqrt(mean(x^2) + e), so
# norm(c x; c^2 e) = norm(x; e). To replace the epsilon e by e', multiply the residual stream by c = sqrt(e' / e), and
# divide by c everything that reads the stream other than through a norm.


def _epsilon_config(model: nn.Module, positions: int) -> TransformerConfig | None:
    config = model.config
    if (
        config.norm.epsilon == USUAL_EPSILON
        or type(model) not in (CausalLM, Seq2Seq)
        or not isinstance(config.position, LearnedOptions | RotaryOptions | None)
        or config.norm.position not in ("pre", "post")
        or not config.stack.final_norm
        or config.norm.kind == "frozen_batch_norm"
        or config.embedding.norm
        or config.output.transform is not None
        or config.attention.qk_norm is not None
        or config.attention.mla is not None
        or _has_experts(config)
        or not all(kind.attention_norm for kind in config.kinds)
    ):
        return None
    return config.replace(**{"norm.epsilon": USUAL_EPSILON})


# Parameters that write to the residual stream: tables at its start, output maps of the sublayers. With post-norm, the
# stream is the output of the norms, and the sublayers read it directly.
_TABLES = re.compile(r"(source_)?embedding/embedding|(encoder|decoder)/position_table")
_WRITES = re.compile(r".*/(out|down)/(kernel|bias)")
_NORMS = re.compile(r".*/(attention_norm|cross_attention_norm|feed_forward_norm)/(scale|bias)")
_READS = re.compile(r".*/(query|key|value|up|gate)/kernel")


def _epsilon(before: nn.Module, after: nn.Module, params: Flat) -> Flat:
    config = before.config
    # c = sqrt(e' / e)
    larger = (after.config.norm.epsilon / config.norm.epsilon) ** 0.5
    post = config.norm.position == "post"
    new = dict(params)
    for path, leaf in params.items():
        if _TABLES.fullmatch(path) or _WRITES.fullmatch(path) or (post and _NORMS.fullmatch(path)):
            new[path] = _times(leaf, larger)  # writes to the stream: multiply by c
        elif post and _READS.fullmatch(path):
            new[path] = _times(leaf, 1 / larger)  # reads the stream without a norm: divide by c
    # The output map reads the last norm, so its result keeps the old scale. If the output map is the embedding table
    # (tied), it has become `larger` times as large, and the norm must make up for that.
    last = 1 / larger if config.embedding.tie else 1.0
    layers = config.decoder_layers if kind_of(before).source else config.num_layers
    place, index = layer_places(config, layers)[-1]
    norm = f"decoder/{place}/feed_forward_norm" if post else "decoder/final_norm"
    for path in (f"{norm}/scale", f"{norm}/bias"):
        if path not in params:
            continue
        if post and index is not None:  # the norms of all layers are stacked: change only the last layer
            new[path] = new[path].at[index].set(_times(params[path][index], last))
        else:
            new[path] = _times(params[path], last)
    return new


def _times(leaf: jax.Array, factor: float) -> jax.Array:
    """Multiply in float32, so that bfloat16 parameters are rounded only once."""
    return (jnp.asarray(leaf).astype(jnp.float32) * factor).astype(leaf.dtype)


def _has_experts(config: TransformerConfig) -> bool:
    return any(kind.moe is not None for kind in config.kinds)


_PLAIN_EMBEDDINGS = Rewrite(_plain_embeddings_config, _plain_embeddings)

REWRITES = (
    _PLAIN_EMBEDDINGS,
    Rewrite(_gated_config, _gated),
    Rewrite(_norm_bias_config),
    Rewrite(_attention_config),
    Rewrite(_output_bias_config),
    Rewrite(_table_config, _table),
    Rewrite(_epsilon_config, _epsilon),
)
"""All rewrites, in the order in which they are applied."""
