"""Llama 1 to 3: decoder, pre-norm, RMSNorm, rotary positions, gated SiLU, grouped-query attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformer.config._model import TransformerConfig
from transformer.config._positions import RotaryOptions
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._encoders import Classifier, Embedder
from transformer.zoo._family import Family, Head, variants
from transformer.zoo._fields import ACTIVATIONS, Biases, Codec, Field, Fields, Labels
from transformer.zoo._rotary import Rope
from transformer.zoo.weights._rules import MATRIX, Rule, modules, norm

DECODER_CONSTANTS = {
    "norm.kind": "rms_norm",
    "position": RotaryOptions(),
    "feed_forward.gated": True,
    "parameters.use_bias": False,
    "embedding.scale": False,
}
"""Constants of Llama and most later decoder families."""

ROTARY_BUFFERS = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
"""Rotary frequencies in old files, which are computed from the config instead."""
COPIES = {"lm_head.weight": "model.embed_tokens.weight"}
"""Copies that files of tied decoders may contain."""

ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
FEED_FORWARD = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
"""Maps of a layer, and the names of their tensors in Llama and most later families."""
_ATTENTION_PATHS = ("model.layers.{layer}.self_attn.", "decoder/{layer}/self_attention/")


def attention_rules(*maps: str) -> list[Rule]:
    """Return the rules for embeddings, attention maps (by default all) and the final norm, with the names of Llama."""
    names = {name: ATTENTION[name] for name in maps or ATTENTION}
    return [
        Rule("model.embed_tokens.weight", "embedding/embedding"),
        *modules(*_ATTENTION_PATHS, names),
        *norm("model.norm", "decoder/final_norm"),
    ]


FEED_FORWARD_RULES = modules("model.layers.{layer}.mlp.", "decoder/{layer}/feed_forward/", FEED_FORWARD)
"""Rules for a gated feed-forward layer."""
_NORMS = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
NORM_RULES = modules("model.layers.{layer}.", "decoder/{layer}/", _NORMS)
"""Rules for the two norms of a pre-norm layer."""
QK_NORM_RULES = modules(*_ATTENTION_PATHS, {"query_norm": "q_norm", "key_norm": "k_norm"})
"""Rules for query and key norms, with the names that Qwen 3, Gemma 3 and OLMo 2 share."""
DECODER_RULES = [*attention_rules(), *NORM_RULES, *FEED_FORWARD_RULES]
"""Rules of Llama and of families with the same tensor names."""


@dataclass(frozen=True)
class Heads(Codec):
    """`num_key_value_heads` and `head_dim`. Read after the model width and the number of query heads.

    As in Llama, null means as many key-value heads as query heads, and a head dimension of width / heads.
    """

    kv_heads: int | None
    """Default of `num_key_value_heads`."""
    head_dim: int | None
    """Default of `head_dim`."""

    names = ("num_key_value_heads", "head_dim")

    def read(self, values: Fields, changes: Fields) -> Fields:
        width, heads = changes["d_model"], changes["num_heads"]
        kv_heads, head_dim = values.get("num_key_value_heads", self.kv_heads), values.get("head_dim", self.head_dim)
        return {
            "attention.num_kv_heads": None if kv_heads == heads else kv_heads,
            "attention.head_dim": None if head_dim is not None and head_dim * heads == width else head_dim,
        }

    def write(self, config: TransformerConfig) -> Fields:
        # Write numbers instead of null, because some models of the reference do not accept null here.
        return {"num_key_value_heads": config.kv_heads, "head_dim": config.size_of_head}


DECODER_SIZES = (
    Field("vocab_size", "vocab_size"),
    Field("hidden_size", "d_model"),
    Field("intermediate_size", "feed_forward.d_ff"),
    Field("num_hidden_layers", "num_layers"),
    Field("num_attention_heads", "num_heads"),
)
"""Fields for sizes that a config.json of a decoder must contain."""
SILU = Field("hidden_act", "feed_forward.activation", "silu", ACTIVATIONS)
"""Default field for the activation of a decoder family."""


def decoder_fields(
    *,
    epsilon: float = 1e-6,
    tied: bool = False,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    activation: Codec = SILU,
) -> tuple[Field, ...]:
    """Return the fields that Llama and later decoders share; the arguments are the defaults that differ per family."""
    return (
        *DECODER_SIZES,
        Heads(kv_heads, head_dim),
        activation,
        Field("rms_norm_eps", "norm.epsilon", epsilon),
        Field("tie_word_embeddings", "embedding.tie", tied),
        Field("attention_dropout", "attention.dropout_rate", 0.0),
        Field("initializer_range", "parameters.initializer_range", 0.02),
    )


LAST_TOKEN = Head(
    model=Classifier,
    constants={"attention.causal": True, "output.pooling": "last", "output.bias": False},
    fields=(Labels(),),
    rules=(Rule("score.weight", "output/kernel", MATRIX),),
)
"""Classifier on the last non-padding token of a decoder."""

LANGUAGE_MODEL = Head(model=CausalLM, rules=(Rule("lm_head.weight", "output/kernel", MATRIX),))
"""Language model whose output map has the usual name."""

HIDDEN_STATES = Head(
    model=Embedder,
    base=True,
    constants={"attention.causal": True, "output.pooling": "last"},
    ignored=(r"lm_head\.weight",),
)
"""Decoder without an output map, whose hidden state at the last non-padding token represents the text."""


def decoder_heads(name: str) -> dict[str, Head]:
    """Return a language model, a last-token classifier and the base model, with the class names of the reference."""
    return {
        f"{name}ForCausalLM": LANGUAGE_MODEL,
        f"{name}ForSequenceClassification": LAST_TOKEN,
        f"{name}Model": HIDDEN_STATES,
    }


def decoder_family(reference: str, **facts: Any) -> Family:
    """Return a family that equals Llama except for the given fields; `reference` begins the class names there."""
    alike = {"heads": decoder_heads(reference), "constants": DECODER_CONSTANTS, "rules": DECODER_RULES}
    return Family(prefix="model.", **alike | {"copies": COPIES} | facts)


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Rotary scaling of Llama 3.1 and 4."""

_TWO = {"vocab_size": 32_000}
_THREE = {"vocab_size": 128_256, "rope_theta": 500_000.0}
_THREE_ONE = _THREE | {"rope_scaling": LLAMA3_SCALING, "max_position_embeddings": 131_072}
_THREE_TWO = _THREE_ONE | {"rope_scaling": LLAMA3_SCALING | {"factor": 32.0}, "tie_word_embeddings": True}

_VARIANTS = {
    "llama-2-7b": ("Llama-2-7b-hf", 6_738_415_616, 4096, 11008, 32, 32, 32, _TWO),
    "llama-2-13b": ("Llama-2-13b-hf", 13_015_864_320, 5120, 13824, 40, 40, 40, _TWO),
    "llama-2-70b": ("Llama-2-70b-hf", 68_976_648_192, 8192, 28672, 80, 64, 8, _TWO),
    "llama-3-8b": ("Meta-Llama-3-8B", 8_030_261_248, 4096, 14336, 32, 32, 8, _THREE),
    "llama-3.1-8b": ("Llama-3.1-8B", 8_030_261_248, 4096, 14336, 32, 32, 8, _THREE_ONE),
    "llama-3.1-70b": ("Llama-3.1-70B", 70_553_706_496, 8192, 28672, 80, 64, 8, _THREE_ONE),
    "llama-3.2-1b": ("Llama-3.2-1B", 1_235_814_400, 2048, 8192, 16, 32, 8, _THREE_TWO | {"head_dim": 64}),
    "llama-3.2-3b": ("Llama-3.2-3B", 3_212_749_824, 3072, 8192, 28, 24, 8, _THREE_TWO | {"head_dim": 128}),
}

LLAMA = decoder_family(
    "Llama",
    name="llama",
    title="Llama",
    citation="Touvron et al. 2023, arXiv 2302.13971 and 2307.09288; Llama Team 2024, arXiv 2407.21783",
    fields=(*decoder_fields(), Rope(), Biases("attention_bias", "mlp_bias")),
    ignored=(ROTARY_BUFFERS,),
    variants=variants("meta-llama/", _VARIANTS, rms_norm_eps=1e-5),
)
