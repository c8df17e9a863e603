"""A model to start training from: somebody's weights, or a run's, as the plain value that `training` takes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import flax.traverse_util
import jax

from transformer.config._checks import ConfigError
from transformer.config._model import TransformerConfig
from transformer.inference._loading import LoadedModel, is_workdir, open_model
from transformer.nn.models._encoders import Classifier, MaskedLM

if TYPE_CHECKING:
    from transformer.training._recipe import Recipe
    from transformer.training._start import Start


_HEAD = ("output", "output_bias", "head_transform")
"""parameters of a model's head"""


def start_from(source: str | os.PathLike, recipe: Recipe) -> Start:
    """The model of a directory of weights, a name on the hub or a run's workdir, for `training.loop.train(start=...)`.

    For a recipe that classifies, a family's other models become its classifier: what the files have of it is taken (of
    BERT the pooler, too), and the old head is left. So does a MaskedLM that a run left.

    Raises:
        FileNotFoundError: no such directory, or no checkpoint in it.
        ConfigError: a model that can't do what the recipe's data asks for.
        ValueError: files that can't be read or are not understood.
    """
    from transformer.training._start import Start
    from transformer.training._tasks import TASKS

    wanted = TASKS[recipe.task].model
    options = {} if is_workdir(source) else {"dtype": recipe.model.param_dtype}
    with _host_memory():
        opened = open_model(source, **options)
    config, params, left = opened.model.config, opened.params, ()
    if type(opened.model) is not wanted:
        if wanted is not Classifier or not (opened.pretrained or isinstance(opened.model, MaskedLM)):
            raise ConfigError(
                f"{source} holds a {type(opened.model).__name__}, but this recipe's data is for a {wanted.__name__}. "
                f"Start from one, or take a recipe with other data."
            )
        config, params, left = (_as_classifier if opened.pretrained else _with_new_head)(opened, recipe)
    return Start(str(source), _told(opened), config, params, opened.vocabulary, left)


def _host_memory() -> contextlib.AbstractContextManager[Any]:
    """Inside, arrays are placed in the host's memory. On an accelerator, the parameters to start from would stay beside
    the training state, which has a copy of them, until the end of the run.
    """
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return contextlib.nullcontext()


def _told(opened: LoadedModel) -> str:
    if opened.pretrained is not None:
        return f"{opened.pretrained.family.title}, {opened.pretrained.architecture}"
    return f"{type(opened.model).__name__}, step {opened.run.step}"


def _as_classifier(opened: LoadedModel, recipe: Recipe) -> tuple[TransformerConfig, Any, tuple[str, ...]]:
    """Config and parameters of the family's classifier, as far as the files have them, and what is not of it."""
    from transformer.zoo._family import abstract_params
    from transformer.zoo._pretrained import as_in_files
    from transformer.zoo.weights._files import WeightFiles
    from transformer.zoo.weights._loading import load_params, parameter_dtypes, parameter_shapes
    from transformer.zoo.weights._quantized import plain_files

    found = opened.pretrained
    family = found.family
    name, head = next(((name, head) for name, head in family.heads.items() if head.model is Classifier), (None, None))
    if head is None:
        raise ConfigError(f"{opened.directory} is a {family.title}, a family without a classifier: take another one.")
    files = plain_files(WeightFiles(opened.directory))
    fields = {field: value for field, value in files.config.items() if field not in ("id2label", "label2id")}
    fields |= {"architectures": [name], "num_labels": recipe.model.output.num_classes or 2}
    config = family.read(fields, head).replace(dtype=recipe.model.dtype, param_dtype=recipe.model.param_dtype)
    model = Classifier(config)
    expected = abstract_params(model)
    shapes = parameter_shapes(expected)
    links, _ = as_in_files(files, family, family.links(model, name, shapes))
    there = [one for one in links if all(tensor in files.tensors for tensor in one.tensors)]
    dtypes = parameter_dtypes(expected)  # some are float32 whatever the others are
    params = load_params(files, there, shapes, dtypes, lambda path, array: jax.device_put(array))
    left = _left(found.params, params, old_transform=config.output.transform != found.model.config.output.transform)
    return config, params, left


def _with_new_head(opened: LoadedModel, recipe: Recipe) -> tuple[TransformerConfig, Any, tuple[str, ...]]:
    """A run's model with the head that the recipe says, the parameters below it, and what is not taken."""
    given = recipe.model.output
    output = dataclasses.replace(
        opened.model.config.output,
        num_classes=given.num_classes,
        bias=None,
        pooling=given.pooling,
        transform=given.transform,
        scale=given.scale,
    )
    config = opened.model.config.replace(output=output)
    params = {name: part for name, part in opened.params.items() if name not in _HEAD}
    return config, params, _left(opened.params, params, old_transform=False)


def _left(old: Any, new: Any, *, old_transform: bool) -> tuple[str, ...]:
    """Paths of what is not taken. A decoder's layers are a classifier's encoder; a transform may be another."""

    def paths(params: Any) -> Iterable[str]:
        return (re.sub(r"^decoder/", "encoder/", path) for path in flax.traverse_util.flatten_dict(params, sep="/"))

    taken = set(paths(new))
    return tuple(sorted(p for p in paths(old) if p not in taken or (old_transform and p.startswith("head_transform/"))))
