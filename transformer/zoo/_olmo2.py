"""OLMo 2: Llama with norms after each sublayer in place of before, and norms on all queries or keys of a token."""

from __future__ import annotations

from collections.abc import Sequence

from transformer.config._model import TransformerConfig
from transformer.zoo._family import Family, Variant
from transformer.zoo._fields import Biases, Rope
from transformer.zoo._llama import (
    COPIES,
    DECODER_CONSTANTS,
    attention_rules,
    decoder_fields,
    decoder_heads,
    feed_forward_rules,
    qk_norm_rules,
)
from transformer.zoo.weights._rules import Rule, norm


def _rules(config: TransformerConfig) -> Sequence[Rule]:
    layer, ours = "model.layers.{layer}.", "decoder/{layer}/"
    return [
        *attention_rules(),
        *qk_norm_rules(),
        *feed_forward_rules(),
        *norm(f"{layer}post_attention_layernorm", f"{ours}attention_norm"),
        *norm(f"{layer}post_feedforward_layernorm", f"{ours}feed_forward_norm"),
    ]


def _variant(hub: str, parameters: int, width: int, inner: int, layers: int, heads: int, kv: int) -> Variant:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": 100_352}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv, "rope_theta": 500_000.0, "rms_norm_eps": 1e-6}
    return Variant(hub=f"allenai/{hub}", parameters=parameters, fields=sizes)


OLMO2 = Family(
    name="olmo2",
    title="OLMo 2",
    citation="OLMo Team 2025, arXiv 2501.00656",
    heads=decoder_heads("Olmo2"),
    constants=DECODER_CONSTANTS | {"norm_position": "reordered", "qk_norm": True, "qk_norm_scope": "all"},
    fields=(*decoder_fields(epsilon=1e-5), Rope(), Biases("attention_bias")),
    rules=_rules,
    copies=COPIES,
    variants={
        "olmo-2-1b": _variant("OLMo-2-0425-1B", 1_484_916_736, 2048, 8192, 16, 16, 16),
        "olmo-2-7b": _variant("OLMo-2-1124-7B", 7_298_617_344, 4096, 11_008, 32, 32, 32),
        "olmo-2-13b": _variant("OLMo-2-1124-13B", 13_716_198_400, 5120, 13_824, 40, 40, 40),
        "olmo-2-32b": _variant("OLMo-2-0325-32B", 32_234_279_936, 5120, 27_648, 64, 40, 8),
    },
)
"""OLMo 2"""
