"""Gradients of embedding and head summed over devices in bfloat16: equal to float32 sums up to one rounding per sum."""

import functools
import re
import uuid

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from training_recipes import VOCABULARY, change, tiny_batch, tiny_recipe

from transformer.config import ConfigError
from transformer.nn._partitioning import lookup, lookup_tokens, sum_of_parts, table_gradients_in
from transformer.training._parallel import place

pytestmark = pytest.mark.cpu_only("needs eight devices")

LAYOUTS = {
    "data x2, fsdp x2, tensor x2": {"data": 2, "fsdp": 2, "tensor": 2},
    "pmap x8": {"kind": "pmap", "data": 8},
}
# a mesh axis of size 2 splits each
MODEL = {"vocab_size": VOCABULARY + 1, "d_model": 8, "num_heads": 2, "feed_forward.d_ff": 6}


@functools.cache
def gradients(layout, dtype, tie, loss_tokens):
    """The optimizer state after one step: AdamW's first moment is the gradient times 1 - beta1."""
    recipe = tiny_recipe(model=MODEL | {"embedding.tie": tie}, optimizer={"clip_norm": None}, loss_tokens=loss_tokens)
    recipe = change(recipe, training={"embedding_gradient_dtype": dtype}, data={"sequence_length": 8})
    batch = {name: np.tile(np.asarray(array), (1, 8))[:, :8] for name, array in tiny_batch().items()}
    placement = place(change(recipe, parallel={"devices": 8} | LAYOUTS[layout]))
    state, _ = placement.train_step(placement.spread(placement.new_state()), batch)
    return jax.tree.map(np.asarray, placement.whole(state).opt_state)


def differences(layout, tie, loss_tokens):
    """Largest relative difference of each gradient from its float32 sum, by the end of its path."""
    wide, narrow = (gradients(layout, dtype, tie, loss_tokens) for dtype in ("float32", "bfloat16"))
    found = {}
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(wide), jax.tree.leaves(narrow), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if "mu/" in name:
            found[name.partition("mu/")[2]] = np.abs(a - b).max() / np.abs(a).max()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "tie", "loss_tokens"),
    [
        ("data x2, fsdp x2, tensor x2", False, 4),
        pytest.param("data x2, fsdp x2, tensor x2", True, 0, marks=pytest.mark.slow),
        pytest.param("pmap x8", False, 0, marks=pytest.mark.slow),
    ],
)
def test_only_vocabulary_gradients_are_rounded(layout, tie, loss_tokens):
    vocabulary = {"embedding/embedding"} if tie else {"embedding/embedding", "output/kernel"}
    found = differences(layout, tie, loss_tokens)
    assert vocabulary < found.keys()
    for name, difference in found.items():
        if name in vocabulary:
            # Each term and each partial sum is rounded to 8 bits; 0 would mean that nothing was rounded.
            assert 1e-5 < difference < 15 * 2.0**-9, name
        else:
            assert difference < 1e-5, name


def table_gradient(mesh, dtype, tokens, of_rows):
    with jax.set_mesh(mesh), table_gradients_in(dtype):
        table = np.zeros((VOCABULARY, of_rows.shape[-1]), np.float32)

        @jax.jit
        def pull(table, tokens, rows):
            return jax.vjp(lambda table: lookup_tokens(table, tokens), table)[1](rows)[0]

        return np.asarray(pull(table, tokens, of_rows))


def test_each_device_adds_its_rows_in_float32():
    """512 rows of the same token: in bfloat16, a sum of ones would stop at 256."""
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    tokens, rows = np.full((4, 512), 3, np.int32), np.ones((4, 512, 2), np.float32)
    found = table_gradient(mesh, "bfloat16", tokens, rows)
    np.testing.assert_array_equal(found[3], 2048.0)
    assert not found[:3].any()
    assert not found[4:].any()


def test_float32_equals_the_plain_lookup():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        given = np.zeros((5, 2), np.float32), np.zeros((8, 3), np.int32)

        def traced(function):
            return str(jax.make_jaxpr(lambda *given: function(*given))(*given))  # a new function: JAX caches traces

        plain = traced(lookup)
        assert traced(lookup_tokens) == plain
        with table_gradients_in("float32"):
            assert traced(lookup_tokens) == plain
        with table_gradients_in("bfloat16"):
            assert traced(lookup_tokens) != plain


def test_a_token_outside_the_table_gives_nan_and_no_gradient():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    tokens = np.array([[0, VOCABULARY], [-1, 2]], np.int32)
    with jax.set_mesh(mesh), table_gradients_in("bfloat16"):
        x = jax.jit(lookup_tokens)(np.ones((VOCABULARY, 3), np.float32), tokens)
    np.testing.assert_array_equal(np.isnan(x).all(-1), [[False, True], [True, False]])
    found = table_gradient(mesh, "bfloat16", tokens, np.ones((2, 2, 3), np.float32))
    np.testing.assert_array_equal(found.sum(1), [3.0, 0.0, 3.0] + [0.0] * (VOCABULARY - 3))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_devices_exchange_values_of_this_dtype(tmp_path, dtype):
    """The program before the pass of XLA for CPU that widens all-reduces of bfloat16: other platforms have none."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), table_gradients_in(dtype):
        table, head = jax.ShapeDtypeStruct((VOCABULARY, 6), jnp.float32), jax.ShapeDtypeStruct((8, 1, 5), jnp.float32)
        tokens = jax.ShapeDtypeStruct((8, 4), jnp.int32, sharding=jax.NamedSharding(mesh, jax.P("data")))

        def both(table, tokens, parts):
            parts = jax.lax.with_sharding_constraint(parts, jax.P("data"))
            gradient = jax.grad(lambda table: lookup_tokens(table, tokens).sum())(table)
            return gradient, sum_of_parts(parts, dtype)

        both.__name__ = (
            f"both_{uuid.uuid4().hex}"  # a program with a known name may come from the cache, without a dump
        )
        lowered = jax.jit(both).lower(table, tokens, head)
        options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_pass_re": "spmd-partitioning"}
        lowered.compile(compiler_options=options)
    (written,) = tmp_path.glob("*after_spmd-partitioning*")
    program = written.read_text()
    found = re.findall(r"([a-z]+\d+)\[([\d,]+)\]", "".join(re.findall(r"= (.+?) all-reduce\(", program)))
    expected = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    assert sorted(found) == [(expected, f"{VOCABULARY},6"), (expected, "5")]


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ConfigError, match=r"training.embedding_gradient_dtype.*float32.*bfloat16.*got 'float16'"):
        tiny_recipe(embedding_gradient_dtype="float16")
