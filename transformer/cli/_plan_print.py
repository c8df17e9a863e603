"""Text output of `plan`: training, generation, search, and the comparison with a measurement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformer.training.plan._contract import Topology
    from transformer.training.plan._decode_plan import DecodePlan
    from transformer.training.plan._measurement import Measured
    from transformer.training.plan._roofline import Estimate
    from transformer.training.plan._search import BatchTried, Tried
    from transformer.training.plan._serve_plan import ServePlan
    from transformer.training.plan._train_plan import Plan


UNPRINTED = "the compiler can't print this program"


def train_lines(name: str, topology: Topology, assumed: Sequence[str], plan: Plan) -> Iterator[str]:
    """Yield the lines of a plan of a training step."""
    yield from _heading(name, topology, plan.mesh, assumed)
    yield from _memory(plan, topology)
    flops, each = plan.flops, f"per {plan.unit.removesuffix('s')}"
    yield (
        f"work: {flops.total:.3g} FLOPs per step, {flops.total / plan.counted:.3g} {each}, {plan.num_parameters:,} "
        f"parameters; {100 * flops.attention / flops.total:.1f} % in attention scores (full matrix)"
    )
    if plan.computed_flops and plan.computed_flops > 1.02 * flops.total:
        yield f"  {plan.computed_flops / flops.total:.2f} times as many with recomputation"
    if plan.fits:
        yield from _collectives(plan.cost and plan.cost.collectives, "per step", UNPRINTED, topology)
        if plan.cost is not None:
            yield from _launches(plan.cost.launches, "per step", topology)
    if plan.estimate is not None:
        one = plan.estimate
        yield (
            f"estimate, not a measurement: {duration(one.seconds)} per step, MFU {percent(one.mfu)} %, "
            f"{plan.units_per_second:,.0f} {plan.unit}/s"
        )
        yield f"  {_parts(one, topology)}"
        if not plan.cost.loops_bounded:
            yield "  a lower bound: a loop with an unknown number of iterations counts as one iteration"
        elif not plan.cost.loops_known:
            yield "  an upper bound: a loop over experts counts with its maximum number of iterations"
    elif plan.fits:
        yield f"no estimate: {UNPRINTED}"
    yield from _notes(topology)
    yield f"planned in {plan.seconds:.1f} s"


def decode_lines(name: str, topology: Topology, assumed: Sequence[str], plan: DecodePlan) -> Iterator[str]:
    """Yield the lines of a plan of generation."""
    wanted = plan.generation
    yield from _heading(name, topology, plan.mesh, assumed)
    yield (
        f"generation (--shape {wanted}): {wanted.rows} rows, {wanted.prompt:,} prompt tokens and {wanted.new:,} "
        f"new tokens per row; {plan.num_parameters:,} parameters"
    )
    yield from _memory(plan, topology)
    yield f"  KV cache: {size(plan.cache_bytes)}, included in the temporaries"
    if plan.fits:
        yield from _collectives(plan.collectives, "per token", plan.unavailable, topology)
    if plan.prefill is not None and plan.token is not None:
        yield from _launches(plan.launches, "per token", topology)
        whole = plan.prefill.seconds + wanted.new * plan.token.seconds
        yield (
            f"estimate, not a measurement: {duration(whole)} in total; after the prefill, "
            f"{plan.tokens_per_second:,.0f} new tokens/s"
        )
        yield f"  prefill {duration(plan.prefill.seconds)}: {_parts(plan.prefill, topology)}"
        yield f"  one token per row {duration(plan.token.seconds)}: {_parts(plan.token, topology)}"
        times = plan.token_bytes / plan.least_token_bytes
        yield (
            f"  it reads and writes {size(plan.token_bytes)}, {times:.2f} times the minimum of "
            f"{size(plan.least_token_bytes)} (parameters and KV cache, read once)"
        )
        if not plan.loops_known:
            yield "  an upper bound: a loop over experts counts with its maximum number of iterations"
    elif plan.fits:
        yield f"no estimate: {plan.unavailable}"
    yield from _notes(topology)
    yield f"planned in {plan.seconds:.1f} s"


def serve_lines(name: str, topology: Topology, assumed: Sequence[str], plan: ServePlan) -> Iterator[str]:
    """Yield the lines of a plan of a server."""
    yield from _heading(name, topology, plan.mesh, assumed)
    stored = plan.dtype if plan.bits is None else f"{plan.bits} bits"
    each = f"per {topology.unit}"
    yield f"weights: {size(plan.weight_bytes)} {each} in {stored}, {plan.num_parameters:,} parameters"
    note = f" ({topology.memory_note})" if topology.memory_note else ""
    yield f"weights and pages together have {size(plan.available_bytes)} {each}{note}"
    yield f"pages of {plan.page_size} tokens in {plan.dtype}: {plan.pages:,}, each {size(plan.page_bytes)} {each}"
    if not plan.fits:
        needed = plan.weight_bytes + -(-plan.length // plan.page_size) * plan.page_bytes
        yield f"does not fit: the weights and one text of {plan.length:,} tokens need {size(needed)} {each}"
        return
    yield f"fits: {plan.slots:,} texts of {plan.length:,} tokens (--slots {plan.slots} --max-tokens {plan.length})"
    yield (
        f"upper bounds, not measurements: {plan.tokens_per_second:,.0f} new tokens/s of all texts, "
        f"{plan.single_tokens_per_second:,.0f} of one text alone; {plan.prompt_tokens_per_second:,.0f} prompt tokens/s"
    )
    yield (
        f"  a step of all texts: max(memory {duration(plan.memory_seconds)}, compute "
        f"{duration(plan.compute_seconds)}), without communication"
    )
    yield f"  a prompt token: {plan.prompt_flops:.3g} FLOPs in the layers, without attention scores"


def search_line(one: Tried) -> str:
    """Return the line of a candidate, which is printed as soon as it is compiled."""
    if one.plan is None:
        return f"{one.candidate.flags}: {one.error}"
    if not one.plan.fits:
        return f"{one.candidate.flags}: does not fit, {size(one.plan.needed_bytes)}"
    if one.plan.estimate is None:
        return f"{one.candidate.flags}: fits, no estimate: {UNPRINTED}"
    return f"{one.candidate.flags}: {one.plan.units_per_second:,.0f} {one.plan.unit}/s"


def search_lines(
    name: str, topology: Topology, assumed: Sequence[str], tried: Sequence[Tried], best: Sequence[Tried]
) -> Iterator[str]:
    """Yield the lines of a search: the candidates that fit, fastest first, with the flags to add to the command."""
    compiled = f"{len(tried)} configurations compiled in {sum(one.seconds for one in tried):.0f} s"
    yield from _heading(name, topology, compiled, assumed)
    speeds = f"{best[0].plan.unit}/s".rjust(11) if best else ""
    if best:
        yield f"rank  {speeds}  ms / step  MFU %  GiB / {topology.unit}  flags to add to this command"
    for place, one in enumerate(best, 1):
        plan = one.plan
        yield (
            f"{place:>4}  {plan.units_per_second:>{len(speeds)},.0f}  {plan.estimate.seconds * 1e3:>9.4g}  "
            f"{percent(plan.estimate.mfu):>5}  {plan.needed_bytes / 2**30:>{len(topology.unit) + 6}.2f}  "
            f"{one.candidate.flags}"
        )
    failed = [one for one in tried if one.plan is None]
    fitting = [one for one in tried if one.plan is not None and one.plan.fits]
    yield f"{len(fitting)} fit, {len(tried) - len(fitting) - len(failed)} do not fit, {len(failed)} failed"
    yield from (f"  not ranked, {search_line(one)}" for one in fitting if one.plan.estimate is None)
    yield from (f"  failed: {one.candidate.flags}: {one.error}" for one in failed)
    yield from _notes(topology)
    yield "Ranked by estimates, not measurements. The batch size changes the training result; the other flags do not."


def batch_line(field: str, one: BatchTried) -> str:
    """Return the line of a batch size, which is printed as soon as its step is compiled."""
    speed = f", {one.plan.units_per_second:,.0f} {one.plan.unit}/s" if one.plan.estimate else ""
    return f"{field} {one.size}: {'fits' if one.plan.fits else 'does not fit'}, {size(one.plan.needed_bytes)}{speed}"


def batch_lines(
    name: str,
    topology: Topology,
    assumed: Sequence[str],
    field: str,
    tried: Sequence[BatchTried],
    best: BatchTried | None,
) -> Iterator[str]:
    """Yield the lines of the search for the largest batch."""
    yield from _heading(name, topology, tried[-1].plan.mesh, assumed)
    if best is None:
        smallest = min(tried, key=lambda one: one.size)
        yield f"nothing fits: {batch_line(field, smallest)}"
        yield from (f"  try {remedy}" for remedy in smallest.plan.remedies)
        return
    larger = min((one.size for one in tried if not one.plan.fits), default=None)
    beyond = f"{larger} does not fit" if larger else "larger batches were not tried"
    yield f"largest batch: {field} {best.size} ({beyond})"
    yield f"  {batch_line(field, best)}, an estimate and not a measurement"
    yield from _notes(topology)
    yield f"{len(tried)} programs compiled in {sum(one.plan.seconds for one in tried):.0f} s"


def here_lines(plan: Plan, measured: Measured, figures: str) -> Iterator[str]:
    """Yield the lines that compare measured steps with the estimate; `figures` describes the peak rates of a device."""
    yield f"device figures: {figures}"
    peak = "" if measured.peak_bytes is None else f", peak memory {size(measured.peak_bytes)}"
    yield f"measured: {duration(measured.step_seconds)} per step, median of {measured.steps} steps{peak}"
    if plan.estimate is not None:
        yield f"measured / estimated: {measured.step_seconds / plan.estimate.seconds:.2f}"


def _heading(name: str, topology: Topology, what: str, assumed: Sequence[str]) -> Iterator[str]:
    count = topology.num_chips
    there = f"{count} {'chip' if topology.unit == 'core' else topology.unit}{'' if count == 1 else 's'}"
    yield f"{name} on {topology}: {there}, {topology.hbm:.4g} GiB per {topology.unit}; {what}"
    yield from (f"assumed: {assumption}" for assumption in assumed)


def _memory(plan: Plan | DecodePlan, topology: Topology) -> Iterator[str]:
    if plan.fits:
        note = f" ({topology.memory_note})" if topology.memory_note else ""
        yield f"fits: {size(plan.needed_bytes)} of {topology.usable_bytes / 2**30:.4g} GiB per {topology.unit}{note}"
    else:
        note = f" ({topology.memory_note})" if topology.memory_note else ""
        available = size(plan.available_bytes)
        yield f"does not fit: it needs {size(plan.needed_bytes)} of {available} per {topology.unit}{note}"
    yield from _kinds(plan.memory)
    if any(plan.host_memory.values()):
        yield f"host memory per {topology.unit}: {size(sum(plan.host_memory.values()))}"
        yield from _kinds(plan.host_memory)
    for remedy in plan.remedies:
        yield f"  try {remedy}"


def _kinds(memory: Mapping[str, int]) -> Iterator[str]:
    for kind, number in memory.items():
        if number:
            yield f"  {kind:29} {size(number):>10}"


def _parts(one: Estimate, topology: Topology) -> str:
    host = f", host {duration(one.host_seconds)}" if one.host_seconds else ""
    far = f" + {topology.network} {duration(one.network_seconds)}" if one.network_seconds else ""
    return (
        f"max(compute {duration(one.compute_seconds)}, memory {duration(one.memory_seconds)}{host}) + collectives "
        f"{duration(one.collective_seconds)}{far}"
    )


def _collectives(collectives: Sequence | None, of: str, unavailable: str, topology: Topology) -> Iterator[str]:
    if collectives is None:
        yield f"collectives: not available, {unavailable}"
    elif not collectives:
        yield "collectives: none"
    else:
        far = {True: f" {topology.network}", False: ""}
        each = (f"{one.count} {one.kind} of {size(one.result_bytes)}{far[one.over_network]}" for one in collectives)
        yield f"collectives: {', '.join(each)} {of}"


def _launches(number: int, of: str, topology: Topology) -> Iterator[str]:
    if topology.counts_launches:
        yield f"launches: {number:,} kernels, copies and collectives {of}"


def _notes(topology: Topology) -> Iterator[str]:
    yield from (f"note: {note}" for note in topology.notes)


def size(number: int) -> str:
    """Format a number of bytes in the largest unit (GiB, MiB, KiB or B) that gives at least 1."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}" if number < 100 * scale else f"{number / scale:.0f} {unit}"
    return f"{number} B"


def duration(seconds: float) -> str:
    """Format seconds; values below one second in milliseconds."""
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"


def percent(share: float) -> str:
    """Format a fraction as percent without decimals; below ten percent with two significant digits."""
    return f"{100 * share:.0f}" if share >= 0.0995 else f"{100 * share:.2g}"
