"""Gemma 2: norms before and after each sublayer, soft-capped scores and logits, sliding window in every other layer."""

from __future__ import annotations

from dataclasses import dataclass

from transformer.config._model import TransformerConfig
from transformer.zoo._family import variants
from transformer.zoo._fields import Biases, Codec, Converted, Field, Fields, Fixed, Unread, activation_field
from transformer.zoo._rotary import Rope
from transformer.zoo.families import _llama as llama
from transformer.zoo.families._gemma import GEMMA1_CONSTANTS
from transformer.zoo.families._qwen2 import FULL, SLIDING, check_layer_types, layer_types, layer_windows, local_layers
from transformer.zoo.weights._rules import modules

GEMMA_CONSTANTS = GEMMA1_CONSTANTS | {"norm.position": "sandwich"}
"""Constants of Gemma 2 and 3."""
GELU = activation_field("hidden_activation", "gelu_pytorch_tanh")

QUERY_SCALE = Converted(
    "query_pre_attn_scalar",
    256,
    lambda scalar, changes: {"attention.scale": scalar**-0.5},
    lambda config: round((config.attention.scale or config.size_of_head**-0.5) ** -2),
)
"""`query_pre_attn_scalar` n: scores are divided by sqrt(n), independent of the head dimension."""


@dataclass(frozen=True)
class AlternatingWindows(Codec):
    """Sliding window `sliding_window` in layers 0, 2, 4, ..., or in the layers that `layer_types` specifies."""

    default: int
    """Default of `sliding_window`."""

    names = ("sliding_window", "layer_types")

    def read(self, values: Fields, changes: Fields) -> Fields:
        return local_layers(*self.types(values, changes))

    def types(self, values: Fields, changes: Fields) -> tuple[list[str], int | None]:
        """Return the `layer_types` and the window."""
        layers, window = changes["num_layers"], values.get("sliding_window", self.default)
        types = values.get("layer_types") or [FULL if layer % 2 else SLIDING for layer in range(layers)]
        check_layer_types(types, layers, window)
        return types, window

    def write(self, config: TransformerConfig) -> Fields:
        windows = layer_windows(config)
        return {"sliding_window": max(filter(None, windows), default=self.default), "layer_types": layer_types(windows)}


_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_post_norm": "post_feedforward_layernorm",
}

GEMMA_RULES = [
    *llama.attention_rules(),
    *llama.FEED_FORWARD_RULES,
    *modules("model.layers.{layer}.", "decoder/{layer}/", _NORMS),
]
"""Rules of Gemma 2: the names of Llama, except for the four norms of each layer."""

_VARIANTS = {
    "gemma-2-2b": (2_614_341_888, 2304, 9216, 26, 8, 4),
    "gemma-2-9b": (9_241_705_984, 3584, 14_336, 42, 16, 8),
    "gemma-2-27b": (27_227_128_320, 4608, 36_864, 46, 32, 16, {"head_dim": 128, "query_pre_attn_scalar": 144}),
}

GEMMA2 = llama.decoder_family(
    "Gemma2",
    name="gemma2",
    title="Gemma 2",
    citation="Gemma Team 2024, arXiv 2408.00118",
    constants=GEMMA_CONSTANTS,
    fields=(
        *llama.decoder_fields(tied=True, kv_heads=4, head_dim=256, activation=GELU),
        Rope(),
        Biases("attention_bias"),
        QUERY_SCALE,
        Field("attn_logit_softcapping", "attention.softcap", 50.0, nullable=True),
        Field("final_logit_softcapping", "output.softcap", 30.0, nullable=True),
        AlternatingWindows(4096),
        Fixed("use_bidirectional_attention", (None, False)),
        # In published files; the reference uses hidden_activation and sliding_window instead.
        Unread(("hidden_act", "sliding_window_size")),
    ),
    rules=GEMMA_RULES,
    ignored=(llama.ROTARY_BUFFERS,),
    variants=variants("google/", _VARIANTS, vocab_size=256_000),
)
