"""Qwen 3: Qwen 2 with query and key norms instead of biases, and an independent head dimension."""

from __future__ import annotations

from transformer.config._options import QKNorm
from transformer.zoo._family import variants
from transformer.zoo._fields import Biases
from transformer.zoo._rotary import Rope
from transformer.zoo.families import _llama as llama
from transformer.zoo.families._qwen2 import UpperWindows

_TIED, _UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}

_VARIANTS = {
    "qwen3-0.6b": ("0.6B", 596_049_920, 1024, 3072, 28, 16, 8, _TIED),
    "qwen3-1.7b": ("1.7B", 1_720_574_976, 2048, 6144, 28, 16, 8, _TIED),
    "qwen3-4b": ("4B", 4_022_468_096, 2560, 9728, 36, 32, 8, _TIED),
    "qwen3-8b": ("8B", 8_190_735_360, 4096, 12_288, 36, 32, 8, _UNTIED),
    "qwen3-14b": ("14B", 14_768_307_200, 5120, 17_408, 40, 40, 8, _UNTIED),
    "qwen3-32b": ("32B", 32_762_123_264, 5120, 25_600, 64, 64, 8, _UNTIED),
}

QWEN3 = llama.decoder_family(
    "Qwen3",
    name="qwen3",
    title="Qwen 3",
    citation="Qwen Team 2025, arXiv 2505.09388",
    constants=llama.DECODER_CONSTANTS | {"attention.qk_norm": QKNorm()},
    fields=(*llama.decoder_fields(kv_heads=32, head_dim=128), Rope(), Biases("attention_bias"), UpperWindows()),
    rules=[*llama.DECODER_RULES, *llama.QK_NORM_RULES],
    variants=variants(
        "Qwen/Qwen3-", _VARIANTS, head_dim=128, vocab_size=151_936, rope_theta=1_000_000.0, rms_norm_eps=1e-6
    ),
)
