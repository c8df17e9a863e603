"""OLMo 2: Llama with norms after each sublayer instead of before it, and query and key norms across all heads."""

from __future__ import annotations

from transformer.config._options import QKNorm
from transformer.zoo._family import variants
from transformer.zoo._fields import Biases
from transformer.zoo._rotary import Rope
from transformer.zoo.families import _llama as llama
from transformer.zoo.weights._rules import modules

_NORMS = {"attention_norm": "post_attention_layernorm", "feed_forward_norm": "post_feedforward_layernorm"}
_RULES = [
    *llama.attention_rules(),
    *llama.QK_NORM_RULES,
    *llama.FEED_FORWARD_RULES,
    *modules("model.layers.{layer}.", "decoder/{layer}/", _NORMS),
]

_VARIANTS = {
    "olmo-2-1b": ("0425-1B", 1_484_916_736, 2048, 8192, 16, 16, 16),
    "olmo-2-7b": ("1124-7B", 7_298_617_344, 4096, 11_008, 32, 32, 32),
    "olmo-2-13b": ("1124-13B", 13_716_198_400, 5120, 13_824, 40, 40, 40),
    "olmo-2-32b": ("0325-32B", 32_234_279_936, 5120, 27_648, 64, 40, 8),
}

OLMO2 = llama.decoder_family(
    "Olmo2",
    name="olmo2",
    title="OLMo 2",
    citation="OLMo Team 2025, arXiv 2501.00656",
    constants=llama.DECODER_CONSTANTS | {"norm.position": "reordered", "attention.qk_norm": QKNorm(scope="all")},
    fields=(*llama.decoder_fields(epsilon=1e-5), Rope(), Biases("attention_bias")),
    rules=_RULES,
    variants=variants("allenai/OLMo-2-", _VARIANTS, vocab_size=100_352, rope_theta=500_000.0, rms_norm_eps=1e-6),
)
