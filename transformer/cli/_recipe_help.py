"""The help of a recipe: `--help` lists the options that most runs change, `--help-all` lists all of them."""

from __future__ import annotations

import dataclasses
import functools
from argparse import ArgumentParser, _ArgumentGroup
from collections.abc import Sequence

from transformer.cli._help import add_option, help_parser
from transformer.cli._own_options import HELP
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
    "model": ("num_layers", "d_model", "num_heads", "feed_forward.d_ff", "dropout_rate", "dtype"),
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
    """Return the recipe with its fields overridden by the words after it, or print its help and raise SystemExit.

    `called` is the command up to the recipe, `about` describes the recipe, and `own` the options of the command itself.
    """
    recipe = override(recipe, [word for word in words if word not in HELP], program=called)
    if help_all or set(HELP) & set(words):
        parser = help_parser(f"{called} [OPTIONS]", f"{about}\n\n{own.rstrip()}")
        (_add_all if help_all else _add_main)(parser, recipe)
        print(parser.format_help(), end="")
        raise SystemExit(0)
    return recipe


def _add_main(parser: ArgumentParser, recipe: Recipe) -> None:
    """Add the fields in `SHOWN`."""
    for group, fields in SHOWN.items():
        off = getattr(recipe, group) is None
        part, section = LoRA() if off else getattr(recipe, group), parser.add_argument_group(group)
        for path in fields:
            *inside, name = path.split(".")
            owner = functools.reduce(getattr, inside, part)
            if any(field.name == name for field in dataclasses.fields(owner)):
                add_option(section, f"{group}.{path}", owner, name, off=off)
    parser.epilog = (
        f"{HELP_ALL} lists all {len(flatten(recipe))} fields of this recipe with their meanings and defaults."
    )


def _add_all(parser: ArgumentParser, recipe: Recipe) -> None:
    """Add all fields that an option can set."""

    def add(section: _ArgumentGroup, path: str, part: object) -> None:
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if dataclasses.is_dataclass(value):
                add(section, f"{path}.{field.name}", value)
            elif isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
                for index, one in enumerate(value):
                    add(section, f"{path}.{field.name}.{index}", one)
            else:
                add_option(section, f"{path}.{field.name}", part, field.name)

    for group in dataclasses.fields(recipe):
        if dataclasses.is_dataclass(getattr(recipe, group.name)):
            add(parser.add_argument_group(group.name), group.name, getattr(recipe, group.name))
