"""Models with one space for texts and images: embeddings of texts, and classification without training."""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from transformer.config._checks import ConfigError
from transformer.inference._image_inputs import embed_images
from transformer.inference._loading import LoadedModel
from transformer.inference._text_batches import round_up
from transformer.inference._text_inputs import Class, class_of, encode_texts, finite
from transformer.nn._masks import Mask
from transformer.nn.models._dual import DualEncoder
from transformer.zoo.weights._flax_files import open_files

if TYPE_CHECKING:
    from transformer.media._images import ImageProcessor

BATCH = 64
"""Number of texts that the model reads at the same time."""


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
    model = _dual(opened)
    if not labels or len(set(labels)) != len(labels):
        raise ConfigError(f"labels must be different texts, at least one, got {list(labels)!r:.200}. Correct them.")
    texts = embed_texts(opened, labels)
    vectors = embed_images(opened, images, processor)
    rows = np.asarray(_similarities(model, opened.params, vectors, texts))
    return [class_of(finite(opened, number, row, "image"), list(labels)) for number, row in enumerate(rows)]


def embed_texts(opened: LoadedModel, texts: Sequence[str]) -> np.ndarray:
    """Compute vectors of texts, of length 1, in the space of the images.

    A text that exceeds the context length is truncated with a warning. A model whose text encoder is not causal
    (SigLIP) was trained on texts that are padded to the context length, without a mask: padding is part of its input.

    Returns:
        (n, D) float32, one vector per text.

    Raises:
        ConfigError: the model has no common space of texts and images, or no tokenizer.
        ValueError: a text that the tokenizer can't encode or that is empty, or results that are not finite.
    """
    model, longest = _dual(opened), opened.model.config.max_length
    settings = _tokenizer_settings(opened)
    texts = [change(text) for text in texts] if (change := _change_of_texts(opened, settings)) else texts
    rows = [ids for ids, _ in encode_texts(opened, texts)]
    fixed = not model.config.attention.causal
    left = fixed and settings.get("padding_side") == "left"
    length = longest if fixed else min(round_up(max(map(len, rows), default=1)), longest)
    size, results = min(len(rows), BATCH), []
    for first in range(0, len(rows), BATCH):
        part = rows[first : first + BATCH]
        tokens = np.full((size, length), opened.tokenizer.pad_id, np.int32)
        lengths = np.ones(size, np.int32)
        for number, ids in enumerate(part):
            before = length - len(ids) if left else 0
            tokens[number, before : before + len(ids)] = ids
            lengths[number] = len(ids)
        vectors = _text_vectors(model, opened.params, tokens, None if fixed else lengths)
        results += list(np.asarray(vectors)[: len(part)])
    return np.stack([finite(opened, number, row) for number, row in enumerate(results)])


def canonical_text(text: str) -> str:
    """Return a text as SigLIP was trained on it: in lower case, without punctuation, with single spaces."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\s+", " ", text).strip()


def _tokenizer_settings(opened: LoadedModel) -> Mapping[str, Any]:
    """Return the fields of tokenizer_config.json of pretrained weights."""
    return {} if opened.pretrained is None else open_files(opened.directory).json("tokenizer_config.json") or {}


def _change_of_texts(opened: LoadedModel, settings: Mapping[str, Any]) -> Callable[[str], str] | None:
    """Return how texts are changed before tokenizer.json applies, if the model was trained on changed texts.

    The tokenizer of SigLIP removes punctuation, which tokenizer.json can't describe. SigLIP 2 was trained on texts in
    lower case with the tokenizer of Gemma, whose tokenizer.json keeps the case.
    """
    if opened.pretrained is None:
        return None
    family, kind = opened.pretrained.family.name, str(settings.get("tokenizer_class", "")).removesuffix("Fast")
    if kind == "SiglipTokenizer":
        return canonical_text
    lower = family == "siglip2" or (family == "siglip" and kind in ("Siglip2Tokenizer", "GemmaTokenizer"))
    return str.lower if lower else None


def _dual(opened: LoadedModel) -> DualEncoder:
    if not isinstance(opened.model, DualEncoder):
        raise ConfigError(
            f"{opened.directory} contains a model of the class {type(opened.model).__name__}, which does not compare "
            f"images with texts. Pass a model with both, such as openai/clip-vit-base-patch32."
        )
    return opened.model


@functools.partial(jax.jit, static_argnames="model")
def _text_vectors(model: DualEncoder, params: Any, tokens: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Return the vectors (B, D) of texts. Compiled once per model and batch shape."""
    mask = None if lengths is None else Mask.lengths(lengths)
    return model.apply({"params": params}, tokens, mask, method="embed_texts")


@functools.partial(jax.jit, static_argnames="model")
def _similarities(model: DualEncoder, params: Any, images: jax.Array, texts: jax.Array) -> jax.Array:
    """Return the probabilities (B, C) of texts for images, from their vectors."""
    logits = model.apply({"params": params}, images, texts, method="logits")
    sigmoid = model.config.images.similarity == "sigmoid"
    return jax.nn.sigmoid(logits) if sigmoid else jax.nn.softmax(logits)
