"""`transformer-zoo inspect audio`: cross-attention of the words of a recording over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from transformer.cli._arguments import PathText
from transformer.cli._inspect import InspectCommand, called

if TYPE_CHECKING:
    from transformer.inference._loaded_model import LoadedModel
    from transformer.inference._speech_attention import SpeechAttention

COLUMNS = 150
"""maximum number of points in time on a page"""


@dataclass(frozen=True, kw_only=True)
class InspectAudio(InspectCommand):
    """Transcribe a recording with Whisper, and draw the attention of each word over time."""

    audio: Annotated[tyro.conf.Positional[PathText], tyro.conf.arg(metavar="AUDIO")]
    """audio file (WAV, FLAC or OGG)"""


def main(command: InspectAudio, arguments: Sequence[str]) -> None:
    from transformer.cli._texts import shown
    from transformer.inference._speech_attention import speech_attention
    from transformer.inference._transcribe import sampling_rate
    from transformer.media._audio import check_file, read_audio

    check_file(command.audio)
    command.check_page()
    opened = command.load()
    found = speech_attention(opened, read_audio(command.audio, sampling_rate(opened)))
    paths = []
    if command.draws_pictures:
        from transformer.viz._speech_maps import save_speech_attention

        directory, overwrite = command.pictures
        spoken = {"words": [word.text for word in found.words], "times": [(one.start, one.end) for one in found.words]}
        facts = {"heads": found.heads, "seconds": found.seconds, "overwrite": overwrite}
        paths = save_speech_attention(found.frames, found.weights, directory, **spoken, **facts)
    if command.html is not None:
        _save_page(command, arguments, opened, found)
    words = [asdict(word) for word in found.words]
    command.report(opened, shown(found.text), audio=command.audio, text=found.text, words=words, paths=paths)


def _save_page(command: InspectAudio, arguments: Sequence[str], opened: LoadedModel, found: SpeechAttention) -> None:
    import numpy as np

    from transformer.viz._attention_page import Panel, save_attention_page
    from transformer.viz._attention_weights import AttentionMap
    from transformer.viz._speech_maps import pooled

    weights, step = pooled(found.weights, COLUMNS)
    visible = np.zeros(weights.shape[2:], bool)
    maps = [AttentionMap("decoder", layer, "cross", one, visible) for layer, one in enumerate(weights)]
    config = opened.model.config
    heads = ", ".join(f"layer {layer + 1} head {head + 1}" for layer, head in found.heads)
    facts = {
        "Model": f"{type(opened.model).__name__} in {opened.directory}; layers: {config.encoder_layers} + "
        f"{config.decoder_layers}, heads: {config.num_heads}",
        "Alignment heads": f"{heads}. The times of the words come from them.",
        "Command": called("audio", arguments),
    }
    texts = {
        "Audio": command.audio,
        "Transcript": found.text,
        "Words": "\n".join(f"{word.start:.2f} to {word.end:.2f} s: {word.text.strip()}" for word in found.words),
    }
    width = step * found.step
    rows = f"A row is a word: the mean over its tokens. A column is {width:.2f} seconds of the recording: the sum."
    save_attention_page(
        command.html,
        [Panel(name=str(opened.directory), maps=maps)],
        title=f"Attention of {opened.directory} to {Path(command.audio).name}",
        source=[f"{column * width:.2f}s" for column in range(weights.shape[-1])],
        target=[word.text.strip() or word.text for word in found.words],
        texts=texts,
        facts=facts,
        rows=rows,
    )
