"""Schedules at the steps that define them, weight decay by path, Muon's matrices, and clipping."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training_recipes import start, tiny_batch, tiny_recipe

from transformer.config import ConfigError, Execution, LearnedOptions, QKNorm
from transformer.nn import ParallelConfig
from transformer.training import OptimizerConfig, place
from transformer.training._optimizers import _hutchinson, decay_mask, make_optimizer, make_schedule, muon_dimensions
from transformer.training._settings import OptimizerName
from transformer.training._start import Start, initialize_from
from transformer.training._state import make_state, parameter_paths


def rates(numbers, **optimizer):
    """Return the learning rate of the n-th update, for each n (the first update has n = 1)."""
    schedule = make_schedule(tiny_recipe(optimizer={"learning_rate": 0.5, "warmup_steps": 4} | optimizer, steps=20))
    return jax.jit(jax.vmap(schedule))(np.asarray(numbers, np.int32) - 1).tolist()


@pytest.mark.parametrize("schedule", ["constant", "cosine", "rsqrt", "wsd"])
def test_warm_up_is_linear_from_zero(schedule):
    np.testing.assert_allclose(rates([1, 2, 3, 4], schedule=schedule), [0.125, 0.25, 0.375, 0.5], rtol=1e-6)


def test_without_warm_up_the_schedule_starts_at_its_peak():
    assert rates([1], schedule="constant", warmup_steps=0) == [0.5]
    np.testing.assert_allclose(rates([1], schedule="cosine", warmup_steps=0), 0.5, rtol=0.01)


def test_constant_schedule_is_constant():
    assert rates([5, 20, 1000], schedule="constant") == [0.5, 0.5, 0.5]


def test_cosine_is_halfway_at_the_middle_and_ends_at_its_fraction():
    got = rates([12, 20, 30], schedule="cosine", final_fraction=0.2)
    np.testing.assert_allclose(got, [0.5 * (0.2 + 0.8 / 2), 0.1, 0.1], rtol=1e-6)
    np.testing.assert_allclose(rates([8], schedule="cosine", decay_steps=8), [0.05], rtol=1e-6)


def test_wsd_is_constant_and_then_decays_linearly_to_its_fraction():
    falling = {"schedule": "wsd", "decay_fraction": 0.4, "final_fraction": 0.2}
    got = rates([4, 8, 12, 14, 16, 20, 30], **falling)  # the last eight of 20 steps
    np.testing.assert_allclose(got, [0.5, 0.5, 0.5, 0.4, 0.3, 0.1, 0.1], rtol=1e-6)
    np.testing.assert_allclose(rates([6, 9, 10], **falling, decay_steps=10), [0.5, 0.2, 0.1], rtol=1e-6)
    at_once = rates([19, 20], **falling | {"decay_fraction": 0.0})
    np.testing.assert_allclose(at_once, [0.5, 0.1], rtol=1e-6)
    whole = rates(
        [3, 4, 12, 20], **falling | {"decay_fraction": 1.0}
    )  # the decay starts after the warm-up, so the rate does not jump
    np.testing.assert_allclose(whole, [0.375, 0.5, 0.3, 0.1], rtol=1e-6)
    for wrong in (-0.1, 1.0 + 1e-10, math.nan, True):
        with pytest.raises(ConfigError, match=r"optimizer.decay_fraction.*0.*1"):
            OptimizerConfig(decay_fraction=wrong)


def test_rsqrt_halves_when_steps_quadruple():
    np.testing.assert_allclose(rates([16, 64], schedule="rsqrt"), [0.25, 0.125], rtol=1e-6)


def test_noam_equals_the_formula_of_the_paper():
    numbers = [1, 3, 4, 5, 100]
    expected = [6**-0.5 * min(n**-0.5, n * 4**-1.5) for n in numbers]
    np.testing.assert_allclose(rates(numbers, schedule="noam", learning_rate=1.0), expected, rtol=1e-6)
    base = 1 / math.sqrt(512 * 4000)
    assert base == pytest.approx(6.99e-4, rel=1e-3)  # the peak of the paper's base model


def params_of(recipe):
    return jax.eval_shape(lambda: make_state(recipe)).params


def chosen(mask, params):
    return {path for path, flag in zip(parameter_paths(params), jax.tree.leaves(mask), strict=True) if flag}


FULL = {
    "attention.qk_norm": QKNorm(),
    "attention.sinks": True,
    "embedding.tie": False,
    "position": LearnedOptions(max_length=7),
}


def test_weight_decay_applies_only_to_matrices():
    params = params_of(tiny_recipe(model=FULL))
    decayed = chosen(decay_mask(OptimizerConfig(), params), params)
    assert decayed == {path for path in parameter_paths(params) if path.endswith("/kernel")}
    assert "output/kernel" in decayed
    assert len(decayed) == 7  # query, key, value, out, up, down, and the output head
    with_tables = chosen(decay_mask(OptimizerConfig(decay_embeddings=True), params), params)
    assert with_tables - decayed == {"embedding/embedding"}


@pytest.mark.slow
def test_only_decayed_parameters_shrink():
    """With gradients of zero, only weight decay changes a parameter: p (1 - rate * decay)."""
    recipe = tiny_recipe(model=FULL, optimizer={"learning_rate": 0.5, "weight_decay": 0.1})
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), params_of(recipe))
    optimizer = make_optimizer(recipe)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    for path, leaf in zip(parameter_paths(params), jax.tree.leaves(optax.apply_updates(params, updates)), strict=True):
        np.testing.assert_allclose(leaf, 0.95 if path.endswith("kernel") else 1.0, rtol=1e-6, err_msg=path)


def test_clipping_uses_the_global_gradient_norm():
    """The second moment contains clipped gradients: their squares sum to the square of the limit."""
    recipe = tiny_recipe(optimizer={"clip_norm": 0.25, "beta2": 0.5})
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), params_of(recipe))
    _, state = first_update(make_optimizer(recipe), params)
    (adam,) = (part for part in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(part))
    total = sum(np.asarray(leaf).sum() for leaf in jax.tree.leaves(adam.nu))
    np.testing.assert_allclose(total, 0.5 * 0.25**2, rtol=1e-5)


def first_update(optimizer, params):
    """Return the updates and the state after a step whose gradients equal the parameters, in one program."""
    return jax.jit(lambda params: optimizer.update(params, optimizer.init(params), params))(params)


def is_adam(node):
    return isinstance(node, optax.ScaleByAdamState)


def test_muon_updates_layer_kernels_as_whole_matrices():
    params = params_of(tiny_recipe(model=FULL | {"feed_forward.gated": True}))
    dimensions = jax.tree.leaves(muon_dimensions(params), is_leaf=lambda node: node is None or hasattr(node, "_fields"))
    taken = {path: spec for path, spec in zip(parameter_paths(params), dimensions, strict=True) if spec is not None}
    short = {path.removeprefix("decoder/layers/slot_0/"): tuple(spec) for path, spec in taken.items()}
    heads, merge, plain = ((1,), (2, 3)), ((1, 2), (3,)), ((1,), (2,))  # axis 0 indexes the layers
    assert short == {
        "self_attention/query/kernel": heads,
        "self_attention/key/kernel": heads,
        "self_attention/value/kernel": heads,
        "self_attention/out/kernel": merge,
        "feed_forward/up/kernel": plain,
        "feed_forward/gate/kernel": plain,
        "feed_forward/down/kernel": plain,
    }


def test_muon_steps_are_orthogonal_for_each_layer():
    recipe = tiny_recipe(
        model={"num_layers": 2},
        optimizer={"name": "muon", "learning_rate": 1.0, "weight_decay": 0.0, "clip_norm": None},
    )
    params = params_of(recipe)
    random = np.random.default_rng(0)
    gradients = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), params)
    updates, _ = jax.device_get(first_update(make_optimizer(recipe), gradients))
    for layer in range(recipe.model.num_layers):
        step = -updates["decoder"]["layers"]["slot_0"]["feed_forward"]["up"]["kernel"][layer]  # (6, 5)
        singular = np.linalg.svd(step / (0.2 * math.sqrt(6)), compute_uv=False)
        assert singular.min() > 0.6
        assert singular.max() < 1.3
    scale = updates["decoder"]["final_norm"]["scale"]
    np.testing.assert_allclose(
        np.abs(scale), np.abs(scale[0]), rtol=1e-3
    )  # Adam's first step is the sign of the gradient


RATES = {"adamw": 0.02, "muon": 0.02, "adafactor": 0.02, "lion": 0.01, "schedule_free_adamw": 0.05, "sophia": 0.02}


def named(name, **changes):
    """Return a tiny recipe that trains with an optimizer."""
    recipe = dataclasses.replace(tiny_recipe(), execution=Execution(scan=False, attention="reference"))
    rate = {"learning_rate": RATES[name]} | changes
    return dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, name=name, **rate))


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", OptimizerName.__args__)
def test_every_optimizer_reduces_the_loss(name):
    state, step = start(named(name))
    losses = []
    for _ in range(20):
        state, metrics = step(state, tiny_batch())
        losses.append(float(metrics["loss_sum"]) / float(metrics["weight"]))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("adafactor", optax.adafactor(0.02, multiply_by_parameter_scale=False)),
        ("lion", optax.lion(0.01, b1=0.9, b2=0.99, weight_decay=0.0)),
        ("schedule_free_adamw", optax.contrib.schedule_free_adamw(0.05, b1=0.9, b2=0.99, weight_decay=0.0)),
    ],
)
def test_shared_optimizers_equal_optax(name, reference):
    recipe = named(name, clip_norm=None, weight_decay=0.0)
    kernel = np.random.default_rng(0).normal(size=(130, 140)).astype(np.float32)
    params = {"kernel": kernel, "scale": np.ones(3, np.float32)}

    @functools.partial(jax.jit, static_argnums=0)
    def steps(optimizer, params):
        state, moved = optimizer.init(params), params
        for turn in range(3):
            gradients = jax.tree.map(lambda leaf, turn=turn: jnp.sin(leaf + turn), params)
            updates, state = optimizer.update(gradients, state, moved)
            moved = optax.apply_updates(moved, updates)
        return moved

    both = [steps(optimizer, params) for optimizer in (make_optimizer(recipe), reference)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), *both)


def test_adafactor_stores_row_and_column_statistics():
    params = {"kernel": np.ones((130, 140), np.float32)}
    state = jax.eval_shape(make_optimizer(named("adafactor")).init, params)
    sizes = {leaf.size for leaf in jax.tree.leaves(state)}
    assert {130, 140} <= sizes
    assert max(sizes) == 140


def test_adafactor_sees_the_heads_of_a_kernel_as_one_axis():
    """(layers, D, N, H) has D rows and N H columns in each layer, and the update is that of the matrix."""
    kernel = np.random.default_rng(0).normal(size=(2, 128, 4, 32)).astype(np.float32)
    ours, reference = (
        make_optimizer(named("adafactor", clip_norm=None, weight_decay=0.0)),
        optax.adafactor(0.02, multiply_by_parameter_scale=False),
    )
    params = {"self_attention": {"query": {"kernel": kernel}}}
    matrix = kernel.reshape(2, 128, 128)
    updates, state = first_update(ours, params)
    expected, _ = first_update(reference, list(matrix))
    np.testing.assert_allclose(updates["self_attention"]["query"]["kernel"].reshape(matrix.shape), expected, rtol=1e-5)
    assert max(leaf.size for leaf in jax.tree.leaves(state)) == 2 * 128


@pytest.mark.parametrize("name", ["adafactor", *(pytest.param(n, marks=pytest.mark.slow) for n in ("lion", "muon"))])
def test_scanned_layers_are_updated_like_separate_ones(name):
    """Scanned layers are one array; an optimizer must not limit or normalize their updates together."""
    optimizer = make_optimizer(named(name, clip_norm=None, learning_rate=1.0, weight_decay=0.0))
    random = np.random.default_rng(0)
    sizes = np.array([1.0, 10.0, 0.01])  # of the gradients of the layers, in another order at each step

    def values(*shape):
        return random.normal(size=(3, *shape)).astype(np.float32)

    def layers(kernel, bias, a):
        return {"up": {"kernel": kernel, "bias": bias}, "query": {"a": a}}

    params = layers(values(128, 130), values(130), values(12, 2))
    gradients = [
        jax.tree.map(
            lambda leaf, s=step: values(*leaf.shape[1:]) * np.roll(sizes, s).reshape(3, *[1] * (leaf.ndim - 1)), params
        )
        for step in range(2)
    ]

    def separate(tree):
        return [jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(3)]

    @jax.jit
    def trained(params, gradients):
        state = optimizer.init(params)
        for gradient in gradients:
            updates, state = optimizer.update(gradient, state, params, obj_fn=None)
            params = jax.tree.map(jnp.add, params, updates)
        return params

    together = trained(params, gradients)
    apart = trained(separate(params), [separate(gradient) for gradient in gradients])
    for one, other in zip(separate(jax.device_get(together)), jax.device_get(apart), strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), one, other)


def test_schedule_free_evaluates_its_average():
    state, step = start(named("schedule_free_adamw"))
    for _ in range(3):
        state, _ = step(state, tiny_batch())
    averaged, expected = jax.jit(
        lambda state: (state.averaged, optax.contrib.schedule_free_eval_params(state.opt_state, state.params))
    )(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), averaged, expected)
    different = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), averaged, state.params)
    assert max(jax.tree.leaves(different)) > 1e-3


@pytest.mark.parametrize("name", OptimizerName.__args__)
def test_a_loaded_model_has_the_optimizer_state_of_a_new_one(name):
    """Schedule-free AdamW, whose state has a copy of the parameters, would otherwise return to the random ones."""
    recipe = named(name)
    state, step = start(recipe)
    given = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf) + 1.0), state.params)
    begun = initialize_from(Start("somewhere", "GPT-2", recipe.model, given, None), state)
    chex.assert_trees_all_equal(begun.opt_state, jax.jit(make_optimizer(recipe).init)(given))
    chex.assert_trees_all_equal(begun.averaged, given)
    if name == "schedule_free_adamw":
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=0.1), step(begun, tiny_batch())[0].averaged, given
        )


def test_sophia_estimates_the_diagonal_of_the_hessian():
    """For a diagonal Hessian the estimate is exact, whatever the random signs are; and it equals that of optax."""
    params, squares = (
        {"a": np.float32([1.0, -2.0]), "b": np.float32(3.0)},
        {"a": np.float32([5.0, 7.0]), "b": np.float32(0.5)},
    )

    def loss(params):
        return sum(jax.tree.leaves(jax.tree.map(lambda p, c: (c * p**2).sum() / 2, params, squares)))

    def estimate(estimator, loss):
        return jax.jit(lambda params: estimator.update(params, estimator.init(params), params, obj_fn=loss)[0])(params)

    diagonal = estimate(_hutchinson(), loss)
    jax.tree.map(np.testing.assert_allclose, diagonal, squares)

    def coupled(params):
        return loss(params) * params["b"] + jnp.prod(params["a"])

    optax_estimator = optax.contrib.hutchinson_estimator_diag_hessian()
    found = [estimate(estimator, coupled) for estimator in (_hutchinson(), optax_estimator)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *found)


@pytest.mark.parametrize(
    "name", ["adafactor", *(pytest.param(n, marks=pytest.mark.slow) for n in ("lion", "schedule_free_adamw", "sophia"))]
)
def test_sharded_updates_equal_one_device(name):
    recipe = named(name)
    recipe = dataclasses.replace(
        recipe, model=recipe.model.replace(d_model=16, num_heads=4, **{"feed_forward.d_ff": 32})
    )
    losses = {}
    for layout in (ParallelConfig(devices=1), ParallelConfig(data=2, fsdp=4)):
        placement = place(dataclasses.replace(recipe, parallel=layout))
        state, found = placement.spread(placement.new_state()), []
        for _ in range(3):
            state, metrics = placement.train_step(state, {k: np.asarray(v) for k, v in tiny_batch().items()})
            found.append(float(metrics["loss_sum"]))
        losses[layout.fsdp] = found
    np.testing.assert_allclose(losses[4], losses[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimizerConfig(name="schedule_free_adamw", warmup_steps=0), r"--optimizer.schedule"),
        (
            lambda: tiny_recipe(optimizer={"name": "schedule_free_adamw"}, ema_decay=0.9),
            r"training.ema_decay",
        ),
        (lambda: tiny_recipe(optimizer={"name": "sophia"}), r"--execution.attention"),
    ],
)
def test_rejects_options_excluded_by_an_optimizer(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
