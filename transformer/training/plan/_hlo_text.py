"""Parse the text of compiled programs (HLO): computations, their operations, and the arrays of a type."""

from __future__ import annotations

import functools
import math
import re
from typing import NamedTuple

HOST_SPACE = 5
"""memory space of the host in the text of TPU programs: S(5)"""


class Array(NamedTuple):
    """Shape, size and place of an array of a program."""

    shape: tuple[int, ...]
    size: int
    """bytes of the values"""
    bytes: int
    """bytes in memory, where arrays are padded to whole tiles"""
    space: int
    """memory space: 0 for the HBM, `HOST_SPACE`, or another one on the chip"""

    @property
    def in_hbm(self) -> bool:
        return self.space == 0

    @property
    def on_host(self) -> bool:
        return self.space == HOST_SPACE


class Operation(NamedTuple):
    """An operation of a computation."""

    types: str
    """type of its result, with layouts"""
    kind: str
    """name of the operation, such as "dot" """
    operands: list[str]
    """names of its operands; for a constant or a parameter, its value or index is the last one"""
    rest: str
    """attributes and metadata"""

    @property
    def arrays(self) -> list[Array]:
        return arrays(self.types)


_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.+?) ([a-z][a-z0-9-]*)\((.*)$")
_TYPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_WIDTH = re.compile(r"\d+")


@functools.cache
def arrays(types: str) -> list[Array]:
    """Parse the arrays of a type such as "(f32[4,128]{1,0:T(4,128)S(1)}, s32[])".

    {1,0} is the order of the axes from minor to major, T(4,128) the tile, and S(n) with n > 0 a memory space on the
    chip, or the host's; without S the array is in the HBM.
    """
    found = []
    for dtype, sizes, layout in _TYPE.findall(types):
        shape = tuple(map(int, filter(None, sizes.split(","))))
        bits = 8 if dtype == "pred" else int(_WIDTH.search(dtype)[0])
        padded = list(shape)
        order, _, tiling = layout.partition(":")
        if tile := re.match(r"T\(([\d,]+)\)", tiling):  # the HBM stores whole tiles: round the sizes up
            for axis, size in zip(order.split(","), reversed(tile[1].split(",")), strict=False):
                if axis:
                    padded[int(axis)] = -(-shape[int(axis)] // int(size)) * int(size)
        sizes = (math.prod(shape) * bits // 8, math.prod(padded) * bits // 8)
        space = re.search(r"S\((\d+)\)", tiling)
        found.append(Array(shape, *sizes, int(space[1]) if space else 0))
    return found


def parsed(hlo: str) -> tuple[dict[str, dict[str, Operation]], dict[str, str], str]:
    """Return the computations (name -> operations by name), the root of each computation, and the name of the first.

    ValueError if the text has no ENTRY computation.
    """
    inside: dict[str, dict[str, Operation]] = {}
    roots: dict[str, str] = {}
    entry = name = ""
    for line in hlo.splitlines():
        if begin := _HEAD.match(line):
            name = begin[2]
            inside[name] = {}
            entry = name if begin[1] else entry
        elif found := _LINE.match(line):
            root, own, types, kind, rest = found.groups()
            operands, _, rest = rest.partition(")")
            inside[name][own] = Operation(types, kind, re.findall(r"%([\w.-]+)", operands), rest)
            if kind in ("constant", "parameter"):
                inside[name][own].operands.append(operands)
            if root:
                roots[name] = own
    if not entry:
        raise ValueError(
            f"the text of a compiled program must have an ENTRY computation, but this one has none: {hlo[:60]!r}. "
            "Pass the result of `compiled.as_text()`."
        )
    return inside, roots, entry


def called(one: Operation, role: str) -> str:
    """Return the name of the computation that an operation calls in a role such as "body"."""
    return re.search(rf"\b{role}=%?([\w.-]+)", one.rest)[1]
