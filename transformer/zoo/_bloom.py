"""BLOOM: pre-norm, ALiBi, a norm of the embeddings, queries, keys and values in one map head by head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformer.config._model import TransformerConfig
from transformer.nn.models._causal_lm import CausalLM
from transformer.zoo._family import Family, Head, Variant
from transformer.zoo._fields import Codec, Field, FieldError, Fixed, Unread
from transformer.zoo._llama import LAST_TOKEN
from transformer.zoo.weights._rules import MATRIX, MERGED, VECTOR, FusedByHead, Rule, linear, norm


@dataclass(frozen=True)
class OneOf(Codec):
    """A field with several names, `alike`, of which the first is written, and here `attribute`. FieldError: none is
    there, or two that differ.
    """

    alike: tuple[str, ...]
    attribute: str

    @property
    def names(self) -> tuple[str, ...]:
        return self.alike

    def read(self, values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: values[name] for name in self.names if name in values}
        if not given:
            raise FieldError(f"{self.names[0]} is missing")
        if len(set(given.values())) > 1:
            raise FieldError(" but ".join(f"{name} is {value}" for name, value in given.items()))
        return {self.attribute: next(iter(given.values()))}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        return {self.names[0]: getattr(config, self.attribute)}


def _rules(config: TransformerConfig) -> Sequence[Rule]:
    layer, ours = "transformer.h.{layer}.", "decoder/{layer}/"
    fused, heads = f"{layer}self_attention.query_key_value", f"{ours}self_attention/"
    maps = ("query", "key", "value")
    return [
        Rule("transformer.word_embeddings.weight", "embedding/embedding"),
        *norm("transformer.word_embeddings_layernorm", "decoder/embedding_norm"),
        *norm(f"{layer}input_layernorm", f"{ours}attention_norm"),
        Rule(f"{fused}.weight", tuple(f"{heads}{name}/kernel" for name in maps), FusedByHead(MATRIX)),
        Rule(f"{fused}.bias", tuple(f"{heads}{name}/bias" for name in maps), FusedByHead(VECTOR)),
        *linear(f"{layer}self_attention.dense", f"{heads}out", MERGED),
        *norm(f"{layer}post_attention_layernorm", f"{ours}feed_forward_norm"),
        *linear(f"{layer}mlp.dense_h_to_4h", f"{ours}feed_forward/up"),
        *linear(f"{layer}mlp.dense_4h_to_h", f"{ours}feed_forward/down"),
        *norm("transformer.ln_f", "decoder/final_norm"),
    ]


def _variant(name: str, parameters: int, width: int, layers: int, heads: int) -> Variant:
    fields = {"vocab_size": 250_880, "hidden_size": width, "n_layer": layers, "n_head": heads}
    return Variant(hub=f"bigscience/{name}", parameters=parameters, fields=fields)


BLOOM = Family(
    name="bloom",
    title="BLOOM",
    citation="BigScience Workshop 2022, arXiv 2211.05100",
    heads={
        "BloomForCausalLM": Head(model=CausalLM, rules=(Rule("lm_head.weight", "output/kernel", MATRIX),)),
        "BloomForSequenceClassification": LAST_TOKEN,
    },
    constants={"norm": "layer_norm", "position": "alibi", "embedding_norm": True, "use_bias": True}
    | {"activation": "gelu_tanh", "scale_embeddings": False},
    fields=(
        Field("vocab_size", "vocab_size"),
        OneOf(("hidden_size", "n_embed"), "d_model"),
        OneOf(("n_layer", "num_hidden_layers"), "num_layers"),
        OneOf(("n_head", "num_attention_heads"), "num_heads"),
        Field("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Field("tie_word_embeddings", "tie_embeddings", True),
        Field("hidden_dropout", "dropout_rate", 0.0),
        Field("attention_dropout", "attention_dropout_rate", 0.0),
        Field("initializer_range", "initializer_range", 0.02),
        Fixed("apply_residual_connection_post_layernorm", (False,)),
        Fixed("slow_but_exact", (False,)),
        # How the training program computed it.
        Unread(
            ("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi")
            + ("seq_length", "skip_bias_add", "skip_bias_add_qkv", "n_inner")
        ),
    ),
    rules=_rules,
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.word_embeddings.weight"},
    variants={
        "bloom-560m": _variant("bloom-560m", 559_214_592, 1024, 24, 16),
        "bloom-1b1": _variant("bloom-1b1", 1_065_314_304, 1536, 24, 16),
        "bloom-1b7": _variant("bloom-1b7", 1_722_408_960, 2048, 24, 16),
        "bloom-3b": _variant("bloom-3b", 3_002_557_440, 2560, 30, 32),
        "bloom-7b1": _variant("bloom-7b1", 7_069_016_064, 4096, 30, 32),
        "bloom": _variant("bloom", 176_247_271_424, 14_336, 70, 112),
    },
)
