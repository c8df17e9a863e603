"""Times of words in a transcript of Whisper, from its cross-attention and dynamic time warping."""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from transformer.config._checks import ConfigError
from transformer.inference._loaded_model import LoadedModel, Params
from transformer.inference._text_attention import reference_model
from transformer.nn._axes import Array, Int
from transformer.nn.models._speech import SpeechToText
from transformer.viz._attention_weights import layer_weights

MEDIAN_WIDTH = 7
"""encoder positions of the median filter, if config.json has no median_filter_width"""
WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""languages that don't separate words by spaces: each character is a word"""
OPENING = "\"'“¡¿([{-"
"""punctuation that belongs to the next word"""
CLOSING = "\"'.。,，!！?？:：”)]}、"
"""punctuation that belongs to the word before it"""


def alignment_heads(opened: LoadedModel) -> tuple[tuple[int, int], ...]:
    """Return (layer, head) of the heads whose cross-attention follows the time: `alignment_heads` of
    generation_config.json. Without it, all heads of the second half of the decoder, as in Whisper's published code.
    """
    config = opened.model.config
    layers, heads = config.decoder_layers, config.num_heads
    given = opened.pretrained.generation.get("alignment_heads")
    if given is None:
        return tuple((layer, head) for layer in range(layers // 2, layers) for head in range(heads))
    pairs = given if isinstance(given, list) and given else [None]
    for pair in pairs:
        fits = isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair)
        if not fits or not (0 <= pair[0] < layers and 0 <= pair[1] < heads):
            raise ConfigError(
                f"alignment_heads of generation_config.json in {opened.directory} must be a list of pairs [layer, "
                f"head] with layers from 0 to {layers - 1} and heads from 0 to {heads - 1}, got {pair!r:.60}. Correct "
                f"them, or remove the field: then all heads of the second half of the decoder are used."
            )
    return tuple((layer, head) for layer, head in pairs)


def median_width(opened: LoadedModel) -> int:
    """Return the width of the median filter, in encoder positions: `median_filter_width` of config.json."""
    width = opened.pretrained.fields.get("median_filter_width", MEDIAN_WIDTH)
    if type(width) is not int or width < 1 or width % 2 == 0:
        raise ConfigError(
            f"median_filter_width of config.json in {opened.directory} must be an odd whole number, got {width!r:.60}. "
            f"The published models have {MEDIAN_WIDTH}."
        )
    return width


@functools.partial(jax.jit, static_argnames=("model", "heads"))
def cross_attention(
    model: SpeechToText, params: Params, cache: Any, tokens: Int[Array, "1 T"], *, heads: tuple[tuple[int, int], ...]
) -> Float[Array, "N T S"]:
    """Return the cross-attention weights of N heads, given as (layer, head), for tokens after the start token.

    Compiled once per model, heads and T. The encoder does not run again: its keys and values are in the cache of
    `start_window`. Padding at the end of the tokens does not change the weights of those before it.
    """
    variables, options = {"params": params}, {"cache": cache, "mutable": ["intermediates"]}
    _, seen = reference_model(model).apply(variables, None, tokens, **options)
    layers = layer_weights(seen["intermediates"], model.config, "decoder", "cross")
    return jnp.stack([layers[layer][0, head] for layer, head in heads]).astype(jnp.float32)


def token_edges(weights: Float[np.ndarray, "N T S"], width: int) -> np.ndarray:
    """Return the encoder positions at which tokens start and end, (T + 1,): token t is spoken from entry t to t + 1.

    Each weight is normalized by the mean and the standard deviation over the tokens and smoothed over time by a median
    filter. The path of dynamic time warping through the mean of the heads then gives the times (Radford et al. 2022,
    arXiv 2212.04356; the method is that of its published code). The query of a token predicts the next one. Its place
    on the path is therefore the end of the token itself. With T = 0, the result is [0].
    """
    if not weights.shape[1]:
        return np.zeros(1, int)
    deviation = weights.std(1, keepdims=True)
    # Weights that are equal for all tokens say nothing about their order: they stay 0.
    scaled = (weights - weights.mean(1, keepdims=True)) / np.where(deviation > 0, deviation, 1.0)
    rows, columns = time_warping(-median_filter(scaled, width).mean(0))
    starts = np.diff(rows, prepend=-1) > 0
    return np.concatenate([[0], columns[starts]])


def median_filter(values: Float[np.ndarray, "... S"], width: int) -> np.ndarray:
    """Return the running median over the last axis with an odd width; the edges are reflected.

    An axis that is not longer than half of the width is returned unchanged.
    """
    half = width // 2
    if values.shape[-1] <= half:
        return values
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(half, half)], mode="reflect")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1), axis=-1)


def time_warping(cost: Float[np.ndarray, "T S"]) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns of the cheapest path from the first to the last cell: dynamic time warping.

    A step goes one row down, one column right, or both (Sakoe & Chiba 1978). If steps are equally cheap, the path
    stays in its row.
    """
    height, width = cost.shape
    total = np.full((height + 1, width + 1), np.inf)
    total[0, 0] = 0.0
    steps = np.zeros((height + 1, width + 1), np.int8)  # 0: both, 1: down, 2: right
    for number in range(2, height + width + 1):  # the cells of an anti-diagonal don't depend on each other
        i = np.arange(max(1, number - width), min(height, number - 1) + 1)
        j = number - i
        both, down, right = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        step = np.where((both < down) & (both < right), 0, np.where((down < both) & (down < right), 1, 2))
        steps[i, j] = step
        total[i, j] = cost[i - 1, j - 1] + np.choose(step, [both, down, right])
    steps[0, :], steps[:, 0] = 2, 1
    path, i, j = [], height, width
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        step = steps[i, j]
        i, j = i - (step != 2), j - (step != 1)
    rows, columns = np.array(path[::-1]).T
    return rows, columns


def word_slices(decode: Callable[[Sequence[int]], str], tokens: Sequence[int], language: str | None) -> list[slice]:
    """Divide the text tokens of a segment into words, and return the slice of `tokens` of each word.

    A word starts with a space or is punctuation; punctuation is then joined with the word that it belongs to. In
    languages without spaces, each character is a word; a language of None has spaces.
    """
    words = _characters(decode, tokens)
    if language not in WITHOUT_SPACES:
        words = _joined(words)
    words = _with_punctuation(words)
    ends = np.cumsum([count for _, count in words])
    return [slice(int(end) - count, int(end)) for end, (_, count) in zip(ends, words, strict=True)]


def _characters(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> list[tuple[str, int]]:
    """Return texts and numbers of tokens: the shortest runs of tokens that are whole characters."""
    whole, found, begin, offset = decode(tokens), [], 0, 0
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[begin:end])
        broken = text.find("\ufffd")
        # The text itself may contain this sign, as the decoded form of bytes that are no character.
        if broken < 0 or offset + broken >= len(whole) or whole[offset + broken] == "\ufffd":
            found.append((text, end - begin))
            begin, offset = end, offset + len(text)
    if begin < len(tokens) and found:
        text, count = found.pop()
        found.append((text + decode(tokens[begin:]), count + len(tokens) - begin))
    return found


def _joined(parts: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    words: list[tuple[str, int]] = []
    for text, count in parts:
        if not words or text.startswith(" ") or text.strip() in string.punctuation:
            words.append((text, count))
        else:
            words[-1] = words[-1][0] + text, words[-1][1] + count
    return words


def _with_punctuation(parts: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    before: list[tuple[str, int]] = []
    for text, count in reversed(parts):
        if before and text.startswith(" ") and text.strip() in OPENING:
            text, count = text + before[-1][0], count + before.pop()[1]
        before.append((text, count))
    words: list[tuple[str, int]] = []
    for text, count in reversed(before):
        if words and not words[-1][0].endswith(" ") and text in CLOSING:
            words[-1] = words[-1][0] + text, words[-1][1] + count
        else:
            words.append((text, count))
    return words
