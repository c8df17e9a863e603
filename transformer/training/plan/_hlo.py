"""Count the cost of a compiled program from its text (HLO); loop bodies count once per iteration."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
"""HLO operations that communicate between devices"""


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a compiled program, per device."""

    kind: str
    count: int
    """number of executions in a run of the program"""
    result_bytes: int
    """total bytes of their results"""
    wire_bytes: int
    """bytes that the device sends, with ring algorithms"""


@dataclass(frozen=True)
class Cost:
    """Cost of one run of a program, per device."""

    flops: int
    """FLOPs of matrix multiplications and convolutions, without those inside `kernels`"""
    kernels: int
    """number of calls of custom kernels (Pallas)"""
    hbm_bytes: int
    """bytes read from and written to the HBM"""
    collectives: list[Collective]
    """collectives by kind"""
    loops_known: bool
    """whether the number of iterations of every loop is known"""
    loops_bounded: bool
    """whether the number of iterations of every loop, or an upper bound of it, is known"""

    @property
    def wire_bytes(self) -> int:
        """Bytes that the device sends to others."""
        return sum(one.wire_bytes for one in self.collectives)


class _Array(NamedTuple):
    shape: tuple[int, ...]
    size: int
    """bytes of the values"""
    bytes: int
    """bytes in memory, where arrays are padded to whole tiles"""
    in_hbm: bool


class _Operation(NamedTuple):
    types: str
    kind: str
    operands: list[str]
    rest: str

    @property
    def arrays(self) -> list[_Array]:
        return _arrays(self.types)


_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.+?) ([a-z][a-z0-9-]*)\((.*)$")
_TYPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_WIDTH = re.compile(r"\d+")
_CALLEES = re.compile(r"\b(?:calls|to_apply|\w+_computations?)=(\{[^}]*\}|%?[\w.-]+)")
_SILENT = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier")
_VIEWS = ("bitcast", "copy", "reshape")
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # index of the operand with the new values


@functools.cache
def _arrays(types: str) -> list[_Array]:
    """Parse the arrays of a type such as "(f32[4,128]{1,0:T(4,128)S(1)}, s32[])".

    {1,0} is the order of the axes from minor to major, T(4,128) the tile, and S(n) with n > 0 a memory space on the
    chip; without S the array is in the HBM.
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
        found.append(_Array(shape, *sizes, "S(" not in tiling))
    return found


class Program:
    """A compiled program, parsed from its text.

    Raises:
        ValueError: the text has no ENTRY computation.
    """

    def __init__(self, hlo: str):
        self._inside: dict[str, dict[str, _Operation]] = {}
        self._roots: dict[str, str] = {}
        self._entry = name = ""
        for line in hlo.splitlines():
            if begin := _HEAD.match(line):
                name = begin[2]
                self._inside[name] = {}
                self._entry = name if begin[1] else self._entry
            elif found := _LINE.match(line):
                root, own, types, kind, rest = found.groups()
                operands, _, rest = rest.partition(")")
                self._inside[name][own] = _Operation(types, kind, re.findall(r"%([\w.-]+)", operands), rest)
                if kind in ("constant", "parameter"):
                    self._inside[name][own].operands.append(operands)
                if root:
                    self._roots[name] = own
        if not self._entry:
            raise ValueError(
                f"the text of a compiled program must have an ENTRY computation, but this one has none: {hlo[:60]!r}. "
                "Pass the result of `compiled.as_text()`."
            )

    def loop(self, op_name: str) -> str | None:
        """Return the body of the loop that has this name in JAX ("jit(f)/while"); None if there is not exactly one."""
        own = f'op_name="{op_name}"'
        everything = (one for inside in self._inside.values() for one in inside.values())
        found = [_callee(one, "body") for one in everything if one.kind == "while" and own in one.rest]
        return found[0] if len(found) == 1 else None

    def cost(
        self, num_devices: int, *, begin: str | None = None, without: str | None = None, at_most: bool = False
    ) -> Cost:
        """Count the cost per device of one run of the program or of one of its computations.

        The bytes that a device sends in a collective over n devices are those of ring algorithms (Thakur et al. 2005),
        as a multiple of the bytes of the result: 2 (n - 1) / n for all-reduce (n - 1 sends of 1 / n each for a
        reduce-scatter, and as many for an all-gather), (n - 1) / n for all-gather and all-to-all, n - 1 for
        reduce-scatter, and 1 for a permutation. For a conditional, each number is the largest of all branches.

        Args:
            num_devices: number of devices of the program.
            begin: name of the computation to count; None: the whole program.
            without: body of a loop to leave out.
            at_most: count a loop whose number of iterations is unknown at its upper bound, if that is known, instead
                of once.
        """
        known = bounded = True

        def visit(name: str, fused: bool) -> np.ndarray:
            """Return FLOPs, kernels and bytes; then count, result bytes and sent bytes of each kind of collective."""
            nonlocal known, bounded
            total = np.zeros(3 + 3 * len(COLLECTIVES), object)  # Python integers, which can't overflow
            for own, one in self._inside.get(name, {}).items():
                kind = one.kind.removesuffix("-start")
                if kind in COLLECTIVES:
                    place = 3 + 3 * COLLECTIVES.index(kind)
                    total[place : place + 3] += np.array([1, *_collective_bytes(one, kind, num_devices)], object)
                if kind == "while":
                    body, turns = _callee(one, "body"), self._turns(name, one)
                    if body != without:
                        known &= turns is not None
                        turns = _turns_at_most(one) if turns is None and at_most else turns
                        bounded &= turns is not None
                        total += visit(body, fused) * (1 if turns is None else turns)
                    continue
                if kind in ("call", "async", "fusion", "conditional"):
                    callees = re.findall(r"[\w.-]+", " ".join(_CALLEES.findall(one.rest)))
                    parts = [visit(callee, fused or kind == "fusion") for callee in callees]
                    total += (np.maximum.reduce if kind == "conditional" else sum)(parts) if parts else 0
                total[0] += self._flops(name, one)
                total[1] += 'custom_call_target="tpu_custom_call"' in one.rest
                # Inside a fusion, values stay in registers: only the fusion itself reads and writes memory.
                total[2] += 0 if fused else self._traffic(name, own, one)
            return total

        flops, kernels, hbm, *talk = visit(begin or self._entry, False)
        each = zip(COLLECTIVES, talk[::3], talk[1::3], talk[2::3], strict=True)
        return Cost(flops, kernels, hbm, [Collective(*one) for one in each if one[1]], known, bounded)

    def _turns(self, name: str, loop: _Operation) -> int | None:
        """Return the number of iterations of a loop; None if it is unknown.

        It is the compiler's annotation, or follows from a condition `i < n` where n, the initial i and its step are
        constants.
        """
        if annotation := re.search(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)', loop.rest):
            return int(annotation[1])
        condition, body = _callee(loop, "condition"), _callee(loop, "body")
        tests = self._inside.get(condition, {})
        root = tests.get(self._roots.get(condition, ""))
        if root is None or root.kind != "compare" or "direction=LT" not in root.rest:
            return None
        counter, bound = (tests[operand] for operand in root.operands[:2])
        end = self._constant(condition, bound, name, loop)
        place = re.search(r"index=(\d+)", counter.rest)
        if end is None or counter.kind != "get-tuple-element" or place is None:
            return None
        begin = self._constant(condition, counter, name, loop)
        if begin is None:
            return None
        state = self._inside[body][self._roots[body]]
        step = 1
        if state.kind == "tuple":
            added = self._inside[body][state.operands[int(place[1])]]
            constants = [self._constant(body, self._inside[body][operand]) for operand in added.operands]
            step = next((c for c in constants if c), 1) if added.kind == "add" else 1
        return max(0, -(-(end - begin) // step))  # ceil((end - begin) / step)

    def _constant(self, name: str, one: _Operation, outside: str = "", loop: _Operation | None = None) -> int | None:
        """Return the integer value of an operation that is a constant or a constant carry of a loop; None otherwise."""
        inside = self._inside[name]
        while one.kind in ("copy", "bitcast", "copy-done", "copy-start") and one.operands[0] in inside:
            one = inside[one.operands[0]]
        if one.kind == "constant":
            return int(one.operands[0]) if re.fullmatch(r"-?\d+", one.operands[0]) else None
        place = re.search(r"index=(\d+)", one.rest) if one.kind == "get-tuple-element" else None
        carried = self._inside[outside].get(loop.operands[0]) if loop is not None and place else None
        if carried is None or carried.kind != "tuple":
            return None
        return self._constant(outside, self._inside[outside][carried.operands[int(place[1])]])

    def _flops(self, name: str, one: _Operation) -> int:
        """Count two FLOPs (multiply and add) per pair of multiplied values, as XLA's HloCostAnalysis does."""
        if one.kind not in ("dot", "convolution"):
            return 0
        result = one.arrays[0].shape
        left, right = (self._inside[name][operand].arrays[0].shape for operand in one.operands[:2])
        if one.kind == "dot":  # each value of the result is a sum over the contracted axes
            axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)[1]
            return 2 * math.prod(result) * math.prod(left[int(axis)] for axis in filter(None, axes.split(",")))
        inputs, kernel, outputs = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.rest).groups()
        window = re.search(r" window=\{([^}]*)\}", one.rest)
        fields_given = dict(field.split("=") for field in window[1].split()) if window else {}
        groups = math.prod(map(int, re.findall(r"(?:feature|batch)_group_count=(\d+)", one.rest)))
        # batch x input features x output features x, for each spatial axis, the pairs of kernel and input positions
        # that meet. Padding does not count. With groups, each output feature sees 1 / groups of the input features.
        pairs = left[inputs.index("b")] * left[inputs.index("f")] * right[kernel.index("o")] // groups
        for axis in range(sum(map(str.isdigit, kernel))):
            usual = {"size": "1", "stride": "1", "pad": "0_0", "lhs_dilate": "1", "rhs_dilate": "1"}
            fields = (
                int(fields_given[f].split("x")[axis].split("_")[0]) if f in fields_given else int(usual[f][0])
                for f in usual
            )
            pairs *= _meetings(left[inputs.index(str(axis))], result[outputs.index(str(axis))], *fields)
        return 2 * pairs

    def _traffic(self, name: str, own: str, one: _Operation) -> int:
        """Count the bytes that an operation reads from and writes to the HBM; a slice reads only its own part."""
        kind, results = one.kind, one.arrays
        if kind in _SILENT or kind.endswith(("-done", "-update")) or 'custom_call_target="AllocateBuffer"' in one.rest:
            return 0
        if kind in ("call", "async-start", "conditional"):  # the operations inside are counted instead
            return 0
        inside = self._inside[name]
        sources = [inside[operand] for operand in one.operands if operand in inside]
        if kind == "fusion":
            callee = _callee(one, "calls")
            read = sum(self._read(callee, index, source) for index, source in enumerate(sources))
            return read + self._written(callee, self._roots[callee], results)
        if kind in (*_SLICES, "slice-start"):
            part = results[-2] if kind == "slice-start" else results[0]  # ((operand), result, context)
            return part.bytes * (_in_hbm(sources[0]) + part.in_hbm)
        if kind in _UPDATES:  # in place: only the new values are read and written
            new = sources[_UPDATES[kind]].arrays[0]
            return new.bytes * (new.in_hbm + results[0].in_hbm)
        if kind == "copy-start":  # (result, operand, context)
            results = results[:1]
        elif kind.endswith("-start"):  # (operands, results)
            results = results[len(sources) :]
        return sum(array.bytes for array in results if array.in_hbm) + sum(map(_hbm_bytes, sources))

    def _read(self, name: str, index: int, source: _Operation) -> int:
        """Count the bytes that a fusion reads of its operand."""
        return min(_hbm_bytes(source), self._needed(name, index)) if _in_hbm(source) else 0

    def _needed(self, name: str, index: int) -> int:
        """Count the bytes that a fused computation needs of its parameter with this index."""
        inside = self._inside[name]
        number = str(index)
        parameter = next(own for own, one in inside.items() if one.kind == "parameter" and one.operands[-1] == number)
        return self._needed_by_users(name, parameter)

    def _needed_by_users(self, name: str, value: str) -> int:
        """Count the bytes that the users of a value need: those that slice it need only their slices."""
        total = 0
        for own, user in self._inside[name].items():
            if value not in user.operands:
                continue
            place = user.operands.index(value)
            if user.kind in _VIEWS:
                total += self._needed_by_users(name, own)
            elif user.kind in _SLICES and place == 0:
                total += user.arrays[0].bytes
            elif user.kind in _UPDATES and place == 0:
                continue  # updated in place; the old values are not read
            elif user.kind == "fusion":
                total += self._needed(_callee(user, "calls"), place)
            else:
                return 1 << 62  # more than any array: `_read` takes the minimum with the array's size
        return total

    def _written(self, name: str, own: str, results: list[_Array]) -> int:
        """Count the bytes that a fusion writes; an update in place writes only the new values."""
        one = self._inside[name][own]
        if one.kind == "tuple":
            return sum(self._written(name, part, [result]) for part, result in zip(one.operands, results, strict=False))
        if one.kind in _VIEWS:
            return self._written(name, one.operands[0], results)
        if one.kind == "fusion":
            return self._written(_callee(one, "calls"), self._roots[_callee(one, "calls")], results)
        whole = sum(result.bytes for result in results if result.in_hbm)
        if one.kind in _UPDATES:
            new = self._inside[name][one.operands[_UPDATES[one.kind]]]
            return min(whole, new.arrays[0].bytes)
        return 0 if one.kind == "parameter" else whole


def _callee(one: _Operation, role: str) -> str:
    return re.search(rf"\b{role}=%?([\w.-]+)", one.rest)[1]


def _turns_at_most(loop: _Operation) -> int | None:
    """Return the largest number of iterations of a loop over blocks of tokens (`nn.moe.grouped_linear`).

    The loop runs over the used blocks of P allocated ones. Its carry has the inputs and the results of the blocks, both
    of shape (P, Q, ...), and kernels (E, ...), so P is the leading size that occurs twice. Returns None for any other
    loop, or if P is ambiguous.
    """
    if not re.search(r'op_name="[^"]*\bfeed_forward/(?:shard_map/)?while"', loop.rest):
        return None
    counts = [array.shape[0] for array in loop.arrays if len(array.shape) == 3]
    blocks = {count for count in counts if counts.count(count) > 1}
    return blocks.pop() if len(blocks) == 1 else None


def _in_hbm(one: _Operation) -> bool:
    return any(array.in_hbm for array in one.arrays)


def _hbm_bytes(one: _Operation) -> int:
    return sum(array.bytes for array in one.arrays if array.in_hbm)


@functools.cache
def _meetings(inputs: int, outputs: int, size: int, stride: int, pad: int, dilate: int, spread: int) -> int:
    """Count the pairs of kernel and input positions that a convolution multiplies along one axis, without padding.

    Args:
        inputs: size of the input.
        outputs: size of the output.
        size: size of the kernel.
        stride: stride of the kernel.
        pad: padding before the input.
        dilate: dilation of the input (distance of its values after inserting zeros between them).
        spread: dilation of the kernel.
    """
    if size == 1 and stride == 1 and dilate == 1 and pad == 0:
        return outputs
    places = np.arange(outputs, dtype=np.int64) * stride - pad
    last = (inputs - 1) * dilate
    met = 0
    for kernel in range(size):
        at = places + kernel * spread  # position in the dilated input, for each output
        met += int(((at >= 0) & (at <= last) & (at % dilate == 0)).sum())
    return met


def _collective_bytes(one: _Operation, kind: str, num_devices: int) -> tuple[int, int]:
    """Return the bytes of the result of a collective, and the bytes that a device sends."""
    groups = re.search(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]+)\})", one.rest)
    n = num_devices if groups is None else int(groups[1] or groups[2].count(",") + 1)  # devices per group
    sizes = [array.size for array in one.arrays]
    result = sum(sizes)
    if one.kind == "all-gather-start":  # (operands, results)
        result = result * n // (n + 1)
    if one.kind == "collective-permute-start":  # (operand, result, two integers)
        result = max(sizes)
    share = (n - 1) / n
    factor = {"all-reduce": 2 * share, "reduce-scatter": n - 1, "collective-permute": 1.0}.get(kind, share)
    return result, round(factor * result)
