"""`transformer-zoo plan train RECIPE --topology v5e:4x4` and other plans: memory and speed of devices you lack."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from transformer.cli._errors import DONE, FAULT
from transformer.cli._own_options import HELP, split_options
from transformer.cli._plan_print import (
    batch_line,
    batch_lines,
    decode_lines,
    here_lines,
    search_line,
    search_lines,
    serve_lines,
    train_lines,
)
from transformer.config._checks import ConfigError
from transformer.config._invocation import program

if TYPE_CHECKING:
    from transformer.training._recipe import Recipe
    from transformer.training.plan._contract import Topology
    from transformer.training.plan._decode_plan import DecodePlan
    from transformer.training.plan._serve_plan import ServePlan
    from transformer.training.plan._train_plan import Plan

Tried = TypeVar("Tried")
SEARCHED = 12
"""default number of candidates that a search compiles"""
STEPS = 10
"""number of steps that `plan here` measures"""
USAGE = """\
usage: {program} RECIPE{topology} [OPTIONS]

{about}

No data is read. The exit code is 1 if it does not fit. Override the recipe's fields as for `train`: --parallel.fsdp 4
--data.batch-size 64. RECIPE --help lists the main ones, and RECIPE --help-all all of them.

"""
TOPOLOGY = {
    "--topology": "KIND:SIZES|TPU and chips along each axis, v5e:4x4, or GPU, hosts and GPUs per host, h100:2x8; two "
    "slices: '2*v5e:4x4'"
}
FLAGS = {
    "--json": "|print one JSON object",
    "--debug": "|show the traceback of an error, and the compiler's output on stderr",
}
KINDS = {
    "train": (
        "Compile the training step for TPUs or GPUs, and print its memory by kind, the collectives between devices,\n"
        "and an estimate of the step time.",
        TOPOLOGY,
    ),
    "decode": (
        "Compile the program of `generate` for TPUs or GPUs, and print its memory and an estimate of its time.",
        TOPOLOGY
        | {"--shape": "ROWS:PROMPT:NEW|batch size, prompt tokens and new tokens per row (default: 8 and the recipe's)"},
    ),
    "serve": (
        "Compute the weights, pages and bounds of the speed of a server on TPUs or GPUs. Nothing is compiled.",
        TOPOLOGY
        | {
            "--length": "TOKENS|tokens of a text (default: 2048)",
            "--quantize": "int8|int4|quantized weights, as for `generate` (default: none)",
        },
    ),
    "search": (
        "Compile and rank the most promising meshes, batch sizes and remat policies for TPUs or GPUs.",
        TOPOLOGY | {"--candidates": f"N|number of candidates to compile (default: {SEARCHED})"},
    ),
    "batch": ("Find the largest batch that fits on TPUs or GPUs. This compiles up to 12 programs.", TOPOLOGY),
    "here": (
        "Compile the training step for the devices of this machine, run steps, and compare with the estimate.",
        {},
    ),
}
"""kinds of plans by the second word of the command: description, and options with a value; an option has the
placeholder of its value and its meaning
"""


def main(arguments: Sequence[str]) -> int:
    """Print the plan; return 0 if the recipe fits, 1 if it does not."""
    kind, *arguments = arguments
    about, options = KINDS[kind]
    hint = "--topology takes a TPU and its chips along each axis, such as v5e:4x4, or a GPU, hosts and GPUs per host, "
    hint += "such as h100:2x8."
    own, rest = split_options(arguments, flags=(*FLAGS, "--help-all"), options=options, hint=hint)
    called, topology = program(f"plan {kind}"), " --topology v5e:4x4" if options else ""
    described = ""
    for option, text in (options | FLAGS).items():
        value, _, meaning = text.rpartition("|")
        described += f"  {f'{option} {value}':25}{meaning}\n"
    if (rest and rest[0] in HELP) or (own.help_all and not rest):
        print(USAGE.format(program=called, topology=topology, about=about) + described, end="")
        return DONE
    if not rest or rest[0].startswith("-"):
        got = f"got {rest[0]}" if rest else "got nothing"
        raise ConfigError(f"the first argument must be a recipe, {got}. Try: {called} number_words{topology}")
    _check(kind, own)
    if options:
        _without_devices()

    from transformer.cli._recipe_help import overridden
    from transformer.training._completion import without_data
    from transformer.training._overrides import find_recipe, load_recipe_file

    recipe, about = load_recipe_file(find_recipe(rest[0]))
    called = f"{called} {rest[0]}"
    recipe = overridden(recipe, rest[1:], called=called, about=about, own=described, help_all=own.help_all)
    if options and own.topology is None:
        raise ConfigError(
            f"--topology is missing. Pass the TPU or GPU to plan for, such as --topology v5e:4x4 or h100:1x8, or use "
            f"{program('plan here')}."
        )
    recipe, assumed = without_data(recipe)
    answer = _there(kind, own, recipe, assumed) if options else _here(recipe, assumed)
    if own.json:
        values = {"recipe": recipe.name, "topology": str(answer.topology), "assumed": assumed, **answer.values}
        print(json.dumps(values, indent=2))
    else:
        print("\n".join(answer.lines))
    return DONE if answer.fits else FAULT


def _check(kind: str, own: argparse.Namespace) -> None:
    if kind == "search" and own.candidates is not None and not (own.candidates.isdecimal() and int(own.candidates)):
        raise ConfigError(
            f"--candidates must be the number of candidates to compile, an integer of at least 1, got "
            f"{own.candidates!r}."
        )
    if kind == "serve" and own.quantize not in (None, "int8", "int4"):
        raise ConfigError(f"--quantize must be int8 or int4, got {own.quantize!r}.")


@dataclass(frozen=True)
class Answer:
    """Output of a plan of any kind: `values` for JSON, `lines` for text, and whether anything `fits` the `topology`."""

    topology: Topology
    values: dict[str, Any]
    lines: Iterable[str]
    fits: bool


def _without_devices() -> None:
    """Prevent the compilers and JAX from using a TPU or GPU of this machine: the plan is for another topology."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # libtpu's lock protects chips, which are not used here
    import jax

    jax.config.update("jax_platforms", "cpu")  # if JAX is already imported, it has read its variables


def _values(plan: Plan | DecodePlan | ServePlan) -> dict[str, Any]:
    values = dataclasses.asdict(plan)
    if "flops" in values:
        values["flops"]["total"] = plan.flops.total
    return values


def _there(kind: str, own: argparse.Namespace, recipe: Recipe, assumed: Sequence[str]) -> Answer:
    from transformer.training.plan._decode_plan import make_decode_plan, parse_generation
    from transformer.training.plan._topologies import parse_topology, topology_devices
    from transformer.training.plan._train_plan import make_plan

    topology = parse_topology(own.topology)
    if kind == "serve":
        return _serve(own, recipe, assumed, topology)
    generation = parse_generation(own.shape, recipe) if kind == "decode" else None
    terminal = os.fdopen(os.dup(2), "w")  # the terminal, for the progress bar, while stderr is silenced
    with terminal, contextlib.nullcontext() if own.debug else quiet_stderr():
        devices = topology_devices(topology)
        if kind == "search":
            return _search(recipe, assumed, topology, devices, int(own.candidates or SEARCHED), terminal)
        if kind == "batch":
            return _largest_batch(recipe, assumed, topology, devices, terminal)
        if generation is not None:
            plan, lines = make_decode_plan(recipe, generation, topology, devices), decode_lines
        else:
            plan, lines = make_plan(recipe, topology, devices), train_lines
        return Answer(topology, _values(plan), lines(recipe.name, topology, assumed, plan), plan.fits)


def _serve(own: argparse.Namespace, recipe: Recipe, assumed: Sequence[str], topology: Topology) -> Answer:
    from transformer.training.plan._serve_plan import USUAL_LENGTH, make_serve_plan, parse_length

    usual = min(USUAL_LENGTH, recipe.model.max_length or USUAL_LENGTH)
    length = parse_length(own.length or str(usual), recipe)
    plan = make_serve_plan(recipe, length, topology, None if own.quantize is None else int(own.quantize[3:]))
    return Answer(topology, _values(plan), serve_lines(recipe.name, topology, assumed, plan), plan.fits)


def _here(recipe: Recipe, assumed: Sequence[str]) -> Answer:
    import jax

    from transformer.training.plan._measurement import measure, present_topology
    from transformer.training.plan._train_plan import make_plan

    devices = recipe.parallel.choose(jax.local_devices())
    topology, figures = present_topology(devices)
    plan = make_plan(recipe, topology, devices)
    values, lines = _values(plan), [*train_lines(recipe.name, topology, assumed, plan)]
    if plan.fits:
        measured = measure(recipe, STEPS)
        values |= {"figures": figures, "measured": dataclasses.asdict(measured)}
        lines += here_lines(plan, measured, figures)
    return Answer(topology, values, lines, plan.fits)


def _search(
    recipe: Recipe, assumed: Sequence[str], topology: Topology, devices: list[Any], limit: int, terminal: TextIO
) -> Answer:
    from transformer.training.plan._search import ranked, search

    tried = _tried(search(recipe, topology, devices, limit), limit, terminal, search_line)
    best = ranked(tried)
    values = [{"flags": one.candidate.flags} | _values(one.plan) for one in best]
    fits = any(one.plan is not None and one.plan.fits for one in tried)
    return Answer(topology, {"ranked": values}, search_lines(recipe.name, topology, assumed, tried, best), fits)


def _largest_batch(
    recipe: Recipe, assumed: Sequence[str], topology: Topology, devices: list[Any], terminal: TextIO
) -> Answer:
    from transformer.training._flops import batch_field
    from transformer.training.plan._search import MOST_PROGRAMS, best_of, largest_batch

    field = f"--data.{batch_field(recipe.data).replace('_', '-')}"
    plans = largest_batch(recipe, topology, devices)
    tried = _tried(plans, MOST_PROGRAMS, terminal, functools.partial(batch_line, field))
    best = best_of(tried)
    values = {"tried": {one.size: one.plan.needed_bytes for one in tried}}
    if best is not None:
        values |= {"flags": f"{field} {best.size}", "largest_batch": best.size} | _values(best.plan)
    return Answer(topology, values, batch_lines(recipe.name, topology, assumed, field, tried, best), best is not None)


def _tried(plans: Iterable[Tried], limit: int, terminal: TextIO, line: Callable[[Tried], str]) -> list[Tried]:
    """Return plans that are compiled one after the other, and show each as a line."""
    from transformer.training.metrics._writer import Progress

    tried = []
    with Progress(limit, stream=terminal) as progress:
        for one in plans:
            tried.append(one)
            progress.advance(len(tried))
            progress.print(line(one))
    return tried


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Discard what native code writes to stderr inside the context: compilers warn about missing workers and GPUs."""
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
