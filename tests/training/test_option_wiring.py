"""Options of training reach the place where they act, also in combination: dropout, averages, skipped steps."""

import dataclasses

import jax
import numpy as np
import pytest
from training_recipes import VOCABULARY, short_recipe, start, tiny_batch, tiny_recipe

from transformer.config import TransformerConfig
from transformer.data import Preferences
from transformer.training import DPO
from transformer.training._optimizers import make_schedule
from transformer.training._recipe import build_model
from transformer.training._state import make_state
from transformer.training._tasks import TASKS

LENGTH = 7


def test_the_average_and_the_schedule_count_applied_steps():
    """After 9 steps, of which 6 were skipped, the average has decay (1 + 3) / (10 + 3), and the schedule is at 3."""
    recipe = tiny_recipe(nan_policy="skip", ema_decay=0.9)
    recipe = dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, warmup_steps=20))
    state, step = start(recipe)
    before = jax.tree.map(lambda leaf: np.asarray(leaf) + 1.0, state.params)
    state = state.replace(step=np.int32(9), skipped=np.int32(6), ema=before)
    after, metrics = step(state, tiny_batch())
    decay = 4 / 13
    for mean, old, new in zip(*map(jax.tree.leaves, (after.ema, before, after.params)), strict=True):
        np.testing.assert_allclose(mean, decay * old + (1 - decay) * np.asarray(new), rtol=1e-5, atol=1e-6)
    assert float(metrics["learning_rate"]) == pytest.approx(float(jax.jit(make_schedule(recipe))(3)), rel=1e-6)


def test_the_reference_of_dpo_has_no_dropout():
    """The same parameters with dropout are another model: its scores are not 0, and differ between keys."""
    model = TransformerConfig(vocab_size=VOCABULARY, d_model=6, num_heads=3, num_layers=1, d_ff=5, dropout_rate=0.5)
    recipe = dataclasses.replace(short_recipe("dpo", model, Preferences(path="none", max_length=LENGTH)), dpo=DPO())
    random = np.random.default_rng(0)
    ids = random.integers(3, VOCABULARY, (4, 2, LENGTH + 1)).astype(np.int32)
    batch = {"tokens": ids[..., :-1], "targets": ids[..., 1:], "weights": np.ones(ids[..., 1:].shape, np.float32)}
    batch = jax.device_put(batch)
    params, built = jax.jit(lambda: make_state(recipe).params)(), build_model(recipe)

    @jax.jit
    def rewards(key):
        given = {"deterministic": key is None, "rngs": None if key is None else {"dropout": key}}
        _, _, sums, _ = TASKS["dpo"].compared(built, params, params, batch, recipe.dpo, **given)
        return sums["chosen_reward"]

    assert float(rewards(None)) == 0.0
    first, second = (float(rewards(jax.random.key(seed))) for seed in (0, 1))
    assert abs(first) > 1e-3
    assert abs(first - second) > 1e-3
