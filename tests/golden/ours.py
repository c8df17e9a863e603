"""Results of this library for the test cases: the same weights and inputs as `reference`, and the same result names."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from golden.case import (
    GRIDS,
    SUFFIX,
    Case,
    dynamic_images,
    image_patches,
    numbers,
    past_values,
    real_tokens,
    recordings,
    texts,
    tokens,
    with_images,
)

from transformer.config import Patches
from transformer.nn._masks import Mask
from transformer.nn.models import (
    Classifier,
    DualEncoder,
    Embedder,
    ImagePatches,
    MaskedLM,
    PatchReconstructor,
    Seq2Seq,
    SeriesEncoder,
    SpeechEncoder,
    SpeechRecognizer,
    SpeechToText,
    VisionLanguageModel,
)
from transformer.nn.models._vision import VisionEncoder
from transformer.zoo.weights._files import write_weights

MASKED = 2
"""Number of masked patches at the end of each channel, for the pretraining of models of time series."""


def write(directory: Path, record: dict[str, Any]) -> Path:
    """Write the checkpoint that a golden record describes."""
    tensors = {name: numbers(name, tuple(shape)) for name, shape in record["tensors"].items()}
    write_weights(directory, record["config"], tensors)
    return directory


def inputs_of(model: Any, case: Case, padding: str, pad_id: int = 0) -> tuple[tuple, dict[str, Any]]:
    """Return the positional and keyword arguments of a model call.

    `jax.device_put` makes the arrays, because `jnp.asarray` would compile a program for each shape.
    """
    config = model.config
    if isinstance(model, VisionEncoder | DualEncoder):
        images = _images(config.patches or config.images.patches)
        if isinstance(model, VisionEncoder):
            return (images,), {}
        ids, real = texts(case.length, config.vocab_size, padding)
        mask = None if padding == "none" else Mask.lengths(jax.device_put(real.sum(1)))
        return (jax.device_put(ids), images), {"mask": mask}
    if isinstance(model, SpeechEncoder):
        return (jax.device_put(recordings()),), {}
    real = real_tokens(padding, 2, case.length)
    ids = jax.device_put(
        tokens(1, config.embedding.source_vocab_size or config.vocab_size, 2, case.length) * real + (1 - real) * pad_id
    )
    named: dict[str, Any] = {}
    mask = None
    if padding == "right":
        mask = Mask.lengths(jax.device_put(real.sum(1)))
    if padding == "left":
        mask = Mask.segments(jax.device_put(real))
        named["positions"] = jax.device_put(np.maximum(real.cumsum(1) - 1, 0))
    if isinstance(model, VisionLanguageModel):
        count = 4 if config.image_tokens is None else config.image_tokens.count
        ids = jax.device_put(with_images(np.asarray(ids), count))
        images = images_of(model)
        named["images"] = images if config.image_tokens else ImagePatches.of(images, config.dynamic_images)
        if config.image_tokens and config.image_tokens.attention == "prefix":
            named["prefix_lengths"] = jax.device_put(np.full(2, case.length - SUFFIX))
    if isinstance(model, SeriesEncoder):
        series = config.series
        masked = np.broadcast_to(
            np.arange(series.patches) >= series.patches - MASKED, (2, series.channels, series.patches)
        )
        named = {"masked": jax.device_put(masked)} if isinstance(model, PatchReconstructor) else {}
        return (jax.device_put(past_values(series.context_length, series.channels)),), named
    if isinstance(model, SpeechToText):
        frames = np.random.RandomState(5).standard_normal((2, config.speech.mel_bins, 2 * config.longest_source))
        target = tokens(2, config.vocab_size, 2, case.length - 4)
        return (jax.device_put(frames.astype(np.float32).transpose(0, 2, 1)), jax.device_put(target)), {}
    if isinstance(model, Seq2Seq):
        target = tokens(2, config.vocab_size, 2, case.length - 4)
        return (ids, jax.device_put(target)), {"source_mask": mask}
    if isinstance(model, MaskedLM | Classifier | Embedder) and (config.embedding.token_types or 1) > 1:
        types = np.broadcast_to(np.arange(case.length) >= case.length // 2, (2, case.length))
        named["token_types"] = jax.device_put(types.astype(np.int32))
    return (ids,), named | {"mask": mask}


def _images(patches: Patches) -> jnp.ndarray | ImagePatches:
    """Return two images."""
    if patches.resize_positions:
        values, _ = image_patches(patches.patch_size**2 * patches.channels)
        return ImagePatches(jax.device_put(values), jax.device_put(np.asarray(GRIDS)))
    shape = (2, patches.channels, patches.image_height, patches.image_width)
    pixels = np.random.RandomState(5).standard_normal(shape).astype(np.float32)
    return jax.device_put(pixels.transpose(0, 2, 3, 1))


def without_head(model: Any) -> bool:
    """Return whether the model has no logits."""
    if type(model) is SeriesEncoder:
        return True
    return isinstance(model, Embedder) or (isinstance(model, SpeechEncoder) and not isinstance(model, SpeechRecognizer))


def images_of(model: VisionLanguageModel) -> Any:
    """Return the images (2, 2, height, width, channels) of both rows; the second row has only one.

    If they can have any size, return a list of images for each row.
    """
    if (dynamic := model.config.dynamic_images) is not None:
        first, second, third = dynamic_images(dynamic.multiple, dynamic.channels)
        return [[first, second], [third]]
    patches = model.config.image_tokens.patches
    shape = (3, patches.channels, patches.image_height, patches.image_width)
    pixels = np.random.RandomState(5).standard_normal(shape).astype(np.float32).transpose(0, 2, 3, 1)
    return jax.device_put(np.concatenate([pixels, np.zeros_like(pixels[:1])]).reshape(2, 2, *pixels.shape[1:]))


def run(model: Any, params: Any, case: Case, padding: str, pad_id: int = 0) -> dict[str, np.ndarray]:
    """Return hidden states and, if the model has a head, logits."""
    inputs, named = inputs_of(model, case, padding, pad_id)

    @jax.jit
    def both(params, inputs, named):
        def compute(module):
            hidden = module.hidden(*inputs, **named)
            pooler = isinstance(model, Embedder) and model.config.output.pooler is not None
            more = {"pooler_output": module.pooler_output(hidden, named["mask"])} if pooler else {}
            return {"hidden": hidden} | ({} if without_head(model) else {"logits": module(*inputs, **named)}) | more

        return model.apply({"params": params}, method=compute)

    results = both(params, inputs, named)
    hidden = results["hidden"]
    if isinstance(model, DualEncoder):
        results |= {"hidden": hidden[0], "image_hidden": hidden[1], **_vectors(model, params, *inputs, named["mask"])}
    return {name: np.asarray(value, np.float32) for name, value in results.items()}


def _vectors(model: DualEncoder, params: Any, ids: Any, images: Any, mask: Any) -> dict[str, Any]:
    """Return the vectors of texts and images."""
    apply = jax.jit(model.apply, static_argnames="method")
    of_texts = apply({"params": params}, ids, mask, method="embed_texts")
    return {"texts": of_texts, "images": apply({"params": params}, images, method="embed_images")}


def gradients(model: Any, params: Any, case: Case) -> Any:
    """Return the gradient of mean(log-probabilities * fixed random numbers) by the parameters."""
    inputs, named = inputs_of(model, case, "none")

    @jax.jit
    def gradient(params):
        def loss(params):
            logits = model.apply({"params": params}, *inputs, **named)
            direction = np.random.RandomState(3).standard_normal(logits.shape).astype(np.float32)
            return (jax.nn.log_softmax(logits) * direction).mean()

        return jax.grad(loss)(params)

    return gradient(params)


def compare(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], padding: str, case: Case) -> None:
    """Assert equality up to 1e-4, except for padding."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        expected, got = np.asarray(expected, np.float32), ours[name]
        assert got.shape == expected.shape, name
        assert np.abs(expected).max() > 0.05, name  # something to compare
        per_token = got.ndim == 3 and got.shape[1] == case.length
        if per_token and padding != "none":
            real = real_tokens(padding, 2, case.length).astype(bool)
            got, expected = got[real], expected[real]
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4, err_msg=name)
