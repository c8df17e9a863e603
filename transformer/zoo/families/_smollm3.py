"""SmolLM3: Llama without rotary positions in every fourth layer."""

from __future__ import annotations

from transformer.config._layer_patterns import fold
from transformer.config._model import TransformerConfig
from transformer.config._parts import LayerKind
from transformer.zoo._family import variants
from transformer.zoo._fields import Biases, Codec, FieldError, Fields, Unread
from transformer.zoo._rotary import Rope
from transformer.zoo.families._llama import decoder_family, decoder_fields
from transformer.zoo.families._qwen2 import FULL, SLIDING, check_layer_types, layer_types
from transformer.zoo.weights._rules import layer_kinds


def rotary_layers(values: Fields, layers: int) -> list[bool]:
    """Return which layers have rotary positions: those with 1 in `no_rope_layers`, in spite of its name.

    Without the list, every `no_rope_layer_interval`-th layer has none.
    """
    every = values.get("no_rope_layer_interval", 4)
    if type(every) is not int or every < 1:
        raise FieldError(f"no_rope_layer_interval must be an integer of at least 1, got {every!r:.80}")
    given = values.get("no_rope_layers")
    given = [int((layer + 1) % every != 0) for layer in range(layers)] if given is None else given
    if not isinstance(given, list) or len(given) != layers or not all(one in (0, 1) for one in given):
        raise FieldError(f"no_rope_layers must have 0 or 1 for each of the {layers} layers, got {given!r:.80}")
    return [bool(one) for one in given]


class RotaryLayers(Codec):
    """Layers with rotary positions, and sliding windows.

    Windows need `use_sliding_window`. They are in the layers that `layer_types` names, or in those without rotary
    positions.
    """

    names = ("no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window", "layer_types")

    def read(self, values: Fields, changes: Fields) -> Fields:
        rotary = rotary_layers(values, changes["num_layers"])
        window = values.get("sliding_window") if values.get("use_sliding_window") else None
        types = values.get("layer_types")
        if types is None:
            types = [FULL if window is None or one else SLIDING for one in rotary]
        # The names are also checked without use_sliding_window: whether the reference then applies the windows depends
        # on its attention implementation.
        check_layer_types(types, len(rotary), window)
        windows = [window if name == SLIDING else None for name in types]
        return fold([LayerKind(window=size, rotary=one) for size, one in zip(windows, rotary, strict=True)])

    def write(self, config: TransformerConfig) -> Fields:
        kinds = layer_kinds(config, config.num_layers)
        windows = [kind.window for kind in kinds]
        window = next(filter(None, windows), None)
        return {
            "no_rope_layers": [int(kind.rotary) for kind in kinds],
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": layer_types(windows),
        }


_VARIANTS = {"smollm3-3b": ("SmolLM3-3B", 3_075_098_624, 2048, 11_008, 36, 16, 4)}

SMOLLM3 = decoder_family(
    "SmolLM3",
    name="smollm3",
    title="SmolLM3",
    citation="Bakouch et al. 2025, https://huggingface.co/blog/smollm3",
    fields=(
        *decoder_fields(tied=True, kv_heads=4),
        Rope(default_base=2_000_000.0),
        Biases("attention_bias", "mlp_bias"),
        RotaryLayers(),
        Unread(("max_window_layers",)),
    ),
    variants=variants("HuggingFaceTB/", _VARIANTS, vocab_size=128_256, rope_theta=5e6),
)
