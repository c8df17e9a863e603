"""Transcription of recordings: with CTC, or with Whisper in windows, with language, temperatures and segments."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from transformer.config._checks import ConfigError, nearest
from transformer.generate._loop import DecodeResult
from transformer.generate._prompts import decoding_model
from transformer.generate._speech import SpeechRules, decode_window, start_window
from transformer.inference._ctc import recognize, waveform_features
from transformer.inference._loaded_model import LoadedModel
from transformer.inference._transcript import Segment, TimedWord, Transcript, clipped
from transformer.inference._word_times import alignment_heads, cross_attention, median_width, token_edges, word_slices
from transformer.media._audio import check_samples
from transformer.media._features import LogMel, Waveform, load_features
from transformer.nn._axes import PRNGKey
from transformer.nn.models._speech import FRAMES_A_POSITION


@dataclass(frozen=True, kw_only=True)
class TranscriptionOptions:
    """How a recording is transcribed. The defaults are those of Whisper (Radford et al. 2022, section 4.5).

    A model with CTC has one language and decodes greedily; temperatures, thresholds and seed are those of Whisper.

    Raises:
        ConfigError: a value is out of range, or no temperature is given.
    """

    timestamps: bool = False
    """generate timestamps; recordings that are longer than one window always have them"""
    word_timestamps: bool = False
    """also find the time of each word (`Segment.words`), from the cross-attention; implies `timestamps`. CTC always
    gives a segment for each word"""
    language: str | None = None
    """language of the recording, such as en; None: detect it in the first window"""
    translate: bool = False
    """translate to English instead of transcribing"""
    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """sampling temperatures; the next one is used if the result of a window fails a threshold; 0 is greedy decoding"""
    max_compression_ratio: float | None = 2.4
    """threshold: the text is repetitive if zlib compresses its bytes by more than this factor; None: no threshold"""
    min_log_probability: float | None = -1.0
    """threshold: the text is unreliable if the mean log-probability of its tokens is below; None: no threshold"""
    max_no_speech: float | None = 0.6
    """a window is silent, and has no text, if the probability of no speech is above this value and the mean
    log-probability below its threshold; None: no window is silent"""
    seed: int = 0
    """random seed of sampling"""

    def __post_init__(self):
        for name in ("max_compression_ratio", "min_log_probability", "max_no_speech"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Real) or not math.isfinite(value)):
                raise ConfigError(f"{name} must be a finite number, or None for no threshold, got {value!r}.")
        if not self.temperatures or any(not 0 <= value < math.inf for value in self.temperatures):
            raise ConfigError(
                f"temperatures must be one or more finite numbers of at least 0, got {self.temperatures!r}. The first "
                f"one is usually 0."
            )


def transcribe(
    opened: LoadedModel, samples: ArrayLike, options: TranscriptionOptions = TranscriptionOptions()
) -> Transcript:
    """Transcribe a recording.

    Whisper reads one window at a time (30 seconds). A longer recording is transcribed window by window: each one starts
    at the last timestamp of the one before. Text of earlier windows is not part of the prompt.

    wav2vec 2.0 and HuBERT give a segment for each word, see `recognize` for longer recordings.

    Args:
        opened: a model of Whisper, or of wav2vec 2.0 or HuBERT with CTC.
        samples: (N,), mono, at the sampling rate of the model (`transformer.media.read_audio` reads a file).
        options: how the recording is transcribed.

    Raises:
        ConfigError: another kind of model, missing settings, an unknown language, or options that the model does not
            support.
        ValueError: invalid samples, or logits that are not finite.
    """
    windows = list(transcribe_windows(opened, samples, options))
    segments = [segment for _, found in windows for segment in found]
    text = "".join(segment.text for segment in segments).strip()
    return Transcript(text=text, language=windows[0][0], segments=segments)


def transcribe_windows(
    opened: LoadedModel, samples: ArrayLike, options: TranscriptionOptions = TranscriptionOptions()
) -> Iterator[tuple[str | None, list[Segment]]]:
    """Transcribe a recording, and yield the language and the segments of each window as soon as it is finished.

    Arguments and errors are those of `transcribe`. A model with CTC yields all segments at once.
    """
    if opened.kind.writes == "characters" and opened.pretrained is not None:
        if options.language is not None or options.translate:
            _refuse_languages(opened)
        return iter([(None, recognize(opened, samples))])
    return Transcriber(opened, options).windows(samples)


def _refuse_languages(opened: LoadedModel) -> NoReturn:
    raise ConfigError(
        f"{opened.directory} contains a model for a single language, which only transcribes: language and translate "
        f"can't be set. Remove them, or pass a multilingual model."
    )


def sampling_rate(opened: LoadedModel) -> int:
    """Return the sampling rate in Hz that a speech model reads; errors are those of `transcribe`."""
    return speech_features(opened).sampling_rate


def speech_features(opened: LoadedModel) -> LogMel | Waveform:
    """Return the feature settings of a speech model."""
    if opened.kind.writes == "characters" and opened.pretrained is not None:
        return waveform_features(opened)
    if opened.kind.writes != "transcript" or opened.pretrained is None:
        raise ConfigError(
            f"{opened.directory} contains a {type(opened.model).__name__}, but transcription needs pretrained weights "
            f"of Whisper, or of wav2vec 2.0 or HuBERT with CTC. Pass a directory of such weights."
        )
    features, config = load_features(opened.directory), opened.model.config
    expected = (config.speech.mel_bins, FRAMES_A_POSITION * config.longest_source)
    got = (features.feature_size, features.chunk_frames) if isinstance(features, LogMel) else None
    if got != expected:
        raise ConfigError(
            f"preprocessor_config.json in {opened.directory} must describe {expected[1]} frames of {expected[0]} mel "
            f"bins, the input of the model, got {features}. Download the files again: they do not belong together."
        )
    return features


def _task(translate: bool) -> str:
    """Return the name of the task in task_to_id of generation_config.json."""
    return "translate" if translate else "transcribe"


@dataclass(frozen=True)
class SpeechTokens:
    """Special tokens of Whisper, from generation_config.json."""

    start: int
    end: int
    no_timestamps: int
    languages: Mapping[str, int]
    """id by language code, such as en; empty: the model has only one language"""
    tasks: Mapping[str, int]
    suppressed_first: Sequence[int]
    max_initial_timestamp: int | None
    """largest index of the first timestamp; None: any"""
    max_length: int | None
    """maximum number of generated tokens per window; None: up to the end of the position table"""

    @staticmethod
    def of(opened: LoadedModel) -> SpeechTokens:
        """Read the tokens; raise ConfigError for missing or invalid ones."""
        values, size = opened.pretrained.generation, opened.model.config.vocab_size
        required = {name: values.get(name) for name in ("no_timestamps_token_id", "eos_token_id")}
        required["decoder_start_token_id"] = values.get("decoder_start_token_id", opened.bos_id)
        named: dict[str, Mapping[str, int]] = {}
        for name in ("lang_to_id", "task_to_id") if values.get("is_multilingual", True) else ():
            named[name] = values.get(name) if isinstance(values.get(name), dict) else {}
            required |= {f"{name}[{key!r}]": i for key, i in named[name].items()} or {name: None}
        first = values.get("begin_suppress_tokens") or []
        required |= {f"begin_suppress_tokens[{number}]": i for number, i in enumerate(first)}
        wrong = [name for name, i in required.items() if type(i) is not int or not 0 <= i < size]
        if wrong:
            raise ConfigError(
                f"generation_config.json in {opened.directory} must have token ids from 0 to {size - 1} for "
                f"{', '.join(wrong[:5])}, got {required[wrong[0]]!r:.80}. Download the file again."
            )
        return SpeechTokens(
            start=required["decoder_start_token_id"],
            end=required["eos_token_id"],
            no_timestamps=required["no_timestamps_token_id"],
            languages={key.strip("<|>"): i for key, i in named.get("lang_to_id", {}).items()},
            tasks=named.get("task_to_id", {}),
            suppressed_first=first,
            max_initial_timestamp=values.get("max_initial_timestamp_index"),
            max_length=values.get("max_length"),
        )

    @property
    def no_speech(self) -> int:
        """The token whose probability after the start token is that of no speech."""
        return self.no_timestamps - 1

    def prompt(self, language: str | None, translate: bool, timestamps: bool) -> list[int]:
        """Return the tokens after the start token."""
        both = [] if language is None else [self.languages[language], self.tasks[_task(translate)]]
        return both + ([] if timestamps else [self.no_timestamps])

    def rules(self, suppressed: Sequence[int], vocab_size: int) -> SpeechRules:
        """Return the rules for the tokens that may follow."""
        limit = vocab_size if self.max_initial_timestamp is None else self.max_initial_timestamp
        return SpeechRules(
            suppressed=np.isin(np.arange(vocab_size), suppressed),
            suppressed_first=np.isin(np.arange(vocab_size), self.suppressed_first),
            end_id=np.int32(self.end),
            no_timestamps_id=np.int32(self.no_timestamps),
            last_first=np.int32(self.no_timestamps + 1 + limit),
        )


class Transcriber:
    """Transcribes recordings with one Whisper model; see `transcribe`."""

    def __init__(self, opened: LoadedModel, options: TranscriptionOptions):
        self.opened, self.options = opened, options
        self.features = speech_features(opened)
        self.tokens = SpeechTokens.of(opened)
        self.model = decoding_model(opened.model)
        config = opened.model.config
        self.rules = self.tokens.rules(opened.suppressed, config.vocab_size)
        self.slots = config.max_length
        # Seconds of one timestamp step: one encoder position.
        self.step = FRAMES_A_POSITION * self.features.hop_length / self.features.sampling_rate
        self._check_language()
        if options.word_timestamps:
            self.heads, self.median = alignment_heads(opened), median_width(opened)

    def _check_language(self) -> None:
        known, options = self.tokens.languages, self.options
        if not known and (options.language is not None or options.translate):
            _refuse_languages(self.opened)
        if options.language is not None and options.language not in known:
            raise ConfigError(
                f"language must be one of {', '.join(sorted(known))}, got {options.language!r}."
                f"{nearest(options.language, known)}"
            )
        if known and (wanted := _task(options.translate)) not in self.tokens.tasks:
            raise ConfigError(
                f"{self.opened.directory} contains a model that can't {wanted} (task_to_id in "
                f"generation_config.json). Pass another model."
            )

    def windows(self, samples: ArrayLike) -> Iterator[tuple[str | None, list[Segment]]]:
        """Yield the language and the segments of each window of samples (N,)."""
        samples = check_samples(samples, self.features.sampling_rate)
        frames, chunk = self.features.frames(samples), self.features.chunk_frames
        count = -(-len(samples) // self.features.hop_length)
        timestamps = self.options.timestamps or self.options.word_timestamps or count > chunk
        language, start = self.options.language, 0
        while start < count:
            length = min(count - start, chunk)
            window = frames[start : start + chunk]
            window = np.pad(window, ((0, chunk - len(window)), (0, 0)))
            key = jax.random.fold_in(jax.random.key(self.options.seed), start)
            found = self.window(window, language, timestamps, key)
            language = found.language
            segments, used = self._segments(found, start, length, timestamps)
            yield language, [clipped(segment, len(samples) / self.features.sampling_rate) for segment in segments]
            # A window ends at its last timestamp, and always after its start.
            start += used if used > 0 else length

    def window(self, frames: np.ndarray, language: str | None, timestamps: bool, key: PRNGKey) -> Window:
        """Return the result of the first temperature that passes the thresholds, for frames (F, M)."""
        logits, cache = start_window(
            self.model, self.opened.params, frames[None], np.int32(self.tokens.start), cache_slots=self.slots
        )
        probabilities = jax.nn.softmax(logits[0].astype(jnp.float32))
        no_speech = float(probabilities[self.tokens.no_speech])
        if language is None and self.tokens.languages:
            codes = list(self.tokens.languages)
            language = codes[int(jnp.argmax(logits[0, np.array(list(self.tokens.languages.values()))]))]
        prompt = np.array(self.tokens.prompt(language, self.options.translate, timestamps), np.int32)[None]
        room = self.slots - 1 - prompt.shape[1]
        limit = room if self.tokens.max_length is None else min(room, self.tokens.max_length)
        sizes = {"num_frames": len(frames), "new_slots": self.slots, "timestamps": timestamps}
        for number, temperature in enumerate(self.options.temperatures):
            sampling = np.float32(temperature), jax.random.fold_in(key, number), np.int32(limit)
            result = decode_window(
                self.model, self.opened.params, logits, cache, prompt, *sampling, self.rules, **sizes
            )
            best = self._judge(*jax.device_get(result), temperature, no_speech)
            if best.silent or not best.fails:
                break
        return Window(language=language, best=best, cache=cache, prompt=prompt[0].tolist())

    def attention(self, window: Window, heads: tuple[tuple[int, int], ...]) -> np.ndarray:
        """Return the cross-attention weights (N, T, S) of N heads, given as (layer, head).

        Row t is that of the t-th generated token, which the model read to predict the next one. If a transcript has no
        end token, its last token was not read, and has no row.
        """
        tokens = window.best.tokens if window.best.ended else window.best.tokens[:-1]
        read = [*window.prompt, *tokens]
        padded = np.pad(np.array(read, np.int32), (0, self.slots - 1 - len(read)))[None]
        weights = cross_attention(self.model, self.opened.params, window.cache, padded, heads=heads)
        return np.asarray(weights[:, len(window.prompt) : len(read)])

    def edges(self, window: Window, length: int) -> np.ndarray:
        """Return the encoder positions where the tokens of a window of `length` frames start and end, (T + 1,)."""
        weights = self.attention(window, self.heads)[..., : length // FRAMES_A_POSITION]
        edges = token_edges(weights, self.median) if weights.shape[-1] else np.zeros(weights.shape[1] + 1, int)
        return np.pad(edges, (0, len(window.best.tokens) + 1 - len(edges)), mode="edge")

    def _judge(
        self, result: DecodeResult, log_probability: np.ndarray, temperature: float, no_speech: float
    ) -> Decoded:
        """Compare the result of one temperature with the thresholds."""
        if result.failed.any():
            raise ValueError(
                f"the logits of {self.opened.directory} are not finite, so no token can be chosen. Check that the "
                f"weights are complete, or load them as float32."
            )
        tokens = result.tokens[0, : result.counts[0]].tolist()
        average = float(log_probability[0]) / max(len(tokens) + bool(result.ended[0]), 1)
        options, text = self.options, self._text(tokens).strip().encode()
        ratio = len(text) / len(zlib.compress(text))
        unlikely = options.min_log_probability is not None and average < options.min_log_probability
        repetitive = options.max_compression_ratio is not None and ratio > options.max_compression_ratio
        silent = options.max_no_speech is not None and no_speech > options.max_no_speech and unlikely
        ended = bool(result.ended[0])
        return Decoded(tokens, ended, temperature, average, ratio, no_speech, unlikely or repetitive, silent)

    def _text(self, tokens: Sequence[int]) -> str:
        return self.opened.tokenizer.decode([i for i in tokens if i <= self.tokens.no_timestamps])

    def _segments(self, window: Window, start: int, length: int, timestamps: bool) -> tuple[list[Segment], int]:
        """Divide the tokens of a window into segments at pairs of timestamps.

        The window begins at the frame `start`; `length` of its frames belong to the recording. The second result is the
        number of frames after which the next window starts.
        """
        best = window.best
        if best.silent:
            return [], length
        edges = self.edges(window, length) if self.options.word_timestamps else None
        offset = start * self.features.hop_length / self.features.sampling_rate
        tokens, first = best.tokens, self.tokens.no_timestamps + 1
        # `ends`: a segment ends before the second timestamp of each pair.
        ends = [i for i in range(1, len(tokens)) if tokens[i - 1] >= first and tokens[i] >= first]
        if not timestamps or not ends:
            times = [i - first for i in tokens if i > first]  # without <|0.00|>
            steps = times[-1] if times else length // FRAMES_A_POSITION
            return [self._segment(window, slice(0, len(tokens)), offset, (0, steps), edges)], length
        # A single timestamp at the end means that no speech follows: the whole window is used. Otherwise the last,
        # unfinished segment is decoded again in the next window.
        complete = tokens[-1] >= first and tokens[-2] < first
        slices = [*ends, len(tokens)] if complete else ends
        found, begin = [], 0
        for end in slices:
            part = tokens[begin:end]
            steps = part[0] - first, part[-1] - first
            found.append(self._segment(window, slice(begin, end), offset, steps, edges))
            begin = end
        return found, length if complete else FRAMES_A_POSITION * (tokens[ends[-1] - 1] - first)

    def _segment(
        self, window: Window, part: slice, offset: float, steps: tuple[int, int], edges: np.ndarray | None
    ) -> Segment:
        """Return the segment of a slice of the tokens, which starts and ends after these timestamp steps."""
        best = window.best
        tokens = best.tokens[part]
        return Segment(
            start=round(offset + steps[0] * self.step, 3),
            end=round(offset + steps[1] * self.step, 3),
            text=self._text(tokens),
            tokens=tokens,
            temperature=best.temperature,
            average_log_probability=best.average,
            compression_ratio=best.ratio,
            no_speech=best.no_speech,
            words=None if edges is None else self.words(window, part, offset, edges),
        )

    def words(self, window: Window, part: slice, offset: float, edges: np.ndarray) -> list[TimedWord]:
        """Return the words of a slice of the tokens, from the encoder positions (T + 1,) where tokens start and end."""
        tokens = window.best.tokens
        places = [i for i in range(*part.indices(len(tokens))) if tokens[i] < self.tokens.end]
        text = [tokens[i] for i in places]
        return [
            TimedWord(
                start=round(offset + float(edges[places[word.start]]) * self.step, 3),
                end=round(offset + float(edges[places[word.stop - 1] + 1]) * self.step, 3),
                text=self.opened.tokenizer.decode(text[word]),
                tokens=text[word],
            )
            for word in word_slices(self.opened.tokenizer.decode, text, window.language)
        ]


@dataclass(frozen=True)
class Window:
    """The transcript of a window, and what the model has read."""

    language: str | None
    best: Decoded
    cache: Any
    """the cache after the start token, with the keys and values of the encoder"""
    prompt: list[int]
    """tokens between the start token and the transcript"""


@dataclass(frozen=True)
class Decoded:
    """The tokens of a window at one temperature, and whether they fail a threshold."""

    tokens: list[int]
    ended: bool
    temperature: float
    average: float
    ratio: float
    no_speech: float
    fails: bool
    silent: bool
