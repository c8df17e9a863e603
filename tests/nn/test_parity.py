"""Comparison with PyTorch and Hugging Face: outputs and gradients of small random models in float32.

The two implementations add the same terms in a different order. For sums of a few dozen numbers the difference is a few
units in the last place (1.2e-7). The tolerance, 1e-5 of the largest number of an array, is enough for two layers.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity_tools import EPSILON, SCALINGS, close, compare, llama_config, normal, randomize

from transformer.config import FeedForwardOptions, RotaryScaling, TransformerConfig
from transformer.nn._attention import dot_product_attention
from transformer.nn._blocks import BLOCKS, LayerInputs, LayerOutput
from transformer.nn._masks import Mask
from transformer.nn._positions import ALiBi, Rotary, Sinusoidal, T5Bias
from transformer.nn._stacks import Decoder, Encoder

pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("torch")]


# Attention.

SDPA = {
    "plain": {},
    "causal": {"causal": True},
    "mask": {"mask": np.random.default_rng(5).random((2, 1, 5, 7)) > 0.4},
    "mask by head": {"mask": np.random.default_rng(6).random((2, 6, 5, 7)) > 0.4},
    "row that sees nothing": {"mask": np.arange(5)[:, None] > np.arange(7)},
    "bias": {"bias": normal(7, 1, 6, 5, 7)},
    "scale": {"scale": 0.7},
    "grouped": {"kv_heads": 2, "causal": True},
    "one key head": {"kv_heads": 1, "scale": 0.3},
}


@pytest.mark.parametrize("case", SDPA)
def test_attention_equals_torch(torch, case):
    """scaled_dot_product_attention: heads before positions, causal from the top left corner, any value size."""
    case = {"kv_heads": 6, "scale": None, "causal": False, "mask": None, "bias": None} | SDPA[case]
    kv_heads = case["kv_heads"]
    arrays = normal(1, 2, 5, 6, 3), normal(2, 2, 7, kv_heads, 3), normal(3, 2, 7, kv_heads, 11)
    weights = normal(4, 2, 5, 6, 11)

    tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
    term = case["mask"] if case["bias"] is None else case["bias"]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *[tensor.transpose(1, 2) for tensor in tensors],
        attn_mask=None if term is None else torch.tensor(term),
        is_causal=case["causal"],
        scale=case["scale"],
        enable_gqa=kv_heads != 6,
    ).transpose(1, 2)
    (theirs * torch.tensor(weights)).sum().backward()

    @jax.jit
    def ours(*arrays):
        mask, bias = [None if x is None else jnp.asarray(x) for x in (case["mask"], case["bias"])]
        mask = Mask.causal() if case["causal"] else mask
        out = dot_product_attention(*arrays, mask=mask, bias=bias, scale=case["scale"])
        return (out * weights).sum(), out

    (_, out), gradients = jax.value_and_grad(ours, argnums=(0, 1, 2), has_aux=True)(*map(jnp.asarray, arrays))
    close(out, theirs)
    for mine, tensor in zip(gradients, tensors, strict=True):
        close(mine, tensor.grad)


# torch.nn.Transformer.

ENCODER_LAYER = {
    "self_attention/query": "self_attn.in_proj_{}[0]",
    "self_attention/key": "self_attn.in_proj_{}[1]",
    "self_attention/value": "self_attn.in_proj_{}[2]",
    "self_attention/out": "self_attn.out_proj.{}",
    "attention_norm": "norm1.{}",
    "feed_forward/up": "linear1.{}",
    "feed_forward/down": "linear2.{}",
    "feed_forward_norm": "norm2.{}",
}
DECODER_LAYER = ENCODER_LAYER | {
    "cross_attention/query": "multihead_attn.in_proj_{}[0]",
    "cross_attention/key": "multihead_attn.in_proj_{}[1]",
    "cross_attention/value": "multihead_attn.in_proj_{}[2]",
    "cross_attention/out": "multihead_attn.out_proj.{}",
    "cross_attention_norm": "norm2.{}",
    "feed_forward_norm": "norm3.{}",
}
LENGTHS = np.array([7, 4], np.int32)
X, CONTEXT = normal(11, 2, 5, 15), normal(12, 2, 7, 15)


def stack_rules(layer, ours="", theirs=""):
    rules = {f"{ours}layers/slot_0/{path}": f"{theirs}layers.*.{name}" for path, name in layer.items()}
    return rules | {f"{ours}final_norm": f"{theirs}norm.{{}}"}


def paper_config(order, activation="relu", **changes):
    sizes = {"d_model": 15, "num_heads": 3, "feed_forward.d_ff": 13, "num_layers": 2}
    norms = {"norm.position": order, "norm.epsilon": EPSILON}
    return TransformerConfig(
        **sizes, **norms, feed_forward=FeedForwardOptions(activation=activation), position=None, **changes
    )


def torch_layer(torch, kind, order, activation="relu"):
    return getattr(torch.nn, f"Transformer{kind}Layer")(
        *(15, 3, 13),
        dropout=0.0,
        activation=activation,
        layer_norm_eps=EPSILON,
        batch_first=True,
        norm_first=order == "pre",
    )


def torch_stack(torch, kind, order):
    """Build PyTorch's stack of layers.

    With post-norm there is no final norm, as in the paper (section 3.1), because each layer ends with one.
    nn.Transformer would add it.
    """
    norm = torch.nn.LayerNorm(15, eps=EPSILON) if order == "pre" else None
    options = {"enable_nested_tensor": False} if kind == "Encoder" else {}
    return getattr(torch.nn, f"Transformer{kind}")(torch_layer(torch, kind, order), 2, norm, **options)


def hidden_keys(torch):
    """Return PyTorch's key_padding_mask, in which True means hidden."""
    return torch.arange(7)[None] >= torch.tensor(LENGTHS)[:, None]


def causal(torch):
    return torch.nn.Transformer.generate_square_subsequent_mask(5)


def first(results):
    """Return the hidden states, the first result of a block or stack; return variables unchanged."""
    results = results.x if isinstance(results, LayerOutput) else results
    return results[0] if isinstance(results, tuple) else results


@pytest.mark.parametrize(("order", "activation", "theirs"), [("post", "relu", "relu"), ("pre", "gelu_erf", "gelu")])
def test_encoder_layer_equals_torch(torch, order, activation, theirs):
    layer = randomize(torch, torch_layer(torch, "Encoder", order, theirs))
    compare(
        torch,
        layer,
        lambda x: layer(x, src_key_padding_mask=hidden_keys(torch)),
        ENCODER_LAYER,
        BLOCKS[order](paper_config(order, activation)),
        lambda apply, x: first(apply(x, LayerInputs(mask=Mask.lengths(jnp.asarray(LENGTHS))))),
        CONTEXT,
        gradients_of=1,
    )


@pytest.mark.parametrize(("order", "activation", "theirs"), [("post", "gelu_erf", "gelu"), ("pre", "relu", "relu")])
def test_decoder_layer_equals_torch(torch, order, activation, theirs):
    layer = randomize(torch, torch_layer(torch, "Decoder", order, theirs))
    compare(
        torch,
        layer,
        lambda x, context: layer(x, context, causal(torch), memory_key_padding_mask=hidden_keys(torch)),
        DECODER_LAYER,
        BLOCKS[order](paper_config(order, activation), causal=True, cross=True),
        lambda apply, x, context: first(
            apply(x, LayerInputs(mask=Mask.causal(), context=context, context_mask=Mask.lengths(jnp.asarray(LENGTHS))))
        ),
        X,
        CONTEXT,
        gradients_of=2,
    )


class EncoderDecoder(nn.Module):
    """Encoder and decoder over vectors, like torch.nn.Transformer."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x, y, mask):
        context = Encoder(self.config, name="encoder")(x, mask=mask)[0]
        return Decoder(self.config, cross=True, name="decoder")(y, context, context_mask=mask)[0]


@pytest.mark.parametrize("order", ["post", "pre"])
def test_encoder_and_decoder_equal_torch(torch, order):
    stacks = {f"custom_{kind.lower()}": torch_stack(torch, kind, order) for kind in ("Encoder", "Decoder")}
    both = randomize(torch, torch.nn.Transformer(15, 3, batch_first=True, **stacks))
    hidden = hidden_keys(torch)
    rules = stack_rules(ENCODER_LAYER, "encoder/", "encoder.") | stack_rules(DECODER_LAYER, "decoder/", "decoder.")
    compare(
        torch,
        both,
        lambda x, y: both(x, y, tgt_mask=causal(torch), src_key_padding_mask=hidden, memory_key_padding_mask=hidden),
        rules,
        EncoderDecoder(paper_config(order)),
        lambda apply, x, y: apply(x, y, Mask.lengths(jnp.asarray(LENGTHS))),
        CONTEXT,
        X,
        gradients_of=2,
    )


# Positions.


@pytest.mark.parametrize("case", SCALINGS)
@pytest.mark.parametrize("size", [64, 128])
def test_rotary_frequencies_equal_transformers(transformers, case, size):
    """Hugging Face computes them in float32, this library in float64."""
    base, ours, theirs = SCALINGS[case]
    kind = case.split(",")[0]
    config = llama_config(
        transformers,
        base,
        {"rope_type": kind, **theirs},
        hidden_size=2 * size,
        num_attention_heads=2,
        **{"attention.head_dim": size},
    )
    if kind == "default":
        frequencies, factor = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq, 1.0
    else:
        frequencies, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](config)
    rotary = Rotary(base=base, scaling=None if ours is None else RotaryScaling(**ours))
    np.testing.assert_allclose(rotary.frequencies(size), frequencies.numpy(), rtol=1e-5)
    assert rotary.magnitude == pytest.approx(factor, rel=1e-9)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (64, 1000)])
def test_t5_buckets_equal_transformers(torch, transformers, bidirectional, buckets, max_distance):
    distance = np.arange(-1100, 1101, dtype=np.int32)
    bucket = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket
    theirs = bucket(torch.tensor(distance, dtype=torch.long), bidirectional, buckets, max_distance)
    ours = T5Bias(num_heads=3, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional)
    np.testing.assert_array_equal(ours.bucket(jnp.asarray(distance)), theirs.numpy())


@pytest.mark.parametrize("num_heads", [1, 2, 3, 8, 12, 16, 23])
def test_alibi_equals_bloom(torch, transformers, num_heads):
    """Hugging Face omits a constant per query, so differences to the first key are compared."""
    build = transformers.models.bloom.modeling_bloom.build_alibi_tensor
    theirs = build(torch.ones(1, 7), num_heads, torch.float32).reshape(num_heads, 7)
    last = jnp.full((1, 1), 6)
    bias = ALiBi(num_heads=num_heads).bias(last, jnp.arange(7)[None])[0, :, 0]
    close(bias - bias[:, :1], theirs, 1e-6)


def test_sinusoids_equal_marian(transformers):
    """Marian has all sines before all cosines. Reducing angles modulo 2 pi has an error of 1e-6 at these positions."""
    embedding = transformers.models.marian.modeling_marian.MarianSinusoidalPositionalEmbedding(301, 14)
    ours = np.asarray(Sinusoidal().encoding(jnp.arange(301)[None], 14)[0])
    close(np.concatenate([ours[:, 0::2], ours[:, 1::2]], -1), embedding.create_weight())
