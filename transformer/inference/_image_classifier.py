"""Initialization of an image classifier from any encoder of images."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
from flax.traverse_util import flatten_dict

from transformer.config._model import TransformerConfig
from transformer.inference._loaded_model import LoadedModel
from transformer.nn.models._vision import VisionClassifier

if TYPE_CHECKING:
    from transformer.training._recipe import Recipe

_HEAD = ("output", "head_transform", "distillation_output")
"""names of the parameters after the pooling"""


def image_classifier(opened: LoadedModel, recipe: Recipe) -> tuple[TransformerConfig, Any, tuple[str, ...]]:
    """Turn an encoder of images into a classifier of the classes of a recipe's data.

    The head is kept if it has the same classes; their order may differ. Otherwise the classifier gets a new head on the
    pooled vector. Of a DualEncoder, only the encoder of images is used.

    Args:
        opened: a VisionEncoder or a DualEncoder.
        recipe: recipe of the new run, with labeled images.

    Returns:
        The config, the parameters that are kept, and the paths of those that are dropped.
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
    paths = {f"{prefix}{path}" for path in flatten_dict(kept, sep="/")}
    left = tuple(sorted(path for path in flatten_dict(opened.params, sep="/") if path not in paths))
    return config.replace(output=output), kept, left
