"""Attention weights of every layer and head as arrays, and attention rollout."""

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
    """Attention weights of one layer for one example, with the stack and the kind of the attention."""

    stack: Literal["encoder", "decoder"]
    layer: int
    """index of the layer in its stack, from 0"""
    kind: Literal["self", "cross", "rollout"]
    weights: Float[np.ndarray, "N T S"]
    """weight of key s for query t, for each of N heads"""
    hidden: Bool[np.ndarray, "T S"]
    """True: the mask hides key s from query t"""


def attention_maps(
    intermediates: Mapping[str, Any], config: TransformerConfig, row: int | None = None
) -> list[AttentionMap]:
    """Return the attention maps of a call on one example without padding, in the order of computation.

    A layer without attention has no map.

    Args:
        intermediates: the collection "intermediates" that `model.apply(..., mutable=["intermediates"])` returns with
            the output, for a model created with `Execution(sow_weights=True)`. For a `DualEncoder`, pass the entry
            "text" or "image" of it.
        config: config of the model; for the images of a `DualEncoder`, its `image_encoder`.
        row: index of the example in a batch, or of the channel of a time series.

    Raises:
        ValueError: there are no attention weights, or they are those of a batch and `row` is missing.
    """
    if {"text", "image"} <= set(intermediates):
        raise ValueError(
            "these are the attention weights of two encoders, of texts and of images. Pass intermediates['text'] with "
            "the config, or intermediates['image'] with config.image_encoder."
        )
    maps = []
    for stack in ("encoder", "decoder"):
        causal = stack == "decoder" or (config.attention.causal and "decoder" not in intermediates)
        for layer, (kind, parts) in enumerate(_layers(intermediates.get(stack, {}), config, stack)):
            for name, weights in parts.items():
                weights = np.asarray(weights, np.float32)
                if weights.shape[0] != 1 and row is None:
                    raise ValueError(
                        f"attention maps show one example, got a batch of {weights.shape[0]}. Pass the index of one "
                        f"with row=."
                    )
                which = name.removesuffix("_attention")
                mask = _mask(kind, causal=causal) if which == "self" else Mask()
                visible = np.asarray(mask.dense(*weights.shape[2:]))[0, 0]
                maps.append(AttentionMap(stack, layer, which, weights[row or 0], ~visible))
    if not maps:
        raise ValueError(
            "there are no attention weights. Create the model with Execution(sow_weights=True) and call it with "
            "mutable=['intermediates']."
        )
    return maps


def labels_of(one: AttentionMap, words: Mapping[str, Sequence[str]]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the labels of queries and keys of a map, of `words` by stack; ValueError if there is not one for each."""
    queries, keys = words[one.stack], words["encoder" if one.kind == "cross" else one.stack]
    if (len(queries), len(keys)) != one.weights.shape[1:]:
        raise ValueError(
            f"expected one label for each of the {one.weights.shape[1]} queries and {one.weights.shape[2]} keys of the "
            f"{one.stack} {one.kind}-attention, got {len(queries)} and {len(keys)}. Pass source= and target=."
        )
    return queries, keys


def check_finite(*weights: np.ndarray) -> None:
    """Raise ValueError if a weight is not finite."""
    if not all(np.isfinite(one).all() for one in weights):
        raise ValueError("attention weights must be finite. Check the parameters of the model.")


def layer_weights(
    intermediates: Mapping[str, Any], config: TransformerConfig, stack: str, kind: Literal["self", "cross"]
) -> list[Any]:
    """Return the weights (B, N, T, S), traced or not, of each attention layer of a stack ("encoder", "decoder")."""
    name = f"{kind}_attention"
    return [parts[name] for _, parts in _layers(intermediates[stack], config, stack) if name in parts]


def _layers(stack: Mapping[str, Any], config: TransformerConfig, name: str) -> list[tuple[LayerKind, dict[str, Any]]]:
    """Return kind and sown weights of each layer of a stack, in order."""
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
    """Return the weights that the attention modules of a layer sowed, in the order of computation."""
    names = ("self_attention", "cross_attention")
    return {name: layer[name]["weights"][0] for name in names if "weights" in layer.get(name, {})}


def _mask(kind: LayerKind, *, causal: bool) -> Mask:
    mask = Mask.causal() if causal else Mask()
    if kind.chunk is not None:
        mask = mask & Mask.chunks(kind.chunk)
    return mask if kind.window is None else mask & Mask.window(kind.window)


def attention_rollout(maps: Sequence[AttentionMap]) -> list[AttentionMap]:
    """Compute attention rollout (Abnar & Zuidema 2020, arXiv 2005.00928, section 3).

    The rollout estimates how much each position after a layer depends on each input position of the stack, from the
    self-attention alone. It is the product of the matrices A_l = 0.5 W_l + 0.5 I of all layers up to this one, where
    W_l is the mean of the attention weights over the heads; the identity matrix I represents the residual connection.

    Args:
        maps: maps of one stack, in the order of computation. Cross-attention maps are ignored.

    Returns:
        One map of kind "rollout" with one head per self-attention layer. Its rows sum to 1, even if the heads have a
        sink logit. A cell is hidden if no path through the layers connects the two positions.

    Raises:
        ValueError: the maps are of both stacks.
    """
    if len({one.stack for one in maps}) > 1:
        raise ValueError(
            "a rollout needs the maps of one stack, got maps of the encoder and the decoder. Pass those of one stack."
        )
    result: list[AttentionMap] = []
    for one in maps:
        if one.kind != "self":
            continue
        itself = np.eye(one.weights.shape[1])
        rollout, reached = (result[-1].weights[0], ~result[-1].hidden) if result else (itself, itself > 0)
        # A_l = 0.5 W_l + 0.5 I, (T, T), in float64: the product runs over all layers.
        step = 0.5 * one.weights.mean(0, dtype=np.float64) + 0.5 * itself
        # Rows of W_l sum to less than 1 if the heads have a sink logit: divide by the sum before R_l = A_l R_(l-1).
        rollout = (step / step.sum(-1, keepdims=True)) @ rollout
        # Reachable positions, as a Boolean matrix product. Computed in float32, because NumPy multiplies Boolean
        # matrices slowly.
        reached = (~one.hidden | (itself > 0)).astype(np.float32) @ reached.astype(np.float32) > 0
        weights = rollout[None].astype(np.float32)
        result.append(AttentionMap(one.stack, one.layer, "rollout", weights, ~reached))
    return result


def printable(word: str) -> str:
    """Return a word with visible symbols for white space, and escapes for unprintable characters."""
    word = _SIGNS.get(word, word)
    return "".join(_SIGNS.get(c, c if c.isprintable() else ascii(c)[1:-1]) for c in word)
