"""Parse the text of compiled programs (HLO): computations, operations, the arrays of a type, and collectives."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
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
    """Return computations (name -> operations by name), the root of each, and the name of the first; ValueError: no
    ENTRY.
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


COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
"""HLO operations that communicate between devices"""

_MEGASCALE = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
"""collectives across TPU slices, which the compiler rewrites to a `send` to the host, whose runtime (Megascale)
communicates over the data-center network, and a `recv`"""


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a compiled program, per device, within slices or across slices."""

    kind: str
    count: int
    """number of executions in a run of the program"""
    result_bytes: int
    """total bytes of their results"""
    wire_bytes: int
    """bytes that the device sends, with ring algorithms"""
    over_network: bool = False
    """whether they communicate between slices over the data-center network (DCN)"""


def collective_bytes(one: Operation, kind: str, num_devices: int, result: Operation | None = None) -> tuple[int, int]:
    """Return the bytes of the result of a collective (None: `one`), and the bytes that a device sends."""
    n = _group_size(one, num_devices)
    sizes = [array.size for array in (result or one).arrays]
    result_bytes = sum(sizes)
    if one.kind == "all-gather-start":  # (operands, results)
        result_bytes = result_bytes * n // (n + 1)
    if one.kind == "collective-permute-start":  # (operand, result, two integers)
        result_bytes = max(sizes)
    share = (n - 1) / n
    factor = {"all-reduce": 2 * share, "reduce-scatter": n - 1, "collective-permute": 1.0}.get(kind, share)
    return result_bytes, round(factor * result_bytes)


def sent_across_slices(one: Operation) -> tuple[str, int, int] | None:
    """Return the kind of the collective across slices that an operation `send` begins, the bytes of its result, and the
    bytes that a device sends; None if the operation sends to something else.

    The compiler writes the slices that take part as "{1,2}x{0:15}" (slices, and devices of each slice), or as a list of
    groups of devices, {{100000,200000},{100001,200001}}.
    """
    found = re.search(r"_xla_megascale_target=\"?\{+([\d,:]+).*_xla_megascale_transfer_type=\"(\w+)\"", one.rest)
    if found is None or found[2] not in _MEGASCALE:
        return None
    kind, size = _MEGASCALE[found[2]], one.arrays[0].size
    ends = [part.split(":") for part in found[1].split(",")]
    n = sum(int(part[-1]) - int(part[0]) + 1 for part in ends)
    # `size` is that of the input. The result of an all-gather is n inputs, that of a reduce-scatter 1 / n of one.
    share = (n - 1) / n
    result, factor = {
        "all-reduce": (size, 2 * share),
        "all-gather": (n * size, n - 1),
        "reduce-scatter": (size // n, share),
        "collective-permute": (size, 1.0),
    }.get(kind, (size, share))
    return kind, result, round(factor * size)


def _group_size(one: Operation, num_devices: int) -> int:
    """Return the number of devices that take part in a collective together.

    The compiler writes their groups as a list, {{0,1},{2,3}}, as a shape, [2,2]<=[4], or as axes of a mesh,
    mesh['a'=4,'b'=16] {'b'}, where an axis may be only a part of 2 of the devices of its axis: {'b':(1)2}.
    """
    if groups := re.search(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]+)\})", one.rest):
        return int(groups[1] or groups[2].count(",") + 1)
    groups = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", one.rest)
    if groups is None:
        return num_devices
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", groups[1]))
    axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", groups[2])
    return math.prod(int(part or sizes[axis]) for axis, part in axes)
