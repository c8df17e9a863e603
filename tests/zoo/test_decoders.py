"""Decoder families (Mistral, Qwen, Gemma, Mixtral, GPT-NeoX, OLMo 2, Phi-3): config fields and tensors of files."""

import contextlib
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import case as golden_case
from golden import ours
from golden.case import numbers
from kernel_parts import put

from transformer.config import LayerKind, MoE, RotaryScaling, TransformerConfig
from transformer.config._layer_patterns import fold
from transformer.nn._masks import Mask
from transformer.nn.models import CausalLM, Embedder
from transformer.zoo import ENTRIES, load_pretrained
from transformer.zoo.weights._files import write_weights
from transformer.zoo.weights._rules import layer_kinds

SIZES = {
    "vocab_size": 37,
    "hidden_size": 12,
    "intermediate_size": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 4,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def head_of(family):
    return next(iter(ENTRIES[family].heads.items()))


def read(family, **fields):
    """Return the config that a family reads from these fields and `SIZES`."""
    return ENTRIES[family].read(SIZES | fields, head_of(family)[1])


def write(family, config):
    return ENTRIES[family].write(config, head_of(family)[0])


def windows(config):
    return [kind.window for kind in layer_kinds(config, config.num_layers)]


def test_folded_layers_equal_the_list():
    kinds = [LayerKind(window=window) for window in (3, 5)]
    for length in range(1, 8):
        for choice in itertools.product(kinds, repeat=length):
            config = TransformerConfig(num_layers=length, **fold(choice))
            assert layer_kinds(config, length) == list(choice)
    local, full = LayerKind(window=3), LayerKind()
    folded = fold(([local] * 5 + [full]) * 4 + [local] * 2)
    assert folded == {"stack.prefix": (), "stack.period": (*[local] * 5, full), "stack.suffix": (local, local)}


def test_reads_attention_windows():
    assert windows(read("mistral")) == [4096] * 2
    assert windows(read("mistral", sliding_window=None)) == [None] * 2
    assert windows(read("mixtral")) == [None] * 2
    sliding = {"use_sliding_window": True, "sliding_window": 7, "num_hidden_layers": 4}
    for family in ("qwen2", "qwen3"):
        assert windows(read(family, sliding_window=7, max_window_layers=1)) == [None] * 2
        upper = read(family, **sliding, max_window_layers=3)
        assert windows(upper) == [None, None, None, 7]
        assert write(family, upper)["max_window_layers"] == 3
        assert windows(read(family, **sliding, layer_types=[SLIDING, FULL, FULL, SLIDING])) == [7, None, None, 7]
    assert windows(read("qwen3_moe", **sliding)) == [7] * 4
    assert windows(read("gemma2", num_hidden_layers=3)) == [4096, None, 4096]
    assert windows(read("gemma2", sliding_window=7, layer_types=[FULL, SLIDING])) == [None, 7]
    assert windows(read("gemma3_text", num_hidden_layers=7)) == [4096] * 5 + [None, 4096]
    assert windows(read("gemma3_text", num_hidden_layers=4, sliding_window_pattern=2)) == [4096, None] * 2


def test_gemma_3_rotates_local_and_global_layers_differently():
    """Fields of published files and of transformers 5 give the same config."""
    old = {"rope_theta": 900, "rope_local_base_freq": 50, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        FULL: {"rope_type": "linear", "rope_theta": 900.0, "factor": 8.0},
        SLIDING: {"rope_type": "default", "rope_theta": 50.0},
    }
    fields = {"num_hidden_layers": 6, "sliding_window": 7}
    config = read("gemma3_text", **fields, **old)
    assert config == read("gemma3_text", **fields, rope_parameters=new)
    *local, last = layer_kinds(config, 6)
    assert set(local) == {LayerKind(window=7, rotary_base=50.0)}
    assert last == LayerKind(rotary_scaling=RotaryScaling(kind="linear", factor=8.0))
    assert config.rotary.base == 900.0
    assert write("gemma3_text", config)["rope_parameters"] == new

    bases = [kind.rotary_base for kind in layer_kinds(read("gemma3_text", num_hidden_layers=6), 6)]
    assert bases == [10_000.0] * 5 + [None]
    assert read("gemma3_text", num_hidden_layers=6).rotary.base == 1_000_000.0


def test_gemma_uses_its_query_scale():
    config = read("gemma2", query_pre_attn_scalar=144)
    assert config.attention.scale == pytest.approx(1 / 12)
    assert write("gemma2", config)["query_pre_attn_scalar"] == 144
    with pytest.raises(ValueError, match=r"attention.scale.*0\.3"):
        write("gemma2", config.replace(**{"attention.scale": 0.3}))


def test_reads_experts():
    config = read("mixtral", num_local_experts=5, num_experts_per_tok=2, num_hidden_layers=2)
    assert config.stack.period[0].moe == MoE(num_experts=5, top_k=2, load_balance_weight=0.001, router_z_weight=0.0)
    some = {"num_hidden_layers": 5, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 7}
    config = read("qwen3_moe", **some, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [kind.moe is not None for kind in layer_kinds(config, 5)] == [False, True, False, False, False]
    moe = layer_kinds(config, 5)[1].moe
    assert (moe.num_experts, moe.top_k, moe.d_ff, moe.normalize_weights) == (5, 3, 7, False)
    assert write("qwen3_moe", config)["mlp_only_layers"] == [0, 2, 3, 4]
    assert windows(read("qwen3_moe", num_experts=0)) == [None] * 2


@pytest.mark.parametrize(("family", "experts"), [("mixtral", 2), ("qwen3_moe", 3)])
def test_router_losses_do_not_prevent_saving(family, experts):
    config = read(family, num_experts_per_tok=experts, router_aux_loss_coef=0.02, num_hidden_layers=3)
    (kind,) = config.stack.period
    assert kind.moe.load_balance_weight == pytest.approx(0.02 * experts / 3)
    assert write(family, config)["router_aux_loss_coef"] == 0.02

    def with_moe(**changes):
        moe = MoE(**{**vars(kind.moe), **changes})
        return config.replace(**{"stack.period": (LayerKind(window=kind.window, moe=moe),)})

    written = write(family, with_moe(load_balance_weight=0.5, router_z_weight=0.25, d_ff=23))
    assert written["intermediate_size" if family == "mixtral" else "moe_intermediate_size"] == 23
    for change in ({"capacity_factor": 1.5}, {"shared_experts": 1}):
        with pytest.raises(ValueError, match="no counterpart for this model: layers is"):
            write(family, with_moe(**change))


def test_different_layers_are_compared_individually():
    """Equivalent configs have the same canonical form; layers without attention have no rotary positions."""
    config = read("mistral", sliding_window=7, num_hidden_layers=4)
    same = config.replace(
        **{"stack.prefix": config.stack.period, "stack.period": (LayerKind(window=7, rotary_base=10_000.0),)}
    )
    assert write("mistral", same) == write("mistral", config)
    with pytest.raises(ValueError, match="no counterpart for this model: layers is"):
        write("mistral", config.replace(**{"stack.period": (LayerKind(window=7), LayerKind(window=5))}))
    with pytest.raises(ValueError, match="no counterpart for this model: layers is"):
        write("mistral", config.replace(**{"stack.period": (LayerKind(self_attention=False),)}))


def test_reads_rotary_fields():
    scaled = {"rope_type": "linear", "factor": 2.0}
    for name in ("rope_parameters", "rope_scaling"):
        config = read("mistral", **{name: scaled}, rope_theta=99.0)
        assert (config.rotary.base, config.rotary.scaling) == (99.0, RotaryScaling(kind="linear", factor=2.0))
    with pytest.raises(ValueError, match=r"partial_rotary_factor.*0\.5"):
        read("mistral", partial_rotary_factor=0.5)
    for rotated, head in ((2, 49), (30, 44), (6, 47), (44, 44)):  # 30 / 44 * 44 is less than 30
        fields = {"hidden_size": 3 * head, "rotary_pct": math.nextafter(rotated / head, 2.0), "intermediate_size": 19}
        sizes = {name: SIZES[name] for name in ("vocab_size", "num_hidden_layers", "num_attention_heads")}
        neox = ENTRIES["gpt_neox"]
        config = neox.read(sizes | fields, head_of("gpt_neox")[1])
        assert config.rotary.dim == (None if rotated == head else rotated)
        assert (
            neox.read(neox.write(config, "GPTNeoXForCausalLM"), head_of("gpt_neox")[1]).rotary.dim == config.rotary.dim
        )


LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("qwen2", {"layer_types": [FULL]}, r"layer_types.*1.*2"),
        ("qwen2", {"layer_types": [FULL, SLIDING]}, r"sliding_attention.*sliding_window"),
        ("smollm3", {"layer_types": [FULL, SLIDING], "sliding_window": 3}, r"sliding_attention.*use_sliding_window"),
        ("gemma2", {"layer_types": [FULL, "blockwise_attention"]}, r"layer_types.*blockwise_attention"),
        ("gemma2", {"use_bidirectional_attention": True}, r"use_bidirectional_attention"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping.*50\.0"),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_theta": 9.0}},
            r"rope_parameters.*rope_theta",
        ),
        ("gemma3_text", {"rope_scaling": {"partial_rotary_factor": 0.5}}, "this family always rotates whole heads"),
        ("mixtral", {"num_experts_per_tok": 9}, r"top_k \(9\).*num_experts \(8\)"),
        ("olmo2", {"clip_qkv": 8.0}, r"clip_qkv"),
        ("phi3", {"rope_scaling": LONGROPE | {"long_factor": [1.0] * 3}}, "must have the same number of factors"),
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0]}}, r"long_factor"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "supports only default and longrope"),
        ("mistral", {"rope_scaling": LONGROPE | {"short_factor": 1.0}}, r"short_factor"),
        ("phi3", {"attention_bias": True}, r"attention_bias"),
    ],
)
def test_rejects_unsupported_settings(family, fields, message):
    with pytest.raises(ValueError, match=message):
        read(family, **fields)


PUBLISHED = {
    "mistral": {"model.layers.1.self_attn.rotary_emb.inv_freq": (2,)},
    "gpt_neox": {
        "gpt_neox.layers.0.attention.bias": (1, 1, 64, 64),
        "gpt_neox.layers.1.attention.masked_bias": (),
        "gpt_neox.layers.1.attention.rotary_emb.inv_freq": (1,),
    },
}


@pytest.mark.parametrize("family", ["mistral", "gpt_neox", "gemma2"])
def test_buffers_of_published_files_are_ignored(tmp_path, family):
    record = golden_case.golden(family)["lm"]
    tensors = {name: numbers(name, tuple(shape)) for name, shape in record["tensors"].items()}
    more = {name: numbers(name, shape) for name, shape in PUBLISHED.get(family, {}).items()}
    if record["config"]["tie_word_embeddings"]:
        more["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert more
    write_weights(tmp_path / "published", record["config"], tensors | more)
    loaded, plain = load_pretrained(tmp_path / "published"), load_pretrained(ours.write(tmp_path / "plain", record))
    jax.tree.map(np.testing.assert_array_equal, loaded.params, plain.params)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("tied", [True, False])
def test_reads_the_base_model_of_a_language_model(tmp_path, family, tied):
    """As in the files of Qwen3-Embedding, whose config.json names the language model."""
    record = golden_case.golden(family)["lm"]
    tensors = {
        name: numbers(name, tuple(shape)) for name, shape in record["tensors"].items() if name != "lm_head.weight"
    }
    config = record["config"] | {"tie_word_embeddings": tied}
    head = {} if tied else {"lm_head.weight": numbers("lm_head.weight", tensors["model.embed_tokens.weight"].shape)}
    write_weights(tmp_path / "whole", config, tensors | head)
    write_weights(tmp_path / "base", config, {name.removeprefix("model."): array for name, array in tensors.items()})
    whole = load_pretrained(tmp_path / "whole")
    with (
        contextlib.nullcontext() if tied else pytest.warns(UserWarning, match=r"lm_head\.weight.*Model.*architecture=")
    ):
        base = load_pretrained(tmp_path / "base")
    assert isinstance(base.model, CausalLM if tied else Embedder)
    tokens, lengths = put(np.arange(1, 11).reshape(2, 5)), np.array([5, 3])
    hidden = jax.jit(lambda params: whole.model.apply({"params": params}, tokens, method="hidden"))(whole.params)

    @jax.jit
    def states(params):
        if tied:
            return base.model.apply({"params": params}, tokens, method="hidden")
        return base.model.apply({"params": params}, tokens, mask=Mask.lengths(put(lengths)))

    expected = np.asarray(hidden) if tied else np.asarray(hidden)[np.arange(2), lengths - 1]
    np.testing.assert_allclose(states(base.params), expected, atol=1e-5)


def test_published_fields_that_change_nothing_are_read():
    read("gemma2", hidden_act="gelu_pytorch_tanh", sliding_window_size=4096, cache_implementation="hybrid")
    read("gemma3_text", _sliding_window_pattern=6, use_bidirectional_attention=False)
    read("qwen3_moe", max_window_layers=48, output_router_logits=False)
    read("mixtral", router_jitter_noise=0.0)
    read("phi3", embd_pdrop=0.0, original_max_position_embeddings=4096, attention_bias=False)


@pytest.mark.parity
def test_the_load_balance_loss_of_one_layer_equals_the_reference(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import torch
    from golden import reference

    case = golden_case.cases("mixtral")["lm"]
    case = golden_case.Case(case.architecture, case.config, case.values | {"num_hidden_layers": 1})
    theirs, _ = reference.fill(reference.build(case), case, tmp_path)
    loaded = load_pretrained(tmp_path)
    tokens = jnp.asarray(golden_case.tokens(1, 37, 1, case.length))
    with torch.no_grad():
        expected = theirs(torch.tensor(np.asarray(tokens), dtype=torch.long), output_router_logits=True).aux_loss
    _, aux = loaded.model.apply({"params": loaded.params}, tokens, method="with_aux")
    # The reference returns a mean without the coefficient. Ours is a sum over tokens, with the coefficient included.
    got = aux["load_balance"][0] / case.length
    assert got == pytest.approx(loaded.fields["router_aux_loss_coef"] * float(expected), rel=1e-5)
