"""Complete models equal Hugging Face's, with tiny random weights: values and gradients in float32."""

import jax.numpy as jnp
import numpy as np
import pytest
from parity_tools import EPSILON, SCALINGS, compare, ids, llama_config, randomize

from transformer.config import (
    EmbeddingOptions,
    LearnedOptions,
    NormOptions,
    RotaryScaling,
    T5BiasOptions,
    TransformerConfig,
    gpt2_decoder,
    llama_decoder,
)
from transformer.nn._masks import Mask
from transformer.nn.models import CausalLM, Seq2Seq

pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("torch")]


GPT2 = {
    "embedding": "transformer.wte.weight",
    "decoder/position_table": "transformer.wpe.weight",
    "decoder/layers/slot_0/attention_norm": "transformer.h.*.ln_1.{}",
    "decoder/layers/slot_0/self_attention/query": "transformer.h.*.attn.c_attn.{}[0]",
    "decoder/layers/slot_0/self_attention/key": "transformer.h.*.attn.c_attn.{}[1]",
    "decoder/layers/slot_0/self_attention/value": "transformer.h.*.attn.c_attn.{}[2]",
    "decoder/layers/slot_0/self_attention/out": "transformer.h.*.attn.c_proj.{}",
    "decoder/layers/slot_0/feed_forward_norm": "transformer.h.*.ln_2.{}",
    "decoder/layers/slot_0/feed_forward/up": "transformer.h.*.mlp.c_fc.{}",
    "decoder/layers/slot_0/feed_forward/down": "transformer.h.*.mlp.c_proj.{}",
    "decoder/final_norm": "transformer.ln_f.{}",
}


def compare_logits(torch, theirs, names, config, tokens, **options):
    """Compare logits and gradients of two decoders."""

    def apply_ours(apply, tokens):
        return apply(tokens)

    compare(torch, theirs, lambda tokens: theirs(tokens).logits, names, CausalLM(config), apply_ours, tokens, **options)


def test_gpt2_equals_transformers(torch, transformers):
    """Radford et al. 2019: learned positions, pre-norm, tanh GELU, tied embeddings, epsilon 1e-5."""
    sizes = {"vocab_size": 29, "n_positions": 13, "n_embd": 15, "n_layer": 2, "n_head": 3, "n_inner": 17}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    theirs = transformers.GPT2Config(**sizes, **dropout, **special, attn_implementation="eager")
    assert theirs.layer_norm_epsilon == 1e-5
    theirs = randomize(torch, transformers.GPT2LMHeadModel(theirs))
    ours = gpt2_decoder(
        vocab_size=29,
        position=LearnedOptions(max_length=13),
        d_model=15,
        num_layers=2,
        num_heads=3,
        **{"feed_forward.d_ff": 17},
    )
    compare_logits(torch, theirs, GPT2, ours, ids(21, 29, 2, 11), inputs_first=True)


LLAMA = {
    "embedding": "model.embed_tokens.weight",
    "decoder/layers/slot_0/attention_norm": "model.layers.*.input_layernorm.weight",
    "decoder/layers/slot_0/self_attention/query": "model.layers.*.self_attn.q_proj.weight",
    "decoder/layers/slot_0/self_attention/key": "model.layers.*.self_attn.k_proj.weight",
    "decoder/layers/slot_0/self_attention/value": "model.layers.*.self_attn.v_proj.weight",
    "decoder/layers/slot_0/self_attention/out": "model.layers.*.self_attn.o_proj.weight",
    "decoder/layers/slot_0/feed_forward_norm": "model.layers.*.post_attention_layernorm.weight",
    "decoder/layers/slot_0/feed_forward/gate": "model.layers.*.mlp.gate_proj.weight",
    "decoder/layers/slot_0/feed_forward/up": "model.layers.*.mlp.up_proj.weight",
    "decoder/layers/slot_0/feed_forward/down": "model.layers.*.mlp.down_proj.weight",
    "decoder/final_norm": "model.norm.weight",
    "output": "lm_head.weight",
}


@pytest.mark.parametrize("case", ["default", "llama3", "yarn"])
def test_llama_equals_transformers(torch, transformers, case):
    """Grouped queries, rotary positions, RMSNorm, SwiGLU, no biases, untied (Touvron et al. 2023, arXiv 2302.13971)."""
    base, ours, theirs = SCALINGS[case]
    short = 24  # short enough for the scaling to have an effect
    if ours is not None:
        ours, theirs = ours | {"original_length": short}, theirs | {"original_max_position_embeddings": short}
    sizes = {"hidden_size": 18, "num_hidden_layers": 2, "intermediate_size": 17, "head_dim": 4, "vocab_size": 29}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    theirs = llama_config(transformers, base, {"rope_type": case, **theirs}, **sizes, **heads, rms_norm_eps=EPSILON)
    theirs = randomize(torch, transformers.LlamaForCausalLM(theirs))
    sizes = {"vocab_size": 29, "d_model": 18, "num_layers": 2, "num_heads": 6, "attention.num_kv_heads": 2}
    sizes["attention.head_dim"] = 4
    scaling = None if ours is None else RotaryScaling(**ours)
    ours = llama_decoder(
        **sizes,
        **{"norm.epsilon": EPSILON, "feed_forward.d_ff": 17, "position.base": base, "position.scaling": scaling},
    )
    compare_logits(torch, theirs, LLAMA, ours, ids(22, 29, 2, 11))


def t5_layer(stack, cross):
    ours, theirs, last = f"{stack}/layers/slot_0/", f"{stack}.block.*.layer.", 2 if cross else 1
    projections = {"query": "q", "key": "k", "value": "v", "out": "o"}
    rules = {f"{ours}self_attention/{a}": f"{theirs}0.SelfAttention.{b}.weight" for a, b in projections.items()}
    rules[f"{ours}attention_norm"] = f"{theirs}0.layer_norm.weight"
    if cross:
        rules |= {f"{ours}cross_attention/{a}": f"{theirs}1.EncDecAttention.{b}.weight" for a, b in projections.items()}
        rules[f"{ours}cross_attention_norm"] = f"{theirs}1.layer_norm.weight"
    for a, b in {"gate": "wi_0", "up": "wi_1", "down": "wo"}.items():
        rules[f"{ours}feed_forward/{a}"] = f"{theirs}{last}.DenseReluDense.{b}.weight"
    rules[f"{ours}feed_forward_norm"] = f"{theirs}{last}.layer_norm.weight"
    rules[f"{stack}/position_table"] = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    rules[f"{stack}/final_norm"] = f"{stack}.final_layer_norm.weight"
    return rules


def test_t5_equals_transformers(torch, transformers):
    """T5 1.1: bidirectional and causal relative bias, unscaled scores, RMSNorm, GEGLU, no biases, any head size."""
    sizes = {"vocab_size": 29, "d_model": 15, "d_kv": 4, "d_ff": 17, "num_layers": 2, "num_decoder_layers": 2}
    buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}
    theirs = transformers.T5Config(
        **sizes,
        **buckets,
        num_heads=3,
        feed_forward_proj="gated-gelu",
        layer_norm_epsilon=EPSILON,
        dropout_rate=0.0,
        initializer_factor=0.3,  # with large unscaled scores, softmax amplifies rounding errors
        tie_word_embeddings=False,  # here: tied, but not scaled
        attn_implementation="eager",
    )
    theirs = randomize(torch, transformers.T5ForConditionalGeneration(theirs))
    sizes = {
        "vocab_size": 29,
        "d_model": 15,
        "num_layers": 2,
        "num_heads": 3,
        "attention.head_dim": 4,
        "feed_forward.d_ff": 17,
    }
    position = {"position": T5BiasOptions(), "position.buckets": 8, "position.max_distance": 10, "attention.scale": 1.0}
    layers = {
        "feed_forward.activation": "gelu_tanh",
        "feed_forward.gated": True,
        "parameters.use_bias": False,
        "norm.kind": "rms_norm",
    }
    ours = TransformerConfig(
        **sizes, **position, **layers, norm=NormOptions(epsilon=EPSILON), embedding=EmbeddingOptions(scale=False)
    )
    lengths = np.array([13, 6], np.int32)
    compare(
        torch,
        theirs,
        lambda source, target: (
            theirs(
                source, attention_mask=torch.arange(13)[None] < torch.tensor(lengths)[:, None], decoder_input_ids=target
            ).logits
        ),
        {"embedding": "shared.weight"} | t5_layer("encoder", False) | t5_layer("decoder", True),
        Seq2Seq(ours),
        lambda apply, source, target: apply(source, target, source_mask=Mask.lengths(jnp.asarray(lengths))),
        ids(23, 29, 2, 13),
        ids(24, 29, 2, 11),
    )
