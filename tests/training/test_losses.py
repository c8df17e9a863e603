"""Cross-entropy: compared with its definition, with label smoothing, and for targets outside the vocabulary."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numeric_parts import random_params
from training_recipes import VOCABULARY, batch_outputs, tiny_batch, tiny_recipe

from transformer.nn.models import Classifier
from transformer.training import build_model
from transformer.training.tasks._losses import correct, cross_entropy, ctc_loss

LOGITS = (np.random.default_rng(3).normal(size=(2, 5, 7)) * 3).astype(np.float32)
TARGETS = np.array([[0, 6, 3, 3, 1], [2, 2, 5, 0, 6]], np.int32)
WEIGHTS = np.array([[1, 1, 1, 0, 0], [1, 0.5, 1, 1, 1]], np.float32)
loss_of = jax.jit(cross_entropy, static_argnames=("label_smoothing", "z_loss"))
ctc = jax.jit(ctc_loss)


def log_probabilities(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_the_loss_equals_its_definition(smoothing):
    target = (1 - smoothing) * np.eye(7)[TARGETS] + smoothing / 7
    expected = -(target * log_probabilities(LOGITS)).sum(-1)
    total, weight = loss_of(LOGITS, TARGETS, WEIGHTS, smoothing)
    np.testing.assert_allclose(total, (expected * WEIGHTS).sum(), rtol=1e-6)
    assert weight == WEIGHTS.sum() == 7.5


def test_z_loss_adds_the_square_of_the_log_partition():
    log_z = np.log(np.exp(np.asarray(LOGITS, np.float64)).sum(-1))
    plain, _ = loss_of(LOGITS, TARGETS, WEIGHTS, 0.1)
    total, weight = loss_of(LOGITS, TARGETS, WEIGHTS, 0.1, z_loss=0.3)
    np.testing.assert_allclose(float(total) - float(plain), (0.3 * log_z**2 * WEIGHTS).sum(), rtol=1e-5)
    assert weight == 7.5


def test_the_gradient_is_softmax_minus_target():
    gradient, _ = jax.jit(jax.grad(cross_entropy, has_aux=True))(LOGITS, TARGETS, WEIGHTS)
    expected = (np.exp(log_probabilities(LOGITS)) - np.eye(7)[TARGETS]) * WEIGHTS[..., None]
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_the_loss_is_float32_and_finite_for_bfloat16_and_huge_logits():
    half = LOGITS.astype(jnp.bfloat16)
    total, weight = loss_of(half, TARGETS, WEIGHTS)
    chex.assert_type([total, weight], jnp.float32)
    expected = -(np.eye(7)[TARGETS] * log_probabilities(half)).sum(-1)
    np.testing.assert_allclose(total, (expected * WEIGHTS).sum(), rtol=1e-6)
    huge, _ = loss_of(LOGITS * np.float32(1e30), TARGETS, WEIGHTS)
    assert np.isfinite(huge)


@pytest.mark.parametrize("bad", [-1, -100, 7, 2**30])
def test_a_target_outside_the_vocabulary_gives_nan(bad):
    targets = TARGETS.copy()
    targets[1, 4] = bad
    assert np.isnan(loss_of(LOGITS, targets, WEIGHTS)[0])
    assert np.isnan(loss_of(LOGITS, targets, WEIGHTS, 0.1)[0])


@pytest.mark.parametrize("ignored", [-100, 7])
def test_targets_of_weight_zero_are_ignored(ignored):
    targets = np.where(WEIGHTS == 0, np.int32(ignored), TARGETS)
    loss = jax.jit(jax.value_and_grad(lambda *given: cross_entropy(*given, 0.1), has_aux=True))
    (value, _), gradient = loss(LOGITS, targets, WEIGHTS)
    (expected, _), expected_gradient = loss(LOGITS, TARGETS, WEIGHTS)
    assert value == expected
    np.testing.assert_array_equal(gradient, expected_gradient)


def test_correct_counts_by_weight():
    logits, count = 5 * np.eye(7, dtype=np.float32)[TARGETS], jax.jit(correct)
    assert count(logits, TARGETS, WEIGHTS) == 7.5
    assert count(np.roll(logits, 1, -1), TARGETS, WEIGHTS) == 0.0


def test_causal_batches_pass_on_segments_and_positions():
    """Two texts packed into one row have the same logits as each text alone."""
    model = build_model(tiny_recipe())
    tokens = np.asarray(tiny_batch()["tokens"][:2])
    packed = {
        "tokens": tokens.reshape(1, 14),
        "segment_ids": np.repeat([[1, 2]], 7, 1),
        "positions": np.tile(np.arange(7), (1, 2)),
    }
    params = random_params(model, tokens)["params"]
    forward = jax.jit(lambda *batches: [batch_outputs("causal_lm", model, params, batch) for batch in batches])
    together, alone = forward(packed, {"tokens": tokens})
    chex.assert_shape(together, (1, 14, VOCABULARY))
    np.testing.assert_allclose(np.asarray(together).reshape(2, 7, VOCABULARY), alone, atol=1e-5)


@pytest.mark.slow
def test_pair_batches_hide_padding_of_the_source():
    model, batch = build_model(tiny_recipe("seq2seq")), tiny_batch("seq2seq")
    batch = {name: np.asarray(array) for name, array in batch.items()}
    params = random_params(model, batch["source"], batch["tokens"])["params"]
    forward = jax.jit(lambda batch: batch_outputs("seq2seq", model, params, batch))
    logits = np.asarray(forward(batch))
    hidden = np.arange(5) >= batch["source_lengths"][:, None]
    changed = batch | {"source": np.where(hidden, np.int32(9), batch["source"])}
    np.testing.assert_array_equal(forward(changed), logits)
    seen = batch | {"source": np.where(hidden, batch["source"], np.int32(9))}
    assert np.abs(forward(seen) - logits).max() > 1e-3


def test_classifier_batches_hide_padding():
    recipe = tiny_recipe(model={"output.num_classes": 3})
    model = Classifier(recipe.model, recipe.execution)
    tokens, lengths = np.asarray(tiny_batch()["tokens"]), np.full(8, 4)
    params = random_params(model, tokens)["params"]
    forward = jax.jit(lambda batch: batch_outputs("classifier", model, params, batch))
    logits, changed = forward({"tokens": tokens, "lengths": lengths}), tokens.copy()
    changed[:, 4:] = 5
    chex.assert_shape(logits, (8, 3))
    np.testing.assert_array_equal(forward({"tokens": changed, "lengths": lengths}), logits)


def test_dropout_applies_only_with_a_key():
    recipe = tiny_recipe(model={"dropout_rate": 0.5})
    model, batch = build_model(recipe), tiny_batch()
    params = random_params(model, batch["tokens"])["params"]

    @jax.jit
    def outputs(params):
        """Without a key, and with two keys."""
        keys = None, jax.random.key(1), jax.random.key(2)
        return [batch_outputs("causal_lm", model, params, batch, key) for key in keys]

    plain, one, two = map(np.asarray, outputs(params))
    np.testing.assert_array_equal(plain, outputs(params)[0])
    assert np.abs(one - plain).max() > 1e-3
    assert np.abs(one - two).max() > 1e-3


def test_ctc_sums_over_all_sequences_of_frames():
    """Every sequence of tokens is listed, merged, and compared with the targets."""
    logits = np.random.default_rng(3).normal(size=(3, 4, 3)).astype(np.float32)
    targets, target_lengths = np.array([[1, 2], [1, 1], [2, 0]]), np.array([2, 2, 1])
    lengths = np.array([4, 4, 3])
    expected = 0.0
    for row in range(3):
        log_p, total = log_probabilities(logits[row]), 0.0
        wanted = targets[row, : target_lengths[row]].tolist()
        for tokens in itertools.product(range(3), repeat=int(lengths[row])):
            if [token for token, _ in itertools.groupby(tokens) if token] == wanted:
                total += np.exp(sum(log_p[frame, token] for frame, token in enumerate(tokens)))
        expected -= np.log(total)
    loss, count = ctc(logits, lengths, targets, target_lengths)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert count == 5


@pytest.mark.parametrize(("targets", "fits"), [([1, 2, 1], True), ([1, 1, 2], False), ([1, 2, 1, 2], False)])
def test_ctc_of_targets_without_enough_frames_is_infinite(targets, fits):
    logits, lengths = np.zeros((1, 5, 3), np.float32), np.array([3])
    loss, _ = ctc(logits, lengths, np.array([targets]), np.array([len(targets)]))
    assert bool(np.isfinite(loss)) == fits


@pytest.mark.parity
@pytest.mark.parametrize("blank", [0, 4])
def test_ctc_equals_torch(blank):
    torch = pytest.importorskip("torch")
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(3, 19, 5)).astype(np.float32)
    targets = generator.integers(0, 4, (3, 6)) + (blank == 0)
    lengths, target_lengths = np.array([19, 13, 17]), np.array([6, 3, 5])
    given = torch.tensor(logits, requires_grad=True)
    log_p = torch.log_softmax(given, -1).transpose(0, 1)
    theirs = torch.nn.functional.ctc_loss(
        log_p, torch.tensor(targets), torch.tensor(lengths), torch.tensor(target_lengths), blank, reduction="sum"
    )
    theirs.backward()
    arrays = tuple(map(jnp.asarray, (lengths, targets, target_lengths)))
    (loss, _), gradient = jax.value_and_grad(ctc_loss, has_aux=True)(jnp.asarray(logits), *arrays, blank)
    np.testing.assert_allclose(loss, theirs.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, given.grad.numpy(), atol=1e-4)
