"""Mistral: Llama whose layers all see a window of the last tokens only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformer.config._model import TransformerConfig
from transformer.config._parts import LayerKind
from transformer.zoo._family import Family, Variant
from transformer.zoo._fields import Codec, Rope
from transformer.zoo._llama import (
    COPIES,
    DECODER_CONSTANTS,
    ROTARY_BUFFERS,
    decoder_fields,
    decoder_heads,
    decoder_rules,
)
from transformer.zoo.weights._rules import layer_kinds


@dataclass(frozen=True)
class SameWindow(Codec):
    """`sliding_window`, of all layers; null: none."""

    default: int | None
    """where the file doesn't say"""

    @property
    def names(self) -> tuple[str, ...]:
        return ("sliding_window",)

    def read(self, values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        return {"period": (LayerKind(window=values.get("sliding_window", self.default)),)}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        return {"sliding_window": layer_kinds(config, config.num_layers)[0].window}


def _variant(hub: str, **changes: Any) -> Variant:
    sizes = {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
    return Variant(hub=hub, parameters=changes.pop("parameters", 7_241_732_096), fields=sizes | changes)


MISTRAL = Family(
    name="mistral",
    title="Mistral",
    citation="Jiang et al. 2023, arXiv 2310.06825",
    heads=decoder_heads("Mistral"),
    constants=DECODER_CONSTANTS,
    fields=(*decoder_fields(kv_heads=8), Rope(), SameWindow(4096)),
    rules=decoder_rules,
    ignored=(ROTARY_BUFFERS,),
    copies=COPIES,
    variants={
        "mistral-7b-v0.1": _variant("mistralai/Mistral-7B-v0.1", sliding_window=4096),
        "mistral-7b-instruct-v0.2": _variant(
            "mistralai/Mistral-7B-Instruct-v0.2", sliding_window=None, rope_theta=1_000_000.0
        ),
        "mistral-7b-v0.3": _variant(
            "mistralai/Mistral-7B-v0.3",
            parameters=7_248_023_552,
            vocab_size=32_768,
            sliding_window=None,
            rope_theta=1_000_000.0,
        ),
    },
)
"""Mistral 7B"""
