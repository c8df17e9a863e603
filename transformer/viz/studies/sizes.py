"""The size of everything between tokens and logits, seen while the model itself is traced: nothing is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax

from transformer.nn.attention import MultiHeadAttention
from transformer.nn.blocks import Block
from transformer.nn.layers import Embedding, FeedForward, LayerNorm, Linear, RMSNorm
from transformer.nn.stacks import Stack

_LINEAR = {
    "query": ("query = x W_Q, all heads in one product", "B T N H"),
    "key": ("key = x W_K", "B S K H"),
    "value": ("value = x W_V", "B S K Hv"),
    "out": ("heads side by side, times W_O", "B T D"),
    "up": ("x W_1", "B T F"),
    "gate": ("x W_gate", "B T F"),
    "down": ("act(...) W_2", "B T D"),
}


@dataclass(frozen=True)
class Size:
    """One step on the way through a model."""

    place: str
    """path of the module, as in the parameters; layers that repeat are seen once"""
    what: str
    """what is computed there"""
    axes: str
    """letters of `transformer.nn.axes`, "B T D" """
    shape: tuple[int, ...]
    """how long each of these axes is"""
    repeats: int = 1
    """how often it is done, one after the other: layers of the same kind"""


def sizes(model: nn.Module, *inputs: Any) -> list[Size]:
    """What each step of `model` makes of `inputs` (arrays, or `jax.ShapeDtypeStruct`s), in the order it is computed.

    Works for the models of `transformer.nn.models` and for its stacks, blocks and attention alone. Needs no parameters:
    the model is initialized and called as shapes only.
    """
    found: dict[Size, None] = {}  # a scanned layer is traced more than once, and told once
    repeats: dict[tuple[str, ...], int] = {}

    def record(path: tuple[str, ...], what: str, axes: str, array: Any) -> None:
        times = next((n for start, n in repeats.items() if path[: len(start)] == start), 1)
        found[Size("/".join(path), what, axes, array.shape, times)] = None

    def watch(call, args, kwargs, context):
        module, path = context.module, context.module.path
        if isinstance(module, Linear) and isinstance(module.parent, MultiHeadAttention) and module.name == "out":
            attention = module.parent
            (weights,) = attention.get_variable("intermediates", "weights")[-1:]
            record(attention.path, "weights = softmax(scores), for each head", "B N T S", weights)
            record(attention.path, "weighted sums of values, for each head", "B T N Hv", args[0])
        if context.method_name == "__call__" and isinstance(module, MultiHeadAttention):
            kwargs = kwargs | {"sow_weights": True}
        if context.method_name == "__call__" and isinstance(module, MultiHeadAttention | Stack):
            kwargs = {"deterministic": True} | kwargs
        result = call(*args, **kwargs)
        if context.method_name not in ("__call__", "head"):
            return result
        if isinstance(module, Linear) and isinstance(module.parent, MultiHeadAttention | FeedForward):
            record(path, *_LINEAR[module.name], result)
        elif isinstance(module, Embedding):
            record(path, "embedding: a row of the table for each token", "B T D", result)
        elif isinstance(module, nn.Dropout) and isinstance(module.parent, Stack):
            record(path[:-1], "with positions", "B T D", result)
        elif isinstance(module, LayerNorm | RMSNorm) and isinstance(module.parent, Block | Stack):
            record(path[:-1], module.name.replace("_", " "), "B T D", result)
        elif isinstance(module, Block):
            record(path, "the layer's output", "B T D", result[0])
        elif isinstance(module, Stack):
            record(path, "the stack's output", "B T D", result[0])
        elif context.method_name == "head":
            axes = "B C" if result.ndim == 2 else "B T V"
            record((), "logits", axes, result)
        return result

    def run(*arrays):
        params = model.init(jax.random.key(0), *arrays)["params"]
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            names = tuple(entry.key for entry in path)
            if "layers" in names:
                repeats[names[: names.index("layers") + 1]] = leaf.shape[0]
        with nn.intercept_methods(watch):
            return model.apply({"params": params}, *arrays, mutable=["intermediates"])

    jax.eval_shape(run, *inputs)
    return list(found)


def sizes_table(found: Sequence[Size]) -> str:
    """The sizes as aligned lines, indented by place."""
    rows = [("", "axes", "size")]
    shown: tuple[str, ...] = ()
    for size in found:
        place = tuple(part for part in size.place.split("/") if part and part not in _LINEAR)
        for depth, part in enumerate(place):
            if place[: depth + 1] != shown[: depth + 1]:
                note = f", {size.repeats} times" if part == "layers" and size.repeats > 1 else ""
                rows.append((f"{'  ' * depth}{part}{note}:", "", ""))
        shown = place
        rows.append((f"{'  ' * len(place)}{size.what}", size.axes, " x ".join(map(str, size.shape))))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{what:{widths[0]}}  {axes:{widths[1]}}  {size}".rstrip() for what, axes, size in rows)
