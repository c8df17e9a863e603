"""Qwen 3: Qwen 2 with norms on queries and keys in place of biases, and heads of a size of their own."""

from __future__ import annotations

from collections.abc import Sequence

from transformer.config._model import TransformerConfig
from transformer.zoo._family import Family, Variant
from transformer.zoo._fields import Biases, Rope
from transformer.zoo._llama import (
    COPIES,
    DECODER_CONSTANTS,
    decoder_fields,
    decoder_heads,
    decoder_rules,
    qk_norm_rules,
)
from transformer.zoo._qwen2 import UpperWindows
from transformer.zoo.weights._rules import Rule


def _rules(config: TransformerConfig) -> Sequence[Rule]:
    return [*decoder_rules(config), *qk_norm_rules()]


def _variant(name: str, parameters: int, width: int, inner: int, layers: int, heads: int, *, tied: bool) -> Variant:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
    return Variant(
        hub=f"Qwen/{name}",
        parameters=parameters,
        fields=sizes | {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied},
    )


QWEN3 = Family(
    name="qwen3",
    title="Qwen 3",
    citation="Qwen Team 2025, arXiv 2505.09388",
    heads=decoder_heads("Qwen3"),
    constants=DECODER_CONSTANTS | {"qk_norm": True},
    fields=(*decoder_fields(kv_heads=32, head_dim=128), Rope(), Biases("attention_bias"), UpperWindows()),
    rules=_rules,
    copies=COPIES,
    variants={
        "qwen3-0.6b": _variant("Qwen3-0.6B", 596_049_920, 1024, 3072, 28, 16, tied=True),
        "qwen3-1.7b": _variant("Qwen3-1.7B", 1_720_574_976, 2048, 6144, 28, 16, tied=True),
        "qwen3-4b": _variant("Qwen3-4B", 4_022_468_096, 2560, 9728, 36, 32, tied=True),
        "qwen3-8b": _variant("Qwen3-8B", 8_190_735_360, 4096, 12_288, 36, 32, tied=False),
        "qwen3-14b": _variant("Qwen3-14B", 14_768_307_200, 5120, 17_408, 40, 40, tied=False),
        "qwen3-32b": _variant("Qwen3-32B", 32_762_123_264, 5120, 25_600, 64, 64, tied=False),
    },
)
"""Qwen 3, the dense ones"""
