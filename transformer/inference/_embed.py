"""Embedding of texts and images."""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer.config._checks import ConfigError
from transformer.config._options import Pooling
from transformer.inference._image_inputs import run_images
from transformer.inference._loaded_model import LoadedModel, Params
from transformer.inference._sentences import SentenceSettings
from transformer.inference._text_batches import Batch, Columns, pool_texts, round_up
from transformer.inference._text_inputs import encode_texts, hidden_states, run_texts, text_model
from transformer.media._images import ImageProcessor
from transformer.nn._masks import Mask
from transformer.nn.models._dual import DualEncoder
from transformer.nn.models._dynamic_images import ImagePatches
from transformer.nn.models._kinds import kind_of
from transformer.nn.models._vision import VisionEmbedder, VisionEncoder
from transformer.zoo.weights._flax_files import open_files

BATCH = 64
"""Number of texts that the model reads at the same time."""


def embed(opened: LoadedModel, texts: Sequence[str], settings: SentenceSettings | None = None) -> np.ndarray:
    """Compute embeddings: pooled hidden states of the non-padding tokens (of the encoder, for a Seq2Seq).

    Vectors of a DualEncoder (CLIP, SigLIP) are in the space of its images, of length 1, without `settings`. A text that
    exceeds the context length is truncated with a warning.

    Args:
        opened: the model.
        texts: n texts.
        settings: pooling, normalization and preprocessing; None: the defaults of `SentenceSettings`.

    Returns:
        (n, D) float32, one vector per text.

    Raises:
        ConfigError: the model does not read text.
        ValueError: a text that the tokenizer can't encode or that has no tokens, or results that are not finite.
    """
    if opened.kind.compares:
        return embed_texts(opened, texts)
    settings = settings or SentenceSettings()
    return embed_encoded(opened, encode_sentences(opened, texts, settings), settings)


def encode_sentences(
    opened: LoadedModel, texts: Sequence[str], settings: SentenceSettings, *, truncate: bool = True
) -> list[Columns]:
    """Return token ids and token types of texts as `embed` reads them; `truncate` cuts long texts, with a warning."""
    text_model(opened)
    prepared = [settings.prompt + text for text in texts]
    if settings.lower_case:
        from tokenizers import normalizers

        # Character by character, as sentence-transformers; str.lower writes the last sigma of a word differently.
        prepared = [normalizers.Lowercase().normalize_str(text) for text in prepared]
    return encode_texts(opened, prepared, settings.max_length, truncate=truncate)


def embed_encoded(opened: LoadedModel, rows: Sequence[Columns], settings: SentenceSettings) -> np.ndarray:
    """Compute the vectors (n, D) float32 of the texts of `encode_sentences`; D is at most `settings.dimensions`."""
    options = {"pooling": settings.pooling, "normalize": settings.normalize}
    compute = functools.partial(_vectors, text_model(opened), opened.params, **options)
    return np.stack(run_texts(opened, rows, compute))[:, : settings.dimensions]


@functools.partial(jax.jit, static_argnames=("model", "pooling", "normalize"))
def _vectors(model: nn.Module, params: Params, batch: Batch, *, pooling: Pooling, normalize: bool) -> jax.Array:
    """Return the vectors (K, D) of K texts in float32. Compiled once per model, settings and batch shape."""
    pooled = pool_texts(hidden_states(model, params, batch), batch, pooling).astype(jnp.float32)
    if not normalize:
        return pooled
    # L2 normalization; the bound avoids 0 / 0 for a zero vector.
    return pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)


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
    model, longest = dual_encoder(opened), opened.model.config.max_length
    settings = {} if opened.pretrained is None else open_files(opened.directory).json("tokenizer_config.json") or {}
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
    return np.stack([opened.finite(number, row) for number, row in enumerate(results)])


def canonical_text(text: str) -> str:
    """Return a text as SigLIP was trained on it: in lower case, without punctuation, with single spaces."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\s+", " ", text).strip()


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


def dual_encoder(opened: LoadedModel) -> DualEncoder:
    """Return a model with one space for texts and images; raise ConfigError for another kind of model."""
    if not opened.kind.compares:
        raise ConfigError(
            f"{opened.directory} contains a model of the class {type(opened.model).__name__}, which does not compare "
            f"images with texts. Pass a model with both, such as openai/clip-vit-base-patch32."
        )
    return opened.model


@functools.partial(jax.jit, static_argnames="model")
def _text_vectors(model: DualEncoder, params: Params, tokens: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Return the vectors (B, D) of texts. Compiled once per model and batch shape."""
    mask = None if lengths is None else Mask.lengths(lengths)
    return model.apply({"params": params}, tokens, mask, method="embed_texts")


def embed_images(opened: LoadedModel, images: Sequence[Any], processor: ImageProcessor | None = None) -> np.ndarray:
    """Compute embeddings of images.

    They are the output of a VisionEmbedder (DINOv2: the class token; ViT: its pooler), the vector that a
    VisionClassifier classifies, or, for a DualEncoder (CLIP, SigLIP), a vector of length 1 in the space of its texts.

    Args:
        opened: a model of images.
        images: paths, PIL images or arrays, see `media.open_image`.
        processor: preprocessing; None: that of preprocessor_config.json in the directory of the model.

    Returns:
        (n, D) float32, one vector per image.

    Raises:
        ConfigError: the model does not read images, or the preprocessing is missing or does not fit the model.
        FileNotFoundError, ValueError: an image that can't be read, or results that are not finite.
    """
    if "images" not in opened.kind.embeds:
        raise ConfigError(
            f"{opened.directory} contains a model of the class {type(opened.model).__name__}, which does not read "
            f"images. Pass a model of images, such as facebook/dinov2-base."
        )
    return np.stack(run_images(opened, images, processor, _image_vectors))


@functools.partial(jax.jit, static_argnames="model")
def _image_vectors(model: VisionEncoder | DualEncoder, params: Params, pixels: jax.Array | ImagePatches) -> jax.Array:
    """Return the vectors (B, D) of images. Compiled once per model and batch shape."""
    variables = {"params": params}
    if kind_of(model).compares:
        return model.apply(variables, pixels, method="embed_images")
    if isinstance(model, VisionEmbedder):
        return model.apply(variables, pixels)
    return model.apply(variables, pixels, method="pooled").astype(jnp.float32)
