"""GPT-2: decoder, pre-norm, learned positions; its files store linear maps as (in, out), not (out, in)."""

from __future__ import annotations

from transformer.config._positions import LearnedOptions
from transformer.zoo._family import LAYER_NORM, Family, variants
from transformer.zoo._fields import ACTIVATIONS, Field, Fixed, Unread, sizes, training_fields
from transformer.zoo.families._llama import LANGUAGE_MODEL, LAST_TOKEN
from transformer.zoo.weights._rules import SAME, VECTOR, Fused, Reshaped, Rule, fused, linear, norm

# GPT-2 computes x W with W (in, out), so kernels are reshaped but not transposed: (in, *out) <-> (in, out), and
# (N, H, out) <-> (N H, out) for the output map of attention.
_ROWS = Reshaped(1)
_ROWS_MERGED = Reshaped(2)
_HEADS = tuple(f"decoder/{{layer}}/self_attention/{name}" for name in ("query", "key", "value"))

_LAYER, _OURS = "transformer.h.{layer}.", "decoder/{layer}/"
_RULES = [
    Rule("transformer.wte.weight", "embedding/embedding", SAME),
    Rule("transformer.wpe.weight", "decoder/position_table", SAME),
    *norm(f"{_LAYER}ln_1", f"{_OURS}attention_norm"),
    *fused(f"{_LAYER}attn.c_attn", _HEADS, Fused(1, _ROWS), Fused(0, VECTOR)),
    *linear(f"{_LAYER}attn.c_proj", f"{_OURS}self_attention/out", _ROWS_MERGED),
    *norm(f"{_LAYER}ln_2", f"{_OURS}feed_forward_norm"),
    *linear(f"{_LAYER}mlp.c_fc", f"{_OURS}feed_forward/up", _ROWS),
    *linear(f"{_LAYER}mlp.c_proj", f"{_OURS}feed_forward/down", _ROWS),
    *norm("transformer.ln_f", "decoder/final_norm"),
]

_VARIANTS = {
    "gpt2": (124_439_808, 768, 12, 12),
    "gpt2-medium": (354_823_168, 1024, 24, 16),
    "gpt2-large": (774_030_080, 1280, 36, 20),
    "gpt2-xl": (1_557_611_200, 1600, 48, 25),
}

GPT2 = Family(
    name="gpt2",
    title="GPT-2",
    citation="Radford et al. 2019, Language Models are Unsupervised Multitask Learners",
    heads={"GPT2LMHeadModel": LANGUAGE_MODEL, "GPT2ForSequenceClassification": LAST_TOKEN},
    constants=LAYER_NORM | {"position": LearnedOptions(), "parameters.use_bias": True},
    fields=(
        Field("n_positions", "position.max_length", 1024),
        *sizes(vocab_size=("vocab_size", 50257), d_model=("n_embd", 768)),
        *sizes(num_layers=("n_layer", 12), num_heads=("n_head", 12)),
        Field("n_inner", "feed_forward.d_ff", None, nullable=True),
        Field("activation_function", "feed_forward.activation", "gelu_new", ACTIVATIONS),
        Field("layer_norm_epsilon", "norm.epsilon", 1e-5),
        Field("tie_word_embeddings", "embedding.tie", True),
        *training_fields("resid_pdrop", "attn_pdrop", rates=0.1),
        Fixed("scale_attn_weights", (True,)),
        Fixed("scale_attn_by_inverse_layer_idx", (False,)),
        Unread(
            ("embd_pdrop", "n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj")
            + ("summary_activation", "summary_proj_to_labels", "summary_first_dropout")
        ),
    ),
    rules=_RULES,
    prefix="transformer.",
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
    copies={"lm_head.weight": "transformer.wte.weight"},
    variants=variants(
        "openai-community/", _VARIANTS, ("n_embd", "n_layer", "n_head"), vocab_size=50257, n_positions=1024
    ),
)
