"""Use in other projects: under their meshes, modules cost as much as Flax's, with Auto and Explicit axes."""

import collections
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_specs import attention_spec
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numeric_parts import random_params

import transformer
from transformer.config import ALiBiOptions, LearnedOptions, RotaryOptions
from transformer.nn._partitioning import axis_rules, constrain, mesh_axes, num_shards, unmapped_axes
from transformer.nn._sharding import make_mesh
from transformer.nn.kernels import choose
from transformer.nn.layers._layers import Embedding

pytestmark = pytest.mark.cpu_only("needs eight devices")

ROWS, LENGTH, WIDTH, HEADS = 8, 6, 16, 4
NAMES = [("data", "tensor"), ("dp", "tp"), ("data", "model")]
OURS = transformer.MultiHeadAttention(num_heads=HEADS)
FLAX = nn.MultiHeadDotProductAttention(num_heads=HEADS)
X = np.random.default_rng(1).normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
PARAMS = random_params(FLAX, X)["params"]

needs_explicit = pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="Explicit axes are supported from jax 0.9")


def make(names, kind=AxisType.Auto, sizes=(4, 2)):
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))


def put(array, mesh, *spec):
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


def by_heads(mesh):
    """Shard rows of x over the first axis, heads over the second (Shoeybi et al. 2019, arXiv 1909.08053, section 3)."""
    rows, heads = mesh.axis_names

    def place(path, leaf):
        if path[0].key == "out":
            return put(leaf, mesh, *((heads,) if leaf.ndim == 3 else ()))
        return put(leaf, mesh, *((None, heads) if leaf.ndim == 3 else (heads,)))

    return jax.tree_util.tree_map_with_path(place, PARAMS), put(X, mesh, rows)


def loss_of(attention):
    def loss(params, x):
        y = attention.apply({"params": params}, x)
        return jnp.square(y[0] if isinstance(y, tuple) else y).sum()

    return loss


def compiled(attention, params, x, mesh=None):
    """Compile a loss and its gradients; `mesh` is set during tracing."""
    step = jax.jit(jax.value_and_grad(loss_of(attention)))
    if mesh is None:
        return step.lower(params, x).compile()
    with jax.set_mesh(mesh):
        return step.lower(params, x).compile()


def collectives(program):
    """Count the collectives of each kind."""
    return collections.Counter(
        re.findall(r" (all-[a-z]+|reduce-scatter|collective-permute)(?:-start)?\(", program.as_text())
    )


def flops(program):
    cost = program.cost_analysis()
    return (cost[0] if isinstance(cost, list) else cost)["flops"]


@pytest.mark.parametrize("is_set", [True, False], ids=["set_mesh", "no set_mesh"])
@pytest.mark.parametrize("names", NAMES, ids="-".join)
def test_uses_no_collective_that_flax_does_not_use(names, is_set):
    mesh = make(names)
    params, x = by_heads(mesh)
    theirs, ours = (compiled(one, params, x, mesh if is_set else None) for one in (FLAX, OURS))
    found, needed = collectives(ours), collectives(theirs)
    assert needed, "the sharding must need communication, or the test shows nothing"
    assert found["all-gather"] <= needed["all-gather"]
    assert found.total() <= needed.total()


@pytest.mark.parametrize("names", NAMES, ids="-".join)
def test_a_data_parallel_step_computes_each_row_once(names):
    """All eight devices share the rows of a batch, which are split over both axes; the mesh is set."""
    mesh = make(names)
    params = jax.tree.map(lambda leaf: put(leaf, mesh), PARAMS)
    x = put(X, mesh, names)
    rules = [("batch", names)]
    theirs = compiled(FLAX, params, x, mesh)
    with axis_rules(rules):
        ours = compiled(OURS, params, x, mesh)
    assert flops(ours) <= 1.05 * flops(theirs)
    assert collectives(ours)["all-gather"] == 0
    if names == ("dp", "tp"):  # the default rules know none of these axes
        ours = compiled(OURS, params, x, mesh)
        assert flops(ours) <= 1.05 * flops(theirs)
        assert collectives(ours)["all-gather"] == 0


@pytest.mark.default_cases(1)
@needs_explicit
@pytest.mark.parametrize("names", NAMES, ids="-".join)
def test_explicit_axes_have_equal_cost_and_results(names):
    auto, explicit = make(names), make(names, AxisType.Explicit)
    theirs = compiled(FLAX, *by_heads(auto))
    params, x = by_heads(explicit)
    ours = compiled(OURS, params, x, explicit)
    assert collectives(ours)["all-gather"] <= collectives(theirs)["all-gather"]
    assert collectives(ours).total() <= collectives(theirs).total()
    with jax.set_mesh(explicit):
        loss, grads = ours(params, x)
        out, _ = jax.eval_shape(lambda x: OURS.apply({"params": params}, x), x)
        assert out.sharding.spec[0] == names[0]
    expected, expected_grads = jax.jit(jax.value_and_grad(loss_of(FLAX)))(PARAMS, X)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    # The gradient of a bias of the keys is 0 up to rounding, because it adds the same number to all scores of a query.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), grads, expected_grads)


CONFIG = {"vocab_size": 32, "d_model": 16, "num_heads": 4, "feed_forward.d_ff": 24, "num_layers": 2}
MODELS = {
    "learned": transformer.CausalLM(
        transformer.TransformerConfig(**CONFIG, position=LearnedOptions(max_length=LENGTH)),
        execution=transformer.Execution(scan=False),
    ),
    "rotary, scanned": transformer.CausalLM(
        transformer.TransformerConfig(
            **CONFIG, position=RotaryOptions(), attention=transformer.AttentionOptions(num_kv_heads=2)
        )
    ),
    "ALiBi": transformer.CausalLM(transformer.TransformerConfig(**CONFIG, position=ALiBiOptions())),
    "routed": transformer.CausalLM(
        transformer.TransformerConfig(
            **CONFIG,
            stack=transformer.StackOptions(period=(transformer.LayerKind(moe=transformer.MoE(num_experts=4, d_ff=8)),)),
        )
    ),
}


# Every model with one kernel, and every kernel with a model that passes a bias.
CASES = [pytest.param(n, "reference", marks=pytest.mark.slow if n == "routed" else ()) for n in MODELS]
CASES.append(("ALiBi", "blockwise"))


@pytest.mark.default_cases(2)
@needs_explicit
@pytest.mark.parametrize(("name", "kernel"), CASES)
def test_models_work_with_the_mesh_that_jax_makes(name, kernel):
    """`jax.make_mesh((8,), ("data",))` has an Explicit axis since JAX 0.9."""
    mesh, model = jax.make_mesh((8,), ("data",)), MODELS[name]
    assert mesh.axis_types == (AxisType.Explicit,)
    model = model.clone(execution=transformer.Execution(scan=model.execution.scan, attention=kernel))
    tokens = np.random.default_rng(2).integers(0, 32, (ROWS, LENGTH)).astype(np.int32)
    params = random_params(model, tokens)["params"]

    def loss(params, tokens):
        return jnp.square(model.apply({"params": params}, tokens)).sum()

    expected, expected_grads = jax.jit(jax.value_and_grad(loss))(params, tokens)
    with jax.set_mesh(mesh):
        found, grads = jax.jit(jax.value_and_grad(loss))(params, put(tokens, mesh, "data"))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), grads, expected_grads)


@needs_explicit
def test_the_embedding_looks_up_with_explicit_axes():
    mesh = jax.make_mesh((8,), ("data",))
    tokens = (np.arange(ROWS * LENGTH, dtype=np.int32) % 7).reshape(ROWS, LENGTH)
    embedding = Embedding(vocab_size=7, features=4)
    params = random_params(embedding, tokens)
    with jax.set_mesh(mesh):
        rows = jax.jit(embedding.apply)(params, put(tokens, mesh, "data"))
    assert rows.sharding.spec[0] == "data"
    np.testing.assert_array_equal(rows, np.asarray(params["params"]["embedding"])[tokens])


@needs_explicit
def test_explicit_axes_without_a_set_mesh_are_an_error_with_a_remedy():
    params, x = by_heads(make(("data", "tensor"), AxisType.Explicit))
    with pytest.raises(ValueError, match=r"tensor.*`with jax\.set_mesh\(mesh\):`.*AxisType\.Auto"):
        jax.eval_shape(lambda x: OURS.apply({"params": params}, x), x)


@pytest.mark.skipif(jax.__version_info__ >= (0, 9), reason="Explicit axes are supported")
def test_explicit_axes_on_an_old_jax_are_an_error_with_a_remedy():
    mesh = make(("data",), AxisType.Explicit, (8,))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"AxisType\.Auto"):
        OURS.apply({"params": PARAMS}, put(X, mesh, "data"))


class TestRules:
    def test_our_axis_names_follow_the_rules(self):
        x = np.ones((ROWS, LENGTH, 4, 2), np.float32)
        mesh = make(("dp", "tp"))

        def place(x):
            return constrain(x, "batch", "length", "heads", "head_dim")

        with jax.set_mesh(mesh):
            assert unmapped_axes() == ("dp", "tp")
            with axis_rules([("batch", "dp"), ("heads", "tp"), ("embed", None)]):
                assert jax.jit(lambda x: place(x))(x).sharding.spec == PartitionSpec("dp", None, "tp")
                assert (num_shards("batch"), num_shards("heads"), num_shards("length")) == (4, 2, 1)
                assert unmapped_axes() == ()
            with nn.logical_axis_rules([("batch", ("dp", "tp")), ("mlp", "tp")]):
                assert jax.jit(lambda x: place(x))(x).sharding.spec == PartitionSpec(("dp", "tp"))
            assert mesh_axes("batch") == ()

    def test_the_first_rule_with_axes_of_the_mesh_wins(self):
        with jax.set_mesh(make(("dp", "tp"))), axis_rules([("batch", ("pod", "dp")), ("batch", "dp")]):
            assert mesh_axes("batch") == ("dp",)

    def test_none_replicates_and_a_missing_rule_changes_nothing(self):
        mesh = make(("dp", "tp"))
        x = put(np.ones((8, 6), np.float32), mesh, "dp", "tp")
        with jax.set_mesh(mesh):
            with axis_rules([("batch", "dp"), ("embed", None)]):
                assert jax.jit(lambda x: constrain(x, "batch", "embed"))(x).sharding.spec == PartitionSpec("dp")
            with axis_rules([("batch", "dp")]):
                assert jax.jit(lambda x: constrain(x, "batch", "embed"))(x).sharding.spec == PartitionSpec("dp", "tp")
            assert jax.jit(lambda x: constrain(x, "batch", "embed"))(x).sharding.spec == PartitionSpec("dp", "tp")

    def test_parameter_rules_may_share_the_list(self):
        with jax.set_mesh(make(("dp", "tp"))), axis_rules([("layers", None), ("batch", "dp"), ("embed", "dp")]):
            placed = jax.jit(lambda x: constrain(x, "batch", "embed"))(np.ones((8, 8), np.float32))
            assert placed.sharding.spec == PartitionSpec("dp")

    def test_rejects_an_unknown_axis_name(self):
        with (
            pytest.raises(ValueError, match="'mlp'"),
            axis_rules([("mlp", "tp")]),
        ):
            pass

    def test_a_mesh_axis_is_used_once_per_array(self):
        with jax.set_mesh(make(("dp", "tp"))), axis_rules([("batch", "dp"), ("length", "dp")]):
            placed = jax.jit(lambda x: constrain(x, "batch", "length"))(np.ones((8, 8), np.float32))
            assert placed.sharding.spec == PartitionSpec("dp")


def test_a_kernel_without_automatic_sharding_needs_the_axes():
    """Each device would run splash on all rows; auto selects a kernel that the compiler can partition."""
    request = attention_spec(2048)
    with jax.set_mesh(make(("dp", "tp"))):
        with pytest.raises(ValueError, match="axis_rules"):
            choose("splash", request)
        with axis_rules([("batch", "dp"), ("heads", "tp")]):
            assert choose("splash", request) == "splash"


def test_splash_is_not_chosen_if_the_sharding_is_unknown(monkeypatch):
    """jax.jit of sharded arrays without a mesh set: the compiler can't partition a Pallas kernel."""
    monkeypatch.setattr(transformer.nn.kernels, "platform", lambda: "tpu")
    request = attention_spec(2048)
    with pytest.warns(UserWarning, match=r"8.*jax\.set_mesh\(mesh\)"):
        assert choose("auto", request) == "blockwise"
    with jax.set_mesh(make_mesh({"data": 8})):
        assert choose("auto", request) == "splash"
    chosen = []
    jax.pmap(lambda x: chosen.append(choose("auto", request)) or x)(np.ones(8, np.float32))
    assert chosen == ["splash"]


@pytest.mark.parametrize("kernel", ["ring", "all_gather_kv"])
def test_supports_a_length_sharded_over_axes_of_any_name(kernel):
    query, key, value = np.random.default_rng(0).normal(size=(3, 2, 16, 2, 4)).astype(np.float32)
    mask = transformer.Mask.causal()

    def attend(*arrays):
        return transformer.dot_product_attention(*arrays, mask=mask, implementation=kernel)

    expected = jax.jit(lambda *arrays: transformer.dot_product_attention(*arrays, mask=mask))(query, key, value)
    for names, rule in ((("dp", "sp"), "sp"), (("sp", "inner"), ("sp", "inner"))):
        with jax.set_mesh(make(names, sizes=(2, 2))), axis_rules([("length", rule)]):
            np.testing.assert_allclose(jax.jit(attend)(query, key, value), expected, atol=1e-5)
