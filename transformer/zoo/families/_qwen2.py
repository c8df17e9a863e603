"""Qwen 2 and 2.5: Llama with biases on queries, keys and values, and optional sliding windows in the upper layers."""

from __future__ import annotations

from collections.abc import Sequence

from transformer.config._layer_patterns import fold
from transformer.config._model import TransformerConfig
from transformer.config._parts import LayerKind, MoE
from transformer.zoo._family import variants
from transformer.zoo._fields import Codec, FieldError, Fields
from transformer.zoo._rotary import Rope
from transformer.zoo.families import _llama as llama
from transformer.zoo.weights._rules import layer_kinds

SLIDING, FULL = "sliding_attention", "full_attention"
"""Names in `layer_types` for layers with and without a sliding window."""


def check_types(types: Sequence[str], layers: int, kind: str, other: str) -> None:
    """Raise FieldError if `layer_types` has other names than two, or the wrong length."""
    if strange := sorted(set(map(str, types)) - {kind, other}):
        raise FieldError(f"layer_types has {', '.join(strange)}, but only {kind} and {other} are supported")
    if len(types) != layers:
        raise FieldError(f"layer_types has {len(types)} names, but the model has {layers} layers")


def check_layer_types(types: Sequence[str], layers: int, window: int | None) -> None:
    """Raise FieldError if `layer_types` has unknown names, has the wrong length, or uses an undefined window."""
    check_types(types, layers, SLIDING, FULL)
    if SLIDING in types and window is None:
        raise FieldError(
            f"layer_types has {SLIDING}, but there is no window: sliding_window is not set, or disabled by "
            f"use_sliding_window"
        )


def local_layers(types: Sequence[str], window: int | None, **other: MoE) -> Fields:
    """Return the layers with these `layer_types`, with other fields that all layers share."""
    return fold([LayerKind(window=window if name == SLIDING else None, **other) for name in types])


def layer_types(windows: Sequence[int | None]) -> list[str]:
    """Return the `layer_types` for layers with these windows."""
    return [FULL if window is None else SLIDING for window in windows]


def layer_windows(config: TransformerConfig) -> list[int | None]:
    """Return the window of each layer."""
    return [kind.window for kind in layer_kinds(config, config.num_layers)]


class UpperWindows(Codec):
    """`sliding_window` in the layers from index `max_window_layers`, or in those of `layer_types`, if it is used."""

    names = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

    def read(self, values: Fields, changes: Fields) -> Fields:
        layers, first = changes["num_layers"], values.get("max_window_layers", 28)
        window = values.get("sliding_window", 4096) if values.get("use_sliding_window") else None
        types = values.get("layer_types")
        if types is None:
            types = [SLIDING if window is not None and layer >= first else FULL for layer in range(layers)]
        check_layer_types(types, layers, window)
        return local_layers(types, window)

    def write(self, config: TransformerConfig) -> Fields:
        windows = layer_windows(config)
        window = next(filter(None, windows), None)
        return {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            # For programs that do not know layer_types.
            "max_window_layers": config.num_layers if window is None else windows.index(window),
            "layer_types": layer_types(windows),
        }


_TIED = {"tie_word_embeddings": True}
_LARGE = {"vocab_size": 152_064}

_VARIANTS = {
    "qwen2-0.5b": ("Qwen2-0.5B", 494_032_768, 896, 4864, 24, 14, 2, _TIED),
    "qwen2-1.5b": ("Qwen2-1.5B", 1_543_714_304, 1536, 8960, 28, 12, 2, _TIED),
    "qwen2-7b": ("Qwen2-7B", 7_615_616_512, 3584, 18_944, 28, 28, 4, _LARGE),
    "qwen2.5-0.5b": ("Qwen2.5-0.5B", 494_032_768, 896, 4864, 24, 14, 2, _TIED),
    "qwen2.5-1.5b": ("Qwen2.5-1.5B", 1_543_714_304, 1536, 8960, 28, 12, 2, _TIED),
    "qwen2.5-3b": ("Qwen2.5-3B", 3_085_938_688, 2048, 11_008, 36, 16, 2, _TIED),
    "qwen2.5-7b": ("Qwen2.5-7B", 7_615_616_512, 3584, 18_944, 28, 28, 4, _LARGE),
    "qwen2.5-72b": ("Qwen2.5-72B", 72_706_203_648, 8192, 29_568, 80, 64, 8, _LARGE | {"rms_norm_eps": 1e-5}),
}

QWEN2 = llama.decoder_family(
    "Qwen2",
    name="qwen2",
    title="Qwen 2 and 2.5",
    citation="Yang et al. 2024, arXiv 2407.10671; Qwen Team 2024, arXiv 2412.15115",
    constants=llama.DECODER_CONSTANTS | {"attention.biases": ("query", "key", "value")},
    fields=(*llama.decoder_fields(kv_heads=32), Rope(), UpperWindows()),
    ignored=(llama.ROTARY_BUFFERS,),
    variants=variants("Qwen/", _VARIANTS, vocab_size=151_936, rms_norm_eps=1e-6, rope_theta=1_000_000.0),
)
