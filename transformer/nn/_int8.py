"""Weights in 8 bits: for generating, where a step takes as long as reading the parameters does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.nn._axes import Array, DType, Float, Leaf
from transformer.nn._parameter_axes import axes_of, declared, end_of


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which parameters are kept in 8 bits, and over which of their axes one scale holds."""

    pattern: str
    """a regular expression that the end of a parameter's path matches, from a "/" on"""
    inputs: tuple[int, ...]
    """axes that a product sums over, counted from the end: every output has a scale of its own"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8:
    """An array of whole numbers from -127 to 127 times a scale, in place of a parameter (Dettmers et al. 2022, arXiv
    2208.07339, section 2: absmax quantization, a scale for each output).
    """

    values: Leaf
    """int8, of the parameter's shape"""
    scale: Leaf
    """float32, of the same shape with size 1 in place of inputs"""

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the parameter."""
        return self.values.shape

    def array(self, dtype: DType = jnp.float32) -> Array:
        """What it stands for, of the parameter's shape."""
        return (self.values.astype(jnp.float32) * self.scale).astype(dtype)


def quantized(array: Float[Array, "..."], inputs: Sequence[int]) -> Int8:
    """An array of any shape in 8 bits, with one scale over the axes `inputs`. Zeros stay zeros."""
    array = jnp.asarray(array, jnp.float32)
    scale = jnp.abs(array).max(tuple(inputs), keepdims=True) / 127.0
    return Int8(jnp.round(array / jnp.where(scale == 0.0, 1.0, scale)).astype(jnp.int8), scale)


def quantize(params: Mapping[str, Any], rules: Sequence[Rule] | None = None) -> tuple[dict[str, Any], list[Quantized]]:
    """A tree of parameters with those that a rule names in 8 bits, for `generate` and whatever else calls a model; and
    what that saves and costs, rule by rule. The parameters may be anything but trained on.

    Without rules these are all parameters whose declared axes say that their module computes with `Int8`
    (`nn/_parameter_axes.py`): the maps of attention and feed-forwards, the output map and the tables of tokens.
    Norms, biases, position tables, routers and experts keep their type.

    Raises:
        ValueError: no rule names any of them, or one is in 8 bits already.
    """
    groups: dict[str, list[tuple[Array, Int8]]] = {rule.pattern: [] for rule in rules or ()}
    if rules is None:
        groups = {end: [] for end, axes in declared().items() if axes.int8 and axes.inputs}

    def one(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if isinstance(leaf, Int8):
            raise ValueError(f"{name} is in 8 bits already. Quantize the parameters as they were loaded.")
        pattern, inputs = _declared_rule(name, leaf) if rules is None else _first_rule(name, rules)
        if not inputs:
            return leaf
        kept = quantized(leaf, inputs)
        groups[pattern].append((leaf, kept))
        return kept

    tree = jax.tree_util.tree_map_with_path(one, params, is_leaf=lambda node: isinstance(node, Int8))
    report = [_compared(pattern, pairs) for pattern, pairs in groups.items() if pairs]
    if not report:
        raise ValueError(f"no parameter matches a rule: {', '.join(groups)}. Give rules for these parameters.")
    return tree, report


def _declared_rule(path: str, leaf: Array) -> tuple[str, tuple[int, ...]]:
    axes = axes_of(path, leaf.ndim)
    return (end_of(path) or "", axes.inputs) if axes is not None and axes.int8 else ("", ())


def _first_rule(path: str, rules: Sequence[Rule]) -> tuple[str, tuple[int, ...]]:
    found = (rule for rule in rules if re.search(rf"(^|/)({rule.pattern})$", path))
    return next(((rule.pattern, rule.inputs) for rule in found), ("", ()))


@dataclass(frozen=True)
class Quantized:
    """What became of the parameters of a rule."""

    pattern: str
    """of the rule"""
    arrays: int
    """how many parameters it names"""
    bytes_before: int
    """of these parameters"""
    bytes_after: int
    """of the same in 8 bits, scales included"""
    relative_error: float
    """root mean square of what was lost, over that of the parameters"""

    def __str__(self):
        sizes = f"{self.bytes_before / 2**20:.1f} MiB -> {self.bytes_after / 2**20:.1f} MiB"
        return f"{self.pattern}: {self.arrays} arrays, {sizes}, relative error {100 * self.relative_error:.2f} %"


def _compared(pattern: str, pairs: Sequence[tuple[Array, Int8]]) -> Quantized:
    lost = sum(float(jnp.square(kept.array() - array).sum()) for array, kept in pairs)
    whole = sum(float(jnp.square(jnp.asarray(array, jnp.float32)).sum()) for array, _ in pairs)
    return Quantized(
        pattern=pattern,
        arrays=len(pairs),
        bytes_before=sum(array.nbytes for array, _ in pairs),
        bytes_after=sum(kept.values.nbytes + kept.scale.nbytes for _, kept in pairs),
        relative_error=float(np.sqrt(lost / whole)) if whole else 0.0,
    )
