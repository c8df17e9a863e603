"""8-bit parameters: a model computes with the dequantized values, and the report states the true error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.config import MLA, Execution, LayerKind, MoE, TransformerConfig
from transformer.generate import Sampling, generate
from transformer.nn._int8 import Int8, Rule, quantize, quantized
from transformer.nn.models import CausalLM, Seq2Seq

SIZES = {"vocab_size": 40, "d_model": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "d_ff": 24}
TOKENS = jax.random.randint(jax.random.key(1), (2, 7), 0, 40)


def dequantized(params):
    return jax.tree.map(
        lambda node: node.array() if isinstance(node, Int8) else node,
        params,
        is_leaf=lambda node: isinstance(node, Int8),
    )


def test_each_number_is_the_nearest_of_255():
    array = jax.random.normal(jax.random.key(0), (3, 5, 4)).at[:, :, 1].set(0.0)
    kept = quantized(array, (-3, -2))
    assert (kept.values.dtype, kept.shape, kept.scale.shape) == (jnp.int8, array.shape, (1, 1, 4))
    assert (np.abs(kept.array() - array) <= kept.scale / 2 + 1e-7).all()
    assert (kept.array()[:, :, 1] == 0).all()
    np.testing.assert_allclose(np.abs(kept.array()).max((0, 1)), np.abs(array).max((0, 1)), rtol=1e-6)


MODELS = {
    "tied": (CausalLM, {}),
    "own output, gated, biases": (CausalLM, {"embedding.tie": False, "gated": True, "use_bias": True}),
    "bfloat16": (CausalLM, {"dtype": "bfloat16"}),
    "routed": (CausalLM, {"stack.period": (LayerKind(moe=MoE(num_experts=3, top_k=2, shared_experts=1)),)}),
    "encoder and decoder": (Seq2Seq, {}),
    "latents": (
        CausalLM,
        {
            "num_kv_heads": None,
            "attention.mla": MLA(kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
            "position": "rotary",
        },
    ),
}


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_computes_with_what_they_stand_for(kind, scan):
    cls, fields = MODELS[kind]
    model = cls(TransformerConfig(**(SIZES | fields)), Execution(scan=scan))
    inputs = (TOKENS,) * (2 if cls is Seq2Seq else 1)
    params = jax.jit(model.init)(jax.random.key(0), *inputs)["params"]
    small, report = quantize(params)
    call = jax.jit(lambda params: model.apply({"params": params}, *inputs))
    found, expected, whole = call(small), call(dequantized(small)), call(params)
    tolerance = 0.1 if kind == "bfloat16" else 1e-5
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    assert 1e-4 < np.abs(found - whole).max() < 0.15 * np.abs(whole).max()
    paths = [jax.tree_util.keystr(path) for path, leaf in jax.tree.leaves_with_path(small) if leaf.dtype == jnp.int8]
    assert not [path for path in paths if "experts" in path or "router" in path or "norm" in path or "bias" in path]
    assert len(paths) == sum(row.arrays for row in report)
    if kind == "routed":
        assert [path for path in paths if "shared" in path]


@pytest.mark.slow
def test_it_writes_text():
    model = CausalLM(TransformerConfig(**SIZES), Execution(scan=False))
    params = jax.jit(model.init)(jax.random.key(0), TOKENS)["params"]
    small, _ = quantize(params)
    options = {"max_new_tokens": 6, "sampling": Sampling(temperature=0.0)}
    expected = generate(model, dequantized(small), [[1, 2], [3]], **options)
    assert generate(model, small, [[1, 2], [3]], **options) == expected
    assert generate(model, small, [[1, 2], [3]], **options, slots=1) == expected


def test_what_is_saved_and_lost_is_told():
    params = {"embedding": {"embedding": jax.random.normal(jax.random.key(0), (64, 32))}, "other": jnp.ones(3)}
    small, (row,) = quantize(params)
    assert (row.arrays, row.bytes_before, row.bytes_after) == (1, 4 * 64 * 32, 64 * 32 + 4 * 64)
    lost = small["embedding"]["embedding"].array() - params["embedding"]["embedding"]
    expected = np.linalg.norm(lost) / np.linalg.norm(params["embedding"]["embedding"])
    assert row.relative_error == pytest.approx(expected, rel=1e-5)
    assert 0 < row.relative_error < 0.01
    assert str(row).startswith("*embedding/embedding: 1 arrays, 0.0 MiB -> 0.0 MiB, relative error 0.")
    assert small["other"] is params["other"]


def test_rules_of_ones_own():
    params = {"a": {"kernel": jnp.ones((2, 3))}, "b": {"kernel": jnp.ones((2, 3))}}
    small, _ = quantize(params, [Rule(pattern="b/kernel", inputs=(-1,))])
    assert isinstance(small["b"]["kernel"], Int8)
    assert small["b"]["kernel"].scale.shape == (2, 1)
    assert small["a"]["kernel"] is params["a"]["kernel"]


def test_what_can_not_be_quantized_is_said():
    params = {"embedding": {"embedding": jnp.ones((2, 2))}}
    with pytest.raises(ValueError, match=r"embedding/embedding is already quantized to 8 bits"):
        quantize(quantize(params)[0])
    with pytest.raises(ValueError, match=r"no parameter matches a rule: x/kernel\. Pass rules"):
        quantize(params, [Rule(pattern="x/kernel", inputs=(-1,))])
