"""Cross-attention of Whisper for the words of a recording."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from transformer.config._checks import ConfigError
from transformer.inference._loaded_model import LoadedModel
from transformer.inference._transcribe import Transcriber, TranscriptionOptions
from transformer.inference._transcript import TimedWord
from transformer.media._audio import check_samples
from transformer.nn.models._speech import FRAMES_A_POSITION


@dataclass(frozen=True, kw_only=True)
class SpeechAttention:
    """The words of a recording and their attention to it, of `speech_attention`."""

    text: str
    """the transcript"""
    language: str | None
    """language of the recording; None: the model has only one"""
    words: list[TimedWord]
    """the W words with their times"""
    weights: Float[np.ndarray, "L N W S"]
    """cross-attention weights of each layer and head, for each word and encoder position of the recording"""
    heads: tuple[tuple[int, int], ...]
    """layer and head of the alignment heads, which give the times"""
    frames: Float[np.ndarray, "F M"]
    """log-mel frames of the recording"""
    step: float
    """seconds per encoder position"""
    seconds: float
    """duration of the recording"""


def speech_attention(opened: LoadedModel, samples: ArrayLike) -> SpeechAttention:
    """Transcribe a recording of at most one window with Whisper, and return the cross-attention of each word.

    The weights of a word are the mean over its tokens, of the queries that predict them. Encoder positions of the
    silence after the recording are left out, so that the weights of a word may sum to less than 1.

    Args:
        opened: a model of Whisper.
        samples: (N,), mono, at the sampling rate of the model.

    Raises:
        ConfigError: another kind of model, missing settings, or a recording that is longer than a window.
        ValueError: invalid samples, a recording without words, or logits that are not finite.
    """
    if opened.kind.writes == "characters":
        raise ConfigError(
            f"{opened.directory} contains a {type(opened.model).__name__}, which has no cross-attention: with CTC, "
            f"each frame gives a character. Pass a model of Whisper; for times of words, use `transcribe`."
        )
    transcriber = Transcriber(opened, TranscriptionOptions(word_timestamps=True))
    features = transcriber.features
    samples = check_samples(samples, features.sampling_rate)
    seconds, count = len(samples) / features.sampling_rate, -(-len(samples) // features.hop_length)
    if count > features.chunk_frames:
        raise ConfigError(
            f"the recording must have at most {features.chunk_length} seconds, one window of the model, got "
            f"{seconds:.1f}. Cut it, for example with ffmpeg -t {features.chunk_length}."
        )
    frames = features.frames(samples)[: features.chunk_frames]
    window = transcriber.window(frames, None, True, jax.random.key(0))
    tokens = slice(0, len(window.best.tokens))
    words = [] if window.best.silent else transcriber.words(window, tokens, 0.0, transcriber.edges(window, count))
    if not words:
        raise ValueError("the transcript of the recording has no words. Pass a recording of speech.")
    config = opened.model.config
    shape = config.decoder_layers, config.num_heads
    rows = transcriber.attention(window, tuple(np.ndindex(*shape)))[..., : max(1, count // FRAMES_A_POSITION)]
    text_places = [i for i, token in enumerate(window.best.tokens) if token < transcriber.tokens.end]
    ends = np.cumsum([len(word.tokens) for word in words])
    # Row i - 1 predicts token i. Token 0 is a timestamp, so that no word needs the row before the first.
    means = [
        rows[:, [place - 1 for place in text_places[end - len(word.tokens) : end]]].mean(1)
        for end, word in zip(ends, words, strict=True)
    ]
    return SpeechAttention(
        text=opened.tokenizer.decode([token for word in words for token in word.tokens]).strip(),
        language=window.language,
        words=words,
        weights=np.stack(means, 1).reshape(*shape, len(words), -1),
        heads=transcriber.heads,
        frames=frames[:count],
        step=transcriber.step,
        seconds=seconds,
    )
