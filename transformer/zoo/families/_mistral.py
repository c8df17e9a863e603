"""Mistral: Llama with sliding-window attention in all layers."""

from __future__ import annotations

from transformer.config._parts import LayerKind
from transformer.zoo._family import Variant
from transformer.zoo._fields import Codec, Converted, Json
from transformer.zoo._rotary import Rope
from transformer.zoo.families._llama import ROTARY_BUFFERS, decoder_family, decoder_fields, decoder_variant
from transformer.zoo.weights._rules import layer_kinds


def same_window(default: int | None) -> Codec:
    """Return the codec of `sliding_window` in all layers; null disables it."""
    return Converted(
        "sliding_window",
        default,
        lambda window, changes: {"stack.period": (LayerKind(window=window),)},
        lambda config: layer_kinds(config, config.num_layers)[0].window,
    )


def _variant(name: str, parameters: int, **fields: Json) -> Variant:
    return decoder_variant(f"mistralai/{name}", parameters, 4096, 14_336, 32, 32, 8, rms_norm_eps=1e-5, **fields)


_SMALL = {"vocab_size": 32_000}
_WHOLE = {"sliding_window": None, "rope_theta": 1_000_000.0}

MISTRAL = decoder_family(
    "Mistral",
    name="mistral",
    title="Mistral",
    citation="Jiang et al. 2023, arXiv 2310.06825",
    fields=(*decoder_fields(kv_heads=8), Rope(), same_window(4096)),
    ignored=(ROTARY_BUFFERS,),
    variants={
        "mistral-7b-v0.1": _variant("Mistral-7B-v0.1", 7_241_732_096, **_SMALL, sliding_window=4096),
        "mistral-7b-instruct-v0.2": _variant("Mistral-7B-Instruct-v0.2", 7_241_732_096, **_SMALL, **_WHOLE),
        "mistral-7b-v0.3": _variant("Mistral-7B-v0.3", 7_248_023_552, vocab_size=32_768, **_WHOLE),
    },
)
"""Mistral 7B."""
