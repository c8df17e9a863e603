"""`python -m transformer inspect --audio`: cross-attention of the words of a recording over time."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from transformer.cli._inspect_image import check_page
from transformer.config._checks import ConfigError
from transformer.config._invocation import program

if TYPE_CHECKING:
    from transformer.cli._inspect_text import Inspect
    from transformer.inference._loaded_model import LoadedModel
    from transformer.inference._speech_attention import SpeechAttention

_EXCLUDED = ("prompt", "image", "target", "max_new_tokens", "system", "template", "switch", "compare", "chat", "sizes")
"""options that have no meaning for a recording"""
COLUMNS = 150
"""maximum number of points in time on a page"""


def check(command: Inspect) -> None:
    """Raise an error for options that --audio excludes, or a missing file, before a model is loaded."""
    from transformer.media._audio import check_file

    if given := [name for name in _EXCLUDED if getattr(command, name) not in (None, False, ())]:
        raise ConfigError(f"--{given[0].replace('_', '-')} can't be combined with --audio. Remove one of them.")
    check_file(command.audio)
    check_page(command)


def draw(command: Inspect, arguments: Sequence[str]) -> None:
    """Draw the cross-attention of the words of a recording, and print its text and the paths of the files."""
    from transformer.cli._texts import shown
    from transformer.inference._speech_attention import speech_attention
    from transformer.inference._transcribe import sampling_rate
    from transformer.media._audio import read_audio

    run = command.load()
    found = speech_attention(run, read_audio(command.audio, sampling_rate(run)))
    paths = []
    if command.html is None or command.output is not None:
        from transformer.viz._speech_maps import save_speech_attention

        paths = save_speech_attention(
            found.frames,
            found.weights,
            command.directory / "attention" if command.output is None else command.output,
            words=[word.text for word in found.words],
            times=[(word.start, word.end) for word in found.words],
            heads=found.heads,
            seconds=found.seconds,
            overwrite=command.overwrite or command.output is None,  # this program owns the file names in a workdir
        )
    if command.html is not None:
        _save_page(command, arguments, run, found)
    if command.json:
        page = {} if command.html is None else {"page": str(command.html)}
        words = [asdict(word) for word in found.words]
        command.print_json(
            run, audio=command.audio, text=found.text, words=words, paths=[str(path) for path in paths], **page
        )
        return
    print(shown(found.text))
    for path in [*paths, *([] if command.html is None else [command.html])]:
        print(path)


def _save_page(command: Inspect, arguments: Sequence[str], run: LoadedModel, found: SpeechAttention) -> None:
    import numpy as np

    from transformer.viz._attention_page import Panel, save_attention_page
    from transformer.viz._attention_weights import AttentionMap
    from transformer.viz._speech_maps import pooled

    weights, step = pooled(found.weights, COLUMNS)
    visible = np.zeros(weights.shape[2:], bool)
    maps = [AttentionMap("decoder", layer, "cross", one, visible) for layer, one in enumerate(weights)]
    config = run.model.config
    heads = ", ".join(f"layer {layer + 1} head {head + 1}" for layer, head in found.heads)
    facts = {
        "Model": f"{type(run.model).__name__} in {run.directory}; layers: {config.encoder_layers} + "
        f"{config.decoder_layers}, heads: {config.num_heads}",
        "Alignment heads": f"{heads}. The times of the words come from them.",
        "Command": f"{program('inspect')} {shlex.join(arguments)}",
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
        [Panel(name=str(run.directory), maps=maps)],
        title=f"Attention of {run.directory} to {Path(command.audio).name}",
        source=[f"{column * width:.2f}s" for column in range(weights.shape[-1])],
        target=[word.text.strip() or word.text for word in found.words],
        texts=texts,
        facts=facts,
        rows=rows,
    )
