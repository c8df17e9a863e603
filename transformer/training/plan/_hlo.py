"""What a compiled program does, counted from its text (HLO): each loop as often as it turns."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
"""operations in which devices tell each other something"""


@dataclass(frozen=True)
class Collective:
    """All operations of a kind in a compiled step, as one device sees them."""

    kind: str
    count: int
    """how often in a step, loops counted as often as they run"""
    result_bytes: int
    """of their results together"""
    wire_bytes: int
    """that the device sends, by the ring algorithms"""


@dataclass(frozen=True)
class Cost:
    """What one device does in a run of a program."""

    flops: int
    """of matrix products and convolutions, without those of `kernels`"""
    kernels: int
    """calls of kernels that were not written by the compiler (Pallas)"""
    hbm_bytes: int
    """read and written by operations whose arrays lie in the HBM"""
    collectives: list[Collective]
    """by kind, those there are"""
    loops_known: bool
    """whether the turns of every loop are known"""
    loops_bounded: bool
    """whether they are known, or counted as often as they can be at most"""

    @property
    def wire_bytes(self) -> int:
        """Sent to other devices."""
        return sum(one.wire_bytes for one in self.collectives)


class _Array(NamedTuple):
    shape: tuple[int, ...]
    size: int
    """bytes"""
    bytes: int
    """as it lies, in whole tiles"""
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
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is new


@functools.cache
def _arrays(types: str) -> list[_Array]:
    """The arrays of a type such as "(f32[4,128]{1,0:T(4,128)S(1)}, s32[])"; S(n), n > 0, is a memory on the chip."""
    found = []
    for dtype, sizes, layout in _TYPE.findall(types):
        shape = tuple(map(int, filter(None, sizes.split(","))))
        bits = 8 if dtype == "pred" else int(_WIDTH.search(dtype)[0])
        padded = list(shape)
        order, _, tiling = layout.partition(":")
        if tile := re.match(r"T\(([\d,]+)\)", tiling):  # the HBM holds whole tiles
            for axis, size in zip(order.split(","), reversed(tile[1].split(",")), strict=False):
                if axis:
                    padded[int(axis)] = -(-shape[int(axis)] // int(size)) * int(size)
        sizes = (math.prod(shape) * bits // 8, math.prod(padded) * bits // 8)
        found.append(_Array(shape, *sizes, "S(" not in tiling))
    return found


class Program:
    """The text of a compiled program, parsed.

    Raises:
        ValueError: a text without a computation to begin at.
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
                f"the text of a compiled program has an ENTRY computation, this one has none: {hlo[:60]!r}. Give what "
                "`compiled.as_text()` gives."
            )

    def loop(self, op_name: str) -> str | None:
        """The body of the one loop that JAX calls so ("jit(f)/while"); None: there is none, or several."""
        own = f'op_name="{op_name}"'
        everything = (one for inside in self._inside.values() for one in inside.values())
        found = [_callee(one, "body") for one in everything if one.kind == "while" and own in one.rest]
        return found[0] if len(found) == 1 else None

    def cost(
        self, num_devices: int, *, begin: str | None = None, without: str | None = None, at_most: bool = False
    ) -> Cost:
        """What a device does in one run, or in one of the computation `begin`; the loop with the body `without` is left
        out. A loop whose turns the text does not tell counts once, or with `at_most` as often as it can turn, if that
        can be read. Of branches each number is that of the branch where it is largest.

        Bytes on the wire are those of ring algorithms over n devices (Thakur et al. 2005): all-reduce 2 (n - 1) / n of
        its result, all-gather (n - 1) / n, reduce-scatter n - 1 times its result, permute all of it.
        """
        known = bounded = True

        def visit(name: str, fused: bool) -> np.ndarray:
            """FLOPs, kernels, bytes; then count, bytes and bytes on the wire of each kind of collective."""
            nonlocal known, bounded
            total = np.zeros(3 + 3 * len(COLLECTIVES), object)  # whole numbers of any size
            for own, one in self._inside.get(name, {}).items():
                kind = one.kind.removesuffix("-start")
                if kind in COLLECTIVES:
                    place = 3 + 3 * COLLECTIVES.index(kind)
                    total[place : place + 3] += np.array([1, *_told(one, kind, num_devices)], object)
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
                total[2] += 0 if fused else self._traffic(name, own, one)
            return total

        flops, kernels, hbm, *talk = visit(begin or self._entry, False)
        each = zip(COLLECTIVES, talk[::3], talk[1::3], talk[2::3], strict=True)
        return Cost(flops, kernels, hbm, [Collective(*one) for one in each if one[1]], known, bounded)

    def _turns(self, name: str, loop: _Operation) -> int | None:
        """How often a loop turns: as the compiler wrote, or of a condition `i < n` with constants."""
        if told := re.search(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)', loop.rest):
            return int(told[1])
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
        return max(0, -(-(end - begin) // step))

    def _constant(self, name: str, one: _Operation, outside: str = "", loop: _Operation | None = None) -> int | None:
        """The whole number that an operation gives, if it is a constant; also one that a loop carries in its tuple."""
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
        """Two for each pair of numbers that is multiplied, counted as XLA does (HloCostAnalysis)."""
        if one.kind not in ("dot", "convolution"):
            return 0
        result = one.arrays[0].shape
        left, right = (self._inside[name][operand].arrays[0].shape for operand in one.operands[:2])
        if one.kind == "dot":
            axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)[1]
            return 2 * math.prod(result) * math.prod(left[int(axis)] for axis in filter(None, axes.split(",")))
        inputs, kernel, outputs = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.rest).groups()
        window = re.search(r" window=\{([^}]*)\}", one.rest)
        told = dict(field.split("=") for field in window[1].split()) if window else {}
        groups = math.prod(map(int, re.findall(r"(?:feature|batch)_group_count=(\d+)", one.rest)))
        pairs = left[inputs.index("b")] * left[inputs.index("f")] * right[kernel.index("o")] // groups
        for axis in range(sum(map(str.isdigit, kernel))):
            usual = {"size": "1", "stride": "1", "pad": "0_0", "lhs_dilate": "1", "rhs_dilate": "1"}
            fields = (int(told[f].split("x")[axis].split("_")[0]) if f in told else int(usual[f][0]) for f in usual)
            pairs *= _meetings(left[inputs.index(str(axis))], result[outputs.index(str(axis))], *fields)
        return 2 * pairs

    def _traffic(self, name: str, own: str, one: _Operation) -> int:
        """Bytes that an operation reads from the HBM and writes to it; of a slice only what it takes."""
        kind, results = one.kind, one.arrays
        if kind in _SILENT or kind.endswith(("-done", "-update")) or 'custom_call_target="AllocateBuffer"' in one.rest:
            return 0
        if kind in ("call", "async-start", "conditional"):  # what is inside counts
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
        if kind in _UPDATES:
            new = sources[_UPDATES[kind]].arrays[0]
            return new.bytes * (new.in_hbm + results[0].in_hbm)
        if kind == "copy-start":  # (result, operand, context)
            results = results[:1]
        elif kind.endswith("-start"):  # (operands, results)
            results = results[len(sources) :]
        return sum(array.bytes for array in results if array.in_hbm) + sum(map(_hbm_bytes, sources))

    def _read(self, name: str, index: int, source: _Operation) -> int:
        """Bytes that a fusion reads of its operand."""
        return min(_hbm_bytes(source), self._needed(name, index)) if _in_hbm(source) else 0

    def _needed(self, name: str, index: int) -> int:
        inside = self._inside[name]
        number = str(index)
        parameter = next(own for own, one in inside.items() if one.kind == "parameter" and one.operands[-1] == number)
        return self._needed_by_users(name, parameter)

    def _needed_by_users(self, name: str, value: str) -> int:
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
                continue  # written in place
            elif user.kind == "fusion":
                total += self._needed(_callee(user, "calls"), place)
            else:
                return 1 << 62  # all of it
        return total

    def _written(self, name: str, own: str, results: list[_Array]) -> int:
        """Bytes that a fusion writes: of an update in place only what is new."""
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
    """All blocks P of a loop over blocks of tokens (`nn.moe.grouped_linear`), which turns for those in use. It
    carries their inputs and results, (P, Q, ...) both, beside kernels (E, ...). None: another loop, or not to be read.
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
    """How often, along one axis, a number of the kernel meets one of the input that is no padding."""
    if size == 1 and stride == 1 and dilate == 1 and pad == 0:
        return outputs
    places = np.arange(outputs, dtype=np.int64) * stride - pad
    last = (inputs - 1) * dilate
    met = 0
    for kernel in range(size):
        at = places + kernel * spread
        met += int(((at >= 0) & (at <= last) & (at % dilate == 0)).sum())
    return met


def _told(one: _Operation, kind: str, num_devices: int) -> tuple[int, int]:
    """Bytes of the result of a collective, and those on the wire."""
    groups = re.search(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]+)\})", one.rest)
    n = num_devices if groups is None else int(groups[1] or groups[2].count(",") + 1)
    sizes = [array.size for array in one.arrays]
    result = sum(sizes)
    if one.kind == "all-gather-start":  # (operands, results)
        result = result * n // (n + 1)
    if one.kind == "collective-permute-start":  # (operand, result, two numbers)
        result = max(sizes)
    share = (n - 1) / n
    factor = {"all-reduce": 2 * share, "reduce-scatter": n - 1, "collective-permute": 1.0}.get(kind, share)
    return result, round(factor * result)
