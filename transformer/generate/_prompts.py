"""Check the arguments of the user before compilation (compiled code can't raise), and convert them to arrays."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, SupportsIndex, TypeAlias, TypeVar

import flax.linen as nn
import numpy as np

from transformer.config._checks import ConfigError
from transformer.config._model import DynamicImageTokens, ImageTokens, TransformerConfig
from transformer.generate._decoding import Batch
from transformer.generate._layers import Params
from transformer.nn.kernels import portable
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._dynamic_images import ImagePatches, check_image
from transformer.nn.models._kinds import kind_of
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.nn.models._speech import FRAMES_A_POSITION, check_frames

AnyModel = TypeVar("AnyModel", bound=nn.Module)
Ids: TypeAlias = Any
"""token ids of one row: a list or an array of integers; `check_rows` validates it"""


def check_text_model(verb: str, model: nn.Module, params: Params) -> int:
    """Return the size of the vocabulary of a model that generates text; `verb`, the calling function, is for messages.

    Raises:
        ValueError: if the model does not generate text, or the parameters have an outer "params".
        ConfigError: if the config has no vocab_size.
    """
    kind = kind_of(model)
    if kind.writes in (None, "characters"):
        instead = "`classify` returns its classes" if kind.classifies == "text" else "`embed` returns its vectors"
        raise ValueError(
            f"{verb} needs a CausalLM or a Seq2Seq, got a {type(model).__name__}, which generates no text; {instead}."
        )
    if isinstance(params, Mapping) and set(params) == {"params"}:
        raise ValueError('params must be the inner parameter tree, got {"params": ...}: pass params["params"].')
    return vocabulary(model.config)


def decoding_model(model: AnyModel) -> AnyModel:
    """Return the model for inference: with a kernel that supports a KV cache."""
    return model.clone(execution=portable(model.execution))


def end_ids(eos_id: SupportsIndex | Sequence[SupportsIndex] | None, vocab_size: int) -> list[int]:
    """Return the ids that end a row, without duplicates; raise ValueError for one outside the vocabulary."""
    ends = [] if eos_id is None else [eos_id] if isinstance(eos_id, SupportsIndex) else list(eos_id)
    for end in ends:
        check_id("eos_id", end, vocab_size)
    return list(dict.fromkeys(int(end) for end in ends if end is not None))


def source_rows(model: CausalLM | Seq2Seq, sources: Any, vocab_size: int) -> Batch | None:
    """Return the sources as padded rows, or as frames for a SpeechToText; None for a CausalLM, which has none."""
    kind = kind_of(model)
    if not kind.source:
        if sources is not None:
            raise ValueError(
                "sources are only supported for a Seq2Seq: a CausalLM has no encoder. Pass the text as prompts."
            )
        return None
    if sources is None:
        raise ValueError("sources is missing: a Seq2Seq needs a source. prompts contain only the start of the targets.")
    if kind.reads == ("sound",):
        return frame_rows(model.config, sources)
    rows = check_rows("source", sources, model.config.embedding.source_vocab_size or vocab_size)
    check_source_lengths(model.config, rows)
    return pad(rows, padded_length(rows, model.config.longest_source))


def target_rows(
    prompts: Sequence[Ids] | None, source: Batch | None, bos_id: SupportsIndex | None, vocab_size: int
) -> list[np.ndarray]:
    """Return the ids that each row starts with: the prompts, or `[bos_id]` for each source."""
    check_id("bos_id", bos_id, vocab_size)
    if prompts is None:
        if source is None:
            raise ValueError("prompts is missing. Pass a list of token ids for each row.")
        if bos_id is None:
            raise ValueError("bos_id is missing. Pass the id that a target starts with, or prompts.")
        prompts = [[bos_id]] * len(source.lengths)
    rows = check_rows("prompt", prompts, vocab_size)
    if source is not None and len(source.lengths) != len(rows):
        raise ValueError(f"there must be as many prompts as sources, got {len(rows)} and {len(source.lengths)}.")
    return rows


def image_rows(
    model: nn.Module, prompts: Sequence[np.ndarray], images: Sequence[Any] | None
) -> np.ndarray | ImagePatches | None:
    """Return the images of prompts as one array (B, I, height, width, channels), with zeros where a row has fewer.

    For a model that reads images of any size, return `ImagePatches`. Images that do not fit model or prompts are a
    ValueError.
    """
    config = None
    if kind_of(model).image_prompts:
        config = model.config.image_tokens or model.config.dynamic_images
    if images is not None and config is None:
        raise ValueError(
            f"images are only supported for a VisionLanguageModel: this {type(model).__name__} reads only text. Remove "
            f"them."
        )
    if config is None:
        return None
    images = [[]] * len(prompts) if images is None else images
    if len(images) != len(prompts):
        raise ValueError(
            f"images must be one list of images for each of the {len(prompts)} prompts, got {len(images)}."
        )
    for number, (row, its_images) in enumerate(zip(prompts, images, strict=True)):
        counts = [_count_tokens(config, number, image) for image in its_images]
        if (found := int((np.asarray(row) == config.token_id).sum())) != sum(counts):
            each = ", ".join(map(str, sorted(set(counts))))
            raise ValueError(
                f"prompt {number} has {found} image tokens (id {config.token_id}), but {len(its_images)} images need "
                f"{sum(counts)}{f', {each} each' if counts else ''}. Put the tokens of each image into the prompt."
            )
    most = max(map(len, images))
    if most == 0:
        return None
    if isinstance(config, DynamicImageTokens):
        return ImagePatches.of(images, config)
    shape = (config.patches.image_height, config.patches.image_width, config.patches.channels)
    blank = np.zeros(shape, np.float32)
    return np.stack([np.stack([*row, *[blank] * (most - len(row))]) for row in images]).astype(np.float32)


def _count_tokens(config: ImageTokens | DynamicImageTokens, number: int, image: Any) -> int:
    """Return the number of tokens of an image of the prompt `number`; raise ValueError for another shape."""
    if isinstance(config, DynamicImageTokens):
        check_image(image, config)
        return config.count(*np.shape(image)[:2])
    shape = (config.patches.image_height, config.patches.image_width, config.patches.channels)
    if np.shape(image) != shape:
        raise ValueError(
            f"the images of prompt {number} must be arrays (height, width, channels) of shape {shape}, got "
            f"{np.shape(image)}. Apply the preprocessing of the model."
        )
    return config.count


def slots_of_prompts(rows: Sequence[np.ndarray], source: Batch | None, longest: int | None) -> int:
    """Return the padded length of the prompts."""
    # Almost every target of a Seq2Seq starts with a single token; padding it to 16 tokens would be wasted work.
    single = source is not None and all(len(row) == 1 for row in rows)
    return 1 if single else padded_length(rows, longest)


def padded_length(rows: Sequence[np.ndarray], longest: int | None) -> int:
    """Return the padded length of rows: at most the length of a learned position table, which all rows fit in."""
    slots = bucket(max(len(row) for row in rows))
    return slots if longest is None else min(slots, longest)


def bucket(size: int) -> int:
    """Round `size` up, so that similar sizes share a shape and few shapes are compiled.

    The result is a multiple of 16, or of a quarter of the power of two below `size` if that is larger. So sizes beyond
    64 increase by at most a quarter.
    """
    step = max(16, 1 << max((size - 1).bit_length() - 3, 0))
    return -(-size // step) * step


def pad(rows: Sequence[np.ndarray], length: int) -> Batch:
    """Return rows of ids as one array (B, length)."""
    # Padding repeats the last id of the row. So a row reads only its own entries of the embedding table: NaN in another
    # entry can't reach it.
    tokens = np.stack([np.pad(row, (0, length - len(row)), mode="edge") for row in rows])
    return Batch(tokens=tokens.astype(np.int32), lengths=np.array([len(row) for row in rows], np.int32))


def check_rows(what: str, rows: Sequence[Ids], vocab_size: int) -> list[np.ndarray]:
    """Return rows of token ids as arrays; a ValueError names `what` ("prompt" or "source"), row and index."""
    if isinstance(rows, str) or len(rows) == 0:
        raise ValueError(f"{what}s must be a list with at least one list of token ids, got {rows!r}.")
    return [_check_row(f"{what} {number}", row, vocab_size) for number, row in enumerate(rows)]


def _check_row(name: str, row: Ids, vocab_size: int) -> np.ndarray:
    if isinstance(row, str) or np.ndim(row) != 1:
        raise ValueError(f"{name} must be a list of token ids, got {row!r}. Encode text with its tokenizer first.")
    if len(row) == 0:
        raise ValueError(
            f"{name} is empty: there must be at least one token to continue from. Pass, for example, the tokenizer's "
            f"bos_id."
        )
    ids = np.asarray(row)
    if ids.dtype.kind not in "iu":
        raise ValueError(f"{name} must contain integers, got values of type {ids.dtype}.")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        raise ValueError(
            f"{name} has id {ids[outside[0]]} at index {outside[0]}, but token ids must be from 0 to {vocab_size - 1} "
            f"(vocab_size {vocab_size}). Was the text encoded by another tokenizer?"
        )
    return ids


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of tokens with which both texts begin."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))))


def check_id(name: str, value: SupportsIndex | None, vocab_size: int) -> None:
    """Raise ValueError unless `value` is None or an id of the vocabulary."""
    if value is None:
        return
    if not isinstance(value, Integral) or isinstance(value, bool) or not 0 <= value < vocab_size:
        raise ValueError(
            f"{name} must be a token id from 0 to {vocab_size - 1} (vocab_size {vocab_size}), got {value!r}."
        )


def check_new_tokens(max_new_tokens: SupportsIndex) -> int:
    """Return `max_new_tokens` as an int; raise ValueError unless it is an integer of at least 1."""
    if not isinstance(max_new_tokens, Integral) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be an integer of at least 1, got {max_new_tokens!r}.")
    return int(max_new_tokens)


def row_seeds(seed: SupportsIndex | Sequence[SupportsIndex], batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the seed of each row and the number to fold into it, both (B,).

    For a single seed these are (seed, row index), for one seed per row (seed of the row, 0).
    """
    single = isinstance(seed, Integral)
    seeds = [seed] * batch if single else list(seed)
    if len(seeds) != batch:
        raise ValueError(f"seed must be one integer, or one for each of the {batch} rows, got {len(seeds)}.")
    for value in seeds:
        if not isinstance(value, Integral) or isinstance(value, bool) or not 0 <= value < 2**32:
            raise ValueError(f"seed must be an integer from 0 to {2**32 - 1}, got {value!r}.")
    return np.array(seeds, np.uint32), np.arange(batch) if single else np.zeros(batch, int)


def frame_rows(config: TransformerConfig, sources: Any) -> Batch:
    """Return the sources of a SpeechToText, frames (B, F, M), with the number of encoder positions as lengths."""
    try:
        frames = np.asarray(sources)
    except ValueError as error:
        raise ValueError("sources of a SpeechToText must be frames, an array (batch, frames, mel bins).") from error
    check_frames(config, frames)
    positions = -(-frames.shape[1] // FRAMES_A_POSITION)
    return Batch(tokens=frames.astype(np.float32), lengths=np.full(len(frames), positions, np.int32))


def check_source_lengths(config: TransformerConfig, sources: Sequence[np.ndarray]) -> None:
    """Raise ValueError if a source is longer than a learned position table."""
    if config.longest_source is None:
        return
    field = "max_length" if config.position.source_max_length is None else "source_max_length"
    for number, row in enumerate(sources):
        if len(row) > config.longest_source:
            table = _table(field, config.longest_source)
            raise ValueError(f"source {number} has {len(row)} tokens, but {table}. Shorten the source.")


def _table(field: str, rows: int) -> str:
    return f"the model's learned position table has only {rows} positions ({field})"


def check_lengths(config: TransformerConfig, prompts: Sequence[np.ndarray], max_new_tokens: int) -> None:
    """Raise ValueError if a prompt with its new tokens is longer than a learned position table."""
    if config.max_length is None:
        return
    for number, row in enumerate(prompts):
        total = len(row) + max_new_tokens
        if total > config.max_length:
            room = config.max_length - len(row)
            remedy = f"Request at most {room} new tokens, or shorten the prompt." if room > 0 else "Shorten the prompt."
            raise ValueError(
                f"prompt {number} has {len(row)} tokens, {total} with {max_new_tokens} new ones, but "
                f"{_table('max_length', config.max_length)}. {remedy}"
            )


def warn_if_rescaled(config: TransformerConfig, prompt: int | np.ndarray, read: int | np.ndarray) -> None:
    """Warn, once per process, if a text has grown past the length where the rotary scaling of the model changes.

    `prompt` is the number of tokens of the prompt, and `read` how many of the text with its prompt the model has read;
    or both of each row (B,).
    """
    longest = config.unscaled_length
    if longest is not None and ((np.asarray(prompt) <= longest) & (np.asarray(read) > longest)).any():
        kinds = {one.kind for one in config.rotary_scalings if one.by_length}
        _warn_once(
            f"a text grew past {longest} tokens while it was generated. There the rotary scaling of the model "
            f"({', '.join(sorted(kinds))}, original_length {longest}) rotates by other frequencies: keys and values in "
            f"the cache were computed with the former ones, so the text may differ from one that continues a longer "
            f"prompt. To compute them again, pass the text so far as a new prompt."
        )


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=4)


def vocabulary(config: TransformerConfig) -> int:
    """Return the config's vocab_size; raise ConfigError if it is not set."""
    if config.vocab_size is None:
        raise ConfigError("vocab_size is not set: generation needs the number of tokens. Set it in the config.")
    return config.vocab_size
