"""`transformer-zoo train RECIPE`: train a recipe, or resume its run. `python train.py RECIPE` is the same command."""

from __future__ import annotations

import argparse
import ast
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from transformer.cli._own_options import HELP, split_options
from transformer.config._checks import ConfigError
from transformer.config._invocation import program
from transformer.config._local_paths import local_path
from transformer.config._recipe_files import SAVED_RECIPE, find_recipe, recipe_files

if TYPE_CHECKING:
    from transformer.training._recipe import Recipe
    from transformer.training._start import Start

USAGE = """\
usage: {program} RECIPE|WORKDIR [--workdir DIR] [--init DIR] [--profile START:STOP] [--fast] [--debug]
       {blank} [--restart] [--allow-change] [--take-over] [--skip-memory-check] [--dry-run]
       {blank} [--GROUP.FIELD VALUE ...]
       {program} RECIPE --help     show the main options of a recipe; --help-all shows all of them
       {program} --list            list all recipes

RECIPE is the name of a recipe (number_words) or the path of a file (configs/number_words.py). Recipes in ./configs
override bundled recipes of the same name. Every field of a recipe is an option, such as --model.num-layers 4.
WORKDIR is the directory of an existing run, which is resumed with its own recipe.

"""

OWN_OPTIONS = """\
  --workdir DIR   directory of the run (default: runs/NAME); an existing run is resumed
  --init DIR      initialize from a model: a directory of weights (config.json, safetensors), a name on the Hugging Face
                  Hub, or the workdir of another run; not needed to resume
  --profile START:STOP
                  write a trace of steps START + 1 to STOP to WORKDIR/profile, for XProf
  --restart       start from step 0 in an existing workdir; the files of the old run move to WORKDIR/previous
  --allow-change  resume an existing run although options differ that keep the shapes of the parameters and the order of
                  the data: learning rate and schedule, batch size, regularization
  --take-over     take over the workdir's lock from a process on another host that no longer exists
  --skip-memory-check
                  start even if the state and the batch are estimated not to fit into memory
  --dry-run       print the complete recipe, parameters, memory and the first batch; train nothing, write nothing
  --fast          run a few steps of everything (training, evaluation, checkpoint, samples) in a temporary workdir,
                  which is removed at the end
  --debug         show the traceback of an error
"""


FLAGS = (
    *("--list", "--fast", "--restart", "--allow-change", "--take-over", "--skip-memory-check", "--dry-run", "--debug"),
    "--help-all",
)


def main(arguments: Sequence[str]) -> int:
    """Load a recipe, override its fields and train; return the exit code: 0 if finished, 128 + signal if stopped."""
    hint = "--workdir and --init take a directory, such as runs/mine; --profile takes steps: 20:30."
    own, rest = split_options(arguments, flags=FLAGS, options=("--workdir", "--init", "--profile"), hint=hint)
    if own.list:
        for name, path in recipe_files().items():
            print(f"{name:24} {_summary(path)}")
        return 0
    if (rest and rest[0] in HELP) or (own.help_all and not rest):
        print(USAGE.format(program=program("train"), blank=" " * len(program("train"))) + OWN_OPTIONS, end="")
        return 0
    _check_given(own, rest)
    recipe, about = _recipe_of(rest[0], own)

    from transformer.cli._recipe_help import overridden
    from transformer.training._overrides import fast

    before = fast(recipe) if own.fast else recipe
    called = f"{program('train')} {rest[0]}"
    recipe = overridden(before, rest[1:], called=called, about=about, own=OWN_OPTIONS, help_all=own.help_all)

    import jax

    from transformer.cli._devices import accelerator_present, unused_warning
    from transformer.inference._initial_model import start_from
    from transformer.inference._reward_model import reward_model
    from transformer.training import _processes as processes
    from transformer.training._loop import train
    from transformer.training._profile import parse_window
    from transformer.training._start import check_options, origin_of

    window = None if own.profile is None else parse_window(own.profile, recipe.training.steps)
    processes.join(recipe.parallel)  # must run before JAX lists its devices
    workdir = _workdir(recipe, own)
    if warning := unused_warning(accelerator_present(), jax.default_backend()):
        print(f"warning: {warning}", file=sys.stderr)
    start = None
    if source := own.init or (None if own.restart else origin_of(workdir)):
        check_options(before, recipe, source)
    if own.init:
        start = start_from(own.init, recipe)
    command = _command_to_resume(arguments, own, workdir)
    teacher = _teacher(recipe, workdir, own.restart)
    checks = {"restart": own.restart, "check_memory": not own.skip_memory_check, "allow_change": own.allow_change}
    if own.dry_run:
        from transformer.training._dry_run import dry_run

        dry_run(recipe, workdir, start=start, teacher=teacher, **checks)
        return 0
    options = {
        "start": start,
        "teacher": teacher,
        "reward_model": reward_model(recipe),
        "profile": window,
        "take_over": own.take_over,
        "temporary": _is_temporary(own),
    }
    code = train(recipe, workdir, command=command, **options, **checks).exit_code
    _remove_temporary(workdir, own, code)
    processes.part()
    return code


def _is_temporary(own: argparse.Namespace) -> bool:
    """Return whether the run gets a temporary workdir."""
    return own.fast and not own.workdir and not own.dry_run


def _workdir(recipe: Recipe, own: argparse.Namespace) -> str:
    """Return the workdir of the run; create it if it is temporary."""
    from transformer.training import _processes as processes

    if _is_temporary(own):
        return processes.first_decides(lambda: tempfile.mkdtemp(prefix=f"{recipe.name}-fast-"))
    return own.workdir or f"runs/{recipe.name}"


def _remove_temporary(workdir: str, own: argparse.Namespace, code: int) -> None:
    """Remove a temporary workdir after a run without errors."""
    from transformer.training import _processes as processes

    if _is_temporary(own) and code == 0 and processes.is_first():
        shutil.rmtree(workdir, ignore_errors=True)
        print(f"--fast: everything ran, and the files were removed ({workdir}). Pass --workdir DIR to keep them.")


def _recipe_of(name: str, own: argparse.Namespace) -> tuple[Recipe, str]:
    """Return a recipe and its description; for the workdir of a run, its recipe, and set `own.workdir`."""
    # The name of a recipe means the recipe, even if a workdir has the same name.
    if name in recipe_files() or not os.path.isfile(os.path.join(name, SAVED_RECIPE)):
        path = find_recipe(name)
        from transformer.training._overrides import load_recipe_file

        return load_recipe_file(path)
    if own.workdir is not None and Path(own.workdir).resolve() != Path(name).resolve():
        raise ConfigError(
            f"{name} is the workdir of a run, which is resumed there, but --workdir is {own.workdir}. Remove "
            "--workdir, or pass the recipe of a new run."
        )
    from transformer.training._recipe import load_recipe

    recipe = load_recipe(name)
    if recipe.grpo is not None:
        raise ConfigError(
            f"the recipe in {name} names rewards, which are code that this command would run. Pass the recipe itself: "
            f"{program('train')} RECIPE --workdir {name}."
        )
    own.workdir = name
    return recipe, f"The recipe of the run in {name}."


def _teacher(recipe: Recipe, workdir: str, restart: bool) -> Start | None:
    """Load the teacher of a new run; None without distillation, or if the run's checkpoints contain it."""
    from transformer.inference._initial_model import start_from
    from transformer.training.workdir._restart import has_checkpoints

    if recipe.distill is None or (has_checkpoints(workdir) and not restart):
        return None
    if not recipe.distill.teacher:
        raise ConfigError("distill needs a trained model, but none was given. Name it with --distill.teacher DIR.")
    return start_from(recipe.distill.teacher, recipe)


def _check_given(own: argparse.Namespace, rest: Sequence[str]) -> None:
    """Raise ConfigError if the recipe is missing, or a directory is the empty string or remote."""
    if not rest or rest[0].startswith("-"):
        got = f"got {rest[0]}" if rest else "got nothing"
        raise ConfigError(
            f"the first argument must be a recipe or the workdir of a run, {got}. "
            f"Try: {program('train')} number_words, or --list."
        )
    for option, value in (("workdir", own.workdir), ("init", own.init)):
        if value == "":
            raise ConfigError(f"--{option} must name a directory, got ''. Remove the option, or pass a name.")
        if value is not None:
            local_path(value, f"--{option}")
    local_path(rest[0], "the recipe")


def _command_to_resume(arguments: Sequence[str], own: argparse.Namespace, workdir: str) -> str:
    """Return the command line that resumes the run in this workdir."""
    # --take-over: the next lock may belong to a running process. --restart: it would discard the run, not resume it.
    # --allow-change stays: until the next checkpoint, the newest one has the former values.
    again = [word for word in arguments if word not in ("--take-over", "--restart")]
    again += [] if own.workdir else ["--workdir", workdir]
    return f"{program('train')} {shlex.join(again)}"


def _summary(path: Path) -> str:
    """Return the first line of a file's docstring. The file is parsed, not run: running it would import JAX."""
    try:
        about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    except (SyntaxError, ValueError, OSError) as error:
        return f"({path} cannot be read: {error})"
    return about.partition("\n")[0]
