"""Shardings for a custom training loop: any tree, any mesh, rules in Flax's form, and Flax's tools."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec
from numeric_parts import random_params
from placements import mesh, specs

from transformer.config import (
    ConfigError,
    FeedForwardOptions,
    LayerKind,
    LearnedOptions,
    MoE,
    RotaryOptions,
    Series,
    TransformerConfig,
)
from transformer.nn._parameter_axes import LAYERS, declared
from transformer.nn._partitioning import axis_rules
from transformer.nn._sharding import PARAMETER_AXES, batch_sharding, parameter_spec, state_shardings, with_logical_axes
from transformer.nn.models import CausalLM, Forecaster, Seq2Seq

pytestmark = pytest.mark.cpu_only("needs eight devices")

# Sizes divisible by 2 and 4, because Flax's tools shard an axis whatever its size.
CONFIG = TransformerConfig(
    vocab_size=24,
    d_model=16,
    num_layers=2,
    num_heads=4,
    feed_forward=FeedForwardOptions(d_ff=32),
    position=RotaryOptions(),
)
ROUTED = CONFIG.replace(**{"stack.period": (LayerKind(moe=MoE(num_experts=4, top_k=2)),)})
TOKENS = jax.device_put(np.random.default_rng(0).integers(0, 24, (8, 6)).astype(np.int32))
KERNEL = "decoder/layers/slot_0/self_attention/query/kernel"


def abstract(model, *inputs):
    return jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs))["params"]


def train_step(state, tokens):
    def loss(params):
        return optax.softmax_cross_entropy_with_integer_labels(
            state.apply_fn({"params": params}, tokens), tokens
        ).mean()

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


@pytest.fixture(scope="module")
def state():
    """Return a Flax train state before and after its first step, on one device."""
    model = CausalLM(CONFIG)
    params = random_params(model, TOKENS)["params"]
    first = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(0.1))
    return first, jax.jit(train_step)(first, TOKENS)


@pytest.mark.parametrize(
    ("sizes", "rules", "expected"),
    [
        ({"data": 8}, None, (None, None, None, None)),
        ({"dp": 2, "tp": 4}, [("embed", "dp"), ("heads", "tp"), ("vocab", "tp")], (None, "dp", "tp", None)),
    ],
    ids=["no axis of ours", "other names"],
)
def test_a_state_of_flax_trains_on_the_mesh_of_its_user(state, sizes, rules, expected):
    first, after = state
    devices = mesh(**sizes)
    shardings = state_shardings(first, devices, rules)
    assert type(first.step) is int
    assert shardings.step == NamedSharding(devices, PartitionSpec())
    placements = specs(shardings)
    for path in (f"params/{KERNEL}", f"opt_state/0/mu/{KERNEL}", f"opt_state/0/nu/{KERNEL}"):
        assert placements[path] == PartitionSpec(*expected), path
    batch = batch_sharding(devices, 2, rules=[("batch", next(iter(sizes)))])
    step = jax.jit(train_step, in_shardings=(shardings, batch), out_shardings=shardings)
    on_host = jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, (first, TOKENS))
    got = step(*jax.device_put(on_host, (shardings, batch)))
    assert int(got.step) == 1
    assert got.params["embedding"]["embedding"].sharding.is_equivalent_to(shardings.params["embedding"]["embedding"], 2)
    # Adam's first step is the sign of the gradient, which rounding errors decide for a gradient near 0.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got.opt_state[0].mu, after.opt_state[0].mu)


def test_leaves_that_are_not_parameters_are_replicated():
    devices = mesh(fsdp=4, tensor=2)
    tree = {
        "step": 3,
        "rate": 0.5,
        "nothing": None,
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(0), 4),
        "mine": np.ones((8, 8)),
        "params": {"output": {"kernel": np.ones((16, 24), np.float32)}},
        "shapes": [{"down": {"kernel": jax.ShapeDtypeStruct((32, 16), jnp.bfloat16)}}],
    }
    shardings = state_shardings(tree, devices)
    assert jax.tree.structure(shardings) == jax.tree.structure(tree)
    placements = specs(shardings)
    assert placements.pop("params/output/kernel") == PartitionSpec("fsdp", "tensor")
    assert placements.pop("shapes/0/down/kernel") == PartitionSpec("tensor", "fsdp")
    assert set(placements.values()) == {PartitionSpec()}
    del tree["shapes"], shardings["shapes"]
    placed = jax.device_put(tree, shardings)
    assert placed["keys"].sharding.is_fully_replicated
    assert placed["params"]["output"]["kernel"].addressable_shards[0].data.shape == (4, 12)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([("embed", "b"), ("heads", "a")], (None, "b", "a", None)),
        ([("heads", ("a", "b"))], (None, None, ("a", "b"), None)),
        (
            [("embed", "a"), ("heads", "a")],
            (None, "a", None, None),
        ),  # two rules name the same axis: the first one applies
        (
            [("heads", "a"), ("embed", "a"), ("embed", "b")],
            (None, "b", "a", None),
        ),  # the next rule for the name applies
        ([("embed", None), ("embed", "a")], (None, None, None, None)),
        (
            [("embed", ("none", "a")), ("heads", "none"), ("heads", "b")],
            (None, "a", "b", None),
        ),  # axes that the mesh lacks are ignored
        ([("layers", "a"), ("batch", "b")], ("a", None, None, None)),
        ([], (None, None, None, None)),
    ],
)
def test_rules_place_the_axes_of_parameters(rules, expected):
    sizes = {"a": 2, "b": 2}
    assert parameter_spec(KERNEL, (2, 16, 4, 4), sizes, rules) == PartitionSpec(*expected)


def test_an_indivisible_axis_is_replicated():
    assert parameter_spec(KERNEL, (2, 16, 3, 4), {"a": 2, "b": 4}, [("heads", "a"), ("embed", "b")]) == PartitionSpec(
        None, "b", None, None
    )


@pytest.mark.parametrize("axis_rules", [axis_rules, nn.logical_axis_rules], ids=["ours", "flax"])
def test_active_flax_rules_are_used(axis_rules):
    devices, tree = mesh(x=2, y=4), {"output": {"kernel": jax.ShapeDtypeStruct((16, 24), jnp.float32)}}
    with axis_rules([("vocab", "x"), ("batch", "y")]):
        assert specs(state_shardings(tree, devices)) == {"output/kernel": PartitionSpec(None, "x")}
        assert batch_sharding(devices, 2).spec == PartitionSpec(("y",), None)
        given = state_shardings(tree, devices, [("embed", "y")])
    assert specs(given) == {"output/kernel": PartitionSpec("y", None)}
    assert specs(state_shardings(tree, devices)) == {"output/kernel": PartitionSpec(None, None)}


@pytest.mark.parametrize("rules", [{"embed": "fsdp"}, ["embed"], "embed", [("embed", 3)], [("embed", "a", "b")]])
def test_malformed_rules_are_an_error(rules):
    message = r"rules must be pairs of a logical axis and a mesh axis, .* got .* pass tuple\(rules\.items\(\)\)"
    with pytest.raises(ConfigError, match=message):
        parameter_spec(KERNEL, (2, 16, 4, 4), {"a": 2}, rules)


PLACED = {
    "state": lambda rules: state_shardings({KERNEL: np.ones((2, 16, 4, 4))}, mesh(dp=2, tp=4), rules),
    "batch": lambda rules: batch_sharding(mesh(dp=2, tp=4), 2, rules),
    "parameter": lambda rules: parameter_spec(KERNEL, (2, 16, 4, 4), {"dp": 2, "tp": 4}, rules),
}


@pytest.mark.parametrize("place", PLACED.values(), ids=PLACED)
def test_rules_that_would_have_no_effect_are_an_error(place):
    """A misspelled name would replicate everything. A logical axis is checked as by `axis_rules`."""
    with pytest.raises(ValueError, match=r"unknown logical axis 'embd': use one of .*embed") as found:
        place([("batch", "dp"), ("embd", "dp")])
    with pytest.raises(ValueError, match="'embd'") as expected, axis_rules([("embd", "dp")]):
        pass
    assert str(found.value) == str(expected.value)
    with pytest.raises(ConfigError, match=r"the mesh, which has dp, tp, got only 'fsdp', 'tensor'\. "):
        place([("embed", "fsdp"), ("batch", ("fsdp", "tensor"))])
    for rules in ([], [("embed", None)], [("embed", "fsdp"), ("heads", "tp")]):  # rules for several meshes
        place(rules)


def test_rules_may_name_the_axes_of_boxes():
    boxed = {"w": nn.LogicallyPartitioned(np.ones((4, 8)), ("mine", None))}
    assert state_shardings(boxed, mesh(dp=2), [("mine", "dp")])["w"].spec == PartitionSpec("dp", None)
    with pytest.raises(ValueError, match="unknown logical axis 'other'"):
        state_shardings(boxed, mesh(dp=2), [("other", "dp")])


def test_every_logical_axis_is_in_the_table():
    ours = {axes for end, axes in declared().items() if not end.startswith("mix_")}  # declared in another test
    assert {name for axes in ours for name in axes.names if name} == PARAMETER_AXES.keys()
    assert LAYERS not in PARAMETER_AXES


@pytest.mark.parametrize(
    "model",
    [
        CausalLM(CONFIG.replace(**{"embedding.tie": False})),
        Seq2Seq(CONFIG.replace(position=LearnedOptions(max_length=8))),
        CausalLM(ROUTED),
    ],
    ids=["causal_lm", "seq2seq", "routed"],
)
@pytest.mark.parametrize(
    "rules",
    [tuple(PARAMETER_AXES.items()), (("heads", "fsdp"), ("embed", "fsdp"), ("feed_forward", ("tensor", "expert")))],
    ids=["ours", "others"],
)
def test_flax_places_boxed_parameters_alike(model, rules):
    devices = mesh(fsdp=2, tensor=2, expert=2)
    params = abstract(model, TOKENS, *[TOKENS] * isinstance(model, Seq2Seq))
    boxed = with_logical_axes(params)
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, nn.meta.unbox(boxed), params))
    logical = nn.get_partition_spec(boxed)
    assert jax.tree.structure(logical) == jax.tree.structure(params)
    by_flax, ours = nn.logical_to_mesh_sharding(logical, devices, rules), state_shardings(params, devices, rules)
    split = 0
    for theirs, own, leaf in zip(*map(jax.tree.leaves, (by_flax, ours, params)), strict=True):
        assert theirs.is_equivalent_to(own, leaf.ndim), (theirs, own)
        split += not own.is_fully_replicated
    assert split > 10
    # With boxed parameters, the optimizer state contains boxes too.
    state = jax.eval_shape(lambda p: TrainState.create(apply_fn=model.apply, params=p, tx=optax.adam(0.1)), boxed)
    assert jax.tree.leaves(state_shardings(state, devices, rules).opt_state[0].mu) == jax.tree.leaves(ours)


def test_a_model_takes_parameters_with_boxes():
    """With the loops over layers and over channels, the program is the same as without boxes."""
    series = Series(channels=3, context_length=8, horizon=5, patch_length=4, patch_stride=4, shared_embedding=False)
    forecaster = Forecaster(CONFIG.replace(input=series, position=None, num_layers=1))
    tokens, values = jax.device_put((np.ones((2, 6), np.int32), np.ones((2, 8, 3), np.float32)))
    for model, inputs in ((CausalLM(ROUTED), tokens), (forecaster, values)):
        params = abstract(model, inputs)
        boxed = with_logical_axes(params)
        assert with_logical_axes(boxed) == boxed
        assert any(map(nn.meta.is_axis_metadata, jax.tree.leaves(boxed, is_leaf=nn.meta.is_axis_metadata)))
        program, with_boxes = (jax.jit(model.apply).lower({"params": p}, inputs).as_text() for p in (params, boxed))
        assert program == with_boxes
