"""Train a recipe: python train.py configs/number_words.py [--model.num-layers 4 ...]. Called again, it goes on."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
USAGE = """\
usage: python train.py RECIPE [--workdir DIR] [--fast] [--debug] [--GROUP.FIELD VALUE ...]
       python train.py RECIPE --help     every field of a recipe, with meaning and default
       python train.py --list            the recipes there are

RECIPE is a file such as configs/number_words.py, or the name of one in configs/.
  --workdir DIR   where the run lives (default: runs/<name of the recipe>); an existing run is gone on with
  --fast          a few steps of everything (training, evaluation, checkpoint, samples) in a temporary workdir
  --debug         a traceback with every error
"""


def main(arguments: list[str]) -> int:
    """Returns 0 when done, 2 for bad input, 1 for a fault or an environment that fails, 128 + signal when stopped."""
    debug = "--debug" in arguments
    try:
        return run(arguments)
    except KeyboardInterrupt:
        print("\nstopped before training began: there is nothing to save.", file=sys.stderr)
        return 130
    except (ValueError, FileNotFoundError) as error:
        return fail(error, 2, debug)
    except Exception as error:
        return fail(error, 1, debug)


def run(arguments: list[str]) -> int:
    """Chooses a recipe, overrides it, runs it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    for flag in ("--list", "--fast", "--debug"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--workdir")
    own, rest = parser.parse_known_args(arguments)
    if own.list:
        return list_recipes()
    if not rest or rest[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if rest else 2
    if rest[0].startswith("-"):
        raise ValueError(
            f"a recipe comes first, got {rest[0]}. Try: python train.py configs/number_words.py {rest[0]} ..."
        )

    from transformer.training.overrides import fast, find_recipe, load_recipe_file, override

    path = find_recipe(rest[0], Path.cwd(), HERE)
    recipe, about = load_recipe_file(path)
    recipe = override(
        fast(recipe) if own.fast else recipe, rest[1:], program=f"train.py {rest[0]}", description=f"{about}\n\n{USAGE}"
    )
    workdir = own.workdir or (tempfile.mkdtemp(prefix=f"{recipe.name}-fast-") if own.fast else f"runs/{recipe.name}")

    import jax

    from transformer.cli.devices import accelerator_present, unused_warning
    from transformer.training.loop import train

    if warning := unused_warning(accelerator_present(), jax.default_backend()):
        print(f"warning: {warning}", file=sys.stderr)
    again = [*arguments, *([] if own.workdir else ["--workdir", workdir])]
    return train(recipe, workdir, command=shlex.join(["python", os.path.relpath(__file__), *again])).exit_code


def list_recipes() -> int:
    """Prints each recipe and the first line of its docstring."""
    import ast

    from transformer.training.overrides import recipe_files

    for name, path in recipe_files(Path.cwd(), HERE).items():
        about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        print(f"{name:20} {about.splitlines()[0] if about else ''}")
    return 0


def fail(error: Exception, code: int, debug: bool) -> int:
    """One line on stderr, or the whole traceback with --debug."""
    if debug:
        traceback.print_exception(error)
    text = " ".join(str(error).split()) or type(error).__name__
    known = isinstance(error, ValueError | OSError | RuntimeError | ArithmeticError)
    print(f"error: {text if known else f'{type(error).__name__}: {text}'}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
