"""8-bit and 4-bit weights for generation, where a decoding step takes about as long as reading the parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from transformer.nn import _few_rows as few_rows
from transformer.nn._axes import Array, DType, Float, Leaf
from transformer.nn._parameter_axes import axes_of, declared, end_of
from transformer.nn.quantization._four_bits import FourBits, in_blocks, packed
from transformer.nn.quantization._linear import linear
from transformer.nn.quantization._schemes import Scheme, integer_linear

GROUP_SIZES = (32, 64, 128)
"""numbers of 4-bit weights that can share a scale"""
GROUP_SIZE = 32
"""default group size"""

Bits = Literal[4, 8]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which parameters are quantized, to how many bits, and which of their axes share one scale."""

    pattern: str
    """a regular expression that must match the end of a parameter's path, starting after a "/" """
    inputs: tuple[int, ...]
    """axes that the matrix multiplication sums over, counted from the end: each output gets its own scale; with 4 bits,
    the groups run along the last of these axes"""
    bits: Bits = 8
    """8: `Int8`, 4: `Int4`"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8:
    """An 8-bit parameter: integers of -127 to 127 times a scale per output (Dettmers et al. 2022, arXiv 2208.07339)."""

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

    def product(self, x: Array, contract: int = 1, quantization: Scheme | None = None) -> Array:
        """Multiply x by the kernel, as `Encoded`."""
        # sum_i x_i (q_ij s_j) = s_j sum_i x_i q_ij: multiply by the integers, then scale each output once (Dettmers et
        # al. 2022, arXiv 2208.07339, section 2). No dequantized kernel is stored. With a scheme for integers, x is
        # rounded to integers too, one scale per row. Other schemes leave x as it is.
        if quantization is not None and quantization.dtype == "int8":
            return integer_linear(x, self.values, self.scale, contract, quantization)
        scale = self.scale.reshape(self.shape[contract:]).astype(x.dtype)
        inputs, lead = math.prod(self.shape[:contract]), x.shape[: x.ndim - contract]
        if few_rows.apply_to(x, math.prod(lead)):
            (y,) = few_rows.products(x.reshape(-1, inputs), (self.values.reshape(inputs, -1),))
            y = y.reshape(*lead, *self.shape[contract:])
        else:
            # Exact: integers up to 256 have a bfloat16 representation.
            y = linear(x, self.values.astype(x.dtype), contract=contract)
        return y * scale.reshape((1,) * (y.ndim - scale.ndim) + scale.shape)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int4(FourBits):
    """A 4-bit parameter: integers from -8 to 7 times a scale per group of weights along one input axis.

    The method is that of the format Q4_0 of ggml: the weight of largest magnitude in a group becomes -8.
    """

    scale: Leaf
    """bfloat16, one scale per group; the axis `axis` enumerates the groups"""

    def array(self, dtype: DType = jnp.float32) -> Array:
        """Return the dequantized parameter, integer * scale, in its original shape."""
        # Stored as 0 to 15 for -8 to 7. With 16 bits of scale for 32 weights, a weight takes 4.5 bits.
        return self._decoded(lambda codes: codes.astype(jnp.float32) - 8, self.scale, dtype)


def quantized_int4(array: Float[Array, "..."], axis: int, group_size: int = GROUP_SIZE) -> Int4:
    """Quantize an array to 4 bits, in groups along `axis` (counted from the end). Zeros stay exactly zero.

    If `group_size` does not divide the axis, groups have the size of its largest even divisor below; an odd axis is
    padded. The error of a weight is at most one scale, and half of it unless the weight is clipped to 7.
    """
    array = jnp.asarray(array, jnp.float32)
    place, size = array.ndim + axis, array.shape[axis]
    # (..., size, ...) -> (..., groups, group size, ...)
    groups = in_blocks(array, place, group_size)
    largest = jnp.abs(groups).argmax(place + 1, keepdims=True)
    # s = w / -8 for the weight w of largest magnitude, which may have either sign; rounded first, so that the integers
    # belong to the scale that is stored.
    scale = (jnp.take_along_axis(groups, largest, place + 1) / -8.0).astype(jnp.bfloat16)
    divisor = scale.astype(jnp.float32)
    # The largest weight gives -8. Its negative would give 8, which has no code and is clipped to 7.
    codes = jnp.clip(jnp.round(groups / jnp.where(divisor == 0.0, 1.0, divisor)), -8, 7) + 8
    return Int4(packed(codes, place), axis, size, scale.squeeze(place + 1))


def quantized(array: Float[Array, "..."], inputs: Sequence[int]) -> Int8:
    """Quantize an array of any shape to 8 bits, with one scale over the axes `inputs`. Zeros stay exactly zero."""
    array = jnp.asarray(array, jnp.float32)
    # s = max |w| / 127, q = round(w / s), so that w ~ q s with an error of at most s / 2 and no clipping.
    scale = jnp.abs(array).max(tuple(inputs), keepdims=True) / 127.0
    # An output whose weights are all zero has s = 0: divide by 1 instead, because 0 / 0 is NaN.
    return Int8(jnp.round(array / jnp.where(scale == 0.0, 1.0, scale)).astype(jnp.int8), scale)


def quantize(
    params: Mapping[str, Any], rules: Sequence[Rule] | None = None, *, bits: Bits = 8, group_size: int = GROUP_SIZE
) -> tuple[dict[str, Any], list[Quantized]]:
    """Quantize parameters to 8 or 4 bits, for `generate` and any other call of a model. They can't be trained then.

    Args:
        params: the tree of parameters.
        rules: which parameters to quantize; the first rule that matches a path applies. None: all parameters whose
            module supports `Int8` according to their declared axes (`nn/_parameter_axes.py`): the kernels of attention
            and feed-forward networks, the output kernel and the token embeddings. Norms, biases, position tables,
            routers and experts keep their dtype.
        bits: bits of the kernels in the layers without `rules`; the output kernel and the token embeddings have 8 bits
            in both cases, because errors in them matter more.
        group_size: number of 4-bit weights that share a scale: 32, 64 or 128.

    Returns:
        The tree with quantized parameters, and a report with sizes and errors, one entry per rule.

    Raises:
        ValueError: a rule that applies to no parameter, parameters of which none can be quantized, a parameter that is
            already quantized, or an unknown group size.
    """
    _check_sizes(bits, group_size)
    groups: dict[str, list[tuple[Array, Int8 | Int4]]] = {rule.pattern: [] for rule in rules or ()}
    if rules is None:
        groups = {end: [] for end, axes in declared().items() if axes.int8 and axes.inputs}

    def one(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        _check_plain(name, leaf)
        rule = _declared_rule(name, leaf.ndim, bits) if rules is None else _first_rule(name, rules)
        if rule is None:
            return leaf
        kept = quantized(leaf, rule.inputs) if rule.bits == 8 else quantized_int4(leaf, rule.inputs[-1], group_size)
        groups[rule.pattern].append((leaf, kept))
        return kept

    tree = jax.tree_util.tree_map_with_path(one, params, is_leaf=lambda node: isinstance(node, Int8 | Int4))
    report = [_compared(pattern, pairs) for pattern, pairs in groups.items() if pairs]
    unused = [pattern for pattern, pairs in groups.items() if not pairs]
    if not report or (rules is not None and unused):
        raise ValueError(f"no parameter matches a rule: {', '.join(unused)}. Pass rules for these parameters.")
    return tree, report


def _check_plain(path: str, leaf: object) -> None:
    if isinstance(leaf, Int8 | Int4):
        number = 8 if isinstance(leaf, Int8) else 4
        raise ValueError(f"{path} is already quantized to {number} bits. Quantize the parameters as they were loaded.")


def _check_sizes(bits: int, group_size: int) -> None:
    if bits not in (4, 8) or group_size not in GROUP_SIZES:
        raise ValueError(
            f"bits must be 4 or 8, and group_size one of {', '.join(map(str, GROUP_SIZES))}; got {bits} and "
            f"{group_size}. Change them."
        )


def quantized_shapes(params: Mapping[str, Any], bits: Bits, group_size: int) -> dict[str, Any]:
    """Return the shapes of `quantize(params, bits=bits, group_size=group_size)`, for a tree of shapes."""

    def one(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if (rule := _declared_rule(name, leaf.ndim, bits)) is None:
            return leaf
        if rule.bits == 8:
            return jax.eval_shape(lambda array: quantized(array, rule.inputs), leaf)
        return jax.eval_shape(lambda array: quantized_int4(array, rule.inputs[-1], group_size), leaf)

    return jax.tree_util.tree_map_with_path(one, params)


def _declared_rule(path: str, num_axes: int, bits: Bits) -> Rule | None:
    axes = axes_of(path, num_axes)
    if axes is None or not axes.int8 or not axes.inputs:
        return None
    return Rule(pattern=end_of(path) or "", inputs=axes.inputs, bits=bits if axes.role == "hidden" else 8)


def _first_rule(path: str, rules: Sequence[Rule]) -> Rule | None:
    return next((rule for rule in rules if re.search(rf"(^|/)({rule.pattern})$", path)), None)


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


def _compared(pattern: str, pairs: Sequence[tuple[Array, Int8 | Int4]]) -> Quantized:
    # relative error = sqrt(sum (q s - w)^2 / sum w^2) over all parameters of the rule
    lost = sum(float(jnp.square(kept.array() - array).sum()) for array, kept in pairs)
    whole = sum(float(jnp.square(jnp.asarray(array, jnp.float32)).sum()) for array, _ in pairs)
    return Quantized(
        pattern=pattern,
        arrays=len(pairs),
        bytes_before=sum(array.nbytes for array, _ in pairs),
        bytes_after=sum(leaf.nbytes for _, kept in pairs for leaf in jax.tree.leaves(kept)),
        relative_error=float(np.sqrt(lost / whole)) if whole else 0.0,
    )
