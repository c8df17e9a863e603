"""From words on a command line to a recipe: find the file, override its fields, say what is wrong in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import os
from collections.abc import Sequence
from pathlib import Path

import tyro

from transformer.config import ConfigError, boxed_message, nearest
from transformer.lora import LoRA
from transformer.recipe_files import find_recipe, recipe_files
from transformer.training.recipe import Recipe
from transformer.training.serial import flatten

__all__ = ["fast", "find_recipe", "load_recipe_file", "override", "recipe_files"]


def load_recipe_file(path: str | os.PathLike) -> tuple[Recipe, str]:
    """The recipe that a file's `get_config()` returns, and the file's docstring.

    Raises:
        ConfigError: the file can't be run, or has no get_config, or that returns something else.
    """
    path = Path(path)
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    if spec is None:
        raise ConfigError(f"{path} is not a Python file. Name a recipe such as configs/number_words.py.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path} can't be run: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, "get_config", None)):
        raise ConfigError(f"{path} is not a recipe: it has no function get_config().")
    try:
        recipe = module.get_config()
    except Exception as error:
        raise ConfigError(f"{path}: get_config() failed: {type(error).__name__}: {error}") from error
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"{path}: get_config() must return a transformer.training.Recipe, got {type(recipe).__name__}."
        )
    return recipe, (module.__doc__ or "").strip()


def override(recipe: Recipe, arguments: Sequence[str], *, program: str, description: str = "") -> Recipe:
    """The recipe with fields set as by `--model.num-layers 4`; any option of `lora` gives a recipe without one a LoRA.

    `program` is what usage and errors call the command, `description` what --help begins with.

    Raises:
        ConfigError: an unknown option (with the nearest right one), a wrong value, or fields that don't fit.
        SystemExit: --help, after it was printed (code 0).
    """
    if recipe.lora is None and any(word.startswith("--lora.") for word in arguments):
        recipe = dataclasses.replace(recipe, lora=LoRA())  # any of its options turns it on
    captured = io.StringIO()
    unknown = _unknown_option(recipe, arguments)
    if unknown:
        raise ConfigError(f"there is no option {unknown}.{nearest(unknown, _options(recipe))} --help shows them all.")
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(
                tyro.conf.FlagConversionOff[tyro.conf.AvoidSubcommands[Recipe]],
                default=recipe,
                args=list(arguments),
                prog=program,
                description=description or "Trains a recipe.",
            )
    except SystemExit as stop:
        if stop.code in (None, 0):
            raise
        raise ConfigError(boxed_message(captured.getvalue())) from None


def fast(recipe: Recipe) -> Recipe:
    """A few steps of everything (training, evaluation, checkpoint, samples), to see that a recipe runs."""
    change = dataclasses.replace
    return change(
        recipe,
        training=change(recipe.training, steps=4),
        optimizer=change(recipe.optimizer, warmup_steps=min(2, recipe.optimizer.warmup_steps)),
        evaluation=change(
            recipe.evaluation, every=2, batches=1, samples=1, sample_tokens=16, exact_match_examples=20, translations=3
        ),
        checkpoint=change(recipe.checkpoint, every=2),
        logging=change(recipe.logging, every=1),
    )


def _options(recipe: Recipe) -> list[str]:
    names = [f"--{field.replace('_', '-')}" for field in flatten(recipe)]
    names += [f"--lora.{field.name}" for field in dataclasses.fields(LoRA)]
    return [*dict.fromkeys(names), "--help", "--list", "--fast", "--workdir", "--init", "--profile", "--debug"]


def _unknown_option(recipe: Recipe, arguments: Sequence[str]) -> str | None:
    names = set(_options(recipe)) | {"-h"}
    given = [argument.split("=", 1)[0] for argument in arguments if argument.startswith("--")]
    return next((option for option in given if option.replace("_", "-") not in names), None)
