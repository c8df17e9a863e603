"""Load a recipe file, and override its fields with command-line options; errors take one line."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import io
import itertools
import os
import re
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tyro

from transformer.config._checks import ConfigError, boxed_message, check_choice, nearest
from transformer.config._local_paths import local_path
from transformer.config._options import QKNorm
from transformer.config._paths import get_path
from transformer.config._positions import POSITIONS
from transformer.config._recipe_files import bundled, find_recipe, recipe_files
from transformer.data._pipeline import check_local_paths
from transformer.training._recipe import LARGEST, Recipe
from transformer.training._serial import flatten
from transformer.training.lora import LoRA
from transformer.training.tasks._distillation import Distill
from transformer.training.tasks._policy_gradient import GRPO
from transformer.training.tasks._preference import DPO

_GROUPS = {"lora": LoRA, "dpo": DPO, "grpo": GRPO, "distill": Distill, "model.attention.qk-norm": QKNorm}
"""groups of options that a recipe may lack"""

__all__ = ["fast", "find_recipe", "load_recipe_file", "override", "recipe_files"]


def load_recipe_file(path: str | os.PathLike) -> tuple[Recipe, str]:
    """Return the recipe that a file's `get_config()` returns, and the file's docstring.

    The file may build on other recipes: `from configs.number_words import get_config as number_words`.

    Raises:
        ConfigError: the file can't be run, has no get_config, or get_config does not return a recipe.
    """
    path = local_path(path, "the recipe")
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    if spec is None:
        raise ConfigError(f"{path} is not a Python file. Pass a recipe such as configs/number_words.py.")
    module = importlib.util.module_from_spec(spec)
    with _recipes_importable(path.parent):
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise ConfigError(f"{path} can't be run: {type(error).__name__}: {error}") from error
        if not callable(getattr(module, "get_config", None)):
            raise ConfigError(
                f"{path} is not a recipe: it has no function get_config(). Add one that returns a "
                f"transformer.training.Recipe."
            )
        try:
            recipe = module.get_config()
        except Exception as error:
            raise ConfigError(f"{path}: get_config() failed: {type(error).__name__}: {error}") from error
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"{path}: get_config() must return a transformer.training.Recipe, got {type(recipe).__name__}."
        )
    return recipe, (module.__doc__ or "").strip()


@contextlib.contextmanager
def _recipes_importable(folder: Path) -> Iterator[None]:
    """Make `import configs.NAME` find recipes of this folder, of `configs/` here, and the bundled ones."""

    def taken() -> dict[str, types.ModuleType]:
        names = [name for name in sys.modules if name.partition(".")[0] == "configs"]
        return {name: sys.modules.pop(name) for name in names}

    before = taken()
    package = types.ModuleType("configs")
    package.__path__ = [str(place.resolve()) for place in (folder, Path("configs"), bundled())]
    sys.modules["configs"] = package
    try:
        yield
    finally:
        taken()
        sys.modules.update(before)


def override(recipe: Recipe, arguments: Sequence[str], *, program: str) -> Recipe:
    """Return the recipe with fields set by options such as `--model.num-layers 4`.

    Any option of a group in `_GROUPS` turns it on, such as `--lora.rank 4`; `--lora None` turns it off.

    Args:
        program: name of the command in usage and errors.

    Raises:
        ConfigError: an unknown option (the error suggests the nearest one), an invalid value, contradictory fields, or
            a remote path.
        SystemExit: --help was printed (code 0).
    """
    recipe, arguments = _with_groups(*_with_position(recipe, list(arguments)))
    captured = io.StringIO()
    unknown = _unknown_option(recipe, arguments)
    if unknown:
        raise ConfigError(f"unknown option {unknown}.{suggestion(unknown, _options(recipe))} --help-all lists all.")
    try:
        with contextlib.redirect_stderr(captured):
            recipe = tyro.cli(
                tyro.conf.FlagConversionOff[tyro.conf.AvoidSubcommands[Recipe]],
                default=recipe,
                args=list(arguments),
                prog=program,
            )
    except SystemExit as stop:
        if stop.code in (None, 0):
            raise
        raise ConfigError(_with_group_options(boxed_message(captured.getvalue()), recipe)) from None
    check_local_paths(recipe.data)
    return recipe


def _with_group_options(message: str, recipe: Recipe) -> str:
    """Return an error with the options of a group, if the name of the group was given as an option."""
    given = message.removeprefix("unexpected argument: ").rstrip(".").split(",")[0]
    if given == message or not given.startswith("--"):
        return message
    options = [option for option in _options(recipe) if option.startswith(f"{given}.")]
    if options:
        return f"{given} is a group of options. Pass the ones that you want to set: {', '.join(options[:8])}."
    if given in _options(recipe):
        return f"{given} is not set in this recipe, and has no option. Set it in a recipe file: docs/tutorial.md."
    return message


def _with_position(recipe: Recipe, arguments: list[str]) -> tuple[Recipe, list[str]]:
    """Set the position scheme that `--model.position NAME` names; return the recipe and the other arguments."""
    arguments = [part for word in arguments for part in re.split(r"(?<=^--model\.position)=", word)]
    if (place := next((i for i, word in enumerate(arguments) if word == "--model.position"), None)) is None:
        return recipe, arguments
    name = arguments[place + 1] if place + 1 < len(arguments) else ""
    check_choice("--model.position", name, [*POSITIONS, "none"])
    fields = {}
    if name == "learned" and "--model.position.max-length" in arguments:  # tyro sets it
        fields["max_length"] = LARGEST
    position = None if name == "none" else POSITIONS[name](**fields)
    model = recipe.model.replace(position=position)
    return dataclasses.replace(recipe, model=model), arguments[:place] + arguments[place + 2 :]


def _with_groups(recipe: Recipe, arguments: list[str]) -> tuple[Recipe, list[str]]:
    """Turn groups on or off before tyro, which has no flag for a group; return the arguments without `--GROUP None`."""
    for group, kind in _GROUPS.items():
        field = group.replace("-", "_")
        options = any(word.startswith(f"--{group}.") for word in arguments)
        place = next(
            (i for i, pair in enumerate(itertools.pairwise(arguments)) if pair == (f"--{group}", "None")), None
        )
        if place is not None:
            if options:
                name = "LoRA" if group == "lora" else group
                raise ConfigError(
                    f"--{group} None turns {name} off, but --{group}.* options turn it on. Remove one of them."
                )
            recipe = _unchecked(recipe, field, None)
            arguments = arguments[:place] + arguments[place + 2 :]
        elif options and get_path(recipe, field) is None:
            recipe = _unchecked(recipe, field, kind())
    return recipe, arguments


def _unchecked(whole: Any, path: str, value: Any) -> Any:
    """Return a copy of a dataclass with one field set, without its checks, which apply to the result of all options."""
    name, _, rest = path.partition(".")
    changed = copy.copy(whole)
    object.__setattr__(changed, name, _unchecked(getattr(whole, name), rest, value) if rest else value)
    return changed


def fast(recipe: Recipe) -> Recipe:
    """Shorten a recipe to a few steps of training, evaluation, checkpoints and samples, to check that it runs."""
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
    names += [
        f"--{group}.{field.name}".replace("_", "-")
        for group, kind in _GROUPS.items()
        for field in dataclasses.fields(kind)
    ]
    own = ("help", "list", "fast", "workdir", "init", "profile", "restart", "take-over")
    own = (*own, "skip-memory-check", "dry-run", "debug", "help-all", "allow-change")
    return [*dict.fromkeys(names), *(f"--{name}" for name in own)]


def _unknown_option(recipe: Recipe, arguments: Sequence[str]) -> str | None:
    names = set(_options(recipe)) | {"-h"}
    given = [argument.split("=", 1)[0] for argument in arguments if argument.startswith("--")]
    return next((option for option in given if option.replace("_", "-") not in names), None)


OTHER_NAMES = {
    "optimizer.learning-rate": ("lr", "max-lr", "base-lr"),
    "training.steps": ("max-steps", "max-iters", "num-steps", "train-steps", "total-steps", "iterations"),
    "training.accumulation": ("gradient-accumulation-steps", "grad-accum", "accumulate-grad-batches"),
    "data.batch-size": ("per-device-train-batch-size", "train-batch-size", "micro-batch-size", "bs"),
    "data.sequence-length": ("block-size", "max-seq-length", "max-seq-len", "seq-len", "context-length", "max-length"),
    "model.num-layers": ("n-layer", "n-layers", "layers", "depth", "num-hidden-layers"),
    "model.num-heads": ("n-head", "n-heads", "heads", "num-attention-heads"),
    "model.d-model": ("n-embd", "hidden-size", "dim", "width"),
    "model.dropout-rate": ("dropout",),
    "model.dtype": ("bf16", "fp16", "precision", "mixed-precision"),
    "optimizer.clip-norm": ("max-grad-norm", "grad-clip", "gradient-clip-val"),
    "optimizer.warmup-steps": ("warmup", "warmup-iters"),
    "optimizer.name": ("optim",),
    "evaluation.every": ("eval-interval", "eval-steps", "eval-every"),
    "checkpoint.every": ("save-steps", "save-every"),
    "logging.every": ("logging-steps", "log-interval", "log-every"),
    "execution.remat": ("gradient-checkpointing", "activation-checkpointing"),
    "parallel.devices": ("gpus", "num-gpus", "nproc-per-node"),
    "workdir": ("output-dir", "out-dir", "out", "logdir", "save-dir", "checkpoint-dir"),
    "init": ("model-name-or-path", "pretrained", "init-from", "load"),
}
"""names of options in nanoGPT, transformers, PyTorch Lightning and MaxText, by our option"""
EXPLANATIONS = {
    ("resume", "resume-from", "resume-from-checkpoint", "continue"): (
        "To resume a run, pass its workdir in place of the recipe."
    ),
    ("epochs", "num-epochs", "num-train-epochs", "max-epochs"): (
        "Training is measured in steps, not in epochs: --training.steps."
    ),
    ("wandb", "report-to", "mlflow", "trackio", "tracker"): (
        "Metrics are written to metrics.jsonl and as TensorBoard events, and to the trackers in --logging.writers: "
        "wandb, mlflow, trackio."
    ),
    ("device", "accelerator", "cuda", "cpu", "tpu"): "The environment variable JAX_PLATFORMS=cpu selects devices.",
    ("version",): "`python -m transformer --version` prints the versions.",
}


def suggestion(option: str, options: Sequence[str]) -> str:
    """Return a sentence with the option that "--lr" probably means, with a leading space; "" if none is similar."""
    name = option.removeprefix("--").replace("_", "-").lower()
    for names, explanation in EXPLANATIONS.items():
        if name in names:
            return f" {explanation}"
    last = name.rpartition(".")[2]
    known = [one for one in options if one.rpartition(".")[2].removeprefix("--") == last]
    known += [f"--{ours}" for ours, theirs in OTHER_NAMES.items() if last in theirs and f"--{ours}" in options]
    if known and option not in known:
        return f" Did you mean {' or '.join(map(repr, known[:3]))}?"
    return nearest(option, options)
