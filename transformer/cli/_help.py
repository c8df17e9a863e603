"""The text of `train RECIPE --help`: the options of a recipe that most runs change. `--help-all` lists all of them."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, Union

from transformer.cli._own_options import HELP
from transformer.config._paths import get_path
from transformer.data.kinds import PLACES
from transformer.training._overrides import override
from transformer.training._recipe import Recipe
from transformer.training._serial import flatten
from transformer.training.lora import LoRA

HELP_ALL = "--help-all"

SHOWN = {
    "training": ("steps", "seed", "accumulation"),
    "optimizer": ("learning_rate", "warmup_steps"),
    "data": (
        *("sequence_length", "context_length", "max_length", "max_source_length", "max_target_length"),
        *("batch_size", "batch_tokens", *sorted(PLACES)),
    ),
    "model": ("num_layers", "d_model", "num_heads", "d_ff", "dropout_rate", "dtype"),
    "lora": ("rank",),
    "parallel": ("data", "fsdp", "tensor"),
    "evaluation": ("every",),
    "checkpoint": ("every",),
    "logging": ("every",),
}
"""fields that the short help shows, by group; a recipe may lack some of them"""


def overridden(
    recipe: Recipe, words: Sequence[str], *, called: str, about: str, own: str, help_all: bool = False
) -> Recipe:
    """Return the recipe with its fields overridden by a command line, or print its help.

    Args:
        recipe: recipe of the command.
        words: arguments after the recipe.
        called: the command up to the recipe.
        about: description of the recipe.
        own: lines about the options of the command itself.
        help_all: print all options.

    Raises:
        SystemExit: help was printed (code 0).
    """
    if help_all:
        return override(recipe, ["--help"], program=called, description=f"{about}\n\n{own}")
    recipe = override(recipe, [word for word in words if word not in HELP], program=called)
    if set(HELP) & set(words):
        print(short_help(recipe, usage=f"{called} [OPTIONS]", about=about, own=own), end="")
        raise SystemExit(0)
    return recipe


def short_help(recipe: Recipe, *, usage: str, about: str, own: str) -> str:
    """Return the help of a recipe: what it is, the options of the command itself, and the fields in `SHOWN`.

    Args:
        recipe: the recipe, whose values are the defaults.
        usage: the first line, without "usage: ".
        about: description of the recipe.
        own: lines about the options of the command itself.
    """
    parser = argparse.ArgumentParser(prog=usage, usage=usage, add_help=False, formatter_class=_Formatter)
    parser.description = f"{about}\n\n{own.rstrip()}"
    for group, fields in SHOWN.items():
        part = LoRA() if group == "lora" and recipe.lora is None else getattr(recipe, group)
        present = {field.name for field in dataclasses.fields(part)}
        section = parser.add_argument_group(group)
        for field in filter(present.__contains__, fields):
            _add(section, f"{group}.{field}", part, off=group == "lora" and recipe.lora is None)
    parser.epilog = (
        f"{HELP_ALL} lists all {len(flatten(recipe))} fields of this recipe with their meanings and defaults."
    )
    return parser.format_help()


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the descriptions; puts the meaning of an option below it, indented."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=6)


def _add(section: Any, path: str, part: Any, off: bool) -> None:
    """Add the option of a field to a section of the help; `off`: the group is not in use."""
    name = path.rpartition(".")[2]
    value = get_path(part, name)
    default = "off" if off else " ".join(map(str, value)) if isinstance(value, tuple) else value
    meaning = f"{field_docs(type(part)).get(name, '')} (default: {'none' if default == '' else default})"
    section.add_argument(
        f"--{path.replace('_', '-')}",
        metavar=_metavar(typing.get_type_hints(type(part))[name]),
        help=" ".join(meaning.split()).replace("%", "%%"),
    )


def _metavar(hint: Any) -> str:
    """Return the placeholder of a value: `INT`, `{a,b}`, `INT|None`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"{{{','.join(map(str, arguments))}}}"
    if origin in (Union, types.UnionType):
        return "|".join(_metavar(one) for one in arguments)
    if origin is tuple:
        return f"{_metavar(arguments[0])} ..."
    if hint is bool:
        return "{True,False}"
    return {str: "TEXT", type(None): "None"}.get(hint, getattr(hint, "__name__", str(hint)).upper())


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields by name: the strings below them, also in its base classes."""
    found: dict[str, str] = {}
    for base in reversed([one for one in cls.__mro__ if dataclasses.is_dataclass(one)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for statement, after in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
                text = getattr(after.value, "value", None)
                if isinstance(text, str):
                    found[statement.target.id] = inspect.cleandoc(text)
    return found
