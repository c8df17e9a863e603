"""GPT-2: pre-norm, learned positions, maps kept as (in, out)."""

from __future__ import annotations

from collections.abc import Sequence

from transformer.config._model import TransformerConfig
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._encoders import Classifier
from transformer.zoo._family import Family, Head, Variant
from transformer.zoo._fields import ACTIVATIONS, Field, Fixed, Labels, Unread
from transformer.zoo.weights._rules import MATRIX, SAME, VECTOR, Fused, Reshaped, Rule, norm

_ROWS = Reshaped(1)
_ROWS_MERGED = Reshaped(2)
_HEADS = tuple(f"decoder/{{layer}}/self_attention/{name}" for name in ("query", "key", "value"))


def _rules(config: TransformerConfig) -> Sequence[Rule]:
    layer, ours = "transformer.h.{layer}.", "decoder/{layer}/"

    def rows(tensor: str, parameter: str, relation: Reshaped = _ROWS) -> list[Rule]:
        weight = Rule(f"{layer}{tensor}.weight", f"{ours}{parameter}/kernel", relation)
        return [weight, Rule(f"{layer}{tensor}.bias", f"{ours}{parameter}/bias", VECTOR)]

    return [
        Rule("transformer.wte.weight", "embedding/embedding", SAME),
        Rule("transformer.wpe.weight", "decoder/position_table", SAME),
        *norm(f"{layer}ln_1", f"{ours}attention_norm"),
        Rule(f"{layer}attn.c_attn.weight", tuple(f"{name}/kernel" for name in _HEADS), Fused(1, _ROWS)),
        Rule(f"{layer}attn.c_attn.bias", tuple(f"{name}/bias" for name in _HEADS), Fused(0, VECTOR)),
        *rows("attn.c_proj", "self_attention/out", _ROWS_MERGED),
        *norm(f"{layer}ln_2", f"{ours}feed_forward_norm"),
        *rows("mlp.c_fc", "feed_forward/up"),
        *rows("mlp.c_proj", "feed_forward/down"),
        *norm("transformer.ln_f", "decoder/final_norm"),
    ]


def _variant(name: str, parameters: int, width: int, layers: int, heads: int) -> Variant:
    fields = {"vocab_size": 50257, "n_positions": 1024, "n_embd": width, "n_layer": layers, "n_head": heads}
    return Variant(hub=f"openai-community/{name}", parameters=parameters, fields=fields)


GPT2 = Family(
    name="gpt2",
    title="GPT-2",
    citation="Radford et al. 2019, Language Models are Unsupervised Multitask Learners",
    heads={
        "GPT2LMHeadModel": Head(model=CausalLM, rules=(Rule("lm_head.weight", "output/kernel", MATRIX),)),
        "GPT2ForSequenceClassification": Head(
            model=Classifier,
            constants={"causal": True, "pooling": "last", "output_bias": False},
            fields=(Labels(),),
            rules=(Rule("score.weight", "output/kernel", MATRIX),),
        ),
    },
    constants={"norm": "layer_norm", "position": "learned", "use_bias": True, "scale_embeddings": False},
    fields=(
        Field("vocab_size", "vocab_size", 50257),
        Field("n_positions", "max_length", 1024),
        Field("n_embd", "d_model", 768),
        Field("n_layer", "num_layers", 12),
        Field("n_head", "num_heads", 12),
        Field("n_inner", "d_ff", None, nullable=True),
        Field("activation_function", "activation", "gelu_new", ACTIVATIONS),
        Field("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Field("tie_word_embeddings", "tie_embeddings", True),
        Field("resid_pdrop", "dropout_rate", 0.1),
        Field("attn_pdrop", "attention_dropout_rate", 0.1),
        Field("initializer_range", "initializer_range", 0.02),
        Fixed("scale_attn_weights", (True,)),
        Fixed("scale_attn_by_inverse_layer_idx", (False,)),
        Unread(
            ("embd_pdrop", "n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj")
            + ("summary_activation", "summary_proj_to_labels", "summary_first_dropout")
        ),
    ),
    rules=_rules,
    prefix="transformer.",
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
    copies={"lm_head.weight": "transformer.wte.weight"},
    variants={
        "gpt2": _variant("gpt2", 124_439_808, 768, 12, 12),
        "gpt2-medium": _variant("gpt2-medium", 354_823_168, 1024, 24, 16),
        "gpt2-large": _variant("gpt2-large", 774_030_080, 1280, 36, 20),
        "gpt2-xl": _variant("gpt2-xl", 1_557_611_200, 1600, 48, 25),
    },
)
