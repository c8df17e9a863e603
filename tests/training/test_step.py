"""The step: every split of a batch gives the same update, and no non-finite value gets into the state."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_recipes import change, compiled_step, start, tiny_batch, tiny_recipe

from transformer.nn.models import count_parameters
from transformer.training._optimizers import make_schedule
from transformer.training._state import TrainState, parameter_paths
from transformer.training._step import NonFiniteError, _summed_gradients, check_finite, make_eval_step, make_train_step

TASKS = ["causal_lm", "seq2seq"]


def calm(task="causal_lm", **training):
    """Adam divides by the size of a gradient, so a gradient that is only rounding error (a key's bias) gives noise."""
    return tiny_recipe(task, optimizer={"epsilon": 1e-3}, **training)


def run(recipe, batches):
    state, step = start(recipe)
    for batch in batches:
        state, metrics = step(state, batch)
    return state, jax.device_get(metrics)


@pytest.mark.parametrize(
    ("task", "parts"), [("causal_lm", 8), ("causal_lm", 2), pytest.param("seq2seq", 4, marks=pytest.mark.slow)]
)
def test_accumulation_equals_one_large_batch(task, parts):
    batches = [tiny_batch(task, seed=seed) for seed in range(3)]
    whole, whole_metrics = run(calm(task, label_smoothing=0.1), batches)
    state, metrics = run(calm(task, label_smoothing=0.1, accumulation=parts), batches)
    chex.assert_trees_all_close(state.params, whole.params, atol=2e-5)
    np.testing.assert_allclose(metrics["loss_sum"], whole_metrics["loss_sum"], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], whole_metrics["grad_norm"], rtol=1e-4)
    assert metrics["weight"] == whole_metrics["weight"]


@pytest.mark.parametrize("task", ["causal_lm", pytest.param("seq2seq", marks=pytest.mark.slow)])
def test_pmap_over_an_axis_equals_one_device(task):
    recipe = calm(task)
    batch = tiny_batch(task)
    state, _ = start(recipe)
    alone, alone_metrics = run(recipe, [batch])
    devices = jax.local_devices()[:4]
    step = jax.pmap(make_train_step(recipe, axis_name="batch"), axis_name="batch", devices=devices)
    spread = {name: np.asarray(array).reshape(4, 2, *array.shape[1:]) for name, array in batch.items()}
    together, metrics = step(replicate(state, 4), spread)
    chex.assert_trees_all_close(together.params, replicate(alone.params, 4), atol=2e-5)
    np.testing.assert_allclose(metrics["loss_sum"], np.full(4, alone_metrics["loss_sum"]), rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], np.full(4, alone_metrics["grad_norm"]), rtol=1e-4)


def replicate(tree, number):
    return jax.tree.map(lambda leaf: np.broadcast_to(np.asarray(leaf), (number, *leaf.shape)), tree)


@pytest.mark.slow
def test_pmap_has_different_dropout_and_equal_updates_on_each_device():
    recipe = tiny_recipe(model={"dropout_rate": 0.5})
    batch = tiny_batch(rows=1, padding=False)
    state, single = start(recipe)
    step = jax.pmap(make_train_step(recipe, axis_name="batch"), axis_name="batch", devices=jax.local_devices()[:2])
    together, metrics = step(replicate(state, 2), {name: jnp.stack([array, array]) for name, array in batch.items()})
    for leaf in jax.tree.leaves(together.params):
        np.testing.assert_array_equal(leaf[0], leaf[1])
    # with equal masks, the same row on two devices would give exactly twice the loss of one device
    losses = [float(single(state.replace(step=jnp.asarray(number)), batch)[1]["loss_sum"]) for number in range(1)]
    assert all(abs(float(metrics["loss_sum"][0]) - 2 * loss) > 1e-4 for loss in losses)


def test_rows_of_weight_zero_have_no_effect():
    batch = tiny_batch()
    padded = {name: np.concatenate([array, array]) for name, array in batch.items()}
    padded["weights"][8:] = 0.0
    state, metrics = run(calm(), [padded])
    expected, expected_metrics = run(calm(), [batch])
    chex.assert_trees_all_close(state.params, expected.params, atol=1e-6)
    np.testing.assert_allclose(metrics["loss_sum"], expected_metrics["loss_sum"], rtol=1e-6)


def test_randomness_depends_only_on_seed_and_step():
    recipe = tiny_recipe(model={"dropout_rate": 0.5})
    state, step = start(recipe)
    batch = tiny_batch()

    def loss(step, number=0):
        return float(step(state.replace(step=jax.device_put(np.int32(number))), batch)[1]["loss_sum"])

    first = loss(step)
    assert loss(step) == first
    assert loss(step, 1) != first
    assert loss(compiled_step(change(recipe, training={"seed": 1}))) != first


def test_micro_batches_have_different_dropout():
    """Two rows, each a micro-batch: with the same mask for both, their order would make no difference."""
    recipe = tiny_recipe(model={"dropout_rate": 0.5}, accumulation=2)
    rows = tiny_batch(rows=2, padding=False)
    swapped = {name: np.asarray(array)[::-1] for name, array in rows.items()}
    state, step = start(recipe)
    assert not np.isclose(step(state, rows)[1]["loss_sum"], step(state, swapped)[1]["loss_sum"], rtol=1e-5)


def batch_with_target(token):
    """Return a batch whose first target is not in the vocabulary, so that the loss is NaN."""
    batch = tiny_batch()
    targets = np.array(batch["targets"])
    targets[0, 0] = token
    return batch | {"targets": targets}


def test_skip_keeps_the_state_and_counts_the_step():
    recipe = tiny_recipe(nan_policy="skip", ema_decay=0.9)
    state, step = start(recipe)
    state, _ = step(state, tiny_batch())
    bad = batch_with_target(99)
    after, metrics = step(state, bad)
    chex.assert_trees_all_equal((after.params, after.opt_state, after.ema), (state.params, state.opt_state, state.ema))
    counts = jax.device_get((after.step, after.skipped, metrics["skipped"], metrics["finite"]))
    assert counts == (2, 1, 1, False)
    going_on, metrics = step(after, tiny_batch())
    assert jax.device_get((going_on.step, going_on.skipped, metrics["finite"])) == (3, 1, True)
    new, old = map(jax.tree.leaves, jax.device_get((going_on.params, after.params)))
    assert any(np.any(a != b) for a, b in zip(new, old, strict=True))


def test_the_logged_learning_rate_counts_applied_steps():
    recipe = tiny_recipe(nan_policy="skip", optimizer={"schedule": "cosine", "warmup_steps": 4}, steps=9)
    rates, schedule = [], make_schedule(recipe)
    state, step = start(recipe)
    bad = batch_with_target(99)
    for batch in (tiny_batch(), bad, bad, tiny_batch(), tiny_batch()):
        state, metrics = step(state, batch)
        rates.append(float(metrics["learning_rate"]))
    expected = jax.jit(jax.vmap(schedule))(np.int32([0, 1, 1, 1, 2]))
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    assert len(set(rates)) == 3


def test_stop_keeps_the_previous_state_even_if_steps_follow():
    recipe = tiny_recipe()
    state, step = start(recipe)
    state, _ = step(state, tiny_batch())
    bad = batch_with_target(-1)
    after, metrics = step(state, bad)
    following, _ = step(after, tiny_batch())  # the loop dispatches this step before it reads the metrics
    chex.assert_trees_all_equal((following.params, following.opt_state), (state.params, state.opt_state))
    with pytest.raises(NonFiniteError, match=r"step 2: the loss is nan, and all gradients are finite. The state"):
        check_finite(2, jax.device_get(metrics), parameter_paths(state.params))


def test_the_first_non_finite_parameter_is_named():
    recipe = tiny_recipe(model={"embedding.tie": False})
    state, step = start(recipe)
    paths = parameter_paths(state.params)
    broken = jax.tree.map(lambda leaf: leaf, state.params)
    broken["output"]["kernel"] = np.array(broken["output"]["kernel"])
    broken["output"]["kernel"][0, 0] = np.inf
    _, metrics = step(state.replace(params=broken), tiny_batch())
    message = (
        "the first non-finite gradient is that of decoder/final_norm/bias.* Lower --opt.*--training.nan-policy skip"
    )
    with pytest.raises(NonFiniteError, match=message):
        check_finite(1, jax.device_get(metrics), paths)
    assert paths[int(metrics["first_bad"])] == paths[0]
    check_finite(1, numbers(finite=True), paths)
    bad_update = numbers(finite=False, loss_sum=4.0, weight=2.0, first_bad=-1, first_bad_weight=1)
    with pytest.raises(NonFiniteError, match=rf"loss.*2.*{paths[1]}"):
        check_finite(1, bad_update, paths)


def numbers(**values):
    return {name: np.asarray(value) for name, value in values.items()}


def test_an_update_that_is_not_finite_is_not_applied():
    recipe = tiny_recipe(optimizer={"learning_rate": 1e38}, nan_policy="skip")
    state, step = start(recipe)
    after, metrics = step(state, tiny_batch())
    chex.assert_trees_all_equal(after.params, state.params)
    assert metrics["skipped"] == 1


def test_the_average_follows_its_formula():
    recipe = tiny_recipe(ema_decay=0.5)
    state, step = start(recipe)
    chex.assert_trees_all_equal(state.ema, state.params)
    mean = jax.tree.map(np.asarray, state.ema)
    for number in range(9):
        state, _ = step(state, tiny_batch(seed=number))
        decay = min(0.5, (1 + number) / (10 + number))
        mean = jax.tree.map(lambda old, new, d=decay: d * old + (1 - d) * np.asarray(new), mean, state.params)
    chex.assert_trees_all_close(state.ema, mean, rtol=1e-5)
    chex.assert_trees_all_equal(state.averaged, state.ema)
    assert decay == 0.5
    without, _ = start(tiny_recipe())
    assert without.ema is None
    assert without.averaged is without.params


def test_the_average_of_bfloat16_parameters_follows_them():
    """One update of a slow average is less than one step of bfloat16, so that it must not be rounded away."""
    recipe = tiny_recipe(model={"parameters.dtype": "bfloat16"}, optimizer={"learning_rate": 1e-2}, ema_decay=0.999)
    state, step = start(recipe)
    state = state.replace(step=jax.device_put(np.int32(10**6)))  # the decay has reached its final value
    mean = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state.params)
    for number in range(20):
        state, _ = step(state, tiny_batch(seed=number))
        mean = jax.tree.map(lambda old, new: 0.999 * old + 0.001 * np.asarray(new, np.float64), mean, state.params)
    chex.assert_type(jax.tree.leaves(state.ema), jnp.float32)
    for got, expected in zip(jax.tree.leaves(state.ema), jax.tree.leaves(mean), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)
    chex.assert_type(jax.tree.leaves(jax.eval_shape(lambda one: one.averaged, state)), jnp.bfloat16)


def test_the_sum_of_many_bfloat16_gradients_does_not_stop_growing():
    """256 + 1 is 256 in bfloat16: the sum over 512 equal micro-batches would be half of the right one."""
    params = {"w": jax.device_put(np.ones(3, jnp.bfloat16))}
    state = TrainState(step=None, params=params, opt_state=None, ema=None, skipped=None)
    batch = {"weights": jax.device_put(np.ones((512, 2), np.float32))}

    def loss(params, state, batch, key):
        weight = batch["weights"].mean()
        return params["w"].astype(jnp.float32).sum() * weight, {"weight": weight}

    (total, sums), gradients = jax.jit(lambda key: _summed_gradients(loss, state, batch, key, 512))(jax.random.key(0))
    assert (float(total), float(sums["weight"])) == (3 * 512, 512)
    assert gradients["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(gradients["w"], np.float32), 512)


def test_bfloat16_computation_keeps_float32_parameters():
    recipe = tiny_recipe(model={"dtype": "bfloat16"})
    state, step = start(recipe)
    chex.assert_type(jax.tree.leaves(state.params), jnp.float32)
    lowered = step.lower(state, tiny_batch())
    assert "bf16" in lowered.as_text()
    after, metrics = lowered.compile()(state, tiny_batch())
    chex.assert_type(jax.tree.leaves(after.params), jnp.float32)
    full = float(compiled_step(tiny_recipe())(state, tiny_batch())[1]["loss_sum"])
    np.testing.assert_allclose(metrics["loss_sum"], full, rtol=0.02)
    assert float(metrics["loss_sum"]) != full


def test_grad_norm_belongs_to_the_mean_loss():
    recipe = tiny_recipe(optimizer={"clip_norm": 1e-3})
    batch = tiny_batch()
    state, step = start(recipe)
    evaluate = make_eval_step(recipe)

    def mean_loss(params):
        sums = evaluate(params, batch)
        return sums["loss_sum"] / sums["weight"]

    gradient = jax.jit(jax.grad(mean_loss))(state.params)
    norm = np.sqrt(sum(np.square(np.asarray(leaf)).sum() for leaf in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(step(state, batch)[1]["grad_norm"], norm, rtol=1e-5)


def test_evaluation_uses_no_smoothing_or_dropout():
    plain = tiny_recipe()
    other = tiny_recipe(model={"dropout_rate": 0.5}, label_smoothing=0.3, z_loss=0.1)
    state, step = start(plain)
    batch = tiny_batch()
    sums = jax.device_get(jax.jit(make_eval_step(other))(state.params, batch))
    np.testing.assert_allclose(sums["loss_sum"], step(state, batch)[1]["loss_sum"], rtol=1e-6)
    assert sums["weight"] == np.asarray(batch["weights"]).sum()
    assert 0 <= sums["correct"] <= sums["weight"]


def test_parameters_are_counted_and_named_in_order():
    state, _ = start(tiny_recipe())
    paths = parameter_paths(state.params)
    assert paths[0] == "decoder/final_norm/bias"
    assert paths[-1] == "embedding/embedding"
    assert count_parameters(state.params) == sum(leaf.size for leaf in jax.tree.leaves(state.params))


def test_the_z_loss_is_part_of_the_training_loss():
    """The loss of a step contains its term, which is about z_loss ln(V)^2 for a new model."""
    batch = tiny_batch()
    plain, with_term = (run(tiny_recipe(z_loss=weight), [batch])[1] for weight in (0.0, 0.5))
    more = (float(with_term["loss_sum"]) - float(plain["loss_sum"])) / float(plain["weight"])
    np.testing.assert_allclose(more, 0.5 * np.log(13) ** 2, rtol=0.5)
    assert with_term["grad_norm"] != plain["grad_norm"]
