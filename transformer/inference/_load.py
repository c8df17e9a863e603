"""Loading of models, from the workdir of a training run or from pretrained weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn

from transformer.config._checks import ConfigError
from transformer.config._local_paths import local_path
from transformer.config._recipe_files import SAVED_RECIPE
from transformer.inference._loaded_model import LoadedModel
from transformer.nn.models._kinds import kind_of
from transformer.zoo._gemma_orbax import is_orbax
from transformer.zoo._pretrained import Pretrained, load_pretrained


def is_workdir(path: str | os.PathLike) -> bool:
    """Return whether this directory is the workdir of a training run."""
    return (local_path(path, "path") / SAVED_RECIPE).exists()


def load_model(
    source: str | os.PathLike, *, step: Literal["best", "newest"] | int = "best", **options: Any
) -> LoadedModel:
    """Load a model as data, without the methods of `open_model`, which has the same arguments and errors."""
    local_path(source, "source")
    if is_workdir(source):
        from transformer.training.tasks._table import TASKS
        from transformer.training.workdir._runs import load_run

        if options:
            raise ConfigError(
                f"{source} is the workdir of a run, which does not support the options {', '.join(options)}."
            )
        run = load_run(source, step)
        context = TASKS[run.recipe.task].context(run.recipe.model, run.recipe.data)
        begin = None if run.tokenizer is None else run.tokenizer.begin_id
        return LoadedModel(run.model, run.params, Path(source), run.tokenizer, context, begin, run=run)

    if Path(source).is_dir() and not (Path(source) / "config.json").exists() and not is_orbax(source):
        raise ConfigError(
            f"{source} contains neither a run (recipe.json) nor weights (config.json). Pass the workdir of a run, such "
            f"as runs/number_words, or a directory with config.json and model.safetensors."
        )
    if step != "best":
        raise ConfigError(f"{source} is not the workdir of a run. It has a single set of weights, and no step {step}.")
    found = load_pretrained(source, **options)
    context = found.model.config.max_length or _documented_context(found)
    begin = found.fields.get("decoder_start_token_id")
    return LoadedModel(found.model, found.params, found.directory, found.tokenizer, context, begin, pretrained=found)


def _documented_context(found: Pretrained) -> int | None:
    """Return max_position_embeddings, the documented context length of a model without a position table."""
    inner = found.fields.get("text_config")  # of a vision-language model
    fields = inner if isinstance(inner, dict) and kind_of(found.model).image_prompts else found.fields
    length = fields.get("max_position_embeddings")
    if length is not None and (type(length) is not int or length < 1):
        raise ConfigError(
            f"max_position_embeddings in {found.directory}/config.json must be an integer of at least 1, got "
            f"{length!r:.80}. Correct it."
        )
    return length


def load(source: str | os.PathLike, **options: Any) -> tuple[nn.Module, Any]:
    """Load a model and its parameters, for use as `model.apply({"params": params}, ...)`.

    Args:
        source: the workdir of a training run, a directory of pretrained weights, a GGUF file, or an id on the Hugging
            Face hub.
        **options: `step` for a workdir, or options of `zoo.load_pretrained` (`dtype`, `mesh`, ...).

    Returns:
        The model and its parameters, without the outer "params".

    Raises:
        FileNotFoundError, ConfigError, ValueError: see `open_model`.
    """
    opened = load_model(source, **options)
    return opened.model, opened.params
