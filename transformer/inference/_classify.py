"""Classification of texts, images and time series, and of images by labels without training."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from transformer.config._checks import ConfigError
from transformer.inference._embed import dual_encoder, embed_images, embed_texts
from transformer.inference._image_inputs import filled, run_images
from transformer.inference._loaded_model import LoadedModel, Params
from transformer.inference._text_batches import Batch, pool_texts
from transformer.inference._text_inputs import encode_texts, hidden_states, run_texts, text_model
from transformer.media._images import ImageProcessor
from transformer.nn.models._dual import DualEncoder
from transformer.nn.models._dynamic_images import ImagePatches
from transformer.nn.models._encoders import Classifier
from transformer.nn.models._series import SeriesClassifier
from transformer.nn.models._vision import VisionClassifier

BATCH = 64
"""Number of series that the model reads at the same time."""


@dataclass(frozen=True)
class Class:
    """Classification result: the most probable class, its probability, and the probabilities of all classes."""

    label: str
    """Name of the most probable class."""
    probability: float
    probabilities: dict[str, float]
    """Probability of every label."""

    def top(self, count: int) -> list[tuple[str, float]]:
        """Return the `count` most probable labels with their probabilities, the most probable first."""
        return sorted(self.probabilities.items(), key=lambda both: -both[1])[:count]


def classify(opened: LoadedModel, texts: Sequence[str]) -> list[Class]:
    """Return the most probable class of each text.

    Raises:
        ConfigError: the model is not a classifier, or its outputs are not probabilities of mutually exclusive classes.
        ValueError: see `embed`.
    """
    model = text_model(opened)
    if opened.kind.classifies != "text":
        raise ConfigError(
            f"{opened.directory} contains a model of the class {type(model).__name__}, which is not a classifier. Pass "
            f"a classifier, or train one: configs/finetune_classifier.py."
        )
    names = class_names(opened)
    rows = run_texts(opened, encode_texts(opened, texts), functools.partial(_text_probabilities, model, opened.params))
    return [class_of(row, names) for row in rows]


def classify_images(opened: LoadedModel, images: Sequence[Any], processor: ImageProcessor | None = None) -> list[Class]:
    """Return the most probable class of each image.

    Args:
        opened: an image classifier.
        images: paths, PIL images or arrays, see `media.open_image`.
        processor: preprocessing; None: that of preprocessor_config.json in the directory of the model.

    Raises:
        ConfigError: the model is not an image classifier, its outputs are not probabilities of mutually exclusive
            classes, or the preprocessing is missing or does not fit the model.
        FileNotFoundError, ValueError: an image that can't be read, or results that are not finite.
    """
    if opened.kind.classifies != "images":
        remedy = "Pass an image classifier, such as google/vit-base-patch16-224."
        if opened.kind.compares:
            remedy = "It compares images with texts: pass labels (--labels), or call classify_with_labels."
        raise ConfigError(
            f"{opened.directory} contains a model of the class {type(opened.model).__name__}, which does not classify "
            f"images. {remedy}"
        )
    names = class_names(opened)
    return [class_of(row, names) for row in run_images(opened, images, processor, _probabilities)]


def classify_series(opened: LoadedModel, series: Sequence[Any]) -> list[Class]:
    """Return the most probable class of each time series.

    Args:
        opened: a classifier of time series (PatchTST).
        series: (n, context_length, channels), or a list of n arrays (context_length, channels), in any unit that
            training used.

    Raises:
        ConfigError: the model is no classifier of time series, or its outputs are not probabilities of mutually
            exclusive classes.
        ValueError: no series, series of another shape, or results that are not finite.
    """
    if opened.kind.classifies != "series":
        raise ConfigError(
            f"{opened.directory} contains a model of the class {type(opened.model).__name__}, which does not classify "
            f"time series. Pass the weights of a PatchTSTForClassification."
        )
    names = class_names(opened)
    values = np.asarray(series, np.float32)
    if not len(values):
        raise ValueError("there are no series. Pass at least one.")
    size, rows = min(len(values), BATCH), []
    for first in range(0, len(values), BATCH):
        part = filled(values[first : first + BATCH], size)
        rows += list(np.asarray(_probabilities(opened.model, opened.params, part)))
    return [class_of(opened.finite(number, row, "series"), names) for number, row in enumerate(rows[: len(values)])]


def classify_with_labels(
    opened: LoadedModel, images: Sequence[Any], labels: Sequence[str], processor: ImageProcessor | None = None
) -> list[Class]:
    """Return the label that fits each image best, without training (Radford et al. 2021, arXiv 2103.00020, section 3).

    Args:
        opened: a DualEncoder (CLIP, SigLIP).
        images: paths, PIL images or arrays, see `media.open_image`.
        labels: texts that describe the classes, such as "a photo of a cat".
        processor: preprocessing; None: that of preprocessor_config.json in the directory of the model.

    Returns:
        One result per image. The probabilities sum to 1 for a model that was trained with softmax (CLIP); those of a
        model that was trained with a sigmoid (SigLIP) say for each label whether it fits.

    Raises:
        ConfigError: the model has no common space of texts and images, labels are missing or repeated, or the
            preprocessing is missing or does not fit the model.
        FileNotFoundError, ValueError: an image or a label that can't be read, or results that are not finite.
    """
    model = dual_encoder(opened)
    if not labels or len(set(labels)) != len(labels):
        raise ConfigError(f"labels must be different texts, at least one, got {list(labels)!r:.200}. Correct them.")
    texts = embed_texts(opened, labels)
    vectors = embed_images(opened, images, processor)
    rows = np.asarray(_similarities(model, opened.params, vectors, texts))
    return [class_of(opened.finite(number, row, "image"), list(labels)) for number, row in enumerate(rows)]


def class_names(opened: LoadedModel) -> list[str]:
    """Return the names of a classifier's classes, or their numbers if they have no names.

    Raises ConfigError if its outputs are not probabilities of mutually exclusive classes.
    """
    classes = opened.model.config.output.num_classes
    problem = None if opened.pretrained is None else opened.pretrained.fields.get("problem_type")
    if classes == 1 or problem in ("regression", "multi_label_classification"):
        reason = "" if problem is None else f" (problem_type {problem})"
        raise ConfigError(
            f"{opened.directory} does not choose one of several classes: it has {classes} independent outputs{reason}. "
            f"Load it with transformer.load and use its logits."
        )
    return opened.labels or [str(i) for i in range(classes)]


def class_of(probabilities: np.ndarray, names: Sequence[str]) -> Class:
    """Return the classification result for the probabilities (C,) of classes with these names."""
    best = int(probabilities.argmax())
    every = {name: float(p) for name, p in zip(names, probabilities, strict=True)}
    return Class(names[best], float(probabilities[best]), every)


@functools.partial(jax.jit, static_argnames="model")
def _text_probabilities(model: Classifier, params: Params, batch: Batch) -> jax.Array:
    """Return the class probabilities (K, C) of K texts. Compiled once per model and batch shape."""
    pooled = pool_texts(hidden_states(model, params, batch), batch, model.config.output.pooling)
    return jax.nn.softmax(model.apply({"params": params}, pooled, method=Classifier.head))  # over C


@functools.partial(jax.jit, static_argnames="model")
def _probabilities(
    model: VisionClassifier | SeriesClassifier, params: Params, values: jax.Array | ImagePatches
) -> jax.Array:
    """Return the class probabilities (B, C) of images or series. Compiled once per model and batch shape."""
    return jax.nn.softmax(model.apply({"params": params}, values))  # over C


@functools.partial(jax.jit, static_argnames="model")
def _similarities(model: DualEncoder, params: Params, images: jax.Array, texts: jax.Array) -> jax.Array:
    """Return the probabilities (B, C) of texts for images, from their vectors."""
    logits = model.apply({"params": params}, images, texts, method="logits")
    sigmoid = model.config.images.similarity == "sigmoid"
    return jax.nn.sigmoid(logits) if sigmoid else jax.nn.softmax(logits)
