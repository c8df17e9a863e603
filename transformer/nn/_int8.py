"""8-bit weights for generation, where each decoding step takes about as long as reading all parameters from memory."""

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
    """Which parameters are quantized to 8 bits, and which of their axes share one scale."""

    pattern: str
    """a regular expression that must match the end of a parameter's path, starting after a "/" """
    inputs: tuple[int, ...]
    """axes that the matrix multiplication sums over, counted from the end: each output gets its own scale"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8:
    """An 8-bit parameter: integers from -127 to 127 times a scale.

    The method is absmax quantization with one scale per output (Dettmers et al. 2022, arXiv 2208.07339, section 2).
    """

    values: Leaf
    """int8, same shape as the parameter"""
    scale: Leaf
    """float32, same shape as the parameter except for size 1 on the input axes"""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return self.values.shape

    def array(self, dtype: DType = jnp.float32) -> Array:
        """Return the dequantized parameter, values * scale, in its original shape."""
        # Multiply in float32 and round once: the scale has more significant bits than a 16-bit dtype.
        return (self.values.astype(jnp.float32) * self.scale).astype(dtype)


def quantized(array: Float[Array, "..."], inputs: Sequence[int]) -> Int8:
    """Quantize an array of any shape to 8 bits, with one scale over the axes `inputs`. Zeros stay exactly zero."""
    array = jnp.asarray(array, jnp.float32)
    # s = max |w| / 127, q = round(w / s), so that w ~ q s with an error of at most s / 2 and no clipping.
    scale = jnp.abs(array).max(tuple(inputs), keepdims=True) / 127.0
    # An output whose weights are all zero has s = 0: divide by 1 instead, because 0 / 0 is NaN.
    return Int8(jnp.round(array / jnp.where(scale == 0.0, 1.0, scale)).astype(jnp.int8), scale)


def quantize(params: Mapping[str, Any], rules: Sequence[Rule] | None = None) -> tuple[dict[str, Any], list[Quantized]]:
    """Quantize parameters to 8 bits, for `generate` and any other call of a model. They can't be trained afterwards.

    Args:
        params: the tree of parameters.
        rules: which parameters to quantize; the first rule that matches a path applies. None: all parameters whose
            module supports `Int8` according to their declared axes (`nn/_parameter_axes.py`): the kernels of attention
            and feed-forward networks, the output kernel and the token embeddings. Norms, biases, position tables,
            routers and experts keep their dtype.

    Returns:
        The tree with quantized parameters, and a report with sizes and errors, one entry per rule.

    Raises:
        ValueError: no rule matches any parameter, or a parameter is already quantized.
    """
    groups: dict[str, list[tuple[Array, Int8]]] = {rule.pattern: [] for rule in rules or ()}
    if rules is None:
        groups = {end: [] for end, axes in declared().items() if axes.int8 and axes.inputs}

    def one(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if isinstance(leaf, Int8):
            raise ValueError(f"{name} is already quantized to 8 bits. Quantize the parameters as they were loaded.")
        pattern, inputs = _declared_rule(name, leaf) if rules is None else _first_rule(name, rules)
        if not inputs:
            return leaf
        kept = quantized(leaf, inputs)
        groups[pattern].append((leaf, kept))
        return kept

    tree = jax.tree_util.tree_map_with_path(one, params, is_leaf=lambda node: isinstance(node, Int8))
    report = [_compared(pattern, pairs) for pattern, pairs in groups.items() if pairs]
    if not report:
        raise ValueError(f"no parameter matches a rule: {', '.join(groups)}. Pass rules for these parameters.")
    return tree, report


def _declared_rule(path: str, leaf: Array) -> tuple[str, tuple[int, ...]]:
    axes = axes_of(path, leaf.ndim)
    return (end_of(path) or "", axes.inputs) if axes is not None and axes.int8 else ("", ())


def _first_rule(path: str, rules: Sequence[Rule]) -> tuple[str, tuple[int, ...]]:
    found = (rule for rule in rules if re.search(rf"(^|/)({rule.pattern})$", path))
    return next(((rule.pattern, rule.inputs) for rule in found), ("", ()))


@dataclass(frozen=True)
class Quantized:
    """The result of quantizing the parameters of one rule."""

    pattern: str
    """the pattern of the rule"""
    arrays: int
    """number of quantized parameters"""
    bytes_before: int
    """size of these parameters before quantization"""
    bytes_after: int
    """size after quantization, including scales"""
    relative_error: float
    """root mean square of the quantization error, divided by that of the parameters"""

    def __str__(self):
        sizes = f"{self.bytes_before / 2**20:.1f} MiB -> {self.bytes_after / 2**20:.1f} MiB"
        return f"{self.pattern}: {self.arrays} arrays, {sizes}, relative error {100 * self.relative_error:.2f} %"


def _compared(pattern: str, pairs: Sequence[tuple[Array, Int8]]) -> Quantized:
    # relative error = sqrt(sum (q s - w)^2 / sum w^2) over all parameters of the rule
    lost = sum(float(jnp.square(kept.array() - array).sum()) for array, kept in pairs)
    whole = sum(float(jnp.square(jnp.asarray(array, jnp.float32)).sum()) for array, _ in pairs)
    return Quantized(
        pattern=pattern,
        arrays=len(pairs),
        bytes_before=sum(array.nbytes for array, _ in pairs),
        bytes_after=sum(kept.values.nbytes + kept.scale.nbytes for _, kept in pairs),
        relative_error=float(np.sqrt(lost / whole)) if whole else 0.0,
    )
