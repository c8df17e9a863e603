"""Configs are validated at birth, and every field of them is read."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from transformer.config import (
    ConfigError,
    Execution,
    LayerKind,
    MoE,
    RotaryScaling,
    TransformerConfig,
    transformer_base,
    transformer_big,
)
from transformer.models import CausalLM, Classifier, Seq2Seq

TINY = TransformerConfig(vocab_size=11, d_model=12, num_layers=2, num_heads=2, d_ff=7)
ROTARY = {"position": "rotary"}
YARN = RotaryScaling(kind="yarn", factor=4.0, original_length=64)
LLAMA3 = RotaryScaling(kind="llama3", factor=4.0, original_length=64)
ROUTED = MoE(num_experts=3, capacity_factor=1.0)

# field -> (model, changes common to both sides, the change)
CHANGES = {
    "vocab_size": (CausalLM, {}, 13),
    "source_vocab_size": (Seq2Seq, {}, 13),
    "d_model": (CausalLM, {}, 16),
    "num_layers": (CausalLM, {}, 3),
    "num_encoder_layers": (Seq2Seq, {}, 1),
    "num_decoder_layers": (Seq2Seq, {}, 1),
    "num_heads": (CausalLM, {}, 3),
    "num_kv_heads": (CausalLM, {}, 1),
    "head_dim": (CausalLM, {}, 5),
    "value_dim": (CausalLM, {}, 3),
    "d_ff": (CausalLM, {}, 5),
    "activation": (CausalLM, {}, "silu"),
    "gated": (CausalLM, {}, True),
    "use_bias": (CausalLM, {}, False),
    "norm": (CausalLM, {}, "rms_norm"),
    "norm_epsilon": (CausalLM, {}, 1e-3),
    "norm_position": (CausalLM, {}, "post"),
    "position": (CausalLM, {}, "alibi"),
    "max_length": (CausalLM, {"position": "learned", "max_length": 9}, 10),
    "rotary_base": (CausalLM, ROTARY, 99.0),
    "rotary_dim": (CausalLM, ROTARY, 2),
    "rotary_scaling": (CausalLM, ROTARY, YARN),
    "relative_buckets": (CausalLM, {"position": "t5"}, 16),
    "relative_max_distance": (CausalLM, {"position": "t5"}, 99),
    "scale_embeddings": (CausalLM, {}, False),
    "tie_embeddings": (CausalLM, {}, False),
    "dropout_rate": (CausalLM, {}, 0.1),
    "attention_dropout_rate": (CausalLM, {}, 0.1),
    "attention_scale": (CausalLM, {}, 1.0),
    "attention_softcap": (CausalLM, {}, 30.0),
    "logit_softcap": (CausalLM, {}, 30.0),
    "qk_norm": (CausalLM, {}, True),
    "attention_sinks": (CausalLM, {}, True),
    "initializer_range": (CausalLM, {}, 0.02),
    "num_classes": (Classifier, {"num_classes": 3}, 4),
    "pooling": (Classifier, {"num_classes": 3}, "first"),
    "dtype": (CausalLM, {}, "bfloat16"),
    "param_dtype": (CausalLM, {}, "bfloat16"),
    "prefix": (CausalLM, {}, (LayerKind(window=2),)),
    "period": (CausalLM, {}, (LayerKind(), LayerKind(window=2))),
    "suffix": (CausalLM, {}, (LayerKind(window=2),)),
}


def program(model: type, config: TransformerConfig) -> str:
    """The whole computation, initialization and a training-mode call, as text with its constants."""
    tokens = jnp.zeros((2, 5), jnp.int32)
    inputs = (tokens, tokens) if model is Seq2Seq else (tokens,)

    def run(key):
        params = model(config).init(key, *inputs)
        return model(config).apply(params, *inputs, deterministic=False, rngs={"dropout": key}), params

    return jax.jit(run).lower(jax.random.key(0)).as_text()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(TransformerConfig)])
def test_every_field_is_read(field):
    model, common, value = CHANGES[field]
    base = TINY.replace(**common)
    assert program(model, base) != program(model, base.replace(**{field: value}))


@pytest.mark.parametrize(
    ("scaling", "field", "value"),
    [
        (YARN, "kind", "linear"),
        (YARN, "factor", 8.0),
        (YARN, "original_length", 16),
        (LLAMA3, "low_frequency_factor", 3.0),
        (LLAMA3, "high_frequency_factor", 9.0),
        (YARN, "beta_fast", 3.0),
        (YARN, "beta_slow", 9.0),
    ],
)
def test_every_field_of_rotary_scaling_is_read(scaling, field, value):
    base = TINY.replace(position="rotary", head_dim=16, rotary_scaling=scaling)
    changed = base.replace(rotary_scaling=dataclasses.replace(scaling, **{field: value}))
    assert program(CausalLM, base) != program(CausalLM, changed)


@pytest.mark.parametrize(
    ("field", "value"),
    [("window", 2), ("rotary_base", 9.0), ("rotary_scaling", YARN), ("self_attention", False), ("moe", ROUTED)],
)
def test_every_field_of_a_layer_kind_is_read(field, value):
    base = TINY.replace(**ROTARY)
    assert program(CausalLM, base) != program(CausalLM, base.replace(period=(LayerKind(**{field: value}),)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts", 5),
        ("top_k", 3),
        ("d_ff", 5),
        ("shared_experts", 1),
        ("normalize_weights", False),
        ("capacity_factor", 0.5),
        ("load_balance_weight", 0.5),
        ("router_z_weight", 0.5),
    ],
)
def test_every_field_of_a_routed_feed_forward_is_read(field, value):
    def program(moe):
        def run(key, tokens):
            model = CausalLM(TINY.replace(period=(LayerKind(moe=moe),)))
            return model.apply(model.init(key, tokens), tokens, method=CausalLM.with_aux)

        return jax.jit(run).lower(jax.random.key(0), jnp.zeros((2, 5), jnp.int32)).as_text()

    assert program(ROUTED) != program(dataclasses.replace(ROUTED, **{field: value}))


@pytest.mark.parametrize(("field", "value"), [("scan", False), ("remat", "full"), ("attention", "chunked")])
def test_every_field_of_execution_is_read(field, value):
    def program(execution):
        def loss(params, tokens):
            return CausalLM(TINY, execution).apply(params, tokens).sum()

        tokens = jnp.zeros((2, 5), jnp.int32)
        params = jax.eval_shape(CausalLM(TINY).init, jax.random.key(0), tokens)
        return jax.jit(jax.grad(loss)).lower(params, tokens).as_text()

    assert program(Execution()) != program(Execution(**{field: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 10, "num_heads": 3}, r"d_model \(10\) must be a multiple of num_heads \(3\) .* Give head_dim"),
        ({"num_heads": 8, "num_kv_heads": 3}, r"num_heads \(8\) must be a multiple of num_kv_heads \(3\)"),
        ({"activation": "gelu_tan"}, r"activation must be one of .*got 'gelu_tan'. Did you mean 'gelu_tanh'\?"),
        ({"norm": "layernorm"}, r"Did you mean 'layer_norm'\?"),
        ({"position": "rotery"}, r"Did you mean 'rotary'\?"),
        ({"d_model": 0}, r"d_model must be a whole number of at least 1, got 0"),
        ({"num_layers": 2.5}, r"num_layers must be a whole number of at least 1, got 2.5"),
        ({"dropout_rate": 1.0}, r"dropout_rate must be a number of at least 0.0 and below 1.0, got 1.0"),
        ({"dropout_rate": None}, r"dropout_rate must be a number .*got None"),
        ({"d_model": None}, r"d_model must be a whole number .*got None"),
        ({"norm_epsilon": -1.0}, r"norm_epsilon must be a number"),
        ({"position": "learned"}, r"max_length is the number of rows .* Give max_length"),
        ({"max_length": 5}, r"max_length is the number of rows"),
        ({"position": "rotary", "head_dim": 5}, r"turn pairs .* Give an even rotary_dim"),
        ({"position": "rotary", "rotary_dim": 128}, r"turn pairs .* at most head_dim"),
        ({"d_model": 9, "num_heads": 3}, r"sinusoidal .* d_model \(9\) must be even"),
        ({"position": "t5", "relative_max_distance": 4}, r"relative_max_distance \(4\) must be above"),
        ({"period": ()}, r"period is empty"),
        ({"period": (LayerKind(), LayerKind()), "num_layers": 3}, r"num_layers \(3\) must be prefix"),
        ({"prefix": (LayerKind(),) * 7}, r"num_layers \(6\) must be prefix \(7\)"),
        ({"num_encoder_layers": 3, "period": (LayerKind(), LayerKind())}, r"num_encoder_layers \(3\) must be prefix"),
    ],
)
def test_an_impossible_model_says_what_to_change(changes, message):
    with pytest.raises(ConfigError, match=message):
        TransformerConfig(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TINY.replace(d_modle=3), r"no field 'd_modle'. Did you mean 'd_model'\?"),
        (lambda: RotaryScaling(kind="yarm", factor=2.0), r"Did you mean 'yarn'\?"),
        (lambda: RotaryScaling(kind="linear", factor=0.5), r"factor must be a number of at least 1.0, got 0.5"),
        (lambda: RotaryScaling(kind="llama3", factor=2.0, low_frequency_factor=4.0), r"must be above low_freq"),
        (lambda: RotaryScaling(kind="yarn", factor=2.0, beta_slow=40.0), r"beta_fast \(32.0\) must be above"),
        (lambda: LayerKind(window=0), r"window must be a whole number of at least 1, got 0"),
        (lambda: LayerKind(window=3, self_attention=False), r"window says how .* Leave window out, or let"),
        (lambda: MoE(num_experts=0), r"num_experts must be a whole number of at least 1, got 0"),
        (lambda: MoE(num_experts=2, top_k=3), r"top_k \(3\) must be at most num_experts \(2\). Change one"),
        (lambda: MoE(num_experts=2, top_k=1), r"the weight is always 1, and no router learns. Drop one"),
        (lambda: MoE(num_experts=2, capacity_factor=0.0), r"capacity_factor must be a number .* got 0.0"),
        (lambda: MoE(num_experts=2, shared_experts=-1), r"shared_experts must be a whole number of at least 0"),
        (lambda: MoE(num_experts=2, router_z_weight=-0.1), r"router_z_weight must be a number of at least 0.0, got"),
        (lambda: Execution(remat="dot"), r"Did you mean 'dots'\?"),
    ],
)
def test_impossible_parts_say_what_to_change(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_papers_models_have_the_papers_parameters():
    """Vaswani et al. 2017, table 3: 65 and 213 million with a shared vocabulary of 37,000."""
    for config, millions in [(transformer_base(), 65), (transformer_big(), 213)]:
        tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
        model = Seq2Seq(config.replace(vocab_size=37_000))
        params = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        assert count / 1e6 == pytest.approx(millions, rel=0.04)
    assert transformer_big(dropout_rate=0.2).d_model == 1024
