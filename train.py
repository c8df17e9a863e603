"""Train a recipe: python train.py configs/number_words.py [--model.num-layers 4 ...]. Called again, it goes on."""

from __future__ import annotations

import argparse
import ast
import os
import shlex
import sys
import tempfile
from pathlib import Path

from transformer.cli.allocator import keep_freed_memory
from transformer.cli.compile_cache import keep_compiled
from transformer.cli.errors import run_command
from transformer.config import ConfigError

HERE = Path(__file__).resolve().parent
USAGE = """\
usage: python train.py RECIPE [--workdir DIR] [--init DIR] [--profile START:STOP] [--fast] [--debug]
                              [--GROUP.FIELD VALUE ...]
       python train.py RECIPE --help     every field of a recipe, with meaning and default
       python train.py --list            the recipes there are

RECIPE is a file such as configs/number_words.py, or the name of one in configs/.
  --workdir DIR   where the run lives (default: runs/<name of the recipe>); an existing run is gone on with
  --init DIR      start from a model: a directory of weights (config.json, safetensors), a name on the hub, or the
                  workdir of another run; to go on with a run it need not be given again
  --profile START:STOP
                  trace the steps after START to STOP into WORKDIR/profile, for XProf
  --fast          a few steps of everything (training, evaluation, checkpoint, samples) in a temporary workdir
  --debug         a traceback with an error
"""


def main(arguments: list[str]) -> int:
    """Chooses a recipe, overrides it, runs it; returns the exit code: 0 when done, 128 + signal when stopped."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--list", "--fast", "--debug"):
        parser.add_argument(flag, action="store_true")
    for option in ("--workdir", "--init", "--profile"):
        parser.add_argument(option)
    try:
        own, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(
            f"{error}. --workdir takes a directory, such as runs/mine, as does --init; --profile takes steps: 20:30."
        ) from None
    if own.list:
        return list_recipes()
    if rest and rest[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if not rest or rest[0].startswith("-"):
        got = f"got {rest[0]}" if rest else "got nothing"
        raise ConfigError(f"a recipe comes first, {got}. Try: python train.py configs/number_words.py (or --list)")

    from transformer.training.overrides import fast, find_recipe, load_recipe_file, override

    path = find_recipe(rest[0], Path.cwd(), HERE)
    recipe, about = load_recipe_file(path)
    recipe = fast(recipe) if own.fast else recipe
    before = recipe
    recipe = override(recipe, rest[1:], program=f"train.py {rest[0]}", description=f"{about}\n\n{USAGE}")

    import jax

    from transformer.cli.devices import accelerator_present, unused_warning
    from transformer.inference import start_from
    from transformer.training import processes
    from transformer.training.loop import train
    from transformer.training.profiling import parse_window
    from transformer.training.start import check_options, origin_of
    from transformer.training.summary import python

    window = None if own.profile is None else parse_window(own.profile, recipe.training.steps)
    processes.join(recipe.parallel)  # before anything asks JAX for its devices
    workdir = own.workdir or f"runs/{recipe.name}"
    if own.fast and not own.workdir:
        workdir = processes.first_decides(lambda: tempfile.mkdtemp(prefix=f"{recipe.name}-fast-"))
    again = [*arguments, *([] if own.workdir else ["--workdir", workdir])]
    if warning := unused_warning(accelerator_present(), jax.default_backend()):
        print(f"warning: {warning}", file=sys.stderr)
    start = None
    if source := own.init or origin_of(workdir):
        check_options(before, recipe, source)
    if own.init:
        start = start_from(own.init, recipe)
    command = f"{python()} {shlex.join([os.path.relpath(__file__), *again])}"
    code = train(recipe, workdir, command=command, start=start, profile=window).exit_code
    processes.part()
    return code


def list_recipes() -> int:
    """Prints each recipe and the first line of its docstring."""
    from transformer.training.overrides import recipe_files

    for name, path in recipe_files(Path.cwd(), HERE).items():
        about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        print(f"{name:20} {about.partition(chr(10))[0]}")
    return 0


if __name__ == "__main__":
    keep_compiled()
    keep_freed_memory()
    exit_code = run_command(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv)
    if "transformer.training.processes" in sys.modules:  # --list and --help need not wait for JAX
        sys.modules["transformer.training.processes"].leave(exit_code)
    sys.exit(exit_code)
