"""Gemma 1: Llama with scaled embeddings, zero-centered norms, gated GELU and large heads."""

from __future__ import annotations

from transformer.zoo._family import variants
from transformer.zoo._fields import ACTIVATIONS, Biases, Field, Fixed, Unread
from transformer.zoo._rotary import Rope
from transformer.zoo.families import _llama as llama

GEMMA1_CONSTANTS = llama.DECODER_CONSTANTS | {"norm.kind": "zero_centered_rms_norm", "embedding.scale": True}
"""Constants of Gemma 1."""

# Published files say "gelu" and mean the tanh approximation, which the reference then uses, too.
_NAMES = {"gelu_pytorch_tanh": "gelu_tanh"} | ACTIVATIONS | {"gelu": "gelu_tanh"}
_GELU = Field("hidden_act", "feed_forward.activation", "gelu_pytorch_tanh", _NAMES)

GEMMA1_FIELDS = (
    *llama.decoder_fields(tied=True, kv_heads=16, head_dim=256, activation=_GELU),
    Rope(),
    Biases("attention_bias"),
    Unread(("hidden_activation",)),  # in published files; the reference uses hidden_act
)
"""Fields of Gemma 1, except for those that its use in another model changes."""

_VARIANTS = {
    "gemma-2b": (2_506_172_416, 2048, 16_384, 18, 8, 1),
    "gemma-7b": (8_537_680_896, 3072, 24_576, 28, 16, 16),
}

GEMMA = llama.decoder_family(
    "Gemma",
    name="gemma",
    title="Gemma",
    citation="Gemma Team 2024, arXiv 2403.08295",
    constants=GEMMA1_CONSTANTS,
    fields=(*GEMMA1_FIELDS, Fixed("use_bidirectional_attention", (None, False))),
    ignored=(llama.ROTARY_BUFFERS,),
    variants=variants("google/", _VARIANTS, vocab_size=256_000),
)
