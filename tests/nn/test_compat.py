"""`transformer.nn.compat` against Flax's own classes."""

import dataclasses
import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numeric_parts import random_params

from transformer import Mask, compat

SEEDS = range(16)
KEY = jax.device_put(np.array([0, 3], np.uint32))
"""a random key, in the old format, because `jax.random.key` compiles a program"""


def normal(seed, *shape):
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


X = normal(0, 2, 5, 12)


def drawn(seed):
    """Draw the fields, inputs and arguments of one call, with any number of batch axes."""
    rng = np.random.default_rng(seed)
    pick = lambda *choices: choices[rng.integers(len(choices))]  # noqa: E731
    lead, queries, heads = pick((2,), (3,), (2, 3), ()), int(rng.integers(1, 8)), pick(1, 2, 3)
    keys = queries if rng.random() < 0.5 else int(rng.integers(1, 8))
    normal = lambda *shape: jax.device_put(rng.normal(size=shape).astype(np.float32))  # noqa: E731
    fields = {
        "num_heads": heads,
        "qkv_features": pick(None, 6 * heads),
        "out_features": pick(None, 5),
        "use_bias": pick(True, False),
        "normalize_qk": pick(True, False),
        "broadcast_dropout": pick(True, False),
        "dropout_rate": pick(0.0, 0.4),
        "precision": pick(None, jax.lax.Precision.HIGHEST, "high"),
        "force_fp32_for_softmax": pick(True, False),
        "dtype": pick(None, jnp.float32),
        "kernel_init": pick(nn.initializers.lecun_normal(), nn.initializers.xavier_uniform()),
        "out_kernel_init": pick(None, nn.initializers.normal(0.3)),
        "bias_init": pick(nn.initializers.zeros, nn.initializers.normal(1.0)),
        "out_bias_init": pick(None, nn.initializers.ones),
    }
    if fields["dropout_rate"] and rng.random() < 0.3:
        fields["deterministic"] = True
    inputs = [normal(*lead, queries, 6)]
    inputs += pick([], [normal(*lead, keys, 7)], [normal(*lead, keys, 7), normal(*lead, keys, 3)])
    last = keys if len(inputs) > 1 else queries
    padding = rng.random((*lead, 1, 1, last)) < 0.7
    dense = rng.random((*lead, heads, queries, last)) < 0.6  # some queries may see no key
    tri = np.tri(queries, last, dtype=np.float32)
    mask = pick(None, padding, dense, dense.astype(np.float32), dense[..., :1, :, :], tri)
    mask = mask if mask is None else jax.device_put(mask)
    options = {"mask": mask, "dropout_rng": pick(None, jax.random.key(seed))}
    if fields["dropout_rate"] and "deterministic" not in fields:
        options["deterministic"] = pick(True, False)
    return fields, inputs, options


def call(module, params, inputs, options, key=KEY):
    """Return the output, the sown weights and all gradients."""

    def loss(params, inputs):
        out, sown = module.apply(
            params, *inputs, **options, sow_weights=True, mutable="intermediates", rngs={"dropout": key}
        )
        return jnp.square(out).mean(), (out, sown)

    (_, results), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, inputs)
    return results, gradients


def assert_close(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: close(np.asarray(a, np.float32), np.asarray(b, np.float32)), ours, theirs)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed < 4 else pytest.mark.slow) for seed in SEEDS])
def test_random_arguments_give_the_results_of_flax(seed):
    fields, inputs, options = drawn(seed)
    theirs, ours = nn.MultiHeadDotProductAttention(**fields), compat.MultiHeadDotProductAttention(**fields)
    rngs = {"params": jax.random.key(seed), "dropout": KEY}
    params, own = jax.jit(lambda: [one.init(rngs, *inputs, **options) for one in (theirs, ours)])()
    jax.tree.map(np.testing.assert_array_equal, own, params)
    assert_close(call(ours, params, inputs, options), call(theirs, params, inputs, options))


def test_signatures_equal_flax():
    ours, theirs = compat.MultiHeadDotProductAttention, nn.MultiHeadDotProductAttention
    fields = {field.name: field.default for field in dataclasses.fields(theirs)}
    assert {field.name: field.default for field in dataclasses.fields(ours)} | {"attention_fn": None} == fields | {
        "attention_fn": None
    }

    def arguments(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert arguments(ours.__call__) == arguments(theirs.__call__)
    assert arguments(compat.dot_product_attention)[:-1] == arguments(nn.dot_product_attention)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtypes_equal_flax(dtype):
    for fields, x in [
        ({"dtype": dtype}, X),
        ({"param_dtype": dtype}, X),
        ({"param_dtype": dtype}, np.asarray(X).astype(dtype)),
    ]:
        theirs, ours = (m(3, **fields) for m in (nn.MultiHeadDotProductAttention, compat.MultiHeadDotProductAttention))
        params = random_params(theirs, x)
        expected, got = jax.jit(lambda params, x: (theirs.apply(params, x), ours.apply(params, x)))(params, x)  # noqa: B023
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(np.float32(got), np.float32(expected), rtol=0.03, atol=0.03)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("lead", [(2,), (2, 3)])
def test_decoding_step_by_step_equals_flax(lead):
    """A collection `cache` that one implementation fills can be read by the other."""
    x = np.asarray(normal(1, *lead, 4, 6))
    mask = np.broadcast_to(np.arange(4) != 1, (*lead, 1, 1, 4))
    fields = {"num_heads": 2, "decode": True}
    theirs, ours = nn.MultiHeadDotProductAttention(**fields), compat.MultiHeadDotProductAttention(**fields)
    variables, own = jax.jit(lambda x: (theirs.init(KEY, x), ours.init(KEY, x)))(x)
    jax.tree.map(np.testing.assert_array_equal, own, variables)
    params, caches = variables["params"], [variables["cache"]] * 2

    @jax.jit
    def step(params, x, caches):
        pairs = zip((theirs, ours), caches, strict=True)
        return [one.apply({"params": params, "cache": cache}, x, mask=mask, mutable="cache") for one, cache in pairs]

    for t in range(4):
        (expected, first), (out, second) = step(params, x[..., t : t + 1, :], caches)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
        caches = [second["cache"], first["cache"]]  # each continues with the cache of the other


ONES = np.ones((2, 5, 12), np.float32)
MISUSES = {
    "heads": ({"num_heads": 5}, (ONES,), {}),
    "value without key": ({}, (ONES, None, ONES), {}),
    "both": ({}, (ONES, ONES), {"inputs_kv": ONES}),
    "batch": ({}, (ONES, ONES[:1]), {}),
    "lengths": ({}, (ONES, ONES, ONES[:, :3]), {}),
    "axes": ({}, (ONES, ONES[0]), {}),
    "mask": ({}, (ONES,), {"mask": np.ones((2, 1, 5, 4), bool)}),
    "mask of three axes": ({}, (ONES,), {"mask": np.ones((2, 5, 5), bool)}),
    "no deterministic": ({"dropout_rate": 0.5}, (ONES,), {}),
    "deterministic twice": ({"dropout_rate": 0.5, "deterministic": True}, (ONES,), {"deterministic": True}),
    "no rng": ({"dropout_rate": 0.5}, (ONES,), {"deterministic": False}),
    "unknown argument": ({}, (ONES,), {"masks": None}),
    "unknown field": ({"heads": 2}, (ONES,), {}),
    "precision": ({"precision": "exact"}, (ONES,), {}),
}


@pytest.mark.parametrize(("fields", "inputs", "options"), MISUSES.values(), ids=MISUSES)
def test_misuse_raises_the_errors_of_flax(fields, inputs, options):
    params = random_params(nn.MultiHeadDotProductAttention(3), X)
    deterministic = {name: option for name, option in options.items() if name == "deterministic"}
    arrays = {name: option for name, option in options.items() if name != "deterministic"}

    def call(kind):
        module = kind(**({"num_heads": 3} | fields))
        return jax.eval_shape(
            lambda params, inputs, arrays: module.apply(params, *inputs, **arrays, **deterministic),
            params,
            inputs,
            arrays,
        )

    raised = []
    for kind in (nn.MultiHeadDotProductAttention, compat.MultiHeadDotProductAttention):
        with pytest.raises(Exception) as info:  # noqa: PT011
            call(kind)
        raised.append(type(info.value))
    assert issubclass(raised[1], raised[0]), raised


def test_kernels_without_a_full_attention_matrix_give_equal_results():
    attention = functools.partial(compat.dot_product_attention, implementation="blockwise")
    ours = compat.MultiHeadDotProductAttention(3, attention_fn=attention)
    theirs = nn.MultiHeadDotProductAttention(3)
    params = random_params(theirs, X)

    @jax.jit
    def run(params):
        mask = nn.make_attention_mask(jnp.arange(5)[None] < 3, jnp.arange(5)[None] < 3, dtype=bool)  # some see no key
        causal = nn.make_causal_mask(X[..., 0])
        return [
            (ours.apply(params, X, mask=mask), theirs.apply(params, X, mask=mask)),
            (ours.apply(params, X, mask=Mask.causal()), theirs.apply(params, X, mask=causal)),
        ]

    for got, expected in run(params):
        np.testing.assert_allclose(got, expected, atol=1e-5)
    with pytest.raises(ValueError, match="blockwise attention kernel can't return attention weights"):
        jax.eval_shape(lambda params: ours.apply(params, X, sow_weights=True, mutable="intermediates"), params)


def test_rejects_a_structured_mask_while_decoding():
    ours = compat.MultiHeadDotProductAttention(3, decode=True)
    variables = random_params(ours, X)
    with pytest.raises(ValueError, match="decode=True"):
        jax.eval_shape(
            lambda variables, x: ours.apply(variables, x[:, :1], mask=Mask.causal(), mutable="cache"), variables, X
        )


def test_replaced_multiplications_are_computed_by_the_function_of_flax():
    calls = []

    def counted():
        return lambda *args: calls.append(args[0]) or jnp.einsum(*args)

    ours = compat.MultiHeadDotProductAttention(
        3, qk_attn_weights_einsum_cls=counted, attn_weights_value_einsum_cls=counted
    )
    theirs = nn.MultiHeadDotProductAttention(3)
    params = random_params(theirs, X)
    out = jax.jit(lambda params: ours.apply(params, X, mask=Mask.causal()))(params)
    assert calls == ["...qhd,...khd->...hqk", "...hqk,...khd->...qhd"]
    expected = jax.jit(lambda params: theirs.apply(params, X, mask=nn.make_causal_mask(X[..., 0])))(params)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_precision_applies_to_the_matrix_multiplications():
    def products(precision):
        with jax.default_matmul_precision(None):  # tests on a GPU use another default
            jaxpr = jax.make_jaxpr(functools.partial(compat.dot_product_attention, precision=precision))(
                *[np.asarray(X)[:, :, None]] * 3
            )
        return str(jaxpr).count("HIGHEST")

    assert products(None) == 0
    assert products("highest") == products(jax.lax.Precision.HIGHEST) == products((jax.lax.Precision.HIGHEST,) * 2) > 0


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize("broadcast", [False, True])
def test_our_function_works_as_attention_fn(lead, broadcast):
    """`attention_fn=compat.dot_product_attention` works with dropout, weights and any number of batch axes."""
    fields = {"num_heads": 2, "dropout_rate": 0.4, "broadcast_dropout": broadcast}
    theirs = nn.MultiHeadDotProductAttention(**fields)
    ours = nn.MultiHeadDotProductAttention(**fields, attention_fn=compat.dot_product_attention)
    x = normal(2, *lead, 5, 6)
    params = random_params(theirs, x, deterministic=True)
    mask = jax.device_put(np.broadcast_to(np.tri(5, dtype=bool), (*lead, 1, 5, 5)))
    for options in ({"deterministic": False, "mask": mask}, {"deterministic": True}):
        assert_close(call(ours, params, [x], options), call(theirs, params, [x], options))


@pytest.mark.parametrize("implementation", ["reference", "query_chunked", "blockwise"])
def test_broadcast_dropout_drops_the_same_weights_in_all_rows_and_heads(implementation):
    ones = np.ones((3, 200, 2, 1), np.float32)
    value = np.broadcast_to(np.eye(200, dtype=np.float32)[None, :, None], (3, 200, 2, 200))
    attend = functools.partial(
        compat.dot_product_attention, dropout_rate=0.3, dropout_rng=KEY, implementation=implementation
    )

    @jax.jit
    def run(ones, value):
        return [attend(ones, ones, value, broadcast_dropout=broadcast) for broadcast in (True, False)]

    kept, alone = (np.asarray(out) > 0 for out in run(ones, value))  # (B, T, N, S)
    np.testing.assert_array_equal(kept, np.broadcast_to(kept[:1, :, :1], kept.shape))
    assert 0.68 < kept[0, :, 0].mean() < 0.72
    assert (alone[0] != alone[1]).any()
