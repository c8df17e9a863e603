"""Initialization of training from an existing model: pretrained weights, or the workdir of another run."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import flax.traverse_util
import jax

from transformer.chat._image_prompts import ImageText
from transformer.config._checks import ConfigError
from transformer.config._local_paths import local_path
from transformer.config._model import TransformerConfig
from transformer.data.files._images import DEFAULT
from transformer.inference._image_inputs import with_size_of
from transformer.inference._load import is_workdir, load_model
from transformer.inference._loaded_model import LoadedModel, Params
from transformer.media._image_settings import SETTINGS_FILES, image_processor
from transformer.media._images import ImageProcessor
from transformer.nn.models._encoders import Classifier, MaskedLM
from transformer.nn.models._vision import VisionClassifier
from transformer.nn.models._vision_language import VisionLanguageModel
from transformer.nn.quantization._adapted import has_encoded
from transformer.zoo._family import abstract_params
from transformer.zoo._formats import open_weights
from transformer.zoo._pretrained import as_in_files
from transformer.zoo.weights._conversion import load_params, parameter_dtypes, parameter_shapes

if TYPE_CHECKING:
    from transformer.training._recipe import Recipe
    from transformer.training._start import Start

_HEAD = ("output", "output_bias", "head_transform", "distillation_output")
"""Names of the parameters of a model's head."""


def start_from(source: str | os.PathLike, recipe: Recipe) -> Start:
    """Load the model from which training starts, for `training.loop.train(start=...)`.

    For a classification recipe, other models of a family are turned into its classifier: all parameters of the
    classifier that the files contain are loaded (for BERT including the pooler), and the old head is dropped. The same
    holds for a MaskedLM of a training run. For labeled images, any encoder of images becomes a classifier,
    with a new head unless the model has the same classes.

    Args:
        source: a directory of weights, an id on the hub, or the workdir of a run.
        recipe: the recipe of the new run.

    Raises:
        FileNotFoundError: the directory does not exist, or it has no checkpoint.
        ConfigError: the model does not fit the data of the recipe.
        ValueError: a file is invalid or not supported.
    """
    from transformer.training._start import Start
    from transformer.training.lora import host_memory
    from transformer.training.tasks._table import TASKS

    local_path(source, "source")
    wanted = TASKS[recipe.task].model
    options = {} if is_workdir(source) else {"dtype": recipe.model.parameters.dtype}
    with host_memory():  # on an accelerator, the training state has a copy of the initial parameters
        opened = load_model(source, **options)
    if has_encoded(opened.params):
        raise ConfigError(
            f"the weights in {source} are quantized and can't be trained. Start from the original weights, with "
            f"--lora.base int8 or nf4 to keep them quantized in memory."
        )
    opened, processor = _with_image_size(opened, recipe)
    config, params, left = opened.model.config, opened.params, ()
    if wanted is VisionClassifier and "images" in opened.kind.embeds:
        config, params, left = _as_image_classifier(opened, recipe)
    elif type(opened.model) is not wanted:
        if wanted is not Classifier or not (opened.pretrained or isinstance(opened.model, MaskedLM)):
            raise ConfigError(
                f"{source} contains a {type(opened.model).__name__}, but the data of this recipe requires a "
                f"{wanted.__name__}. Start from such a model, or use a recipe with other data."
            )
        config, params, left = (_as_classifier if opened.pretrained else _with_new_head)(opened, recipe)
    if wanted is VisionLanguageModel:
        _check_image_text(opened)
    return Start(str(source), _origin(opened), config, params, opened.vocabulary, processor, left)


def _check_image_text(opened: LoadedModel) -> None:
    """Raise ConfigError for a family whose prompts have more than image tokens and text, which rows of data lack."""
    family = None if opened.pretrained is None else opened.pretrained.family
    if family is not None and family.image_text not in (None, ImageText()):
        raise ConfigError(
            f"{opened.directory} is a {family.title}, whose prompts have other tokens around an image, which training "
            f"does not support. Start from a LLaVA model."
        )


def _with_image_size(opened: LoadedModel, recipe: Recipe) -> tuple[LoadedModel, ImageProcessor | None]:
    """Return the model for images of the size that the data gives, and its preprocessing.

    The preprocessing is that of the data config, unless it is the default: then it is that of the model's files.
    """
    given = getattr(recipe.data, "processor", None)
    if given is None or "images" not in opened.kind.reads:
        return opened, None
    own = given
    if given == DEFAULT and any((opened.directory / name).exists() for name in SETTINGS_FILES):
        own = image_processor(opened.directory)
    return with_size_of(opened, own), own


def _origin(opened: LoadedModel) -> str:
    if opened.pretrained is not None:
        return f"{opened.pretrained.family.title}, {opened.pretrained.architecture}"
    return f"{type(opened.model).__name__}, step {opened.run.step}"


def _as_classifier(opened: LoadedModel, recipe: Recipe) -> tuple[TransformerConfig, Any, tuple[str, ...]]:
    """Return the config of the classifier of the model's family, its parameters in the files, and the dropped paths."""
    found, family = opened.pretrained, opened.pretrained.family
    name, head = next(((name, head) for name, head in family.heads.items() if head.model is Classifier), (None, None))
    if head is None:
        raise ConfigError(
            f"{opened.directory} is a {family.title}, a family without a classifier. Start from another one."
        )
    files = open_weights(opened.directory)
    fields = {field: value for field, value in files.config.items() if field not in ("id2label", "label2id")}
    fields |= {"architectures": [name], "num_labels": recipe.model.output.num_classes or 2}
    config = family.read(fields, head).replace(
        dtype=recipe.model.dtype, **{"parameters.dtype": recipe.model.parameters.dtype}
    )
    model = Classifier(config)
    expected = abstract_params(model)
    shapes = parameter_shapes(expected)
    links, _ = as_in_files(files, family, family.links(model, name, shapes))
    available = [one for one in links if all(tensor in files.tensors for tensor in one.tensors)]
    dtypes = parameter_dtypes(expected)  # a few parameters are always float32
    params = load_params(files, available, shapes, dtypes, lambda path, array: jax.device_put(array))
    left = _dropped(found.params, params, old_transform=config.output.transform != found.model.config.output.transform)
    return config, params, left


def _as_image_classifier(opened: LoadedModel, recipe: Recipe) -> tuple[TransformerConfig, Any, tuple[str, ...]]:
    """Turn an encoder of images into a classifier of the data's classes; the results are those of `_as_classifier`.

    The head is kept if it has the same classes; their order may differ. Otherwise the classifier gets a new head on the
    pooled vector. Of a DualEncoder, only the encoder of images is used.
    """
    model, params, names = opened.model, opened.params, recipe.data.class_names()
    if type(model) is VisionClassifier:
        labels = opened.labels
        if not names or list(names) == labels:
            return model.config, params, ()
        if sorted(names) == sorted(labels):
            order = jax.numpy.array([labels.index(name) for name in names])
            head = jax.tree.map(lambda leaf: leaf[..., order], params["output"])  # kernel (D, C), bias (C,)
            return model.config, params | {"output": head}, ()
    config = model.config
    if opened.kind.compares:
        config, params = config.image_encoder, params["image"]
    classes = len(names) or recipe.model.output.num_classes
    output = dataclasses.replace(config.output, num_classes=classes, transform=None, normalize=False)
    kept = {name: part for name, part in params.items() if name not in _HEAD}
    prefix = "image/" if opened.kind.compares else ""
    paths = {f"{prefix}{path}" for path in flax.traverse_util.flatten_dict(kept, sep="/")}
    left = tuple(sorted(path for path in flax.traverse_util.flatten_dict(opened.params, sep="/") if path not in paths))
    return config.replace(output=output), kept, left


def _with_new_head(opened: LoadedModel, recipe: Recipe) -> tuple[TransformerConfig, Any, tuple[str, ...]]:
    """Replace the head of a run's model by the head of the recipe; the results are those of `_as_classifier`."""
    wanted = {name: getattr(recipe.model.output, name) for name in ("num_classes", "pooling", "transform", "scale")}
    config = opened.model.config
    config = config.replace(output=dataclasses.replace(config.output, bias=None, **wanted))
    params = {name: part for name, part in opened.params.items() if name not in _HEAD}
    return config, params, _dropped(opened.params, params, old_transform=False)


def _dropped(old: Params, new: Params, *, old_transform: bool) -> tuple[str, ...]:
    """Return the paths of old parameters that the new model does not use.

    Layers under "decoder" count as the same layers under "encoder", because a classifier stores its layers there.
    With `old_transform`, the transform of the old head counts as dropped, because the new head has a different one.
    """

    def paths(params: Params) -> Iterable[str]:
        return (re.sub(r"^decoder/", "encoder/", path) for path in flax.traverse_util.flatten_dict(params, sep="/"))

    def is_taken(path: str) -> bool:
        if path.startswith("pooler/"):  # a classifier of BERT has the pooler as its transform
            return re.sub(r"^pooler/", "head_transform/", path) in taken
        return path in taken and not (old_transform and path.startswith("head_transform/"))

    taken = set(paths(new))
    return tuple(sorted(path for path in paths(old) if not is_taken(path)))
