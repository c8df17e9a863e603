"""Loss spikes and non-finite values: detect, name, skip, or stop, depending on the recipe."""

import dataclasses
import io

import chex
import jax
import numpy as np
import pytest
from numeric_parts import random_params
from training_recipes import (
    assert_equals_resumed_run,
    change,
    newest_state,
    start,
    text_recipe,
    tiny_batch,
    tiny_recipe,
)

from transformer.config import Execution
from transformer.nn._sharding import ParallelConfig
from transformer.training._loop import train
from transformer.training._parallel import place
from transformer.training._recipe import build_model
from transformer.training._state import parameter_paths
from transformer.training._step import NonFiniteError, check_finite, first_bad_parameter, why_not_finite
from transformer.training.metrics._writer import MetricsWriter, Progress, read_metrics
from transformer.training.tasks._evaluation import evaluate_loss
from transformer.training.workdir import _journal as module
from transformer.training.workdir._journal import Journal, LossSpikeError, TrainStats

# The usual loss


def watched(losses, deviations=3.0):
    """Return the statistics after these losses, each compared with the limit of all previous ones, and the spikes."""
    ledger, spikes = TrainStats(), []
    for loss in losses:
        spikes.append(ledger.watch(loss, ledger.limit, deviations))
    return ledger, spikes


def test_the_limit_is_the_mean_plus_a_number_of_deviations():
    """The mean of up to fifty losses; older ones count less and less."""
    losses = list(np.random.default_rng(0).normal(2.0, 0.1, 40))
    ledger, spikes = watched(losses, deviations=8.0)
    assert not any(spikes)
    np.testing.assert_allclose(ledger.limit, np.mean(losses) + 8.0 * np.std(losses), rtol=1e-12)
    np.testing.assert_allclose(ledger.limit_before, np.mean(losses[:-1]) + 8.0 * np.std(losses[:-1]), rtol=1e-12)
    assert watched(losses[:19])[0].limit is None, "too few to know what is usual"


def test_a_spike_is_counted_and_changes_the_limit_little():
    losses = list(np.random.default_rng(1).normal(2.0, 0.1, 40))
    before, _ = watched(losses, deviations=8.0)
    ledger, spikes = watched([*losses, 1e6], deviations=8.0)
    assert spikes == [False] * 40 + [True]
    assert ledger.spikes == 1
    assert ledger.limit < before.limit + 1.0
    assert not watched([*losses, np.mean(losses) - 1.0], deviations=8.0)[1][-1], "a loss below is none"


def test_a_falling_loss_is_not_a_spike_and_a_lasting_rise_becomes_normal():
    falling = [10.0 * 0.97**step for step in range(200)]
    assert not any(watched(falling, deviations=3.0)[1])
    risen = watched([2.0, 2.1] * 30 + [4.0, 4.1] * 30, deviations=8.0)[1]
    assert risen[60]
    assert not any(risen[90:])


# The policy of the recipe


def played(tmp_path, losses, finite=True, most_in_a_row=None, **training):
    """Return a journal of these losses, one per step, and its messages."""
    recipe = tiny_recipe(steps=len(losses), **training)
    recipe = dataclasses.replace(recipe, logging=dataclasses.replace(recipe.logging, every=1))
    ledger, said = TrainStats(), io.StringIO()
    usual = {
        "weight": 2.0,
        "grad_norm": 1.0,
        "learning_rate": 0.1,
        "skipped": 0,
        "first_bad": -1,
        "first_bad_weight": -1,
    }
    limits = []
    with MetricsWriter(tmp_path) as writer:
        progress = Progress(len(losses), mode="none", stream=said)
        journal = Journal(recipe, ledger, writer, progress, [])
        for step, loss in enumerate(losses, start=1):
            limits.append(journal.skip_above())
            values = usual | {"loss_sum": 2.0 * loss, "finite": finite}
            metrics = {name: np.asarray(value) for name, value in values.items()}
            journal.add(step, metrics, batch=f"batch {step}", why=lambda batch: f"It was {batch}.")
        journal.read()
    return ledger, said.getvalue(), limits, read_metrics(tmp_path / "metrics.jsonl")


SPIKE = [2.0, 2.1] * 15 + [9.0, 2.0]


def test_log_reports_and_counts_spikes(tmp_path):
    ledger, said, limits, lines = played(tmp_path, SPIKE)
    assert "step 31: loss spike: the loss is 9.0000, above the limit of 2.5" in said
    assert "skipped" not in said
    assert ledger.spikes == 1
    assert [line.get("train/spikes", 0) for line in lines] == [0] * 30 + [1, 1]
    assert lines[30]["train/loss"] == 9.0
    assert set(limits) == {None}


def test_skip_passes_a_limit_to_the_step_and_ignores_the_loss(tmp_path):
    _, said, limits, lines = played(tmp_path, SPIKE, spike_policy="skip")
    assert said.rstrip().endswith("(skipped)")
    assert "train/loss" not in lines[30]
    assert all(isinstance(limit, np.float32) for limit in limits), "of one type: the step is compiled once"
    assert np.isinf(limits[:21]).all()
    assert np.isfinite(limits[21:]).all()


def test_stop_is_an_error_that_explains_how_to_resume(tmp_path):
    with pytest.raises(
        LossSpikeError, match=r"step 31: loss spike: the loss is 9\.0000.* 10 standard dev.*spike-policy skip"
    ):
        played(tmp_path, SPIKE, spike_policy="stop")
    played(tmp_path, SPIKE, spike_policy="stop", spike_deviations=200.0)


def limits_of(tmp_path, losses, pauses, bad=()):
    """What each step was judged by, where what is pending was read after the steps `pauses`, and `bad` ones were not
    finite.
    """
    recipe = tiny_recipe(steps=len(losses), spike_policy="skip", nan_policy="skip")
    with MetricsWriter(tmp_path) as writer:
        journal = Journal(recipe, TrainStats(), writer, Progress(len(losses), mode="none"), [])
        limits = []
        for step, loss in enumerate(losses, start=1):
            limits.append(journal.skip_above())
            told = {"loss_sum": loss, "weight": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "skipped": 0}
            told |= {"finite": step not in bad}
            journal.add(step, {name: np.asarray(value) for name, value in told.items()})
            if step in pauses:
                journal.pause()
    return limits


def test_the_limit_does_not_depend_on_when_a_step_is_read(tmp_path):
    """A save or a signal reads the pending metrics, but must not change how the next step is judged."""
    losses = np.random.default_rng(2).normal(2.0, 0.1, 60)
    found = [limits_of(tmp_path, losses, pauses) for pauses in ((), (25,), (24, 25, 26, 40))]
    assert found[0] == found[1] == found[2]


def test_a_non_finite_batch_never_changes_the_limit(tmp_path):
    losses = np.random.default_rng(2).normal(2.0, 0.1, 40)
    found = [limits_of(tmp_path, losses, pauses, bad=(30, 31)) for pauses in ((), (30, 31))]
    assert found[0] == found[1]


def test_only_non_finite_batches_are_an_error_even_with_skip(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_IN_A_ROW", 4)
    ledger, *_ = played(tmp_path, [2.0] * 3, finite=False, nan_policy="skip")
    assert ledger.bad_in_a_row == 3
    with pytest.raises(
        NonFiniteError, match=r"step 4: the last 4 batches in a row were not finite.* It was batch 4\. The data is not"
    ):
        played(tmp_path, [2.0] * 5, finite=False, nan_policy="skip")


# The step


def test_only_a_loss_below_the_limit_updates_the_parameters():
    recipe = tiny_recipe(ema_decay=0.9)
    state, step = start(recipe)
    batch = tiny_batch()
    expected, metrics = step(state, batch)
    loss = np.float32(metrics["loss_sum"]) / np.float32(metrics["weight"])
    same, _ = step(state, batch, np.float32(loss * 1.0001))
    chex.assert_trees_all_close(same, expected, atol=1e-6)  # a different program: equal up to rounding
    after, metrics = step(state, batch, np.float32(loss * 0.9999))
    chex.assert_trees_all_equal((after.params, after.opt_state, after.ema), (state.params, state.opt_state, state.ema))
    assert jax.device_get((after.step, after.skipped, metrics["skipped"], metrics["finite"])) == (1, 1, 1, True)
    following, _ = step(after, batch, np.float32(np.inf))  # with nan_policy "stop", a spike does not end training
    chex.assert_trees_all_equal(following.params, same.params)


def test_batches_skipped_earlier_do_not_count_as_failures():
    """A run may change its nan_policy; batches that it skipped before do not count as failures."""
    state, step = start(tiny_recipe())
    expected, _ = step(state, tiny_batch())
    after, metrics = step(state.replace(skipped=jax.device_put(np.int32(3))), tiny_batch())
    chex.assert_trees_all_equal(after.params, expected.params)
    assert (after.skipped, metrics["finite"]) == (3, True)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"devices": 1}, {"kind": "pmap", "devices": 2}], ids=["mesh", "pmap"])
def test_every_placement_supports_a_limit(parallel):
    recipe = dataclasses.replace(tiny_recipe(), parallel=ParallelConfig(**parallel))
    placement = place(recipe)
    state = placement.new_state()
    before = jax.device_get(state)
    batch = jax.device_get(tiny_batch())
    state, _ = placement.train_step(placement.spread(state), batch, np.float32(0.5))
    chex.assert_trees_all_equal(jax.device_get(placement.whole(state)).params, before.params)
    state, _ = placement.train_step(state, batch, np.float32(np.inf))
    after = jax.device_get(placement.whole(state))
    assert (after.step, after.skipped) == (2, 1)
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (after.params, before.params)), strict=True))


@pytest.mark.slow
def test_a_resumed_run_with_skipped_spikes_equals_an_uninterrupted_run(tmp_path, monkeypatch):
    """The limit is so low that some of twelve batches exceed it."""
    monkeypatch.setattr(module, "_FEWEST", 2)
    recipe = text_recipe(
        tmp_path, training={"spike_policy": "skip", "spike_deviations": 1.0}, optimizer={"learning_rate": 1e-4}
    )
    summary = train(recipe, tmp_path / "run")
    assert summary.skipped == summary.spikes > 0
    assert newest_state(tmp_path / "run").skipped == summary.skipped
    assert_equals_resumed_run(tmp_path / "run", recipe, 5, tmp_path / "other")


# Names in the error message


def with_row(params, token, value):
    """Return the parameters with one row of the embedding changed."""
    table = np.array(params["embedding"]["embedding"])
    table[token] = value
    return params | {"embedding": params["embedding"] | {"embedding": jax.device_put(table)}}


def test_a_non_finite_parameter_is_named():
    recipe = tiny_recipe()
    params = start(recipe)[0].params
    assert first_bad_parameter(params) is None
    params = with_row(params, 3, np.nan)
    assert first_bad_parameter(params) == "embedding/embedding"
    why = why_not_finite(recipe, build_model(recipe), params, tiny_batch())
    assert why == "The parameter embedding/embedding contains NaN or infinity."


def test_the_first_logits_that_overflow_are_named():
    recipe = tiny_recipe(model={"embedding.tie": False})
    model, batch = build_model(recipe), tiny_batch()
    params = random_params(model, batch["tokens"])["params"]
    assert "finite, and so are the logits" in why_not_finite(recipe, model, params, batch)
    tokens = np.asarray(batch["tokens"])
    token = min({*range(3, 13)} - {*tokens[0].tolist()})
    row = np.nonzero(tokens == token)[0][0]
    why = why_not_finite(recipe, model, with_row(params, token, 3e38), batch)
    assert row > 0
    assert f"the logits of row {row} are not at position 0: a value overflowed in float32." in why
    trained_with = build_model(dataclasses.replace(recipe, execution=Execution(attention="ring")))
    assert why_not_finite(recipe, trained_with, with_row(params, token, 3e38), batch) == why, "here is no mesh"


def test_a_non_finite_update_is_reported_with_its_context():
    recipe = tiny_recipe(optimizer={"learning_rate": 1e38})
    state, step = start(recipe)
    _, metrics = step(state, tiny_batch())
    with pytest.raises(NonFiniteError, match=r"decoder/\S+"):
        check_finite(1, jax.device_get(metrics), parameter_paths(state.params), "So.")


@pytest.mark.slow
def test_a_non_finite_initial_parameter_is_reported_at_step_1(tmp_path, monkeypatch):
    """Like a checkpoint that contains NaN: the error of the first step names the parameter."""
    from transformer.training import _loop as loop

    original = loop.begin

    def broken(*args):
        state, ledger = original(*args)
        return state.replace(params=with_row(state.params, 5, np.inf)), ledger

    monkeypatch.setattr(loop, "begin", broken)
    with pytest.raises(NonFiniteError, match=r"^step 1: .* parameter embedding/embedding contains NaN or infinity\."):
        train(text_recipe(tmp_path), tmp_path / "run")


def test_a_non_finite_evaluation_is_an_error_or_a_result():
    batches = [{"loss_sum": 1.0, "correct": 1.0, "weight": 1.0}, {"loss_sum": np.nan, "correct": 0.0, "weight": 1.0}]
    good, bad = jax.device_put(({"a": np.ones(3)}, {"a": np.ones(3), "b": np.array([1.0, np.inf])}))
    with pytest.raises(
        NonFiniteError, match=r"the loss of held-out batch 1 is nan: all parameters are finite, so its log"
    ):
        evaluate_loss(lambda params, batch: batch, good, batches)
    with pytest.raises(NonFiniteError, match=r"1.*NaN"):
        evaluate_loss(lambda params, batch: batch, bad, batches)
    assert np.isnan(evaluate_loss(lambda params, batch: batch, good, batches, strict=False).loss)


def test_rejects_invalid_recipe_values():
    with pytest.raises(ValueError, match=r"training.spike_policy.*got 'go'"):
        tiny_recipe(spike_policy="go")
    with pytest.raises(ValueError, match=r"training.spike_deviations.*1.*got 0"):
        change(tiny_recipe(), training={"spike_deviations": 0})
