"""Mistral: Llama with sliding-window attention in all layers."""

from __future__ import annotations

from transformer.config._parts import LayerKind
from transformer.zoo._family import variants
from transformer.zoo._fields import Codec, Converted
from transformer.zoo._rotary import Rope
from transformer.zoo.families._llama import ROTARY_BUFFERS, decoder_family, decoder_fields
from transformer.zoo.weights._rules import layer_kinds


def same_window(default: int | None) -> Codec:
    """Return the codec of `sliding_window` in all layers; null disables it."""
    return Converted(
        "sliding_window",
        default,
        lambda window, changes: {"stack.period": (LayerKind(window=window),)},
        lambda config: layer_kinds(config, config.num_layers)[0].window,
    )


_SIZES = (4096, 14_336, 32, 32, 8)
_WHOLE = {"sliding_window": None, "rope_theta": 1_000_000.0}

_VARIANTS = {
    "mistral-7b-v0.1": ("v0.1", 7_241_732_096, *_SIZES, {"vocab_size": 32_000, "sliding_window": 4096}),
    "mistral-7b-instruct-v0.2": ("Instruct-v0.2", 7_241_732_096, *_SIZES, _WHOLE | {"vocab_size": 32_000}),
    "mistral-7b-v0.3": ("v0.3", 7_248_023_552, *_SIZES, _WHOLE | {"vocab_size": 32_768}),
}

MISTRAL = decoder_family(
    "Mistral",
    name="mistral",
    title="Mistral",
    citation="Jiang et al. 2023, arXiv 2310.06825",
    fields=(*decoder_fields(kv_heads=8), Rope(), same_window(4096)),
    ignored=(ROTARY_BUFFERS,),
    variants=variants("mistralai/Mistral-7B-", _VARIANTS, rms_norm_eps=1e-5),
)
