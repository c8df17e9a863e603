"""Logical axes of parameters: each module declares those of its own parameters, and other modules look them up.

A declaration is one line next to the module that creates the parameter:

    class Linear(nn.Module):
        parameter_axes = declare({"query/kernel": "embed -> heads _"})

It names the axes in order ("_" is an axis without a name) and states which of them a matrix multiplication sums over.
It has five uses: `sharding` (how a parameter is sharded), `training.optimizers` (which matrices Muon orthogonalizes),
`lora` (which matrices can get low-rank updates), `int8` (which axes share a scale) and `training.flops` (the matrix
multiplications of a training step). `sharding.with_logical_axes` passes the same axes to Flax's tools.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

LAYERS = "layers"
"""logical name of the leading axis of parameters whose layers are stacked; no mesh axis splits it by default"""

Role = Literal["hidden", "input", "output", "vector"]
"""hidden: a matrix between hidden features; input: a table or map from tokens, pixels or numbers to hidden features;
output: a matrix from hidden features to logits or router scores; vector: not a matrix (a scale, a bias, a sink)"""


@dataclass(frozen=True, kw_only=True)
class ParameterAxes:
    """The axes of a parameter, without that of stacked layers; ValueError if inputs and role don't fit together."""

    names: tuple[str | None, ...]
    """logical name of each axis, None for an axis without a name"""
    inputs: tuple[int, ...] = ()
    """axes that a matrix multiplication sums over, counted from the end; () for a vector"""
    outputs: tuple[int, ...] = ()
    """output axes of the multiplication, counted from the end; axes that are neither enumerate separate maps"""
    role: Role = "vector"
    int8: bool = False
    """whether the module that owns the parameter also supports `int8.Int8`"""

    def __post_init__(self):
        if not self.names or set(self.inputs) & set(self.outputs) or bool(self.inputs) != (self.role != "vector"):
            raise ValueError(f"{self} is inconsistent: a matrix has inputs, outputs and a role, a vector has neither.")

    @property
    def is_table(self) -> bool:
        """Whether the parameter is a lookup table (V, D): as an output map it would sum over the last axis."""
        return self.role == "input" and self.inputs == (-1,)


_DECLARED: dict[str, ParameterAxes] = {}


def declare(axes: Mapping[str, str], *, role: Role = "hidden", int8: bool | None = None) -> Mapping[str, ParameterAxes]:
    """Declare the axes of parameters by the end of their path, and return them parsed.

    A path matches if its last components equal the end ("conv_*/kernel" contains a wildcard); if several ends match,
    the one with the most components applies. Axes are "in -> out" or "out <- in" for a matrix, "feed_forward" for a
    vector, and "maps: in -> out" for a stack of separate matrices. `role` is that of the matrices; `int8` says whether
    the module supports `int8.Int8`, None: True for hidden matrices.
    """
    parsed = {}
    for end, text in axes.items():
        found = _parse(text, role, role == "hidden" if int8 is None else int8)
        # Several modules may declare the same end with the same axes, such as query/kernel.
        if _DECLARED.get(end, found) != found:
            raise ValueError(
                f"the axes of {end!r} are declared as {text!r}, but also as {_DECLARED[end]}. Rename the parameter, "
                f"or declare a longer end of its path."
            )
        parsed[end] = found
    _DECLARED.update(parsed)
    end_of.cache_clear()
    return MappingProxyType(parsed)


def declared() -> Mapping[str, ParameterAxes]:
    """Return all declarations by end of a path; those of this package need `transformer.nn.models` to be imported."""
    return MappingProxyType(_DECLARED)


def axes_of(path: str, ndim: int) -> ParameterAxes | None:
    """Return the declared axes of the parameter at `path` ("decoder/layers/slot_0/.../query/kernel").

    None if no declaration matches, or only one with another number of axes. The path of an optimizer state ends in the
    path of its parameter (`0/mu/decoder/...`), so it gets the same axes.
    """
    found = _DECLARED.get(end_of(path) or "")
    # 1: with the leading axis of stacked layers
    return found if found is not None and ndim - len(found.names) in (0, 1) else None


@functools.lru_cache(maxsize=65_536)
def end_of(path: str) -> str | None:
    """Return the declared end that applies to a path: most components first, literal ends before wildcards.

    The arrays of a quantized kernel have its axes: `.../kernel/codes` counts as `.../kernel`.
    """
    parts = re.sub(r"/kernel/(values|scale|codes|absmax)$", "/kernel", path).split("/")

    def matches(end: str) -> bool:
        ends = end.split("/")
        return len(ends) <= len(parts) and all(map(fnmatch.fnmatchcase, parts[-len(ends) :], ends))

    # For example, experts/up/kernel wins over up/kernel, and token_type_embedding/embedding over *embedding/embedding.
    return max(filter(matches, _DECLARED), key=lambda end: (end.count("/"), "*" not in end), default=None)


def parameter_axes(path: str, shape: Sequence[int]) -> tuple[str | None, ...]:
    """Return the logical name of each axis of a parameter, "layers" for stacked ones; () if it is not declared."""
    found = axes_of(path, len(shape))
    return () if found is None else (*[LAYERS] * (len(shape) - len(found.names)), *found.names)


def axis_names() -> set[str]:
    """Return the logical axis names of all declared parameters, and "layers"."""
    return {name for axes in _DECLARED.values() for name in axes.names if name is not None} | {LAYERS}


def _parse(text: str, role: Role, int8: bool) -> ParameterAxes:
    maps, colon, product = text.rpartition(":")
    left, arrow, right = next((product.partition(a) for a in ("->", "<-") if a in product), (product, "", ""))
    first, second = left.split(), right.split()
    if not first or bool(arrow) != bool(second) or (colon and not (arrow and maps.split())):
        raise ValueError(f"axes must be like 'embed -> heads _', 'vocab <- embed' or 'heads', got {text!r}.")
    names = _names(maps.split() + first + second)
    if not arrow:
        return ParameterAxes(names=names)
    # Counted from the end, so a leading axis of stacked layers does not change them. "expert: embed -> feed_forward"
    # has inputs (-2,) and outputs (-1,), and "embed -> heads _" inputs (-3,) and outputs (-2, -1).
    left_axes = tuple(range(-len(first) - len(second), -len(second)))
    right_axes = tuple(range(-len(second), 0))
    inputs, outputs = (left_axes, right_axes) if arrow == "->" else (right_axes, left_axes)
    return ParameterAxes(names=names, inputs=inputs, outputs=outputs, role=role, int8=int8)


def _names(words: Iterable[str]) -> tuple[str | None, ...]:
    return tuple(None if word == "_" else word for word in words)
