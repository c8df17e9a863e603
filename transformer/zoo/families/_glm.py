"""GLM-4: partial rotary positions, biases on queries, keys and values, few key heads; 0414 models: sandwich norm."""

from __future__ import annotations

from dataclasses import replace

from transformer.config._model import TransformerConfig
from transformer.zoo._family import Variant, variants
from transformer.zoo._fields import Converted
from transformer.zoo._rotary import Rope
from transformer.zoo.families._deepseek_v3 import interleaved_rules
from transformer.zoo.families._llama import DECODER_CONSTANTS, decoder_family, decoder_fields, decoder_heads
from transformer.zoo.families._phi3 import fused_feed_forward_rules
from transformer.zoo.weights._rules import Rule, modules, norm

_INPUT_BIASES = Converted(
    "attention_bias",
    True,
    lambda biased, changes: {"attention.biases": ("query", "key", "value") if biased else ()},
    lambda config: bool(config.attention.biases),
)
"""Biases on queries, keys and values; the output map of attention has none."""

_PRE_NORMS = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
_POST_NORMS = {"attention_post_norm": "post_self_attn_layernorm", "feed_forward_post_norm": "post_mlp_layernorm"}


def _rules(config: TransformerConfig) -> list[Rule]:
    layer, ours = "model.layers.{layer}.", "decoder/{layer}/"
    attention, rotated = f"{ours}self_attention/", config.rotary.dim or config.size_of_head
    return [
        Rule("model.embed_tokens.weight", "embedding/embedding"),
        *norm("model.norm", "decoder/final_norm"),
        *modules(layer, ours, _PRE_NORMS | _POST_NORMS),
        *modules(f"{layer}self_attn.", attention, {"value": "v_proj", "out": "o_proj"}),
        *fused_feed_forward_rules(),
        *interleaved_rules(f"{layer}self_attn.", attention, rotated, first=True),
    ]


def _variants(name: str, hub: str, parameters: int) -> dict[str, Variant]:
    sizes = (4096, 13_696, 40, 32, 2)
    return variants("zai-org/", {name: (hub, parameters, *sizes)}, head_dim=128, vocab_size=151_552)


GLM = decoder_family(
    "Glm",
    name="glm",
    title="GLM-4",
    citation="Team GLM 2024, arXiv 2406.12793",
    fields=(
        *decoder_fields(epsilon=1.5625e-07, kv_heads=2, head_dim=128),
        *(Rope(default_share=0.5), _INPUT_BIASES),
    ),
    rules=_rules,
    variants=_variants("glm-4-9b", "glm-4-9b-hf", 9_399_951_360),
)
"""GLM-4 of 2024."""

GLM4 = replace(
    GLM,
    name="glm4",
    title="GLM-4 (0414)",
    citation="Team GLM 2025, https://huggingface.co/zai-org/GLM-4-9B-0414",
    heads=decoder_heads("Glm4"),
    constants=DECODER_CONSTANTS | {"norm.position": "sandwich"},
    variants=_variants("glm-4-9b-0414", "GLM-4-9B-0414", 9_400_279_040),
)
"""GLM-4 of 2025, with a norm behind each sublayer."""
