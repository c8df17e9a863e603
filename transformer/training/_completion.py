"""Complete a recipe: fill in what it leaves open, from a pretrained model, an existing run, a teacher and the data.

A plan reads no data; it lists its assumptions about what the data would determine.
"""

from __future__ import annotations

import dataclasses

import jax
from flax.traverse_util import flatten_dict

from transformer.config._checks import ConfigError, shortened
from transformer.config._model import TransformerConfig
from transformer.config._paths import get_path
from transformer.data._dataset import DataKind, Dataset
from transformer.data._pairs import PairConfig
from transformer.data.files._images import DEFAULT
from transformer.data.kinds._number_words import NumberWords
from transformer.data.kinds._shapes import Shapes
from transformer.media._images import ImageProcessor
from transformer.training._flops import batch_field, batch_rows
from transformer.training._recipe import Origin, Recipe, with_vocabulary
from transformer.training._start import RECIPE_FIELDS, Start
from transformer.training._state import initial_params
from transformer.training.tasks._captions import with_image_token
from transformer.training.tasks._table import TASKS


def complete_recipe(
    recipe: Recipe,
    *,
    start: Start | None = None,
    old: Recipe | None = None,
    teacher: Start | None = None,
    data: Dataset | None = None,
) -> Recipe:
    """Return the recipe with the fields that it leaves open; fields that it sets keep their values.

    A run completes its recipe in `open_run` alone: without the data, which can then be prepared, and again with it.

    Args:
        start: pretrained model to initialize from: the model config except for `RECIPE_FIELDS`, the preprocessing of
            images, and `origin`.
        old: recipe of the run to resume: everything that its start, its teacher and its data had decided.
        teacher: the model of `distill.teacher`, for a new run: its config, its fingerprint and the vocabulary size.
        data: prepared data: labels, columns, mean and standard deviation, vocabulary size, id of the image token and
            number of classes.

    ConfigError if the recipe sets one of these fields to another value, the data does not fit the model, or a model
    that the recipe needs is missing or has other parameters.
    """
    if start is not None:
        recipe = _with_start(recipe, start)
    recipe = _with_teacher(recipe, teacher) if old is None else _with_run(recipe, old)
    if data is not None:
        recipe = _with_data(recipe, data)
        TASKS[recipe.task].check_data(recipe, data.eval_batches(limit=1)[0])
        _check_teacher(recipe)
        if start is not None:
            recipe = _with_new_parameters(recipe, start)
    _check_origin(recipe)
    return recipe


def _with_start(recipe: Recipe, start: Start) -> Recipe:
    origin = Origin(source=start.source, model=start.model, fingerprint=start.fingerprint)
    model, data = _with_recipe_fields(start.config, recipe.model), _with_processor(recipe.data, start.processor)
    return dataclasses.replace(recipe, model=model, data=data, origin=origin)


def _with_recipe_fields(model: TransformerConfig, given: TransformerConfig) -> TransformerConfig:
    """Return `model` with `RECIPE_FIELDS` from `given`, the recipe's model, but for a number of classes that it leaves
    open.
    """
    changes = {field: get_path(given, field) for field in RECIPE_FIELDS}
    if given.output.num_classes is None:
        del changes["output.num_classes"]
    return model.replace(**changes)


def _with_processor(data: DataKind, processor: ImageProcessor | None) -> DataKind:
    """Return the data config with the preprocessing of a model, if the data has images in files and its own default."""
    if processor is None or getattr(data, "processor", None) != DEFAULT:
        return data
    return dataclasses.replace(data, processor=processor)


def _with_run(recipe: Recipe, old: Recipe) -> Recipe:
    model, data, origin, distill = recipe.model, recipe.data, recipe.origin, recipe.distill
    if old.origin is not None and origin is None:
        model, origin = _with_recipe_fields(old.model, model), old.origin
    elif old.origin is not None:
        origin = dataclasses.replace(origin, new=old.origin.new)
    if distill is not None and old.distill is not None and distill.model is None:
        distill = dataclasses.replace(distill, model=old.distill.model, fingerprint=old.distill.fingerprint)
    if model.vocab_size is None:
        model = model.replace(vocab_size=old.model.vocab_size)
    if type(data) is type(old.data):
        data = _with_data_of(data, old)
    recipe = dataclasses.replace(recipe, model=model, data=data, origin=origin, distill=distill)
    return TASKS[recipe.task].kept_from(recipe, old)


def _with_data_of(data: DataKind, old: Recipe) -> DataKind:
    """Return the data config with its open fields from a run on data of the same kind."""
    decided = ("labels", "columns", "mean", "std")
    if getattr(data, "columns", ()) not in ((), getattr(old.data, "columns", ())):
        decided = ("labels",)  # the run's mean and std belong to other columns
    open_fields = [name for name in decided if getattr(data, name, None) == ()]
    data = dataclasses.replace(data, **{name: getattr(old.data, name) for name in open_fields})
    return data if old.origin is None else _with_processor(data, getattr(old.data, "processor", None))


def _with_teacher(recipe: Recipe, teacher: Start | None) -> Recipe:
    if recipe.distill is None:
        if teacher is not None:
            raise ConfigError(
                f"a teacher was passed ({teacher.source}), but the recipe has no distill. Set distill, or remove it."
            )
        return recipe
    if teacher is None:
        raise ConfigError(
            "distill needs a teacher. Name a trained model with --distill.teacher; in Python, pass train(..., "
            "teacher=start_from(recipe.distill.teacher, recipe))."
        )
    config, model = _with_recipe_fields(teacher.config, recipe.model), recipe.model
    if model.vocab_size is None:
        model = model.replace(vocab_size=config.vocab_size)
    distill = dataclasses.replace(recipe.distill, model=config, fingerprint=teacher.fingerprint)
    return dataclasses.replace(recipe, model=model, distill=distill)


def _with_data(recipe: Recipe, data: Dataset) -> Recipe:
    recipe = dataclasses.replace(recipe, data=data.config)
    if data.tokenizer is not None:
        recipe = with_vocabulary(recipe, data.tokenizer.vocab_size)
    return TASKS[recipe.task].decided_by_data(recipe, data)


def _with_new_parameters(recipe: Recipe, start: Start) -> Recipe:
    """Return the recipe with `origin.new`: the parameters of its model that the pretrained model lacks."""
    shapes = flatten_dict(jax.eval_shape(lambda: initial_params(recipe)), sep="/")
    given = flatten_dict(start.params, sep="/")
    unequal = [
        f"{path} has shape {given[path].shape}, but {leaf.shape} in the recipe's model"
        for path, leaf in shapes.items()
        if path in given and given[path].shape != leaf.shape
    ]
    if unequal:
        raise ConfigError(
            f"the parameters of {start.source} don't fit: {shortened(unequal, 6)}. Change the recipe's model or data "
            f"(model.output.num_classes must be the same), or start from another model."
        )
    if not shapes.keys() & given.keys():
        raise ConfigError(
            f"{start.source} ({start.model}) has no parameter of the recipe's model. Start from another model."
        )
    new = tuple(sorted(path for path in shapes if path not in given))
    return dataclasses.replace(recipe, origin=dataclasses.replace(recipe.origin, new=new))


def _check_origin(recipe: Recipe) -> None:
    """Raise ConfigError if the task or LoRA needs a pretrained model, and there is none, or an incomplete one."""
    keeps_reference = TASKS[recipe.task].keeps_reference(recipe)
    if keeps_reference and recipe.origin is None:
        raise ConfigError(
            f"the task {recipe.task} improves a trained model, but none was given. Pass one with --init DIR, such as "
            f"the workdir of a run on conversations."
        )
    if keeps_reference and recipe.origin.new:
        raise ConfigError(
            f"the task {recipe.task} compares the model with {recipe.origin.source}, which lacks parameters of it: "
            f"{', '.join(recipe.origin.new)}. Start from a complete model."
        )
    if recipe.lora is not None and recipe.origin is None:
        raise ConfigError("lora updates a pretrained model, but none was given. Pass one with --init DIR.")


def _check_teacher(recipe: Recipe) -> None:
    """Raise ConfigError if teacher and student have logits for different vocabularies."""
    if recipe.distill is not None and recipe.distill.model.vocab_size != recipe.model.vocab_size:
        raise ConfigError(
            f"the teacher {recipe.distill.teacher} has {recipe.distill.model.vocab_size} logits per token, and the "
            f"model {recipe.model.vocab_size}: they must be equal. Remove model.vocab_size, or choose another teacher."
        )


ASSUMED_LENGTH = 64
"""assumed length of a source or target in tokens, if the recipe leaves it to the data"""
ASSUMED_VOCABULARY = {"char": 128, "byte": 259, "bpe": 8192}
"""assumed vocabulary size by kind of tokenizer, if the recipe leaves it to the data"""


def without_data(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Fill in the fields of a recipe that the data would determine.

    Returns:
        the completed recipe, and a phrase for each assumption.

    Raises:
        ConfigError: the vocabulary size can't be known without the data, batch_tokens is too small for a row, or the
            data is packed pairs, which a plan does not support yet.
    """
    assumed, data = [], recipe.data
    if TASKS[recipe.task].tokens and recipe.model.vocab_size is None:
        kind, small = data.tokenizer.kind, 128 if isinstance(data, NumberWords | Shapes) else 0
        size = data.tokenizer.vocab_size or ASSUMED_VOCABULARY.get(kind) or small
        if not size:
            raise ConfigError(
                f"the size of the {kind} vocabulary depends on the data, which a plan does not read. Pass "
                f"--model.vocab-size."
            )
        recipe = with_vocabulary(recipe, size)
        assumed.append(f"a vocabulary of {size:,} (--model.vocab-size)")
    images = recipe.model.image_tokens
    if images is not None and images.token_id is None:
        recipe = with_image_token(recipe, recipe.model.vocab_size - 1)
    if hasattr(data, "labels") and recipe.model.output.num_classes is None:
        classes = len(data.labels) or 2
        recipe = dataclasses.replace(recipe, model=recipe.model.replace(**{"output.num_classes": classes}))
        assumed += [] if data.labels else ["2 classes (--model.output.num-classes)"]
    free = [field for field in data.open_lengths if getattr(data, field) is None]
    length = min(ASSUMED_LENGTH, recipe.model.max_length or ASSUMED_LENGTH)
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, **dict.fromkeys(free, length)))
    # f[4:10] is "source" or "target" of "max_source_length" and "max_target_length".
    assumed += [f"{f[4:10]}s of {length} tokens (--data.{f.replace('_', '-')})" for f in free]
    if batch_field(recipe.data) == "batch_tokens":
        assumed.append(_widest_bucket(recipe.data))
    return recipe, assumed


def _widest_bucket(data: PairConfig) -> str:
    """Return the assumption about batches with data.batch_tokens; ConfigError if no row fits, or pairs are packed."""
    if data.packed_length is not None:
        raise ConfigError(
            "a plan does not support packed pairs yet. Remove --data.packed-length to plan batches of similar lengths."
        )
    width, rows = max(data.max_source_length, data.max_target_length), batch_rows(data)
    if not rows:
        raise ConfigError(
            f"data.batch_tokens ({data.batch_tokens:,}) is too small for row_multiple ({data.row_multiple}) pairs of "
            f"{width} tokens. Pass at least {width * data.row_multiple:,}, or a smaller --data.max-source-length and "
            "--data.max-target-length."
        )
    return f"batches of the longest pairs: {rows} pairs of {width} tokens (--data.batch-tokens)"
