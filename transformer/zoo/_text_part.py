"""The decoder inside checkpoints of models that also read images or sound, if their other parts are not supported.

The object text_config becomes config.json, and the tensors of the other parts are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from transformer.zoo._fields import NEUTRAL
from transformer.zoo.weights._files import WeightFiles


@dataclass(frozen=True)
class TextPart:
    """Where a checkpoint contains the decoder."""

    family: str
    """The `model_type` of the decoder alone."""
    architecture: str
    """Its class in the reference."""
    prefix: str
    """Prefix of its tensors, which those of the decoder alone do not have."""
    inside: str = ""
    """Prefix that the tensors of the decoder alone have instead."""
    others: tuple[str, ...] = ()
    """Prefixes of the tensors of the other parts."""
    same: tuple[str, ...] = ()
    """Tensors of the decoder that have the same name in both."""


TEXT_PARTS = {
    "llama4": TextPart(
        family="llama4_text",
        architecture="Llama4ForCausalLM",
        prefix="language_model.",
        others=("vision_model.", "multi_modal_projector."),
    ),
    "gemma4": TextPart(
        family="gemma4_text",
        architecture="Gemma4ForCausalLM",
        prefix="model.language_model.",
        inside="model.",
        others=("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
        same=("lm_head.weight",),
    ),
}
"""Decoders inside other models, by the `model_type` of these."""


class TextPartFiles(WeightFiles):
    """Opened files of a whole model, presented as those of its decoder; WeightsError if they have other parts."""

    def __init__(self, files: WeightFiles, part: TextPart):
        self.directory, self._files = files.directory, files
        text = files.config.get("text_config")
        if not isinstance(text, dict):
            raise self._error(f"config.json must have the object text_config, got {text!r:.80}")
        kind = text.get("model_type", part.family)
        if kind != part.family:
            raise self._error(f"model_type of text_config must be {part.family}, got {kind!r:.80}")
        # Names and special tokens of the whole model apply to its texts too.
        outer = {name: value for name, value in files.config.items() if name in NEUTRAL and value is not None}
        outer |= {"tie_word_embeddings": tied} if (tied := files.config.get("tie_word_embeddings")) is not None else {}
        own = {"architectures": [part.architecture], "model_type": part.family}
        self.config: dict[str, Any] = text | outer | own
        known = (part.prefix, *part.others)
        if strange := [name for name in files.tensors if not name.startswith(known) and name not in part.same]:
            raise self._error(f"tensors belong to no known part of the model: {', '.join(sorted(strange)[:5])}")
        self._names = {
            part.inside + name.removeprefix(part.prefix): name
            for name in files.tensors
            if name.startswith(part.prefix) and not name.startswith(part.others)
        } | {name: name for name in part.same if name in files.tensors}
        self.tensors = {name: files.tensors[theirs] for name, theirs in self._names.items()}

    def read(self, name: str) -> np.ndarray:
        """Read one tensor, see `WeightFiles.read`."""
        self._info(name)
        return self._files.read(self._names[name])

    def dtype_read(self, name: str) -> np.dtype:
        """Return the dtype of the array that `read` returns."""
        return self._files.dtype_read(self._names[name])


def text_part(files: WeightFiles) -> WeightFiles:
    """Return the decoder of opened files if the whole model is in `TEXT_PARTS`, otherwise the files."""
    kind = files.config.get("model_type")
    part = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    return files if part is None else TextPartFiles(files, part)
