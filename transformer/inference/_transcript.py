"""The text of a recording: its segments and words, with their times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar


@dataclass(frozen=True)
class TimedWord:
    """A word of a transcript and the time when it is spoken."""

    start: float
    """seconds from the start of the recording"""
    end: float
    """seconds from the start of the recording"""
    text: str
    """the word with its punctuation; it may start with a space"""
    tokens: list[int]
    """token ids"""


@dataclass(frozen=True)
class Segment:
    """A part of a transcript."""

    start: float
    """seconds from the start of the recording"""
    end: float
    """seconds from the start of the recording, at most its duration"""
    text: str
    """text without timestamps; it may start with a space"""
    tokens: list[int]
    """token ids with timestamps"""
    temperature: float | None = None
    """temperature of the window; None: greedy CTC decoding"""
    average_log_probability: float | None = None
    """mean log-probability of the tokens of the window"""
    compression_ratio: float | None = None
    """ratio of the bytes of the window's text before and after compression"""
    no_speech: float | None = None
    """probability that the window has no speech"""
    words: list[TimedWord] | None = None
    """words with their times; None: without `word_timestamps`, or CTC"""


Part = TypeVar("Part", TimedWord, Segment)


def clipped(segment: Segment, duration: float) -> Segment:
    """Return a segment that ends within a recording of this duration: a model may also predict later times."""
    words = None if segment.words is None else [_clipped(word, duration) for word in segment.words]
    return _clipped(replace(segment, words=words), duration)


def _clipped(part: Part, duration: float) -> Part:
    return replace(part, start=round(min(part.start, duration), 3), end=round(min(part.end, duration), 3))


@dataclass(frozen=True)
class Transcript:
    """The text of a recording, and its segments."""

    text: str
    language: str | None
    """language of the recording; None: the model has only one"""
    segments: list[Segment]
