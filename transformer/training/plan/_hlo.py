"""Count the cost of a compiled program from its text (HLO); loop bodies count once per iteration."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from transformer.nn._grouped import tiling
from transformer.nn.kernels._paged import queries_per_block
from transformer.training.plan._hlo_text import (
    COLLECTIVES,
    Array,
    Collective,
    Operation,
    async_results,
    called,
    collective_bytes,
    parsed,
    sent_across_slices,
)

_FACTORS = {
    "int8_flops": re.compile(r"[su][48]\["),
    "fp8_flops": re.compile(r"f8\w+\["),
    "float32_flops": re.compile(r"f32\["),
}
_KERNEL = 'custom_call_target="tpu_custom_call"'
_PAGED_KERNEL = "ragged_paged_attention_kernel"  # in the op_name, the library's name of the kernel
_CALLEES = re.compile(r"\b(?:calls|to_apply|\w+_computations?)=(\{[^}]*\}|%?[\w.-]+)")
_SILENT = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier")
_CONTROL = ("call", "async-start", "conditional", "partition-id", "replica-id")  # no kernels of their own
_VIEWS = ("bitcast", "copy", "reshape")
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # index of the operand with the new values
_NUMBERS = ("count", "result_bytes", "wire_bytes")  # of a `Collective`


@dataclass(frozen=True)
class Cost:
    """Cost of one run of a program, per device."""

    flops: int
    """FLOPs of matrix multiplications and convolutions, without those inside `kernels`"""
    kernels: int
    """number of calls of custom kernels (Pallas), without those for experts, whose FLOPs are known"""
    hbm_bytes: int
    """bytes read from and written to the HBM"""
    copied_bytes: int
    """the part of `hbm_bytes` for copies of whole arrays, for example into another layout"""
    collectives: list[Collective]
    """collectives by kind, first those over fast links"""
    loops_known: bool
    """whether the number of iterations of every loop is known"""
    loops_bounded: bool
    """whether the number of iterations of every loop, or an upper bound of it, is known"""
    host_bytes: int = 0
    """bytes copied between the device and the memory of its host, in the busier direction"""
    int8_flops: int = 0
    """the part of `flops` whose factors are integers of at most 8 bits"""
    fp8_flops: int = 0
    """the part of `flops` whose factors are floating-point numbers of 8 bits"""
    float32_flops: int = 0
    """the part of `flops` whose factors are float32"""
    launches: int = 0
    """number of kernels, copies and collectives that the device starts"""

    @property
    def wire_bytes(self) -> int:
        """Bytes that the device sends over the links of its slice or host."""
        return sum(one.wire_bytes for one in self.collectives if not one.over_network)

    @property
    def network_bytes(self) -> int:
        """Bytes that the device sends over the data-center network."""
        return sum(one.wire_bytes for one in self.collectives if one.over_network)

    @property
    def parts(self) -> dict[str, int]:
        """Arguments of `estimate`: all but the FLOPs, and the traffic with the host."""
        names = ("hbm_bytes", "wire_bytes", "network_bytes", "int8_flops", "fp8_flops", "float32_flops")
        return {name: getattr(self, name) for name in names}


class Program:
    """A compiled program, parsed from its text, with the conventions of the compilers for TPU and CPU.

    Raises:
        ValueError: the text has no ENTRY computation.
    """

    def __init__(self, hlo: str):
        self._inside, self._roots, self._entry = parsed(hlo)

    def loop(self, op_name: str) -> str | None:
        """Return the body of the loop that has this name in JAX ("jit(f)/while"); None if there is not exactly one."""
        own = f'op_name="{op_name}"'
        everything = (one for inside in self._inside.values() for one in inside.values())
        found = [called(one, "body") for one in everything if one.kind == "while" and own in one.rest]
        return found[0] if len(found) == 1 else None

    def cost(
        self,
        num_devices: int,
        *,
        begin: str | None = None,
        without: str | None = None,
        at_most: bool = False,
        expert_shards: int = 1,
    ) -> Cost:
        """Count the cost per device of one run of the program or, with `begin`, of one of its computations.

        The bytes that a device sends in a collective over n devices are those of ring algorithms (Thakur et al. 2005),
        as a multiple of the bytes of the result: 2 (n - 1) / n for all-reduce (n - 1 sends of 1 / n each for a
        reduce-scatter, and as many for an all-gather), (n - 1) / n for all-gather and all-to-all, n - 1 for
        reduce-scatter, and 1 for a permutation. For a conditional, each number is the largest of all branches.

        `without` is the body of a loop to leave out. With `at_most`, a loop whose number of iterations is unknown
        counts at its upper bound, if that is known, instead of once. The experts of a layer are split over
        `expert_shards` devices: the tokens of all of them are rows of a grouped multiplication, but this device
        computes only an even share of the rows.
        """
        known = bounded = True

        def visit(name: str, fused: bool) -> Counter:
            """Return the cost of a computation: the fields of `Cost`, and three numbers for each kind of collective."""
            nonlocal known, bounded
            total = Counter()
            for own, one in self._inside.get(name, {}).items():
                kind = one.kind.removesuffix("-start")
                if kind == "while":
                    body, turns = called(one, "body"), self._turns(name, one)
                    if body != without:
                        known &= turns is not None
                        turns = _turns_at_most(one, expert_shards) if turns is None and at_most else turns
                        bounded &= turns is not None
                        times = 1 if turns is None else turns
                        total += Counter({key: times * number for key, number in visit(body, fused).items()})
                    continue
                if kind in ("call", "async", "fusion", "conditional"):
                    callees = re.findall(r"[\w.-]+", " ".join(_CALLEES.findall(one.rest)))
                    parts = [visit(callee, fused or kind == "fusion") for callee in callees]
                    # `|` keeps the larger of two numbers
                    total += functools.reduce(operator.or_ if kind == "conditional" else operator.add, parts, Counter())
                total += self._own_cost(name, own, one, num_devices, expert_shards, fused)
            return total

        return _as_cost(visit(begin or self._entry, False), known, bounded)

    def _own_cost(
        self, name: str, own: str, one: Operation, num_devices: int, expert_shards: int, fused: bool
    ) -> Counter:
        """Count the cost of an operation without the computations that it calls, with the keys of `cost`."""
        total = Counter(self._host_traffic(name, one))
        if (sent := self._collective(name, own, one, num_devices, fused)) is not None:
            kind, across, *sizes = sent
            total |= {(kind, across, number): size for number, size in zip(_NUMBERS, (1, *sizes), strict=True)}
        kernel = self._known_kernel(name, one, expert_shards)
        flops, kernel_bytes = kernel or (self._flops(name, one), None)
        total["flops"] = flops
        if flops and (factors := self._factors(name, one)) is not None:
            total[factors] = flops
        total["kernels"] = int(kernel is None and self._is_kernel(one))
        total["launches"] = int(not fused and self._is_launch(one))
        # Inside a fusion, values stay in registers: only the fusion itself reads and writes memory.
        traffic = 0 if fused else self._traffic(name, own, one) if kernel_bytes is None else kernel_bytes
        total["hbm_bytes"] = traffic
        total["copied_bytes"] = traffic if one.kind.removesuffix("-start") == "copy" else 0
        return total

    def _collective(
        self, name: str, own: str, one: Operation, num_devices: int, fused: bool
    ) -> tuple[str, bool, int, int] | None:
        """Return kind of a collective, whether it uses the network, bytes of its result, and bytes sent; None for
        others.
        """
        kind = one.kind.removesuffix("-start")
        if kind == "send" and (sent := sent_across_slices(one)) is not None:
            return sent[0], True, *sent[1:]
        if kind not in COLLECTIVES:
            return None
        sliced = self._slice_of(name, own) if fused and kind == "all-reduce" else None
        counted = "reduce-scatter" if sliced else kind
        return counted, False, *collective_bytes(one, counted, num_devices, sliced)

    def _slice_of(self, name: str, own: str) -> Operation | None:
        """Return the slice of its value that a fused computation returns, if any: of an all-reduce, reduce-scatter."""
        root = self._inside[name].get(self._roots.get(name, ""))
        while root is not None and root.kind in _VIEWS:
            root = self._inside[name].get(root.operands[0])
        return root if root is not None and root.kind == "dynamic-slice" and root.operands[0] == own else None

    def _turns(self, name: str, loop: Operation) -> int | None:
        """Return the number of iterations of a loop, from the compiler or a condition `i < n` of constants; None:
        unknown.
        """
        if annotation := re.search(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)', loop.rest):
            return int(annotation[1])
        condition, body = called(loop, "condition"), called(loop, "body")
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

    def _constant(self, name: str, one: Operation, outside: str = "", loop: Operation | None = None) -> int | None:
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

    def _flops(self, name: str, one: Operation) -> int:
        """Count two FLOPs (multiply and add) per pair of multiplied values, as XLA's HloCostAnalysis does."""
        if one.kind not in ("dot", "convolution"):
            return 0
        result = one.arrays[0].shape
        left, right = (self._inside[name][operand].arrays[0].shape for operand in one.operands[:2])
        if one.kind == "dot":  # each value of the result is a sum over the contracted axes
            axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)[1]
            return 2 * math.prod(result) * math.prod(left[int(axis)] for axis in filter(None, axes.split(",")))
        return convolution_flops(one.rest, left, right, result)

    def _factors(self, name: str, one: Operation) -> str | None:
        """Return the key in `_FACTORS` of the dtype of both factors of a multiplication; None: another dtype."""
        types = [self._inside[name][operand].types for operand in one.operands[:2]]
        return next((key for key, dtype in _FACTORS.items() if all(map(dtype.match, types))), None)

    def _is_kernel(self, one: Operation) -> bool:
        """Return whether an operation is a custom kernel, whose FLOPs the text does not show."""
        return _KERNEL in one.rest and "ragged-dot-metadata" not in one.rest

    def _is_launch(self, one: Operation) -> bool:
        """Return whether an operation outside of fusions starts a kernel or a copy."""
        return one.kind not in (*_SILENT, *_CONTROL) and not one.kind.endswith(("-done", "-update"))

    def _known_kernel(self, name: str, one: Operation, expert_shards: int) -> tuple[int, int] | None:
        """Count the FLOPs and the bytes of a kernel that this class knows; None for other operations."""
        return self._grouped(name, one, expert_shards) or self._paged(name, one)

    def _grouped(self, name: str, one: Operation, expert_shards: int) -> tuple[int, int] | None:
        """Count the FLOPs and the bytes of a kernel for grouped multiplications (`nn._grouped`); None for others.

        The arguments of these kernels are the ends of the E groups (E + 1,), the group and the tile of rows of each
        iteration (both (V,)), and two factors. The tiles of R rows are visited V = R / tile + E - 1 times at most,
        because a tile with rows of two groups is visited for each of them. All rows of a visited tile are computed.
        """
        inside = self._inside[name]
        arrays = [inside[own].arrays[0] for own in one.operands if own in inside and inside[own].arrays]
        if _KERNEL not in one.rest or len(arrays) != 7 or [len(a.shape) for a in arrays[1:4]] != [1, 1, 1]:
            return None
        left, right, result = arrays[5], arrays[6], one.arrays[0]
        experts, visits, rows = arrays[1].shape[0] - 1, arrays[2].shape[0], left.shape[0]
        if arrays[3].shape != (visits,) or len(left.shape) != 2 or rows % max(1, visits - experts + 1):
            return None
        tile = rows // (visits - experts + 1)
        computed = -(-rows // expert_shards) + (experts - 1) * tile
        sums_rows = len(result.shape) == 3  # the derivative of the kernels; otherwise rows times kernels
        inner, out = result.shape[1:] if sums_rows else (left.shape[1], result.shape[1])
        written = re.search(r'ragged_dot_tiling="(\d+),(\d+),(\d+)"', one.rest)
        tiles = map(int, written.groups()) if written else tiling(tile, inner, out, whole_input=not sums_rows)
        _, inner_tile, out_tile = tiles
        inner_tiles, out_tiles = -(-inner // inner_tile), -(-out // out_tile)
        width = left.size // math.prod(left.shape)  # bytes of a number
        # The rows are read again for each tile of output features.
        traffic = out_tiles * computed * inner * width
        if sums_rows:
            traffic += inner_tiles * computed * out * width + result.bytes
        else:
            # A part of a kernel stays on the chip while consecutive tiles of rows need the same part.
            reads = experts if inner_tiles == 1 else -(-computed // tile)
            traffic += reads * inner * out * (right.size // math.prod(right.shape)) + computed * out * width
        return 2 * computed * inner * out, traffic

    def _paged(self, name: str, one: Operation) -> tuple[int, int] | None:
        """Count the FLOPs and the bytes, at most, of the kernel for paged caches (`kernels._paged`); None for others.

        Its last two arguments are the queries of all rows (n, N, W) and the pool (P, Q, C, W), and the
        second one is the table of pages (B, M). Each block of queries visits the rows that its queries belong to, and
        for each of them reads the pages of the row, all M at most, and computes all queries of the block.
        """
        if _KERNEL not in one.rest or _PAGED_KERNEL not in one.rest:
            return None
        inside = self._inside[name]
        arrays = [inside[own].arrays[0] for own in one.operands]
        table, query, pool = arrays[1], arrays[-2], arrays[-1]
        (rows, pages), (_, page_size, _, width) = table.shape, pool.shape
        num_queries, num_heads, _ = query.shape
        block = queries_per_block(num_queries, num_heads, width)
        visits = -(-num_queries // block) + rows - 1
        read = visits * pages * (pool.size // pool.shape[0])
        flops = visits * block * num_heads * pages * page_size * 4 * width  # queries x keys, and weights x values
        return flops, read + _hbm_bytes(inside[one.operands[-2]]) + one.arrays[0].bytes * one.arrays[0].in_hbm

    def _traffic(self, name: str, own: str, one: Operation) -> int:
        """Count the bytes that an operation reads from and writes to the HBM; a slice reads only its own part."""
        kind, results = one.kind, one.arrays
        if kind in _SILENT or kind.endswith(("-done", "-update")) or 'custom_call_target="AllocateBuffer"' in one.rest:
            return 0
        if kind in ("call", "async-start", "conditional"):  # the operations inside are counted instead
            return 0
        inside = self._inside[name]
        sources = [inside[operand] for operand in one.operands if operand in inside]
        if kind in ("fusion", "fusion-start"):
            if kind == "fusion-start":  # ((operands), results, context)
                results = async_results(one.types)
            callee = called(one, "calls")
            read = sum(self._read(callee, index, source) for index, source in enumerate(sources))
            return read + self._written(callee, self._roots[callee], results)
        if kind in (*_SLICES, "slice-start"):
            part = results[-2] if kind == "slice-start" else results[0]  # ((operand), result, context)
            return part.bytes * (_in_hbm(sources[0]) + part.in_hbm)
        if kind in _UPDATES:  # in place: only the new values are read and written
            new = sources[_UPDATES[kind]].arrays[0]
            return new.bytes * (new.in_hbm + results[0].in_hbm)
        if kind in ("send", "recv"):  # (result, context, token): read by the host, or written by it
            return results[0].bytes * results[0].in_hbm
        if kind == "copy-start":  # (result, operand, context)
            results = results[:1]
        elif kind.endswith("-start"):  # (operands, results)
            results = results[len(sources) :]
        return sum(array.bytes for array in results if array.in_hbm) + sum(map(_hbm_bytes, sources))

    def _host_traffic(self, name: str, one: Operation) -> dict[str, int]:
        """Count the bytes that a copy writes to the memory of the host, `to_host`, or reads from there, `from_host`."""
        inside, kind = self._inside[name], one.kind.removesuffix("-start")
        if kind not in ("copy", *_SLICES, *_UPDATES):
            return {}
        sources = [inside[operand].arrays[0] for operand in one.operands]
        if kind in _UPDATES:  # in place: only the new values move
            moved, before, after = sources[_UPDATES[kind]], sources[_UPDATES[kind]], sources[0]
        else:
            arrays = one.arrays  # copy-start: (result, operand, context); slices: ((operand), result, context)
            after = arrays[-2] if one.kind.endswith("-start") and kind != "copy" else arrays[0]
            moved, before = after, sources[0]
        if after.on_host == before.on_host:
            return {}
        return {"to_host" if after.on_host else "from_host": moved.size}

    def _read(self, name: str, index: int, source: Operation) -> int:
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
                callee = called(user, "calls")
                total += self._needed(callee, place)
                if self._is_view(callee, place):  # the fusion's result is the same value, with users of its own
                    total += self._needed_by_users(name, own)
            else:
                return 1 << 62  # more than any array: `_read` takes the minimum with the array's size
        return total

    def _is_view(self, name: str, index: int) -> bool:
        """Return whether a fused computation returns its parameter with this index, at most in another shape."""
        inside = self._inside[name]
        one = inside[self._roots[name]]
        while one.kind in _VIEWS:
            one = inside[one.operands[0]]
        return one.kind == "parameter" and one.operands[-1] == str(index)

    def _written(self, name: str, own: str, results: list[Array]) -> int:
        """Count the bytes that a fusion writes; an update in place writes only the new values."""
        one = self._inside[name][own]
        if one.kind == "tuple":
            return sum(self._written(name, part, [result]) for part, result in zip(one.operands, results, strict=False))
        if one.kind in _VIEWS:
            return self._written(name, one.operands[0], results)
        if one.kind == "fusion":
            return self._written(called(one, "calls"), self._roots[called(one, "calls")], results)
        whole = sum(result.bytes for result in results if result.in_hbm)
        if one.kind in _UPDATES:
            new = self._inside[name][one.operands[_UPDATES[one.kind]]]
            return min(whole, new.arrays[0].bytes)
        return 0 if one.kind == "parameter" else whole


def _as_cost(total: Counter, loops_known: bool, loops_bounded: bool) -> Cost:
    """Return the cost for the numbers that `Program.cost` adds up."""
    kinds = [(kind, across) for across in (False, True) for kind in COLLECTIVES]
    sent = {one: [total[*one, number] for number in _NUMBERS] for one in kinds}
    names = "flops", "kernels", "hbm_bytes", "copied_bytes", "int8_flops", "fp8_flops", "float32_flops", "launches"
    return Cost(
        **{name: total[name] for name in names},
        collectives=[Collective(one[0], *sent[one], one[1]) for one in kinds if any(sent[one])],
        loops_known=loops_known,
        loops_bounded=loops_bounded,
        host_bytes=max(total["to_host"], total["from_host"]),
    )


def _turns_at_most(loop: Operation, expert_shards: int) -> int | None:
    """Return the largest number of iterations of a loop over blocks of tokens (`nn._moe.grouped_linear`).

    The loop runs over the used blocks of P allocated ones. Its carry has the inputs and the results of the blocks, both
    of shape (P, Q, ...), and kernels (E, ...), so P is a leading size that occurs twice. In the backward pass E occurs
    twice too, for the kernels and their derivatives, but P is larger. Of experts that are split over devices, a device
    has an even share of the blocks. Returns None for any other loop.
    """
    if not re.search(r'op_name="[^"]*\bfeed_forward/(?:shard_map/)?while"', loop.rest):
        return None
    counts = [array.shape[0] for array in loop.arrays if len(array.shape) == 3]
    blocks = {count for count in counts if counts.count(count) > 1}
    return -(-max(blocks) // expert_shards) if blocks else None


def convolution_flops(rest: str, left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...]) -> int:
    """Count the FLOPs of a convolution from its attributes, and the shapes of its input, kernel and result."""
    inputs, kernel, outputs = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest).groups()
    window = re.search(r" window=\{([^}]*)\}", rest)
    fields_given = dict(field.split("=") for field in window[1].split()) if window else {}
    groups = math.prod(map(int, re.findall(r"(?:feature|batch)_group_count=(\d+)", rest)))
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


def _in_hbm(one: Operation) -> bool:
    return any(array.in_hbm for array in one.arrays)


def _hbm_bytes(one: Operation) -> int:
    return sum(array.bytes for array in one.arrays if array.in_hbm)


@functools.cache
def _meetings(inputs: int, outputs: int, size: int, stride: int, pad: int, dilate: int, spread: int) -> int:
    """Count the pairs of kernel and input positions that a convolution multiplies along one axis, without padding.

    `pad` is the padding before the input, `dilate` the distance of its values, `spread` the dilation of the kernel.
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
