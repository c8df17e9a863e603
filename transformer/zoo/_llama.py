"""Llama 1 to 3: pre-norm, RMSNorm, rotary positions, gated SiLU, grouped heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformer.config._model import TransformerConfig
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._encoders import Classifier
from transformer.zoo._family import Family, Head, Variant
from transformer.zoo._fields import ACTIVATIONS, Biases, Codec, Field, Labels, Rope
from transformer.zoo.weights._rules import MATRIX, MERGED, Rule, linear, norm

DECODER_CONSTANTS = {
    "norm": "rms_norm",
    "position": "rotary",
    "gated": True,
    "use_bias": False,
    "scale_embeddings": False,
}
"""what Llama has in common with most that came after it"""


ROTARY_BUFFERS = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
"""frequencies, which old files hold and which follow from the config"""
COPIES = {"lm_head.weight": "model.embed_tokens.weight"}
"""what files of tied decoders may repeat"""


def attention_rules() -> list[Rule]:
    """Rules of embeddings, maps of attention and the last norm by Llama's names: all but feed-forward and its norms."""
    layer, ours = "model.layers.{layer}.self_attn.", "decoder/{layer}/self_attention/"
    return [
        Rule("model.embed_tokens.weight", "embedding/embedding"),
        *linear(f"{layer}q_proj", f"{ours}query"),
        *linear(f"{layer}k_proj", f"{ours}key"),
        *linear(f"{layer}v_proj", f"{ours}value"),
        *linear(f"{layer}o_proj", f"{ours}out", MERGED),
        *norm("model.norm", "decoder/final_norm"),
    ]


def feed_forward_rules() -> list[Rule]:
    """Rules of a gated feed-forward by Llama's names."""
    layer, ours = "model.layers.{layer}.mlp.", "decoder/{layer}/feed_forward/"
    return [
        *linear(f"{layer}gate_proj", f"{ours}gate"),
        *linear(f"{layer}up_proj", f"{ours}up"),
        *linear(f"{layer}down_proj", f"{ours}down"),
    ]


def norm_rules() -> list[Rule]:
    """Rules of the two norms of a pre-norm layer by Llama's names."""
    layer, ours = "model.layers.{layer}.", "decoder/{layer}/"
    return [
        *norm(f"{layer}input_layernorm", f"{ours}attention_norm"),
        *norm(f"{layer}post_attention_layernorm", f"{ours}feed_forward_norm"),
    ]


def qk_norm_rules() -> list[Rule]:
    """Rules of norms on queries and keys by the names that Qwen3, Gemma 3 and OLMo 2 share."""
    layer, ours = "model.layers.{layer}.self_attn.", "decoder/{layer}/self_attention/"
    return [*norm(f"{layer}q_norm", f"{ours}query_norm"), *norm(f"{layer}k_norm", f"{ours}key_norm")]


def decoder_rules(config: TransformerConfig) -> Sequence[Rule]:
    """Rules of Llama and of those whose tensors have its names."""
    return [*attention_rules(), *norm_rules(), *feed_forward_rules()]


@dataclass(frozen=True)
class Heads(Codec):
    """`num_key_value_heads` and `head_dim`, with what they are where the file doesn't have them; null is as in Llama:
    as many as heads of queries, and an even share of the width. Read after those.
    """

    kv_heads: int | None
    """None: as null"""
    head_dim: int | None
    """None: as null"""

    @property
    def names(self) -> tuple[str, ...]:
        return ("num_key_value_heads", "head_dim")

    def read(self, values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        width, heads = changes["d_model"], changes["num_heads"]
        kv_heads, head_dim = values.get("num_key_value_heads", self.kv_heads), values.get("head_dim", self.head_dim)
        return {
            "num_kv_heads": None if kv_heads == heads else kv_heads,
            "head_dim": None if head_dim is not None and head_dim * heads == width else head_dim,
        }

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        # Numbers, not null: not all of the reference's models know what null means here.
        return {"num_key_value_heads": config.kv_heads, "head_dim": config.size_of_head}


SILU = Field("hidden_act", "activation", "silu", ACTIVATIONS)
"""the activation, where a family says nothing else"""


def decoder_fields(
    *,
    epsilon: float = 1e-6,
    tied: bool = False,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    activation: Codec = SILU,
) -> tuple[Field, ...]:
    """The fields that Llama and those after it share, with the defaults that differ."""
    return (
        Field("vocab_size", "vocab_size"),
        Field("hidden_size", "d_model"),
        Field("intermediate_size", "d_ff"),
        Field("num_hidden_layers", "num_layers"),
        Field("num_attention_heads", "num_heads"),
        Heads(kv_heads, head_dim),
        activation,
        Field("rms_norm_eps", "norm_epsilon", epsilon),
        Field("tie_word_embeddings", "tie_embeddings", tied),
        Field("attention_dropout", "attention_dropout_rate", 0.0),
        Field("initializer_range", "initializer_range", 0.02),
    )


LAST_TOKEN = Head(
    model=Classifier,
    constants={"causal": True, "pooling": "last", "output_bias": False},
    fields=(Labels(),),
    rules=(Rule("score.weight", "output/kernel", MATRIX),),
)
"""a decoder's classifier of the last real token"""


def decoder_heads(name: str) -> dict[str, Head]:
    """A language model and a classifier of the last token, with the reference's names."""
    return {
        f"{name}ForCausalLM": Head(model=CausalLM, rules=(Rule("lm_head.weight", "output/kernel", MATRIX),)),
        f"{name}ForSequenceClassification": LAST_TOKEN,
    }


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _variant(hub: str, parameters: int, width: int, inner: int, layers: int, heads: int, kv: int, **more) -> Variant:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv, "rms_norm_eps": 1e-5}
    return Variant(hub=hub, parameters=parameters, fields=sizes | more)


_THREE = {"vocab_size": 128_256, "rope_theta": 500_000.0}
_THREE_ONE = _THREE | {"rope_scaling": _LLAMA3, "max_position_embeddings": 131_072}
_THREE_TWO = _THREE_ONE | {"rope_scaling": _LLAMA3 | {"factor": 32.0}, "tie_word_embeddings": True}

LLAMA = Family(
    name="llama",
    title="Llama",
    citation="Touvron et al. 2023, arXiv 2302.13971 and 2307.09288; Llama Team 2024, arXiv 2407.21783",
    heads=decoder_heads("Llama"),
    constants=DECODER_CONSTANTS,
    fields=(
        *decoder_fields(),
        Rope(),
        Biases(attention="attention_bias", feed_forward="mlp_bias"),
    ),
    rules=decoder_rules,
    ignored=(ROTARY_BUFFERS,),
    copies=COPIES,
    variants={
        "llama-2-7b": _variant("meta-llama/Llama-2-7b-hf", 6_738_415_616, 4096, 11008, 32, 32, 32, vocab_size=32_000),
        "llama-2-13b": _variant(
            "meta-llama/Llama-2-13b-hf", 13_015_864_320, 5120, 13824, 40, 40, 40, vocab_size=32_000
        ),
        "llama-2-70b": _variant("meta-llama/Llama-2-70b-hf", 68_976_648_192, 8192, 28672, 80, 64, 8, vocab_size=32_000),
        "llama-3-8b": _variant("meta-llama/Meta-Llama-3-8B", 8_030_261_248, 4096, 14336, 32, 32, 8, **_THREE),
        "llama-3.1-8b": _variant("meta-llama/Llama-3.1-8B", 8_030_261_248, 4096, 14336, 32, 32, 8, **_THREE_ONE),
        "llama-3.1-70b": _variant("meta-llama/Llama-3.1-70B", 70_553_706_496, 8192, 28672, 80, 64, 8, **_THREE_ONE),
        "llama-3.2-1b": _variant(
            "meta-llama/Llama-3.2-1B", 1_235_814_400, 2048, 8192, 16, 32, 8, head_dim=64, **_THREE_TWO
        ),
        "llama-3.2-3b": _variant(
            "meta-llama/Llama-3.2-3B", 3_212_749_824, 3072, 8192, 28, 24, 8, head_dim=128, **_THREE_TWO
        ),
    },
)
"""Llama 1 to 3.2"""
