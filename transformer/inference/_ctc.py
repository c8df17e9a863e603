"""Greedy CTC decoding of recordings with wav2vec 2.0 and HuBERT: characters of each frame, then words with times."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from transformer.config._checks import ConfigError
from transformer.config._untrusted import read_json_object
from transformer.generate._prompts import decoding_model
from transformer.inference._loaded_model import LoadedModel, Params
from transformer.inference._transcript import Segment, clipped
from transformer.media._audio import check_samples
from transformer.media._features import Waveform, load_features
from transformer.nn.models._audio import SpeechRecognizer

VOCABULARY_FILE = "vocab.json"
SETTINGS_FILE = "tokenizer_config.json"
ADDED_FILE = "added_tokens.json"
WINDOW_SECONDS = 30
"""Seconds that the model reads at once."""
CONTEXT_SECONDS = 5
"""Seconds at both ends of a window whose characters are those of the neighboring windows."""


@dataclass(frozen=True, kw_only=True)
class CTCVocabulary:
    """Characters of a model with CTC, from vocab.json and tokenizer_config.json (`Wav2Vec2CTCTokenizer`)."""

    characters: Mapping[int, str]
    """character by id"""
    blank: str = "<pad>"
    """character that means that there is none; the padding token"""
    delimiter: str = "|"
    """character between words"""
    space: str = " "
    """text between words"""
    unknown: str = "<unk>"
    """text of an id without a character"""
    lower_case: bool = False
    """write words in lower case"""

    def __post_init__(self):
        if self.blank not in self.characters.values():
            raise ConfigError(
                f"{VOCABULARY_FILE} has no token {self.blank!r:.80}, the blank of CTC. Set pad_token in "
                f"{SETTINGS_FILE} to the token of {VOCABULARY_FILE} that is the blank."
            )

    @staticmethod
    def load(directory: Path, size: int) -> CTCVocabulary:
        """Load the vocabulary of a model with `size` logits."""
        if not (directory / VOCABULARY_FILE).exists():
            raise FileNotFoundError(
                f"{directory} has no {VOCABULARY_FILE}, the characters of the model. Download it from the page of the "
                f"model."
            )
        ids = _object(directory, VOCABULARY_FILE) | _object(directory, ADDED_FILE)
        wrong = [text for text, i in ids.items() if type(i) is not int or not 0 <= i < size]
        if wrong:
            per_language = isinstance(ids[wrong[0]], dict)
            several = " The file has a vocabulary per language, which is not supported." if per_language else ""
            raise ConfigError(
                f"{VOCABULARY_FILE} in {directory} must have an id from 0 to {size - 1} for each character, got "
                f"{ids[wrong[0]]!r:.80} for {wrong[0]!r:.80}.{several} Download the file again: it belongs to another "
                f"model."
            )
        settings = _object(directory, SETTINGS_FILE)
        named = {"blank": "pad_token", "delimiter": "word_delimiter_token"}
        named |= {"space": "replace_word_delimiter_char", "unknown": "unk_token"}
        texts = {ours: _text(settings[name]) for ours, name in named.items() if settings.get(name) is not None}
        if strange := [name for name, text in texts.items() if text is None]:
            raise ConfigError(
                f"{named[strange[0]]} in {directory}/{SETTINGS_FILE} must be a text, got "
                f"{settings[named[strange[0]]]!r:.80}. Download the file again."
            )
        lower_case = settings.get("do_lower_case", False) is True
        return CTCVocabulary(characters={i: text for text, i in ids.items()}, lower_case=lower_case, **texts)

    def character(self, token: int) -> str:
        """Return the character of an id."""
        return self.characters.get(token, self.unknown)

    def words(self, tokens: Sequence[int]) -> list[list[tuple[int, int, int]]]:
        """Merge the tokens of frames to words: lists of (token, first frame, frame after the last one)."""
        # CTC (Graves et al. 2006, section 3.1): merge repeated characters, then remove blanks.
        runs, start = [], 0
        for character, group in itertools.groupby(tokens, key=self.character):
            group = list(group)
            if character != self.blank:
                runs.append((group[0], start, start + len(group)))
            start += len(group)
        between = itertools.groupby(runs, key=lambda run: self.character(run[0]) == self.delimiter)
        return [list(word) for delimiter, word in between if not delimiter]

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of a word."""
        text = "".join(map(self.character, tokens))
        return text.lower() if self.lower_case else text


def recognize(opened: LoadedModel, samples: ArrayLike) -> list[Segment]:
    """Recognize the words of a recording (N,), mono, at the sampling rate of the model, and return a segment for each.

    The character of each frame is the most probable one. A recording of more than 30 seconds is read in windows of this
    length. The first and the last 5 seconds of a window are only context: their characters are those of the windows
    before and after.
    """
    features = waveform_features(opened)
    vocabulary = CTCVocabulary.load(opened.directory, opened.model.config.vocab_size)
    duration = len(samples) / features.sampling_rate
    samples = features.frames(check_samples(samples, features.sampling_rate))
    audio = opened.model.config.audio
    tokens: list[int] = []
    scores: list[float] = []
    for ids, log_probabilities in _windows(opened, samples, features.sampling_rate):
        tokens += ids.tolist()
        scores += log_probabilities.tolist()
    if not np.isfinite(scores).all():
        raise ValueError(
            f"the logits of {opened.directory} are not finite, so no character can be chosen. Check that the weights "
            f"are complete, or load them as float32."
        )
    seconds = audio.stride / features.sampling_rate
    segments = []
    for word in vocabulary.words(tokens):
        ids = [token for token, _, _ in word]
        segment = Segment(
            start=round(word[0][1] * seconds, 3),
            end=round(word[-1][2] * seconds, 3),
            text=vocabulary.text(ids) if not segments else vocabulary.space + vocabulary.text(ids),
            tokens=ids,
            average_log_probability=float(np.mean([scores[first] for _, first, _ in word])),
        )
        segments.append(clipped(segment, duration))
    return segments


def waveform_features(opened: LoadedModel) -> Waveform:
    """Return the feature settings of a model with CTC."""
    features = load_features(opened.directory)
    if not isinstance(features, Waveform):
        raise ConfigError(
            f"preprocessor_config.json in {opened.directory} must describe a Wav2Vec2FeatureExtractor, the input of a "
            f"{type(opened.model).__name__}, got {features}. Download the files again: they do not belong together."
        )
    return features


def _windows(opened: LoadedModel, samples: np.ndarray, rate: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the most probable token of each frame and its log-probability, window by window."""
    audio, model = opened.model.config.audio, decoding_model(opened.model)
    frames = audio.frames(len(samples))
    # Windows start at multiples of the stride, so that their frames are those of the whole recording.
    context = max(1, CONTEXT_SECONDS * rate // audio.stride)
    window = max(WINDOW_SECONDS * rate, audio.shortest + 3 * context * audio.stride)
    size = audio.frames(window)
    start = 0
    while start < frames:
        part = samples[start * audio.stride :][:window]
        last = len(samples) <= start * audio.stride + window
        # Few lengths, so that few programs are compiled: seconds that are powers of 2, up to a whole window.
        length = max(audio.shortest, min(window, rate * 2 ** math.ceil(math.log2(max(1.0, len(part) / rate)))))
        padded = np.pad(part, (0, length - len(part)))[None]
        lengths = np.array([len(part)], np.int32)
        ids, scores = (np.asarray(one)[0] for one in _greedy(model, opened.params, padded, lengths))
        first = context if start else 0
        end = audio.frames(len(part)) if last else size - context
        yield ids[first:end], scores[first:end]
        if last:
            break
        start += size - 2 * context


@functools.partial(jax.jit, static_argnums=0)
def _greedy(
    model: SpeechRecognizer, params: Params, samples: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the most probable token of each frame and its log-probability, (B, T) each."""
    logits = model.apply({"params": params}, samples, lengths)
    tokens = logits.argmax(-1)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return tokens, chosen - jax.nn.logsumexp(logits, axis=-1)


def _object(directory: Path, name: str) -> dict[str, Any]:
    """Return the JSON object of a file; empty if there is no such file."""
    return read_json_object(directory, name) if (directory / name).exists() else {}


def _text(value: object) -> str | None:
    """Return the text of a token, which may be an object with its options; None: no text."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None
