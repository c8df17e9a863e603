"""Layers of a decoder apart from each other: what a loop over tokens needs where it shall not loop over layers too."""

from __future__ import annotations

import functools
from typing import Any

import jax

from transformer.config._options import StackOptions
from transformer.config._parts import Layer
from transformer.nn._partitioning import platform
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._seq2seq import Seq2Seq

COPIED = 2**31
"""bytes of a decoder that are copied on CPU without being asked for"""


def keeps_apart(model: CausalLM | Seq2Seq, params: Any) -> bool:
    """Whether a loop over tokens has each layer's parameters in an array of its own, for which those of the decoder are
    copied once: with `execution.scan` off; and on CPU, where it saves a third of the time a token (docs/benchmarks.md),
    if they are no more than `COPIED`.
    """
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params["decoder"]))
    return not model.execution.scan or (platform() == "cpu" and size <= COPIED)


def separate(model: CausalLM | Seq2Seq, tree: Any) -> Any:
    """A decoder's parameters or cache with its repeated layers, stacked on a leading axis, each as a tree of its own.

    A matrix product of one token takes as long as reading its matrix. Taking a layer out of a stack copies it first,
    at every token, which costs twice that again; this copies all of them once.
    """
    layers = [_part(tree, layer) for layer in _layers(model)]
    rest = {name: leaf for name, leaf in tree.items() if not name.startswith(("prefix_", "suffix_", "layers"))}
    return rest | {f"prefix_{i}": layer for i, layer in enumerate(layers)}


def separated(model: CausalLM | Seq2Seq) -> CausalLM | Seq2Seq:
    """The model whose decoder has the layers of `separate`; its encoder, which no step runs, is left as it falls."""
    config = model.config
    kinds = tuple(layer.kind for layer in _layers(model))
    stack = StackOptions(prefix=kinds, final_norm=config.stack.final_norm)
    config = config.replace(num_layers=len(kinds), stack=stack)
    return type(model)(config, model.execution)


def _layers(model: CausalLM | Seq2Seq) -> tuple[Layer, ...]:
    return model.config.layers(model.config.decoder_layers if isinstance(model, Seq2Seq) else None)


def _part(tree: Any, layer: Layer) -> Any:
    part = functools.reduce(lambda tree, name: tree[name], layer.path.split("/"), tree)
    return part if layer.index is None else jax.tree.map(lambda stacked: stacked[layer.index], part)
