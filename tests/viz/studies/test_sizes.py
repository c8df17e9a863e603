"""Tests of the array shapes between tokens and logits, for each kind of model; nothing is computed."""

import jax
import jax.numpy as jnp
import pytest

from transformer.config import AttentionOptions, Execution, FeedForwardOptions, LayerKind, TransformerConfig
from transformer.nn._attention import MultiHeadAttention
from transformer.nn.models import CausalLM, Classifier, Seq2Seq
from transformer.viz.studies._sizes import sizes, sizes_table

CONFIG = TransformerConfig(
    vocab_size=31,
    d_model=22,
    num_layers=3,
    num_heads=6,
    attention=AttentionOptions(num_kv_heads=3, head_dim=4, value_dim=5),
    feed_forward=FeedForwardOptions(d_ff=13),
)
TOKENS = jax.ShapeDtypeStruct((2, 7), jnp.int32)


def shapes(found, place):
    return [(size.axes, size.shape) for size in found if size.place == place]


def test_lists_attention_step_by_step():
    attention = MultiHeadAttention(num_heads=6, num_kv_heads=3, head_dim=4, value_dim=5)
    found = sizes(attention, jax.ShapeDtypeStruct((2, 7, 22), jnp.float32))
    assert [(size.axes, size.shape) for size in found] == [
        ("B T N H", (2, 7, 6, 4)),
        ("B S K H", (2, 7, 3, 4)),
        ("B S K Hv", (2, 7, 3, 5)),
        ("B N T S", (2, 6, 7, 7)),
        ("B T N Hv", (2, 7, 6, 5)),
        ("B T D", (2, 7, 22)),
    ]


@pytest.mark.parametrize("scan", [True, False])
def test_reports_repeated_layers_once_with_their_number(scan):
    found = sizes(CausalLM(CONFIG, Execution(scan=scan)), TOKENS)
    layers = [size for size in found if "layers" in size.place]
    assert {size.repeats for size in layers} == {3}
    assert {size.repeats for size in found if "layers" not in size.place} == {1}
    assert len(layers) == len(set(layers)) == 11
    assert shapes(found, "decoder/layers/slot_0/feed_forward/up") == [("B T F", (2, 7, 13))]
    assert (found[-1].what, found[-1].shape) == ("logits", (2, 7, 31))


def test_cross_attention_reads_the_source():
    found = sizes(
        Seq2Seq(CONFIG.replace(**{"stack.num_encoder_layers": 2})), jax.ShapeDtypeStruct((2, 5), jnp.int32), TOKENS
    )
    cross = "decoder/layers/slot_0/cross_attention"
    assert shapes(found, f"{cross}/query") == [("B T N H", (2, 7, 6, 4))]
    assert shapes(found, f"{cross}/key") == [("B S K H", (2, 5, 3, 4))]
    assert ("B N T S", (2, 6, 7, 5)) in shapes(found, cross)
    assert {size.repeats for size in found if size.place.startswith("encoder/layers")} == {2}
    assert shapes(found, "embedding") == [("B T D", (2, 5, 22)), ("B T D", (2, 7, 22))]


def test_supports_other_models_and_layer_kinds():
    found = sizes(Classifier(CONFIG.replace(**{"output.num_classes": 3})), TOKENS)
    assert (found[-1].axes, found[-1].shape) == ("B C", (2, 3))
    blind = sizes(CausalLM(CONFIG.replace(**{"stack.period": (LayerKind(self_attention=False),)})), TOKENS)
    assert not [size for size in blind if "attention" in size.place + size.what]
    gated = sizes(
        CausalLM(CONFIG.replace(**{"feed_forward.gated": True, "stack.prefix": (LayerKind(),)}, num_layers=4)), TOKENS
    )
    assert shapes(gated, "decoder/prefix_0/feed_forward/gate") == [("B T F", (2, 7, 13))]


def test_only_shapes_are_computed():
    """The sizes of a model that would need terabytes of memory can be printed."""
    config = TransformerConfig(vocab_size=10**6, d_model=2**16, num_layers=100, num_heads=2**9)
    found = sizes(CausalLM(config), jax.ShapeDtypeStruct((1, 2**20), jnp.int32))
    assert found[-1].shape == (1, 2**20, 10**6)


def test_the_table_is_indented_by_module_depth():
    table = sizes_table(sizes(CausalLM(CONFIG), TOKENS))
    lines = table.splitlines()
    assert "  layers, 3 times:" in lines
    assert "        query = x W_Q, all heads in one matrix multiplication  B T N H   2 x 7 x 6 x 4" in lines
    assert lines[-1].split() == ["logits", "B", "T", "V", "2", "x", "7", "x", "31"]
    assert len([line for line in lines if line == "      self_attention:"]) == 1
