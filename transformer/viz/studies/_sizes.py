"""Shapes of all arrays between tokens and logits, recorded while the model is traced; nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax

from transformer.nn._attention import MultiHeadAttention
from transformer.nn._axes import Array, PyTree
from transformer.nn._blocks import Block
from transformer.nn._stacks import Stack
from transformer.nn.layers._layers import Embedding, FeedForward, Linear
from transformer.nn.layers._norms import LayerNorm, RMSNorm

_LINEAR = {
    "query": ("query = x W_Q, all heads in one matrix multiplication", "B T N H"),
    "key": ("key = x W_K", "B S K H"),
    "value": ("value = x W_V", "B S K Hv"),
    "out": ("concatenated heads, times W_O", "B T D"),
    "up": ("x W_1", "B T F"),
    "gate": ("x W_gate", "B T F"),
    "down": ("act(...) W_2", "B T D"),
}


@dataclass(frozen=True)
class Size:
    """Shape of the result of one step of a model."""

    place: str
    """path of the module, as in the parameters; repeated layers are recorded once"""
    what: str
    """description of the result"""
    axes: str
    """axis letters of `transformer.nn._axes`, such as "B T D" """
    shape: tuple[int, ...]
    """size of each axis"""
    repeats: int = 1
    """number of consecutive layers of the same kind"""


def sizes(model: nn.Module, *inputs: Any) -> list[Size]:
    """Return the shape of the result of each step of `model`, in the order of computation.

    No parameters are needed: the model is only traced (`jax.eval_shape`).

    Args:
        model: a model of `transformer.nn.models`, or a stack, block or attention module.
        inputs: arrays or `jax.ShapeDtypeStruct`s.
    """
    trace = _Trace()

    def run(*arrays):
        params = model.init(jax.random.key(0), *arrays)["params"]
        trace.count_repeats(params)
        with nn.intercept_methods(trace.intercept):
            return model.apply({"params": params}, *arrays, mutable=["intermediates"])

    jax.eval_shape(run, *inputs)
    return list(trace.found)


class _Trace:
    """Record sizes while a model is traced; pass `intercept` to `nn.intercept_methods`."""

    def __init__(self):
        self.found: dict[Size, None] = {}  # a dict, because a scanned layer is traced more than once
        self._repeats: dict[tuple[str, ...], int] = {}

    def count_repeats(self, params: PyTree) -> None:
        """Read from the parameters how often the layers of each stack repeat."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            names = tuple(entry.key for entry in path)
            if "layers" in names:
                self._repeats[names[: names.index("layers") + 1]] = leaf.shape[0]

    def record(self, path: tuple[str, ...], what: str, axes: str, array: Array) -> None:
        """Add the shape of an array that the module at a path computes."""
        times = next((n for start, n in self._repeats.items() if path[: len(start)] == start), 1)
        self.found[Size("/".join(path), what, axes, array.shape, times)] = None

    def intercept(
        self, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any], context: nn.module.InterceptorContext
    ) -> Any:
        """Call a method of a module, without dropout and with sown attention weights, and record its result."""
        module = context.module
        if isinstance(module, Linear) and isinstance(module.parent, MultiHeadAttention) and module.name == "out":
            attention = module.parent
            (weights,) = attention.get_variable("intermediates", "weights")[-1:]
            self.record(attention.path, "weights = softmax(scores), per head", "B N T S", weights)
            self.record(attention.path, "weighted sums of the values, per head", "B T N Hv", args[0])
        if context.method_name == "__call__" and isinstance(module, MultiHeadAttention | Stack):
            kwargs = {"deterministic": True} | kwargs
            kwargs |= {"sow_weights": True} if isinstance(module, MultiHeadAttention) else {}
        result = call(*args, **kwargs)
        if context.method_name in ("__call__", "head") and (step := _step(module, context.method_name, result)):
            self.record(*step)
        return result


def _step(module: nn.Module, method: str, result: Any) -> tuple[tuple[str, ...], str, str, Any] | None:
    """Return path, description, axes and array of the result of a module; None if it is not a separate step."""
    path, parent = module.path, module.parent
    if isinstance(module, Linear) and isinstance(parent, MultiHeadAttention | FeedForward):
        return path, *_LINEAR[module.name], result
    if isinstance(module, Embedding):
        return path, "embedding: one row of the table per token", "B T D", result
    if isinstance(module, nn.Dropout) and isinstance(parent, Stack):
        return path[:-1], "with positions", "B T D", result
    if isinstance(module, LayerNorm | RMSNorm) and isinstance(parent, Block | Stack):
        return path[:-1], module.name.replace("_", " "), "B T D", result
    if isinstance(module, Block):
        return path, "the layer's output", "B T D", result.x
    if isinstance(module, Stack):
        return path, "the stack's output", "B T D", result[0]
    if method == "head":
        return (), "logits", "B C" if result.ndim == 2 else "B T V", result
    return None


def sizes_table(found: Sequence[Size]) -> str:
    """Format the sizes as aligned lines, indented by module."""
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
