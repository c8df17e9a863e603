"""`transformer-zoo train RECIPE`: train a recipe, or resume its run. `python train.py RECIPE` is the same command."""

from __future__ import annotations

import argparse
import ast
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformer.cli._own_options import split_options
from transformer.config._checks import ConfigError
from transformer.config._invocation import program
from transformer.config._recipe_files import find_recipe, recipe_files

USAGE = """\
usage: {program} RECIPE [--workdir DIR] [--init DIR] [--profile START:STOP] [--fast] [--debug]
       {blank} [--restart] [--take-over] [--GROUP.FIELD VALUE ...]
       {program} RECIPE --help     show all fields of a recipe with their meanings and defaults
       {program} --list            list all recipes

RECIPE is the name of a recipe (number_words) or the path of a file (configs/number_words.py). Recipes in ./configs
override bundled recipes of the same name. Every field of a recipe is an option, such as --model.num-layers 4.

  --workdir DIR   directory of the run (default: runs/NAME); an existing run is resumed
  --init DIR      initialize from a model: a directory of weights (config.json, safetensors), a name on the Hugging Face
                  Hub, or the workdir of another run; not needed to resume
  --profile START:STOP
                  write a trace of steps START + 1 to STOP to WORKDIR/profile, for XProf
  --restart       start from step 0 in an existing workdir; the files of the old run move to WORKDIR/previous
  --take-over     take over the workdir's lock from a process on another host that no longer exists
  --fast          run a few steps of everything (training, evaluation, checkpoint, samples) in a temporary workdir
  --debug         show the traceback of an error
"""


def usage() -> str:
    """Return the text that `--help` prints without a recipe."""
    called = program("train")
    return USAGE.format(program=called, blank=" " * len(called))


def main(arguments: Sequence[str]) -> int:
    """Load a recipe, override its fields and train; return the exit code: 0 if finished, 128 + signal if stopped."""
    own, rest = split_options(
        arguments,
        flags=("--list", "--fast", "--restart", "--take-over", "--debug"),
        options={"--workdir": None, "--init": None, "--profile": None},
        hint="--workdir and --init take a directory, such as runs/mine; --profile takes steps: 20:30.",
    )
    if own.list:
        return list_recipes()
    if rest and rest[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0
    _check_given(own, rest)
    path = find_recipe(rest[0])

    from transformer.training._overrides import fast, load_recipe_file, override

    recipe, about = load_recipe_file(path)
    recipe = fast(recipe) if own.fast else recipe
    before = recipe
    recipe = override(recipe, rest[1:], program=f"{program('train')} {rest[0]}", description=f"{about}\n\n{usage()}")

    import jax

    from transformer.cli._devices import accelerator_present, unused_warning
    from transformer.inference._starting import start_from
    from transformer.training import _processes as processes
    from transformer.training._loop import train
    from transformer.training._profiling import parse_window
    from transformer.training._start import check_options, origin_of

    window = None if own.profile is None else parse_window(own.profile, recipe.training.steps)
    processes.join(recipe.parallel)  # must run before JAX lists its devices
    workdir = own.workdir or f"runs/{recipe.name}"
    if own.fast and not own.workdir:
        workdir = processes.first_decides(lambda: tempfile.mkdtemp(prefix=f"{recipe.name}-fast-"))
    if warning := unused_warning(accelerator_present(), jax.default_backend()):
        print(f"warning: {warning}", file=sys.stderr)
    start = None
    if source := own.init or (None if own.restart else origin_of(workdir)):
        check_options(before, recipe, source)
    if own.init:
        start = start_from(own.init, recipe)
    command = _command_to_resume(arguments, own, workdir)
    options = {"start": start, "profile": window, "take_over": own.take_over, "restart": own.restart}
    code = train(recipe, workdir, command=command, **options).exit_code
    processes.part()
    return code


def _check_given(own: argparse.Namespace, rest: Sequence[str]) -> None:
    """Raise ConfigError if the recipe is missing, or a directory is the empty string."""
    if not rest or rest[0].startswith("-"):
        got = f"got {rest[0]}" if rest else "got nothing"
        raise ConfigError(
            f"the first argument must be a recipe, {got}. Try: {program('train')} number_words, or --list."
        )
    for option, value in (("workdir", own.workdir), ("init", own.init)):
        if value == "":
            raise ConfigError(f"--{option} must name a directory, got ''. Remove the option, or pass a name.")


def _command_to_resume(arguments: Sequence[str], own: argparse.Namespace, workdir: str) -> str:
    """Return the command line that resumes the run in this workdir."""
    # --take-over: the next lock may belong to a running process. --restart: it would discard the run, not resume it.
    again = [word for word in arguments if word not in ("--take-over", "--restart")]
    again += [] if own.workdir else ["--workdir", workdir]
    return f"{program('train')} {shlex.join(again)}"


def list_recipes() -> int:
    """Print each recipe with the first line of its docstring."""
    for name, path in recipe_files().items():
        print(f"{name:24} {_summary(path)}")
    return 0


def _summary(path: Path) -> str:
    """Return the first line of a file's docstring. The file is parsed, not run: running it would import JAX."""
    try:
        about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    except (SyntaxError, ValueError, OSError) as error:
        return f"({path} cannot be read: {error})"
    return about.partition("\n")[0]
