"""What devices tell each other, of a compiled program's text; and a roofline of a step's time."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from transformer.plan.chips import Topology


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


_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_OPERATION = re.compile(rf"= (.+?) ({'|'.join(_KINDS)})(-start)?\(")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_CALL = re.compile(r"\b(body|condition|calls|to_apply|branch_computations)=(\{[^}]*\}|%?[\w.-]+)")
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}


def collectives(hlo: str, num_devices: int) -> tuple[list[Collective], bool]:
    """What devices tell each other, of the text of a compiled program; and whether the turns of every loop are known.

    A loop whose turns are not in the text counts as one pass. Bytes on the wire are those of ring algorithms over n
    devices (Thakur et al. 2005): all-reduce 2 (n - 1) / n of its result, all-gather (n - 1) / n, reduce-scatter n - 1
    times its result, permute all of it.
    """
    inside: dict[str, list[str]] = {}
    entry, name = "", ""
    for line in hlo.splitlines():
        if begin := _COMPUTATION.match(line):
            name = begin[2]
            entry = name if begin[1] else entry
        inside.setdefault(name, []).append(line)
    totals = {kind: [0, 0, 0] for kind in _KINDS}
    known = True

    def visit(name: str, times: int) -> None:
        nonlocal known
        for line in inside.get(name, ()):
            if operation := _OPERATION.search(line):
                kind, result, wire = operation[2], *_bytes(line, *operation.groups(), num_devices)
                for place, number in enumerate((1, result, wire)):
                    totals[kind][place] += times * number
                continue
            turns = re.search(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)', line)
            for call, callees in _CALL.findall(line):
                if call == "body":
                    before = sum(total[0] for total in totals.values())
                    visit(callees.strip("{%}"), times * (int(turns[1]) if turns else 1))
                    known &= bool(turns) or before == sum(total[0] for total in totals.values())
                elif not re.search(r" async-(update|done)\(", line):
                    for callee in callees.split(", "):
                        visit(callee.strip("{%}"), times)

    visit(entry, 1)
    return [Collective(kind, *total) for kind, total in totals.items() if total[0]], known


def _bytes(line: str, types: str, kind: str, start: str | None, num_devices: int) -> tuple[int, int]:
    """Bytes of the result of a collective, and those on the wire."""
    groups = re.search(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]+)\})", line)
    n = num_devices if groups is None else int(groups[1] or groups[2].count(",") + 1)
    arrays = re.findall(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]", types)
    sizes = [_SIZES.get(dtype, 4) * math.prod(map(int, filter(None, shape.split(",")))) for dtype, shape in arrays]
    result = sum(sizes)
    if start and kind == "all-gather":  # (operands, results)
        result = result * n // (n + 1)
    if start and kind == "collective-permute":  # (operand, result, two numbers)
        result = max(sizes)
    share = (n - 1) / n
    factor = {"all-reduce": 2 * share, "reduce-scatter": n - 1, "collective-permute": 1.0}.get(kind, share)
    return result, round(factor * result)


@dataclass(frozen=True)
class Estimate:
    """What a step may take, seconds, and what that is made of."""

    seconds: float
    compute_seconds: float
    """products alone"""
    memory_seconds: float
    """bytes to and from the HBM alone"""
    collective_seconds: float
    """what devices tell each other alone"""
    mfu: float
    """model FLOPs utilization: share of all devices' peak"""


def estimate(flops: int, hbm_bytes: int, wire_bytes: int, topology: Topology) -> Estimate:
    """A roofline, an estimate and not a measurement: max(F / P, M / W) + C / I seconds (Williams et al. 2009).

    F: model FLOPs of the step over all chips; P: their peak in bfloat16. M: bytes a device reads and writes, as the
    compiler counts them (of layers in a loop one pass, and with what never leaves the chip); W: its bandwidth. C: bytes
    a device sends; I: its share of the links of its chip. As if collectives never ran beside products, and everything
    at its peak: no latencies, no work that is not counted.
    """
    chip, peak = topology.chip, topology.num_chips * topology.chip.flops
    compute = flops / peak
    memory = hbm_bytes / (chip.hbm_bandwidth / chip.devices)
    collective = wire_bytes / (chip.ici_bandwidth / chip.devices)
    seconds = max(compute, memory) + collective
    return Estimate(seconds, compute, memory, collective, flops / (peak * seconds))
