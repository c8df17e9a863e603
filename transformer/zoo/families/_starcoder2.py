"""StarCoder 2: attention of Llama with a sliding window, LayerNorm, biases, ungated feed-forward layers."""

from __future__ import annotations

from transformer.config._positions import RotaryOptions
from transformer.zoo._family import LAYER_NORM, variants
from transformer.zoo._fields import LAYER_SIZES, Field, Fixed, Unread, activation_field, sizes, training_fields
from transformer.zoo._rotary import Rope
from transformer.zoo.families._llama import NORM_RULES, Heads, attention_rules, decoder_family
from transformer.zoo.families._mistral import same_window
from transformer.zoo.weights._rules import modules

_LAYER, _OURS = "model.layers.{layer}.mlp.", "decoder/{layer}/feed_forward/"
_RULES = [*attention_rules(), *NORM_RULES, *modules(_LAYER, _OURS, {"up": "c_fc", "down": "c_proj"})]

_VARIANTS = {
    "starcoder2-3b": (3_030_371_328, 3072, 12_288, 30, 24, 2, 999_999.4420358813),
    "starcoder2-7b": (7_173_923_840, 4608, 18_432, 32, 36, 4, 1_000_000.0),
}

STARCODER2 = decoder_family(
    "Starcoder2",
    name="starcoder2",
    title="StarCoder 2",
    citation="Lozhkov et al. 2024, arXiv 2402.19173",
    constants=LAYER_NORM | {"position": RotaryOptions()},
    fields=(
        *sizes(vocab_size=("vocab_size", 49_152), d_model=("hidden_size", 3072)),
        Field("intermediate_size", "feed_forward.d_ff", 12_288),
        *sizes(num_layers=("num_hidden_layers", 30), num_heads=("num_attention_heads", 24)),
        Heads(2, None),
        activation_field("hidden_act", "gelu_pytorch_tanh"),
        Field("norm_epsilon", "norm.epsilon", 1e-5),
        Field("use_bias", "parameters.use_bias", True),
        Field("tie_word_embeddings", "embedding.tie", True),
        *training_fields("residual_dropout", "attention_dropout", spread=0.018042),
        Rope(),
        same_window(None),
        Fixed("norm_type", ("layer_norm",)),
        Fixed("mlp_type", ("default",)),
        Unread(("embedding_dropout",)),
    ),
    rules=_RULES,
    variants=variants("bigcode/", _VARIANTS, (*LAYER_SIZES, "rope_theta"), vocab_size=49_152, sliding_window=4096),
)
