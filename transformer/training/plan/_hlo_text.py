"""Parse the text of compiled programs (HLO): computations, operations, the arrays of a type, and collectives."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

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


def async_results(types: str) -> list[Array]:
    """Parse the results in the type of an asynchronous operation, "((operands), results)" or "((operands), results,
    u32[])", where the last one is the context of the operation.
    """
    results = types[types.index(")") + 1 :]
    return arrays(results.removesuffix("u32[])") if results.count("[") > 1 else results)


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
    """All collectives of one kind in a compiled program, per device, over fast links or over the network."""

    kind: str
    count: int
    """number of executions in a run of the program"""
    result_bytes: int
    """total bytes of their results"""
    wire_bytes: int
    """bytes that the device sends, with ring algorithms; over the network, its share of what its host sends"""
    over_network: bool = False
    """whether they communicate over the data-center network: between slices of TPUs, or between hosts of GPUs"""


def collective_bytes(one: Operation, kind: str, num_devices: int, result: Operation | None = None) -> tuple[int, int]:
    """Return the bytes of the result of a collective (None: `one`), and the bytes that a device sends."""
    n = 2 if kind == "collective-permute" else len(replica_groups(one, num_devices)[0])
    sizes = [array.size for array in (result or one).arrays]
    result_bytes = sum(sizes)
    if one.kind.endswith("-start") and one.types.startswith("(("):  # ((operands), results)
        result_bytes = sum(array.size for array in async_results(one.types))
    elif one.kind == "all-gather-start":  # (operand, result)
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


def replica_groups(one: Operation, num_devices: int) -> list[list[int]]:
    """Return the groups of devices that communicate in a collective, as indices into the devices of the program.

    The compiler writes them as a list, {{0,1},{2,3}}, or as a shape, [2,4]<=[4,2]T(1,0): the numbers up to 8 in the
    shape (4, 2), transposed, in two groups of 4. A third form has axes of a mesh, mesh['a'=4,'b'=16] {'b'}, where an
    axis may be only a part of 2 of the devices of its axis, {'b':(1)2}: (1) is the product of the parts before it. For
    a permutation, each pair of source and target is a group. Without groups all devices communicate.
    """
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", one.rest):
        return _lists(pairs[1])
    if groups := re.search(r"replica_groups=\[(\d+),(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", one.rest):
        return _reordered(groups[3]).reshape(int(groups[1]), int(groups[2])).tolist()
    if groups := re.search(r"replica_groups=\{((?:\{[\d,]+\},?)+)\}", one.rest):
        return _lists(groups[1])
    order = r"\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+"
    groups = re.search(rf"replica_groups=@?mesh\[([^\]]*)\](?:, ?device_ids=\(({order})\))? *\{{([^}}]*)\}}", one.rest)
    if groups is None:
        return [list(range(num_devices))]
    sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", groups[1])}
    count, order = math.prod(sizes.values()), groups[2]
    if order is None:
        devices = np.arange(count)
    elif order.startswith("["):
        devices = _reordered(order)
    else:
        devices = np.array(order.split(","), int)
    return _over_axes(devices, sizes, re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", groups[3]))


def _lists(text: str) -> list[list[int]]:
    return [[int(number) for number in part.split(",")] for part in re.findall(r"\{([\d,]+)\}", text)]


def _reordered(text: str) -> np.ndarray:
    """Return the numbers of a shape such as "[4,2]T(1,0)": those up to 8 in the shape (4, 2), transposed."""
    shape, order = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()
    sizes = [int(size) for size in shape.split(",")]
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return (numbers if order is None else numbers.transpose([int(axis) for axis in order.split(",")])).reshape(-1)


def _over_axes(devices: np.ndarray, sizes: dict[str, int], parts: list[tuple[str, str, str]]) -> list[list[int]]:
    """Return the groups of the devices of a mesh that differ only along parts of axes: (axis, product before, size)."""
    shape: list[int] = []
    along: list[int] = []  # indices into `shape` of the parts
    for axis, size in sizes.items():
        own = sorted((int(before or 1), int(part or size)) for name, before, part in parts if name == axis)
        done = 1
        for before, part in own:
            shape += [before // done, part]
            along.append(len(shape) - 1)
            done = before * part
        shape.append(size // done)
    rest = [index for index in range(len(shape)) if index not in along]
    count = math.prod(shape[index] for index in along)
    return devices.reshape(shape).transpose(rest + along).reshape(-1, count).tolist()
