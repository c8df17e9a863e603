"""Quantized multiplications: every intended product is quantized and no other one, with the derivatives of qwix."""

import functools
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from jax._src.ad_checkpoint import saved_residuals  # jax.ad_checkpoint only prints them
from numeric_parts import random_params

from transformer.config import MLA, ConfigError, Execution, LayerKind, MoE, RotaryOptions, TransformerConfig
from transformer.nn._moe import grouped_linear
from transformer.nn._parameter_axes import axes_of
from transformer.nn.models import CausalLM, Seq2Seq
from transformer.nn.quantization._int8 import quantized, quantized_shapes
from transformer.nn.quantization._linear import linear
from transformer.nn.quantization._schemes import SCHEMES, quantized_linear

qwix = pytest.importorskip("qwix")

SIZES = {
    "vocab_size": 40,
    "d_model": 16,
    "num_layers": 2,
    "num_heads": 4,
    "attention.num_kv_heads": 2,
    "feed_forward.d_ff": 24,
}
TOKENS = jax.device_put(np.random.default_rng(1).integers(0, 40, (2, 7)).astype(np.int32))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


MODELS = {
    "dense": (CausalLM, {"feed_forward.gated": True, "embedding.tie": False}),
    "encoder and decoder": (Seq2Seq, {}),
    "experts": (
        CausalLM,
        {"feed_forward.gated": True, "stack.period": (LayerKind(moe=MoE(num_experts=3, top_k=2, shared_experts=1)),)},
    ),
    "latents": (
        CausalLM,
        {
            "attention.num_kv_heads": None,
            "attention.mla": MLA(kv_lora_rank=6, q_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
            "position": RotaryOptions(),
        },
    ),
}


def products(jaxpr, labels):
    """Trace which parameters each matrix multiplication reads.

    Args:
        jaxpr: the program.
        labels: a set of names for each input.

    Returns:
        The names that each output descends from by other operations than multiplications and reductions, and for each
        multiplication the names and the dtypes of its two factors.
    """
    found, known = [], dict(zip(jaxpr.invars, labels, strict=True))

    def names(var):
        return known.get(var, frozenset()) if not hasattr(var, "val") else frozenset()

    def inner(jaxpr, labels):
        outs, more = products(getattr(jaxpr, "jaxpr", jaxpr), labels)
        found.extend(more)
        return outs

    for eqn in jaxpr.eqns:
        read, name, params = [names(var) for var in eqn.invars], eqn.primitive.name, eqn.params
        if name == "dot_general":
            found.append((frozenset().union(*read), [var.aval.dtype for var in eqn.invars]))
            outs = [frozenset()]
        elif name.startswith("reduce_"):  # scales
            outs = [frozenset()] * len(eqn.outvars)
        elif name == "while":
            skip = params["cond_nconsts"]
            outs = inner(params["body_jaxpr"], read[skip:])
        elif any(key in params for key in ("jaxpr", "call_jaxpr", "fun_jaxpr")):
            outs = inner(next(params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), read)
        else:
            programs = [key for key, value in params.items() if hasattr(value, "eqns") or hasattr(value, "jaxpr")]
            assert set(programs) <= {"update_jaxpr"}, name  # of a scatter
            outs = [frozenset().union(*read)] * len(eqn.outvars)
        known.update(zip(eqn.outvars, outs, strict=True))
    return [names(var) for var in jaxpr.outvars], found


def traced(kind, execution, differentiate=False):
    """Return the multiplications of a model, as `products` does, and the paths of the parameters to quantize."""
    cls, fields = MODELS[kind]
    model, inputs = cls(TransformerConfig(**(SIZES | fields)), execution), (TOKENS,) * (2 if cls is Seq2Seq else 1)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs))["params"]
    flat = flatten_dict(params, sep="/")

    def loss(*leaves):
        whole = unflatten_dict(dict(zip(flat, leaves, strict=True)), sep="/")
        return model.apply({"params": whole}, *inputs).sum()

    run = jax.grad(loss, tuple(range(len(flat)))) if differentiate else loss
    jaxpr = jax.make_jaxpr(run)(*flat.values())
    _, found = products(jaxpr.jaxpr, [frozenset([path]) for path in flat])
    return found, {path for path, leaf in flat.items() if axes_of(path, leaf.ndim).role == "hidden"}


def is_quantized(dtypes):
    return all(dtype.itemsize == 1 for dtype in dtypes)


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_exactly_the_layer_kernel_multiplications_are_quantized(kind, scan):
    found, intended = traced(kind, Execution(scan=scan, quantization="int8"))
    assert intended
    assert intended <= frozenset().union(*(names for names, _ in found))
    for names, dtypes in found:
        assert is_quantized(dtypes) == bool(names & intended), (names, dtypes)


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_quantized_gradients_quantize_every_backward_multiplication(kind):
    execution = Execution(quantization="fp8_full")
    forward = [dtypes for _, dtypes in traced(kind, execution)[0] if is_quantized(dtypes)]
    found, intended = traced(kind, execution, differentiate=True)
    both = [dtypes for _, dtypes in found if is_quantized(dtypes)]
    assert len(both) == 3 * len(forward)  # y = x W, dx = dy W^T and dW = x^T dy
    assert sum(jnp.float8_e5m2 in dtypes for dtypes in both) == 2 * len(forward)
    assert all(is_quantized(dtypes) for names, dtypes in found if names & intended)


def test_paths_select_the_quantized_multiplications():
    paths = ("feed_forward/down", "self_attention")
    found, intended = traced("dense", Execution(quantization="int8", quantization_paths=paths))
    chosen = {path for path in intended if "/feed_forward/down/" in path or "/self_attention/" in path}
    assert 0 < len(chosen) < len(intended)
    for names, dtypes in found:
        assert is_quantized(dtypes) == bool(names & chosen), (names, dtypes)


class _Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], 5))
        return jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


@pytest.mark.parametrize("name", SCHEMES)
def test_forward_and_gradients_equal_qwix(name):
    # With quantized gradients, qwix reuses the factors of the forward pass, whose scales are along other axes; we round
    # x and W again. Both are within the rounding error of 8 bits.
    scheme = SCHEMES[name]
    rule = qwix.QtRule(
        weight_qtype=jnp.dtype(scheme.dtype), act_qtype=jnp.dtype(scheme.dtype), bwd_qtype=scheme.gradient_dtype
    )
    x, dy = normal(3, 11, 7), normal(3, 11, 5, seed=1)
    params = random_params(_Dense(), x)
    theirs = qwix.quantize_model(_Dense(), qwix.QtProvider([rule]))

    @jax.jit
    def run(params, x, dy):
        y, pull = jax.vjp(theirs.apply, params, x)
        found, own = jax.vjp(lambda k, x: quantized_linear(x, k, 1, scheme), params["params"]["kernel"], x)
        return y, pull(dy), found, own(dy)

    y, (expected, dx), found, own = jax.tree.map(np.asarray, run(params, x, dy))
    np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-6)
    close = {"rtol": 1e-5, "atol": 1e-5}
    if scheme.gradient_dtype is not None:
        close = {"rtol": 0, "atol": 0.15 if "float" in scheme.dtype else 0.03}
    for ours, other in zip(own, (expected["params"]["kernel"], dx), strict=True):
        scale = np.abs(other).max()
        np.testing.assert_allclose(ours / scale, other / scale, **close)


@pytest.mark.parametrize(("name", "error"), [("int8", 0.012), ("fp8", 0.05)])
def test_quantization_changes_a_product_slightly(name, error):
    x, kernel = normal(64, 4, 16), normal(4, 16, 8, 3, seed=1)
    run = jax.jit(lambda x: linear(x, jnp.asarray(kernel), contract=2, quantization=SCHEMES[name]))
    exact, found = np.tensordot(x, kernel, 2), np.asarray(run(x))
    assert found.shape == exact.shape
    assert 1e-3 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < error
    x[0] *= 1e6
    np.testing.assert_array_equal(np.asarray(run(x))[1:], found[1:])  # each row has its own scale


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", SCHEMES)
def test_grouped_multiplications_equal_separate_experts(name):
    scheme = SCHEMES[name]
    x, kernel, dy = normal(3, 5, 8), normal(3, 8, 6, seed=1), normal(3, 5, 6, seed=2)

    @jax.jit
    def run(x, kernel, dy, expert):
        found, own = jax.vjp(lambda x, k: grouped_linear(x, k, expert, jnp.int32(3), scheme), x, kernel)
        each, pull = jax.vjp(
            lambda x, k: jnp.stack([quantized_linear(x[i], k[e], 1, scheme) for i, e in enumerate((2, 0, 1))]),
            x,
            kernel,
        )
        return (found, *own(dy)), (each, *pull(dy))

    for ours, other in zip(*run(x, kernel, dy, np.array([2, 0, 1], np.int32)), strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_scan_and_remat_change_nothing(kind):
    cls, fields = MODELS[kind]
    config = TransformerConfig(**(SIZES | fields))
    params = jax.jit(cls(config).init)(jax.random.key(0), TOKENS)["params"]

    def gradient(execution):
        model = cls(config, execution)
        run = jax.value_and_grad(lambda params: jnp.square(model.apply({"params": params}, TOKENS)).mean())
        return jax.jit(run)(params)

    expected = gradient(Execution(quantization="int8_full"))
    found = gradient(Execution(quantization="int8_full", scan=False, remat="dots"))
    # A rounding error of float32 before an integer is rounded can change it by 1.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0.05, atol=2e-3), found, expected)


@pytest.mark.cpu_only("reads the flattened products of a CPU")
def test_remat_dots_stores_rounded_products_and_not_their_integers(monkeypatch):
    # As on other devices: products of bfloat16 that a CPU computes directly have float32.
    monkeypatch.setattr("transformer.nn.quantization._linear.multiplies_bfloat16", lambda: False)

    def stored(quantization):
        config = TransformerConfig(**SIZES, dtype="bfloat16")
        model = CausalLM(config, Execution(quantization=quantization, remat="dots"))
        params = jax.eval_shape(lambda: model.init(jax.random.key(0), TOKENS))["params"]
        loss = lambda params: model.apply({"params": params}, TOKENS).sum()  # noqa: E731
        return sorted(str(kept) for kept, _ in saved_residuals(loss, params))

    assert stored("int8") == stored("fp8_full") == stored("none")


def test_8_bit_parameters_are_multiplied_by_8_bit_activations():
    model = CausalLM(TransformerConfig(**SIZES), Execution(quantization="int8"))
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), TOKENS))["params"]
    leaves, tree = jax.tree_util.tree_flatten_with_path(quantized_shapes(params, 8, 64))
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    jaxpr = jax.make_jaxpr(lambda *leaves: model.apply({"params": tree.unflatten(leaves)}, TOKENS))(
        *(leaf for _, leaf in leaves)
    )
    kernels = {path for path in paths if path.endswith("kernel/values")}
    _, found = products(jaxpr.jaxpr, [frozenset([path]) for path in paths])
    assert len(kernels) == 6
    assert kernels <= frozenset().union(*(names for names, _ in found))
    assert all(is_quantized(dtypes) for names, dtypes in found if names & kernels)


def test_multiplication_by_an_8_bit_kernel_equals_rounded_factors():

    @jax.jit
    def run(x, kernel):
        small = quantized(kernel, (0, 1))
        rows = qwix.dequantize(qwix.quantize(x, jnp.int8, channelwise_axes=[0]))
        schemes = SCHEMES["int8"], SCHEMES["int8_full"], SCHEMES["fp8"], None
        return rows, small.array(), [small.product(x, 2, scheme) for scheme in schemes]

    rows, array, products = jax.tree.map(np.asarray, run(normal(5, 4, 3), normal(4, 3, 7, seed=1)))
    for found in products[:2]:
        np.testing.assert_allclose(found, np.tensordot(rows, array, 2), rtol=1e-5, atol=1e-5)
    # No product of int8 and fp8 exists: the activations keep their dtype.
    np.testing.assert_array_equal(products[2], products[3])


@pytest.mark.parametrize(("name", "error"), [("int8", 1e-6), ("int8_full", 0.012)])
def test_gradients_pass_through_a_frozen_8_bit_kernel(name, error):
    """LoRA trains updates below frozen kernels: their gradients are those of the product with x before rounding."""

    @jax.jit
    def run(x, kernel, dy):
        small = quantized(kernel, (0, 1))
        return [
            jax.vjp(lambda x, scheme=scheme: small.product(x, 2, scheme), x)[1](dy)[0]
            for scheme in (SCHEMES[name], None)
        ]

    found, expected = map(np.asarray, run(normal(64, 4, 3), normal(4, 3, 7, 5, seed=1), normal(64, 7, 5, seed=2)))
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < error  # the rounding to 8 bits, see above


def test_rejects_invalid_options(monkeypatch):
    with pytest.raises(ConfigError, match=r"quantization.*int8.*got 'int9'"):
        Execution(quantization="int9")
    with pytest.raises(ConfigError, match=r"a tuple of strings, got the string 'up'\. Pass \('up',\)\."):
        Execution(quantization="int8", quantization_paths="up")
    with pytest.raises(ConfigError, match=r"quantization.*'none'"):
        Execution(quantization_paths=("up",))
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(ConfigError, match=r"'transformer-zoo\[quantization\]'"):
        linear(jnp.ones((2, 3)), jnp.ones((3, 4)), quantization=SCHEMES["int8"])
