"""LoRA: W + alpha / r A B for every kernel shape, and a training state with only these parameters."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from training_recipes import change, compiled_step, tiny_batch, tiny_recipe

from transformer.config import ConfigError, LayerKind, MoE
from transformer.nn.models import count_parameters
from transformer.training import lora
from transformer.training._overrides import override
from transformer.training._recipe import Origin, from_json, to_json
from transformer.training._state import abstract_state, initial_params, make_state, model_params
from transformer.training._step import make_train_step
from transformer.training.lora import LoRA

CONFIG = LoRA(rank=2, alpha=3.0, targets=("query", "value", "out", "up", "gate", "down"))
SHAPES = {
    "query": (7, 3, 5),
    "out": (3, 5, 7),
    "up": (7, 11),
    "down": (11, 7),
    "stacked": {"value": (2, 7, 3, 5), "out": (2, 3, 5, 7)},
    "experts": {"gate": (2, 4, 7, 11)},
}


def tree(shapes, seed=0):
    random = np.random.default_rng(seed)

    def filled(value):
        if isinstance(value, dict):
            return {name: filled(inner) for name, inner in value.items()}
        return {"kernel": jnp.asarray(random.normal(size=value), jnp.float32), "bias": jnp.ones(value[-1:])}

    return {name: filled(value) for name, value in shapes.items()} | {"norm": {"scale": jnp.ones(7)}}


def trained(updates):
    """Updates as after training: B is no longer 0."""
    ramp = jax.tree.map(lambda leaf: (np.arange(leaf.size) / 10).reshape(leaf.shape), updates)
    return jax.tree.map(lambda leaf, more: jnp.asarray(np.asarray(leaf) + more, leaf.dtype), updates, ramp)


BY_HAND = {
    ("query",): "ti,ir,ro->to",
    ("out",): "ti,ir,ro->to",
    ("up",): "ti,ir,ro->to",
    ("down",): "ti,ir,ro->to",
    ("stacked", "value"): "ti,lir,lro->lto",
    ("stacked", "out"): "ti,lir,lro->lto",
    ("experts", "gate"): "ti,leir,lero->leto",
}


@functools.cache
def merged_once():
    """Parameters, updates and merged parameters, for all kernel shapes."""
    params = tree(SHAPES)
    updates = trained(jax.jit(lambda: lora.init(jax.random.key(1), params, CONFIG))())
    return params, updates, jax.jit(lambda: lora.merge(params, updates, CONFIG))()


@pytest.mark.parametrize("path", BY_HAND, ids="-".join)
def test_a_merged_map_is_the_map_plus_its_update_of_the_activations(path):
    """x (W + alpha / r A B) = x W + alpha / r (x A) B, for the axes of each kernel."""
    params, updates, merged = (flatten_dict(jax.device_get(of)) for of in merged_once())
    a, b = updates[*path, "a"], updates[*path, "b"]
    before, after = (of[*path, "kernel"].reshape(*a.shape[:-1], -1) for of in (params, merged))
    x = np.random.default_rng(2).normal(size=(4, a.shape[-2])).astype(np.float32)
    plain, updated = (np.einsum("ti,...io->...to", x, matrix) for matrix in (before, after))
    expected = 3.0 / 2 * np.einsum(BY_HAND[path], x, a, b)
    np.testing.assert_allclose(updated, plain + expected, rtol=1e-4, atol=1e-4)
    assert not np.allclose(updated, plain, atol=0.1)


def test_the_start_equals_the_base_and_only_targets_ever_change():
    params, config = tree(SHAPES), LoRA(rank=3, targets=("query", "gate"))
    updates = jax.jit(lambda: lora.init(jax.random.key(0), params, config))()
    merge = jax.jit(lambda updates: lora.merge(params, updates, config))
    chex.assert_trees_all_equal(merge(updates), params)
    merged = flatten_dict(merge(trained(updates)))
    changed = {path for path, leaf in flatten_dict(params).items() if not np.array_equal(leaf, merged[path])}
    assert changed == {("query", "kernel"), ("experts", "gate", "kernel")}


def test_count_is_rank_times_inputs_and_outputs():
    params = tree(SHAPES)

    def shapes(config):
        return jax.eval_shape(lambda: lora.init(jax.random.key(0), params, config))

    assert count_parameters(shapes(LoRA(rank=3, targets=("query",)))) == 3 * (7 + 15)
    assert count_parameters(shapes(LoRA(rank=2, targets=("value", "gate")))) == 2 * 2 * (7 + 15) + 2 * 2 * 4 * (7 + 11)


def test_types_are_kept_and_another_alpha_scales_the_update():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree({"up": (7, 11)}))
    updates = trained(lora.init(jax.random.key(0), params, LoRA(rank=2, targets=("up",))))
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
    assert lora.merge(params, updates, LoRA(rank=2, targets=("up",)))["up"]["kernel"].dtype == jnp.bfloat16
    wide, updates = tree({"up": (7, 11)}), jax.tree.map(lambda leaf: leaf.astype(jnp.float32), updates)
    once, twice = (lora.merge(wide, updates, LoRA(rank=2, alpha=alpha))["up"]["kernel"] for alpha in (1.0, 2.0))
    np.testing.assert_allclose(twice - wide["up"]["kernel"], 2 * (once - wide["up"]["kernel"]), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "rank must be an integer of at least 1, got 0"),
        ({"alpha": 0.0}, "alpha must be a number of"),
        ({"targets": ()}, "lora.targets must not be empty. Choose from up, gate, down, query"),
        ({"targets": ("querry",)}, "lora.targets must be one of .* got 'querry'. Did you mean 'query'?"),
    ],
)
def test_an_impossible_update_says_what_to_change(fields, message):
    with pytest.raises(ConfigError, match=message):
        LoRA(**fields)


def test_muon_which_is_for_whole_matrices_is_refused():
    adapted = dataclasses.replace(tiny_recipe(), lora=LoRA())
    with pytest.raises(ConfigError, match=r"muon needs whole weight matrices, but lora trains .* Use adamw"):
        change(adapted, optimizer={"name": "muon"})


def test_updates_that_do_not_fit_are_refused():
    params = tree({"query": (7, 3, 5)})
    with pytest.raises(ConfigError, match=r"contains gate, which this model doesn't have\. Choose .*: query"):
        lora.init(jax.random.key(0), params, LoRA(targets=("query", "gate")))
    updates = lora.init(jax.random.key(0), params, LoRA(targets=("query",)))
    with pytest.raises(ConfigError, match="an entry for query, but the parameters have no linear layer there"):
        lora.merge(tree({"key": (7, 3, 5)}), updates, LoRA())
    with pytest.raises(ConfigError, match=r"of query have shapes .*, which don't fit its kernel .*\. Use the updates"):
        lora.merge(tree({"query": (8, 3, 5)}), updates, LoRA())


# In training


def with_lora(**fields):
    recipe = tiny_recipe(**fields)
    origin = Origin(source="somewhere", model="BERT", fingerprint="0" * 64)
    return dataclasses.replace(recipe, lora=LoRA(rank=2, targets=("query", "up")), origin=origin)


def test_the_state_holds_updates_to_train_and_the_base_once():
    recipe = with_lora()
    state = abstract_state(recipe)
    whole = jax.eval_shape(lambda: initial_params(recipe))
    expected = 2 * (6 + 6) + 2 * (6 + 5)
    assert count_parameters(state.params) == count_parameters(state.params["updates"]) == expected
    chex.assert_trees_all_equal_shapes_and_dtypes(state.base, whole)
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * expected


def test_new_parameters_are_trained_whole():
    recipe = with_lora(model={"embedding.tie": False})
    recipe = dataclasses.replace(recipe, origin=dataclasses.replace(recipe.origin, new=("output/kernel",)))
    state = abstract_state(recipe)
    assert list(flatten_dict(state.params["new"], sep="/")) == ["output/kernel"]
    assert "output" not in state.base


def test_experts_and_layers_in_a_row_have_updates_of_their_own():
    moe = {"num_layers": 3, "stack.period": (LayerKind(moe=MoE(num_experts=4)),)}
    state = abstract_state(with_lora(model=moe))
    shapes = {path[-3:]: leaf.shape for path, leaf in flatten_dict(state.params["updates"]).items()}
    assert shapes["experts", "up", "a"] == (3, 4, 6, 2)
    assert shapes["self_attention", "query", "b"] == (3, 2, 6)


def test_a_step_changes_the_updates_alone():
    recipe = with_lora()
    state = jax.jit(lambda: make_state(recipe))()
    base = jax.device_get(state.base)
    after, metrics = compiled_step(recipe)(state, tiny_batch())
    chex.assert_trees_all_equal(after.base, base)
    gradients = jax.tree.map(lambda new, old: np.abs(new - old).max(), after.params, state.params)
    kinds = {path[-1]: step for path, step in flatten_dict(gradients).items()}
    assert kinds["b"] > 0
    assert kinds["a"] == 0  # B was 0, so dL/dA = 0; weight decay applies only to kernels
    assert metrics["grad_norm"] > 0
    again, _ = compiled_step(recipe)(after, tiny_batch())
    merged, start = (flatten_dict(model_params(recipe, of.params, of.base), sep="/") for of in (again, state))
    changed = {path.rpartition("slot_0/")[2] for path in start if not np.array_equal(merged[path], start[path])}
    assert changed == {"self_attention/query/kernel", "feed_forward/up/kernel"}


@pytest.mark.slow
def test_micro_batches_give_the_same_update():
    recipe = with_lora()
    state = jax.jit(lambda: make_state(recipe))()
    split = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, accumulation=4))
    whole, parts = (jax.jit(make_train_step(one))(state, tiny_batch())[0] for one in (recipe, split))
    chex.assert_trees_all_close(whole.params, parts.params, rtol=2e-4, atol=1e-6)


def test_an_option_turns_it_on_and_json_brings_it_back():
    recipe = tiny_recipe()
    assert override(recipe, [], program="p").lora is None
    changed = override(recipe, ["--lora.rank", "5", "--lora.targets", "query", "out"], program="p")
    assert changed.lora == LoRA(rank=5, targets=("query", "out"))
    assert from_json(to_json(changed)) == changed
    with pytest.raises(ConfigError, match=r"unknown option --lora.rang. Did you mean '--lora.rank'\?"):
        override(recipe, ["--lora.rang", "5"], program="p")
    values = to_json(recipe)
    del values["recipe"]["lora"], values["recipe"]["origin"]
    assert from_json(values) == recipe, "a recipe of an earlier version"
