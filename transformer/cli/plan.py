"""`python -m transformer plan RECIPE --topology v5e:4x4`: whether a recipe fits a TPU that is not there."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from transformer.cli.errors import DONE, FAULT
from transformer.config import ConfigError

if TYPE_CHECKING:
    from transformer.plan import Plan, Topology

HERE = Path(__file__).resolve().parents[2]  # configs/ is there, beside the package
USAGE = """\
usage: python -m transformer plan RECIPE --topology v5e:4x4 [--json] [--debug] [--GROUP.FIELD VALUE ...]

Compiles the training step of a recipe for a TPU that need not be there: whether it fits, memory by kind, what chips
tell each other, and an estimate of the time of a step. No data is read. Exit code 1: it does not fit.
  --topology NAME:SIZES   chips along each axis: v5e:4x4, v5p:2x2x2
  --json                  one JSON object
  --debug                 a traceback with an error, and what the compiler writes to stderr
The recipe's fields (RECIPE --help lists them) are set as for train.py: --parallel.fsdp 4 --data.batch-size 64.
"""


def main(arguments: Sequence[str]) -> int:
    """Prints the plan; returns 0 where the recipe fits, 1 where it does not."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--json", "--debug"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--topology")
    try:
        own, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}. --topology takes chips along each axis, such as v5e:4x4.") from None
    if rest and rest[0] in ("-h", "--help"):
        print(USAGE, end="")
        return DONE
    if not rest or rest[0].startswith("-"):
        got = f"got {rest[0]}" if rest else "got nothing"
        raise ConfigError(f"a recipe comes first, {got}. Try: plan configs/number_words.py --topology v5e:1x1")

    # libtpu is not to look for a TPU, nor JAX to compute on one: this is about another.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # its lock is for processes that use the chips
    import jax

    jax.config.update("jax_platforms", "cpu")  # where JAX was imported before

    from transformer.plan import make_plan, parse_topology, topology_devices, without_data
    from transformer.training.overrides import find_recipe, load_recipe_file, override

    recipe, about = load_recipe_file(find_recipe(rest[0], Path.cwd(), HERE))
    recipe = override(recipe, rest[1:], program=f"plan {rest[0]}", description=f"{about}\n\n{USAGE}")
    if own.topology is None:
        raise ConfigError("--topology is missing: which TPU to plan for, such as --topology v5e:4x4.")
    topology = parse_topology(own.topology)
    recipe, assumed = without_data(recipe)
    with contextlib.nullcontext() if own.debug else quiet_stderr():
        plan = make_plan(recipe, topology, topology_devices(topology))
    if own.json:
        values = dataclasses.asdict(plan)
        values["flops"]["total"] = plan.flops.total
        print(json.dumps({"recipe": recipe.name, "topology": str(topology), "assumed": assumed, **values}, indent=2))
    else:
        print("\n".join(lines(recipe.name, topology, assumed, plan, looped=recipe.execution.scan)))
    return DONE if plan.fits else FAULT


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Inside, what compiled code writes to stderr is dropped: libtpu warns of workers that are not to be there."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with tempfile.TemporaryFile() as nowhere:
            os.dup2(nowhere.fileno(), 2)
            yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def lines(name: str, topology: Topology, assumed: Sequence[str], plan: Plan, *, looped: bool) -> Iterator[str]:
    """What is printed; `looped`: layers run in a loop, of which the compiler counts the bytes of one pass."""
    unit, chips = topology.unit, "1 chip" if topology.num_chips == 1 else f"{topology.num_chips} chips"
    yield f"{name} on {topology}: {chips}, {topology.hbm:g} GiB a {unit}; {plan.mesh}"
    yield from (f"assumed: {assumption}" for assumption in assumed)
    if plan.fits:
        yield f"fits: {size(plan.needed_bytes)} of {topology.hbm:g} GiB a {unit}"
    else:
        yield f"does not fit: it needs {size(plan.needed_bytes)} of {size(plan.available_bytes)} a {unit}"
    for kind, number in plan.memory.items():
        if number:
            yield f"  {kind:29} {size(number):>10}"
    for remedy in plan.remedies:
        yield f"  try {remedy}"
    flops = plan.flops
    yield (
        f"work: {flops.total:.3g} FLOPs a step, {flops.total / plan.batch_tokens:.3g} a token, {plan.num_parameters:,} "
        f"parameters; {100 * flops.attention / flops.total:.1f} % in scores (counted whole)"
    )
    if plan.fits:
        yield from _talk(plan)
    if plan.estimate is not None:
        one, pass_ = plan.estimate, " (of looped layers one pass)" if looped else ""
        told = "(not counted)" if plan.collectives is None else f"{one.collective_seconds * 1e3:.3g} ms"
        yield (
            f"estimate, not a measurement: {one.seconds * 1e3:.3g} ms a step, MFU {100 * one.mfu:.2g} %: "
            f"the larger of compute {one.compute_seconds * 1e3:.3g} and memory {one.memory_seconds * 1e3:.3g}{pass_}, "
            f"plus collectives {told}"
        )
    yield f"planned in {plan.seconds:.1f} s"


def _talk(plan: Plan) -> Iterator[str]:
    if plan.collectives is None:
        yield "collectives: not available, the compiler can't print this program"
    elif not plan.collectives:
        yield "collectives: none"
    else:
        each = ", ".join(f"{one.count} {one.kind} of {size(one.result_bytes)}" for one in plan.collectives)
        yield f"collectives{'' if plan.loops_known else ' (per pass of a loop)'}: {each} a step"


def size(number: int) -> str:
    """Bytes in the largest unit of which there is one."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}" if number < 100 * scale else f"{number / scale:.0f} {unit}"
    return f"{number} B"
