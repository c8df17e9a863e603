"""GPT-NeoX and Pythia: decoder, parallel attention and feed-forward, rotary positions on a fraction of each head."""

from __future__ import annotations

from transformer.config._positions import RotaryOptions
from transformer.nn.models._causal_lm import CausalLM
from transformer.zoo._family import LAYER_NORM, Family, Head, variants
from transformer.zoo._fields import ACTIVATIONS, LAYER_SIZES, Field, Unread, training_fields
from transformer.zoo._rotary import Rope
from transformer.zoo.families._llama import DECODER_SIZES, LAST_TOKEN
from transformer.zoo.weights._rules import MATRIX, VECTOR, FusedByHead, Rule, fused, modules, norm


def megatron_layer_rules(layer: str, attention: str) -> list[Rule]:
    """Return the rules for the layers of GPT-NeoX and BLOOM, which were both trained with Megatron-LM.

    `layer` is the prefix of the tensor names of a layer, and `attention` that of attention within the layer.
    """
    ours = "decoder/{layer}/"
    maps = [f"{ours}self_attention/{name}" for name in ("query", "key", "value")]
    behind = {
        "self_attention/out": f"{attention}.dense",
        "feed_forward_norm": "post_attention_layernorm",
        "feed_forward/up": "mlp.dense_h_to_4h",
        "feed_forward/down": "mlp.dense_4h_to_h",
    }
    return [
        *norm(f"{layer}input_layernorm", f"{ours}attention_norm"),
        *fused(f"{layer}{attention}.query_key_value", maps, FusedByHead(MATRIX), FusedByHead(VECTOR)),
        *modules(layer, ours, behind),
    ]


_RULES = [
    Rule("gpt_neox.embed_in.weight", "embedding/embedding"),
    *megatron_layer_rules("gpt_neox.layers.{layer}.", "attention"),
    *norm("gpt_neox.final_layer_norm", "decoder/final_norm"),
]

# The first of several synonyms is written.
_ACTIVATIONS = {"gelu": "gelu_erf", "gelu_fast": "gelu_tanh"} | ACTIVATIONS

_VARIANTS = {
    "pythia-70m": (70_426_624, 512, 2048, 6, 8, 50_304),
    "pythia-160m": (162_322_944, 768, 3072, 12, 12, 50_304),
    "pythia-410m": (405_334_016, 1024, 4096, 24, 16, 50_304),
    "pythia-1b": (1_011_781_632, 2048, 8192, 16, 8, 50_304),
    "pythia-1.4b": (1_414_647_808, 2048, 8192, 24, 16, 50_304),
    "pythia-2.8b": (2_775_208_960, 2560, 10_240, 32, 32, 50_304),
    "pythia-6.9b": (6_857_302_016, 4096, 16_384, 32, 32, 50_432),
    "pythia-12b": (11_846_072_320, 5120, 20_480, 36, 40, 50_688),
    "gpt-neox-20b": (20_554_567_680, 6144, 24_576, 44, 64, 50_432),
}

GPT_NEOX = Family(
    name="gpt_neox",
    title="GPT-NeoX and Pythia",
    citation="Black et al. 2022, arXiv 2204.06745; Biderman et al. 2023, arXiv 2304.01373",
    heads={
        "GPTNeoXForCausalLM": Head(model=CausalLM, rules=(Rule("embed_out.weight", "output/kernel", MATRIX),)),
        "GPTNeoXForSequenceClassification": LAST_TOKEN,
    },
    constants=LAYER_NORM | {"position": RotaryOptions(), "parameters.use_bias": True},
    fields=(
        *DECODER_SIZES,
        Field("hidden_act", "feed_forward.activation", "gelu", _ACTIVATIONS),
        Field("layer_norm_eps", "norm.epsilon", 1e-5),
        Field("use_parallel_residual", "norm.position", True, {True: "parallel", False: "pre"}),
        Field("attention_bias", "attention.biases", True, {True: None, False: ()}),
        Rope(default_share=0.25, share_name="rotary_pct", base_name="rotary_emb_base"),
        Field("tie_word_embeddings", "embedding.tie", False),
        *training_fields("hidden_dropout", "attention_dropout"),
        # Names of dropout rates that the reference ignores.
        Unread(("attention_probs_dropout_prob", "hidden_dropout_prob")),
    ),
    rules=_RULES,
    ignored=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    copies={"embed_out.weight": "gpt_neox.embed_in.weight"},
    variants=variants("EleutherAI/", _VARIANTS, (*LAYER_SIZES[:4], "vocab_size"), rotary_pct=0.25),
)
