"""StarCoder 2: Llama's attention with a window, LayerNorm, biases, and a feed-forward without a gate."""

from __future__ import annotations

from collections.abc import Sequence

from transformer.config._model import TransformerConfig
from transformer.zoo._family import Family, Variant
from transformer.zoo._fields import ACTIVATIONS, Field, Fixed, Rope, Unread
from transformer.zoo._llama import COPIES, Heads, attention_rules, decoder_heads, norm_rules
from transformer.zoo._mistral import SameWindow
from transformer.zoo.weights._rules import Rule, linear


def _rules(config: TransformerConfig) -> Sequence[Rule]:
    layer, ours = "model.layers.{layer}.mlp.", "decoder/{layer}/feed_forward/"
    feed_forward = [*linear(f"{layer}c_fc", f"{ours}up"), *linear(f"{layer}c_proj", f"{ours}down")]
    return [*attention_rules(), *norm_rules(), *feed_forward]


def _variant(name: str, parameters: int, width: int, layers: int, heads: int, kv_heads: int, **more) -> Variant:
    sizes = {"vocab_size": 49_152, "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "sliding_window": 4096}
    return Variant(hub=f"bigcode/{name}", parameters=parameters, fields=sizes | more)


STARCODER2 = Family(
    name="starcoder2",
    title="StarCoder 2",
    citation="Lozhkov et al. 2024, arXiv 2402.19173",
    heads=decoder_heads("Starcoder2"),
    constants={"norm": "layer_norm", "position": "rotary", "scale_embeddings": False},
    fields=(
        Field("vocab_size", "vocab_size", 49_152),
        Field("hidden_size", "d_model", 3072),
        Field("intermediate_size", "d_ff", 12_288),
        Field("num_hidden_layers", "num_layers", 30),
        Field("num_attention_heads", "num_heads", 24),
        Heads(2, None),
        Field("hidden_act", "activation", "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "gelu_tanh"} | ACTIVATIONS),
        Field("norm_epsilon", "norm_epsilon", 1e-5),
        Field("use_bias", "use_bias", True),
        Field("tie_word_embeddings", "tie_embeddings", True),
        Field("residual_dropout", "dropout_rate", 0.0),
        Field("attention_dropout", "attention_dropout_rate", 0.0),
        Field("initializer_range", "initializer_range", 0.018042),
        Rope(),
        SameWindow(None),
        Fixed("norm_type", ("layer_norm",)),
        Fixed("mlp_type", ("default",)),
        Unread(("embedding_dropout",)),
    ),
    rules=_rules,
    copies=COPIES,
    variants={
        "starcoder2-3b": _variant("starcoder2-3b", 3_030_371_328, 3072, 30, 24, 2, rope_theta=999_999.4420358813),
        "starcoder2-7b": _variant("starcoder2-7b", 7_173_923_840, 4608, 32, 36, 4, rope_theta=1_000_000.0),
    },
)
"""StarCoder 2"""
