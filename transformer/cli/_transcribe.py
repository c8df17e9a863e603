"""`transformer-zoo transcribe`: transcribe audio files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, get_args, get_type_hints

import tyro

from transformer.cli._arguments import PathText, option_names_in_errors, parse
from transformer.cli._models import ModelCommand

if TYPE_CHECKING:
    from transformer.inference._transcript import Segment, TimedWord, Transcript


@dataclass(frozen=True, kw_only=True)
class Transcribe(ModelCommand):
    """Print the text of each audio file (WAV, FLAC or OGG); with several files, each after its name.

    The model is Whisper, or wav2vec 2.0 or HuBERT with CTC. Recordings that are longer than one window of the model (30
    seconds) are transcribed window by window.
    """

    files: Annotated[tyro.conf.Positional[tuple[PathText, ...]], tyro.conf.arg(metavar="FILE")]
    """audio files (WAV, FLAC or OGG)"""
    timestamps: Literal["none", "segment", "word"] = "none"
    """print a line for each segment (with CTC: for each word) or for each word: start, end and text; --timestamps alone
    means segment"""
    language: str | None = None
    """language of the recordings, such as en (Whisper); None: detect it"""
    translate: bool = False
    """translate to English (Whisper)"""


def main(arguments: Sequence[str]) -> None:
    """Print the transcripts."""
    command = parse(Transcribe, "transcribe", _with_kind(arguments))
    from transformer.inference._transcribe import TranscriptionOptions, sampling_rate, transcribe
    from transformer.media._audio import check_file, read_audio

    for file in command.files:  # before loading the model, which takes seconds
        check_file(file)
    opened, results = command.load(), []
    rate = sampling_rate(opened)
    times = {"timestamps": command.timestamps != "none", "word_timestamps": command.timestamps == "word"}
    options = TranscriptionOptions(language=command.language, translate=command.translate, **times)
    for file in command.files:
        with option_names_in_errors(language="language", translate="translate"):
            found = transcribe(opened, read_audio(file, rate), options)
        if command.json:
            results.append({"file": file, **dataclasses.asdict(found)})
        else:
            _print(found, file if len(command.files) > 1 else None, command.timestamps)
    command.answer_of(opened, (), results=results)


def _with_kind(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the kind of timestamps after each --timestamps that has none."""
    kinds, found = get_args(get_type_hints(Transcribe)["timestamps"]), []
    for place, word in enumerate(arguments):
        found.append(word)
        if word == "--timestamps" and (*arguments[place + 1 : place + 2], "")[0] not in kinds:
            found.append("segment")
    return found


def _print(found: Transcript, file: str | None, timestamps: str) -> None:
    from transformer.cli._texts import shown

    if file is not None:
        print(f"{file}:")
    if timestamps != "none":
        for part in _parts(found, timestamps):
            print(f"[{_time(part.start)} --> {_time(part.end)}] {shown(part.text.strip())}", flush=True)
    else:
        print(shown(found.text), flush=True)


def _parts(found: Transcript, timestamps: str) -> list[Segment | TimedWord]:
    """Return the words or the segments of a transcript; with CTC, the segments are words."""
    if timestamps != "word":
        return found.segments
    return [part for segment in found.segments for part in ([segment] if segment.words is None else segment.words)]


def _time(seconds: float) -> str:
    """Return a time as minutes and seconds, 02:05.30, with hours if there are any."""
    minutes, rest = divmod(round(seconds * 100), 6000)
    hours, minutes = divmod(minutes, 60)
    return f"{f'{hours}:' if hours else ''}{minutes:02}:{rest // 100:02}.{rest % 100:02}"
