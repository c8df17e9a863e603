"""Who looks at whom, as arrays: the attention weights of every layer and head, and their rollout through a stack."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float

from transformer.config._model import TransformerConfig
from transformer.config._parts import LayerKind
from transformer.nn._masks import Mask

_SIGNS = {" ": "␣", "\n": "⏎", "\\n": "⏎", "\t": "⇥", "\\t": "⇥", "\r": "␍", "\\r": "␍", "": "∅"}


@dataclass(frozen=True)
class AttentionMap:
    """The weights of one attention layer for one example: of which `stack`, and of which `kind`."""

    stack: Literal["encoder", "decoder"]
    layer: int
    """from 0, as data flows"""
    kind: Literal["self", "cross", "rollout"]
    weights: Float[np.ndarray, "N T S"]
    """of each head: how much query t takes from key s"""
    hidden: Bool[np.ndarray, "T S"]
    """which keys the mask hides from which query"""


def attention_maps(
    intermediates: Mapping[str, Any], config: TransformerConfig, row: int | None = None
) -> list[AttentionMap]:
    """What `MultiHeadAttention` sowed in a call on one example without padding, in the order data flows. A layer that
    attends to nothing has no map.

    `intermediates` is the collection of that name, which `model.apply(..., mutable=["intermediates"])` returns beside
    the output of a model made with `Execution(sow_weights=True)`; `row` is the example of a batch, or the channel of a
    series. ValueError when it holds no weights, or those of a batch without a `row`.
    """
    maps = []
    for stack in ("encoder", "decoder"):
        causal = stack == "decoder" or (config.attention.causal and "decoder" not in intermediates)
        for layer, (kind, parts) in enumerate(_layers(intermediates.get(stack, {}), config, stack)):
            for name, weights in parts.items():
                weights = np.asarray(weights, np.float32)
                if weights.shape[0] != 1 and row is None:
                    raise ValueError(
                        f"attention maps show one example, got a batch of {weights.shape[0]}. Say which with row=."
                    )
                which = name.removesuffix("_attention")
                mask = _mask(kind, causal=causal) if which == "self" else Mask()
                visible = np.asarray(mask.dense(*weights.shape[2:]))[0, 0]
                maps.append(AttentionMap(stack, layer, which, weights[row or 0], ~visible))
    if not maps:
        raise ValueError(
            "there are no attention weights: make the model with Execution(sow_weights=True) and call it with "
            "mutable=['intermediates']."
        )
    return maps


def _layers(stack: Mapping[str, Any], config: TransformerConfig, name: str) -> list[tuple[LayerKind, dict[str, Any]]]:
    """Kind and sown weights of each layer of a stack, in order."""
    if not stack:
        return []
    layers = []
    for layer in config.layers(config.encoder_layers if name == "encoder" else config.decoder_layers):
        part = functools.reduce(lambda tree, name: tree.get(name, {}), layer.path.split("/"), stack)
        sown = _sown(part)
        if layer.index is not None:
            sown = {name: weights[layer.index] for name, weights in sown.items()}
        layers.append((layer.kind, sown))
    return layers


def _sown(layer: Mapping[str, Any]) -> dict[str, Any]:
    """The weights that the parts of a layer sowed, in the order data flows."""
    names = ("self_attention", "cross_attention")
    return {name: layer[name]["weights"][0] for name in names if "weights" in layer.get(name, {})}


def _mask(kind: LayerKind, *, causal: bool) -> Mask:
    window = Mask() if kind.window is None else Mask.window(kind.window)
    return window & Mask.causal() if causal else window


def attention_rollout(maps: Sequence[AttentionMap]) -> list[AttentionMap]:
    """How much of each position of a stack's input is in each position behind each of its layers, as far as its
    self-attention alone tells (Abnar & Zuidema 2020, arXiv 2005.00928, section 3): the product of the layers' matrices
    0.5 W + 0.5 I, where W is the mean over heads and I the way around the attention.

    `maps` are those of one stack, in the order data flows; cross-attention among them is left out. Gives a map of one
    head for each layer that attends, of the kind "rollout"; its rows sum to 1, also where a sink takes part of a row.
    What is hidden is what no path through the layers reaches.

    Raises:
        ValueError: maps of both stacks.
    """
    if len({one.stack for one in maps}) > 1:
        raise ValueError("a rollout goes through one stack: give the maps of the encoder, or those of the decoder.")
    result: list[AttentionMap] = []
    for one in maps:
        if one.kind != "self":
            continue
        itself = np.eye(one.weights.shape[1])
        rollout, reached = (result[-1].weights[0], ~result[-1].hidden) if result else (itself, itself > 0)
        step = 0.5 * one.weights.mean(0, dtype=np.float64) + 0.5 * itself
        rollout = (step / step.sum(-1, keepdims=True)) @ rollout
        # In floating point: NumPy multiplies matrices of other types slowly.
        reached = (~one.hidden | (itself > 0)).astype(np.float32) @ reached.astype(np.float32) > 0
        weights = rollout[None].astype(np.float32)
        result.append(AttentionMap(one.stack, one.layer, "rollout", weights, ~reached))
    return result


def printable(word: str) -> str:
    """A word with blanks as signs and unprintable characters as escapes."""
    word = _SIGNS.get(word, word)
    return "".join(_SIGNS.get(c, c if c.isprintable() else ascii(c)[1:-1]) for c in word)
