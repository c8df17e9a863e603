"""LoRA: W + alpha / r A B for every kernel shape, and a training state with only these parameters."""

import dataclasses
import functools
import statistics

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from numeric_parts import random_values
from training_recipes import change, compiled_step, tiny_batch, tiny_recipe

from transformer.config import ConfigError, LayerKind, MoE
from transformer.nn.models import count_parameters
from transformer.nn.models._kinds import example_inputs
from transformer.nn.quantization._adapted import NF4, NF4_LEVELS, linear_frozen, quantized_nf4
from transformer.nn.quantization._int8 import Int8
from transformer.training import lora
from transformer.training._overrides import override
from transformer.training._recipe import Origin, build_model, from_json, to_json
from transformer.training._start import Start, initialize_from
from transformer.training._state import (
    abstract_state,
    initial_params,
    make_state,
    merged_params,
    model_params,
)
from transformer.training._step import make_train_step
from transformer.training.lora import LoRA
from transformer.training.workdir._checkpoint import Checkpointer, load_params

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
        return {"kernel": random.normal(size=value).astype(np.float32), "bias": np.ones(value[-1:], np.float32)}

    leaves = {name: filled(value) for name, value in shapes.items()} | {"norm": {"scale": np.ones(7, np.float32)}}
    return jax.device_put(leaves)


def trained(params, config):
    """Random updates, as after training: B is not 0."""
    return random_values(jax.eval_shape(lambda: lora.init(jax.random.key(0), params, config)))


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
    updates = trained(params, CONFIG)
    return params, updates, jax.jit(lambda: lora.merge(params, updates, CONFIG))()


@pytest.mark.parametrize("path", BY_HAND, ids="-".join)
def test_a_merged_kernel_adds_the_low_rank_update_of_the_activations(path):
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
    merged = flatten_dict(merge(trained(params, config)))
    changed = {path for path, leaf in flatten_dict(params).items() if not np.array_equal(leaf, merged[path])}
    assert changed == {("query", "kernel"), ("experts", "gate", "kernel")}


def test_count_is_rank_times_inputs_and_outputs():
    params = tree(SHAPES)

    def shapes(config):
        return jax.eval_shape(lambda: lora.init(jax.random.key(0), params, config))

    assert count_parameters(shapes(LoRA(rank=3, targets=("query",)))) == 3 * (7 + 15)
    assert count_parameters(shapes(LoRA(rank=2, targets=("value", "gate")))) == 2 * 2 * (7 + 15) + 2 * 2 * 4 * (7 + 11)


def test_dtypes_are_kept_and_alpha_scales_the_update():
    wide = tree({"up": (7, 11)})
    params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), wide)
    updates = trained(params, LoRA(rank=2, targets=("up",)))
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}

    @jax.jit
    def merged(params, updates):
        return [lora.merge(params, updates, LoRA(rank=2, alpha=alpha))["up"]["kernel"] for alpha in (1.0, 2.0)]

    assert jax.eval_shape(merged, params, updates)[0].dtype == jnp.bfloat16
    updates = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float32), updates)
    once, twice = (kernel - np.asarray(wide["up"]["kernel"]) for kernel in map(np.asarray, merged(wide, updates)))
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, r"rank.*1.*got 0"),
        ({"alpha": 0.0}, "alpha must be a number of"),
        ({"targets": ()}, r"lora.targets"),
        ({"targets": ("querry",)}, r"lora.targets.*got 'querry'.*'query'?"),
    ],
)
def test_an_invalid_update_names_the_field_to_change(fields, message):
    with pytest.raises(ConfigError, match=message):
        LoRA(**fields)


def test_rejects_muon():
    adapted = dataclasses.replace(tiny_recipe(), lora=LoRA())
    with pytest.raises(ConfigError, match=r"muon needs whole weight matrices, but lora trains .* Use adamw"):
        change(adapted, optimizer={"name": "muon"})


def test_updates_that_do_not_fit_are_refused():
    params = tree({"query": (7, 3, 5)})
    with pytest.raises(ConfigError, match=r"contains gate, which this model doesn't have\. Choose .*: query"):
        trained(params, LoRA(targets=("query", "gate")))
    updates = trained(params, LoRA(targets=("query",)))
    with pytest.raises(ConfigError, match="an entry for query, but the parameters have no linear layer there"):
        lora.merge(tree({"key": (7, 3, 5)}), updates, LoRA())
    with pytest.raises(ConfigError, match=r"of query have shapes .*, which don't fit its kernel .*\. Use the updates"):
        lora.merge(tree({"query": (8, 3, 5)}), updates, LoRA())


# In training


def with_lora(**fields):
    recipe = tiny_recipe(**fields)
    origin = Origin(source="somewhere", model="BERT", fingerprint="0" * 64)
    return dataclasses.replace(recipe, lora=LoRA(rank=2, targets=("query", "up")), origin=origin)


def test_the_state_stores_the_updates_and_one_copy_of_the_base():
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


def test_experts_and_stacked_layers_have_their_own_updates():
    moe = {"num_layers": 3, "stack.period": (LayerKind(moe=MoE(num_experts=4)),)}
    state = abstract_state(with_lora(model=moe))
    shapes = {path[-3:]: leaf.shape for path, leaf in flatten_dict(state.params["updates"]).items()}
    assert shapes["experts", "up", "a"] == (3, 4, 6, 2)
    assert shapes["self_attention", "query", "b"] == (3, 2, 6)


def test_a_step_changes_only_the_updates():
    recipe = with_lora()
    state = jax.jit(lambda: make_state(recipe))()
    base = jax.device_get(state.base)
    after, metrics = compiled_step(recipe)(state, tiny_batch())
    chex.assert_trees_all_equal(after.base, base)
    new, old = jax.device_get((after.params, state.params))
    gradients = jax.tree.map(lambda new, old: np.abs(new - old).max(), new, old)
    kinds = {path[-1]: step for path, step in flatten_dict(gradients).items()}
    assert kinds["b"] > 0
    assert kinds["a"] == 0  # B was 0, so dL/dA = 0; weight decay applies only to kernels
    assert float(metrics["grad_norm"]) > 0
    again, _ = compiled_step(recipe)(after, tiny_batch())
    merge = jax.jit(lambda of: merged_params(recipe, of.params, of.base))
    merged, start = (flatten_dict(jax.device_get(merge(of)), sep="/") for of in (again, state))
    changed = {path.rpartition("slot_0/")[2] for path in start if not np.array_equal(merged[path], start[path])}
    assert changed == {"self_attention/query/kernel", "feed_forward/up/kernel"}


@pytest.mark.slow
def test_micro_batches_give_the_same_update():
    recipe = with_lora()
    state = jax.jit(lambda: make_state(recipe))()
    split = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, accumulation=4))
    whole, parts = (jax.jit(make_train_step(one))(state, tiny_batch())[0] for one in (recipe, split))
    chex.assert_trees_all_close(whole.params, parts.params, rtol=2e-4, atol=1e-6)


def test_an_option_enables_lora_and_json_restores_it():
    recipe = tiny_recipe()
    assert override(recipe, [], program="p").lora is None
    changed = override(recipe, ["--lora.rank", "5", "--lora.targets", "query", "out"], program="p")
    assert changed.lora == LoRA(rank=5, targets=("query", "out"))
    assert from_json(to_json(changed)) == changed
    with pytest.raises(ConfigError, match=r"--lora.rang.*'--lora.rank'\?"):
        override(recipe, ["--lora.rang", "5"], program="p")


# Applied to activations


def applied_and_merged(config, base=None):
    """Logits with the update next to the frozen kernel, and with merged kernels."""
    recipe = dataclasses.replace(with_lora(), lora=config)
    params = random_values(jax.eval_shape(lambda: initial_params(recipe)))
    model = build_model(recipe)

    @jax.jit
    def outputs(params, updates):
        frozen = lora.quantize_base(params, base)
        trees = lora.adapt(frozen, updates, config), lora.merge(frozen, updates, config), frozen
        return [model.apply({"params": tree}, *example_inputs(model)) for tree in trees]

    return map(np.asarray, outputs(params, trained(params, config)))


QUICK = {(None, True)}


@pytest.mark.parametrize(
    ("base", "dora"),
    [
        pytest.param(base, dora, marks=() if (base, dora) in QUICK else pytest.mark.slow)
        for base in (None, "int8", "nf4")
        for dora in (False, True)
    ],
)
def test_updates_of_activations_equal_merged_kernels(base, dora):
    config = LoRA(rank=2, alpha=0.3, targets=("query", "out", "up"), dora=dora, rslora=True)
    applied, merged, plain = applied_and_merged(config, base)
    np.testing.assert_allclose(applied, merged, rtol=2e-4, atol=2e-5)
    assert np.abs(applied - plain).max() > 1e-3


def test_rslora_divides_by_the_root_of_the_rank():
    assert LoRA(rank=9, alpha=6.0).scale == pytest.approx(6 / 9)
    assert LoRA(rank=9, alpha=6.0, rslora=True).scale == pytest.approx(2.0)


def test_dora_starts_at_the_base_and_sets_the_norm_of_each_output():
    """W' = m (W + s A B) / ||W + s A B|| has columns of norm m (arXiv 2402.09353, equation 5)."""
    params, config = tree(SHAPES), dataclasses.replace(CONFIG, dora=True)
    updates = jax.jit(lambda: lora.init(jax.random.key(1), params, config))()
    merge = jax.jit(lambda updates: lora.merge(params, updates, config))
    chex.assert_trees_all_close(merge(updates), params, rtol=1e-5, atol=1e-6)
    changed = trained(params, config)
    merged, changed = (flatten_dict(jax.device_get(of)) for of in (merge(changed), changed))
    for path in BY_HAND:
        a, b, m = (changed[*path, name] for name in ("a", "b", "magnitude"))
        matrix = merged[*path, "kernel"].reshape(*a.shape[:-1], b.shape[-1])
        np.testing.assert_allclose(np.linalg.norm(matrix, axis=-2), np.abs(m), rtol=1e-4)


def test_the_norm_of_dora_is_a_constant_for_the_gradient():
    """The gradient of A equals that with the norm held fixed (arXiv 2402.09353, section 4.3)."""
    params, config = tree({"up": (7, 11)}), LoRA(rank=2, targets=("up",), dora=True)
    updates = trained(params, config)
    x = jax.device_put(np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32))

    def ours(updates):
        return jnp.square(linear_frozen(x, lora.adapt(params, updates, config)["up"]["kernel"])).sum()

    def fixed(updates, norm):
        a, b, m = (updates["up"][name] for name in ("a", "b", "magnitude"))
        return jnp.square(x @ (params["up"]["kernel"] + config.scale * a @ b) * (m * norm)[None]).sum()

    @jax.jit
    def gradients(updates):
        norm = lora.adapt(params, updates, config)["up"]["kernel"].factor() / updates["up"]["magnitude"]
        return jax.grad(ours)(updates), jax.grad(fixed)(updates, norm)

    chex.assert_trees_all_close(*gradients(updates), rtol=1e-4)


# A quantized base


@jax.jit
def kept_and_read(weights):
    """The stored form of quantized weights, and the weights that it represents."""
    kept = quantized_nf4(weights, -2)
    return kept, kept.array()


def test_nf4_rounds_each_weight_to_the_nearest_level_of_its_block():
    weights = np.random.default_rng(0).normal(size=(2, 128, 3)).astype(np.float32)
    kept, found = kept_and_read(weights)
    assert (kept.codes.shape, kept.codes.dtype, kept.absmax.shape) == ((2, 64, 3), np.uint8, (2, 2, 3))
    blocks = weights.reshape(2, 2, 64, 3)
    largest = np.abs(blocks).max(2, keepdims=True)
    levels = np.array(NF4_LEVELS, np.float32)
    nearest = np.abs((blocks / largest)[..., None] - levels).argmin(-1)
    np.testing.assert_allclose(found, (levels[nearest] * largest).reshape(weights.shape), rtol=1e-6)


def test_the_levels_of_nf4_are_quantiles():
    """Computed as bitsandbytes does: 8 positive and 7 negative quantiles from 1/2 to 0.9677083, and 0."""
    outermost, quantile = 0.9677083, statistics.NormalDist().inv_cdf
    positive, negative = (
        [quantile(outermost + (0.5 - outermost) * i / count) for i in range(count)] for count in (8, 7)
    )
    levels = sorted([*positive, 0.0, *(-level for level in negative)])
    np.testing.assert_allclose(NF4_LEVELS, np.array(levels) / positive[0], atol=2e-7)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("size", [1, 7, 22, 64, 80, 96])
def test_nf4_keeps_the_shape_and_exact_zeros(size):
    weights = np.random.default_rng(0).normal(size=(size, 2)).astype(np.float32)
    weights[0, 0] = 0.0
    weights[:, 1] = 0.0
    kept, found = kept_and_read(weights)
    found = np.asarray(found)
    assert kept.shape == found.shape == (size, 2)
    assert np.all(found[weights == 0] == 0)
    assert np.abs(found - weights).max() <= 0.16 * np.abs(weights).max()  # half the widest gap between levels


@pytest.mark.parametrize("base", ["bfloat16", "int8", "nf4"])
def test_every_linear_layer_of_the_base_is_stored_in_its_format(base):
    recipe = dataclasses.replace(with_lora(), lora=LoRA(rank=2, targets=("query",), base=base))
    moe = {"num_layers": 2, "stack.period": (LayerKind(moe=MoE(num_experts=4)),)}
    for one in (recipe, change(recipe, model=moe)):
        shapes = flatten_dict(jax.eval_shape(lambda one=one: initial_params(one)))
        stored = flatten_dict(abstract_state(one).base)
        kernels = {p for p in shapes if p[-1] == "kernel" and p[-2] not in ("router", "output")}
        kind = {"int8": Int8, "nf4": NF4}.get(base)
        if kind is None:
            assert {p for p, leaf in stored.items() if leaf.dtype == jnp.bfloat16} >= kernels
        else:
            assert {p for p, leaf in stored.items() if isinstance(leaf, kind)} == kernels
        assert all(stored[p].shape == shapes[p].shape for p in shapes)
        assert all(leaf.dtype == jnp.float32 for path, leaf in stored.items() if path[-2] == "router")


def started(base, dora=False, **fields):
    """A recipe with this base, and its state after starting from random parameters."""
    recipe = dataclasses.replace(with_lora(**fields), lora=LoRA(rank=2, targets=("query", "up"), base=base, dora=dora))
    params = initial_params(recipe)
    start = Start("somewhere", "BERT", recipe.model, params, None)
    return recipe, initialize_from(start, jax.jit(lambda: make_state(recipe))()), params


@pytest.mark.parametrize(("base", "dora"), [("int8", False), ("nf4", True)])
@pytest.mark.slow
def test_a_run_trains_on_a_quantized_base(base, dora):
    """The step trains the updates alone, with nearly the loss of the full base; export merges the same numbers."""
    recipe, state, params = started(base, dora)
    full = dataclasses.replace(recipe, lora=dataclasses.replace(recipe.lora, base=None))
    frozen = jax.device_get(state.base)
    losses = []
    for one, begin in ((recipe, state), (full, started(None, dora)[1])):
        step = compiled_step(one)
        for _ in range(3):
            begin, metrics = step(begin, tiny_batch())
        losses.append(float(metrics["loss_sum"]))
        after = begin if one is recipe else after
    chex.assert_trees_all_equal(after.base, frozen)
    assert losses[0] == pytest.approx(losses[1], rel=0.03)
    assert losses[0] != losses[1]
    merged = merged_params(recipe, after.params, after.base)
    assert {leaf.dtype for leaf in jax.tree.leaves(merged)} == {jnp.dtype("float32")}
    chex.assert_trees_all_equal_shapes_and_dtypes(merged, params)
    model = build_model(recipe)
    inputs = example_inputs(model)
    used = model_params(recipe, after.params, after.base)
    applied, exported = (model.apply({"params": tree}, *inputs) for tree in (used, merged))
    np.testing.assert_allclose(applied, exported, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_a_checkpoint_restores_a_quantized_base(tmp_path):
    recipe, state, _ = started("nf4")
    step = compiled_step(recipe)
    once, _ = step(state, tiny_batch())
    once = jax.device_get(once)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, once)
    with Checkpointer(tmp_path) as checkpoints:
        restored = checkpoints.restore_newest(abstract_state(recipe)).state
    chex.assert_trees_all_equal(restored, once)
    chex.assert_trees_all_equal(*(step(one, tiny_batch())[0] for one in (restored, once)))
    nested, _ = load_params(tmp_path, names="base")
    chex.assert_trees_all_equal(lora.nested_like(abstract_state(recipe).base, nested), once.base)
