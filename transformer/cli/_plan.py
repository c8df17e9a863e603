"""`python -m transformer plan RECIPE --topology v5e:4x4`: estimate memory and speed on a TPU you don't have."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

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
    from transformer.training.plan._topologies import Topology

SEARCHED = 12
"""default number of candidates that a search compiles"""
STEPS = 10
"""number of steps that --here measures"""
USAGE = """\
usage: {program} RECIPE --topology v5e:4x4 [--decode [ROWS:PROMPT:NEW]] [--search [N]] [--largest-batch] [--json]
       {program} RECIPE --topology v5e:1x1 --serve [LENGTH] [--int8 | --int4] [--json]
       {program} RECIPE --here

Compile the training step of a recipe for a TPU, which this machine does not need to have. Print whether the step fits,
its memory by kind, the collectives between the chips, and an estimate of the step time. No data is read. The exit code
is 1 if the step does not fit. Override the recipe's fields as for `train`: --parallel.fsdp 4 --data.batch-size 64.
RECIPE --help lists the main ones, and RECIPE --help-all all of them.

"""
OWN_OPTIONS = """\
  --topology NAME:SIZES       TPU type and number of chips along each axis: v5e:4x4, v5p:2x2x2; two slices: '2*v5e:4x4'
  --decode [ROWS:PROMPT:NEW]  plan generation instead of training: batch size, prompt tokens and new tokens per row
  --serve [LENGTH]            plan a server: weights, pages, texts of LENGTH (default: 2048) tokens, bounds of the speed
  --int8, --int4              with --serve: quantized weights, as for `generate`
  --search [N]                compile and rank the N (default: 12) most promising meshes, batch sizes and remat policies
  --largest-batch             find the largest batch that fits; compiles up to 12 programs
  --here                      compile for the devices of this machine, run steps and compare with the estimate
  --json                      print one JSON object
  --debug                     show the traceback of an error, and the compiler's output on stderr
"""


def usage() -> str:
    """Return the text that --help prints without a recipe."""
    return USAGE.format(program=program("plan")) + OWN_OPTIONS


def main(arguments: Sequence[str]) -> int:
    """Print the plan; return 0 if the recipe fits, 1 if it does not."""
    own, rest = split_options(
        arguments,
        flags=("--json", "--debug", "--here", "--largest-batch", "--help-all", "--int8", "--int4"),
        options={"--topology": None, "--decode": "", "--search": str(SEARCHED), "--serve": ""},
        hint="--topology takes a TPU type and its chips along each axis, such as v5e:4x4.",
    )
    if (rest and rest[0] in HELP) or (own.help_all and not rest):
        print(usage(), end="")
        return DONE
    if not rest or rest[0].startswith("-"):
        got = f"got {rest[0]}" if rest else "got nothing"
        raise ConfigError(
            f"the first argument must be a recipe, {got}. Try: {program('plan')} number_words --topology v5e:1x1"
        )
    _check(own)
    if not own.here:
        _without_devices()

    from transformer.cli._help import overridden
    from transformer.training._overrides import find_recipe, load_recipe_file
    from transformer.training.plan._assumptions import without_data

    recipe, about = load_recipe_file(find_recipe(rest[0]))
    called = f"{program('plan')} {rest[0]}"
    recipe = overridden(recipe, rest[1:], called=called, about=about, own=OWN_OPTIONS, help_all=own.help_all)
    if own.topology is None and not own.here:
        raise ConfigError(
            "--topology is missing. Pass the TPU to plan for, such as --topology v5e:4x4, or pass --here."
        )
    recipe, assumed = without_data(recipe)
    answer = _here(recipe, assumed) if own.here else _there(own, recipe, assumed)
    if own.json:
        values = {"recipe": recipe.name, "topology": str(answer.topology), "assumed": assumed, **answer.values}
        print(json.dumps(values, indent=2))
    else:
        print("\n".join(answer.lines))
    return DONE if answer.fits else FAULT


def _check(own: argparse.Namespace) -> None:
    modes = {
        "--here": own.here,
        "--decode": own.decode is not None,
        "--search": own.search is not None,
        "--largest-batch": own.largest_batch,
        "--serve": own.serve is not None,
    }
    chosen = [flag for flag, given in modes.items() if given]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} can't be used together. Pass one of them.")
    if own.search is not None and not (own.search.isdecimal() and int(own.search)):
        raise ConfigError(
            f"--search takes the number of candidates to compile, an integer of at least 1, got {own.search!r}."
        )
    if own.int8 and own.int4:
        raise ConfigError("--int8 and --int4 can't be used together. Remove one of them.")
    if (own.int8 or own.int4) and own.serve is None:
        raise ConfigError("--int8 and --int4 need --serve. Pass --serve, or remove them.")
    if own.here and own.topology is not None:
        raise ConfigError(
            "--here and --topology can't be used together: --here plans for this machine. Remove one of them."
        )


@dataclass(frozen=True)
class Answer:
    """Output of a plan of any kind: `values` for JSON, `lines` for text, and whether anything `fits` the `topology`."""

    topology: Topology
    values: dict[str, Any]
    lines: Iterable[str]
    fits: bool


def _without_devices() -> None:
    """Prevent libtpu and JAX from using a TPU of this machine: the plan is for another topology."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # libtpu's lock protects chips, which are not used here
    import jax

    jax.config.update("jax_platforms", "cpu")  # if JAX is already imported, it has read its variables


def _values(plan: Any) -> dict[str, Any]:
    values = dataclasses.asdict(plan)
    if "flops" in values:
        values["flops"]["total"] = plan.flops.total
    return values


def _there(own: argparse.Namespace, recipe: Recipe, assumed: Sequence[str]) -> Answer:
    from transformer.training.plan._decode_plan import make_decode_plan, parse_generation
    from transformer.training.plan._topologies import parse_topology, topology_devices
    from transformer.training.plan._train_plan import make_plan

    topology = parse_topology(own.topology)
    if own.serve is not None:
        return _serve(own, recipe, assumed, topology)
    generation = None if own.decode is None else parse_generation(own.decode or None, recipe)
    terminal = os.fdopen(os.dup(2), "w")  # the terminal, for the progress bar, while stderr is silenced
    with terminal, contextlib.nullcontext() if own.debug else quiet_stderr():
        devices = topology_devices(topology)
        if own.search is not None:
            return _search(recipe, assumed, topology, devices, int(own.search), terminal)
        if own.largest_batch:
            return _largest_batch(recipe, assumed, topology, devices, terminal)
        if generation is not None:
            plan = make_decode_plan(recipe, generation, topology, devices)
            return Answer(topology, _values(plan), decode_lines(recipe.name, topology, assumed, plan), plan.fits)
        plan = make_plan(recipe, topology, devices)
        return Answer(topology, _values(plan), train_lines(recipe.name, topology, assumed, plan), plan.fits)


def _serve(own: argparse.Namespace, recipe: Recipe, assumed: Sequence[str], topology: Topology) -> Answer:
    from transformer.training.plan._serve_plan import USUAL_LENGTH, make_serve_plan, parse_length

    usual = min(USUAL_LENGTH, recipe.model.max_length or USUAL_LENGTH)
    length = parse_length(own.serve or str(usual), recipe)
    plan = make_serve_plan(recipe, length, topology, 8 if own.int8 else 4 if own.int4 else None)
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
    from transformer.training.metrics._writer import Progress
    from transformer.training.plan._search import ranked, search

    tried = []
    with Progress(limit, stream=terminal) as progress:
        for one in search(recipe, topology, devices, limit):
            tried.append(one)
            progress.advance(len(tried))
            progress.print(search_line(one))
    best = ranked(tried)
    values = [{"flags": one.candidate.flags} | _values(one.plan) for one in best]
    fits = any(one.plan is not None and one.plan.fits for one in tried)
    return Answer(topology, {"ranked": values}, search_lines(recipe.name, topology, assumed, tried, best), fits)


def _largest_batch(
    recipe: Recipe, assumed: Sequence[str], topology: Topology, devices: list[Any], terminal: TextIO
) -> Answer:
    from transformer.training._flops import batch_field
    from transformer.training.metrics._writer import Progress
    from transformer.training.plan._largest_batch import MOST_PROGRAMS, best_of, largest_batch

    field = f"--data.{batch_field(recipe.data).replace('_', '-')}"
    tried = []
    with Progress(MOST_PROGRAMS, stream=terminal) as progress:
        for one in largest_batch(recipe, topology, devices):
            tried.append(one)
            progress.advance(len(tried))
            progress.print(batch_line(field, one))
    best = best_of(tried)
    values = {"tried": {one.size: one.plan.needed_bytes for one in tried}}
    if best is not None:
        values |= {"flags": f"{field} {best.size}", "largest_batch": best.size} | _values(best.plan)
    return Answer(topology, values, batch_lines(recipe.name, topology, assumed, field, tried, best), best is not None)


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Discard what native code writes to stderr inside the context: libtpu warns about missing workers."""
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
