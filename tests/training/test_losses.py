"""Cross-entropy: compared with its definition, with label smoothing, and for targets outside the vocabulary."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_recipes import VOCABULARY, batch_outputs, initial_params, tiny_batch, tiny_recipe

from transformer.nn.models import Classifier
from transformer.training import build_model
from transformer.training._losses import correct, cross_entropy, ctc_loss

LOGITS = jnp.asarray(np.random.default_rng(3).normal(size=(2, 5, 7)) * 3, jnp.float32)
TARGETS = jnp.array([[0, 6, 3, 3, 1], [2, 2, 5, 0, 6]], jnp.int32)
WEIGHTS = jnp.array([[1, 1, 1, 0, 0], [1, 0.5, 1, 1, 1]], jnp.float32)


def log_probabilities(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_equals_its_definition(smoothing):
    target = (1 - smoothing) * np.eye(7)[TARGETS] + smoothing / 7
    expected = -(target * log_probabilities(LOGITS)).sum(-1)
    total, weight = cross_entropy(LOGITS, TARGETS, WEIGHTS, smoothing)
    np.testing.assert_allclose(total, (expected * WEIGHTS).sum(), rtol=1e-6)
    assert weight == WEIGHTS.sum() == 7.5


def test_z_loss_adds_the_square_of_the_log_partition():
    log_z = np.log(np.exp(np.asarray(LOGITS, np.float64)).sum(-1))
    plain, _ = cross_entropy(LOGITS, TARGETS, WEIGHTS, 0.1)
    total, weight = cross_entropy(LOGITS, TARGETS, WEIGHTS, 0.1, z_loss=0.3)
    np.testing.assert_allclose(total - plain, (0.3 * log_z**2 * WEIGHTS).sum(), rtol=1e-5)
    assert weight == 7.5


def test_gradient_is_softmax_minus_target():
    gradient = jax.grad(lambda logits: cross_entropy(logits, TARGETS, WEIGHTS)[0])(LOGITS)
    expected = (np.exp(log_probabilities(LOGITS)) - np.eye(7)[TARGETS]) * WEIGHTS[..., None]
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_is_float32_and_finite_for_bfloat16_and_huge_logits():
    half = jnp.asarray(LOGITS, jnp.bfloat16)
    total, weight = cross_entropy(half, TARGETS, WEIGHTS)
    chex.assert_type([total, weight], jnp.float32)
    expected = -(np.eye(7)[TARGETS] * log_probabilities(half)).sum(-1)
    np.testing.assert_allclose(total, (expected * WEIGHTS).sum(), rtol=1e-6)
    huge, _ = cross_entropy(jnp.asarray(LOGITS) * 1e30, TARGETS, WEIGHTS)
    assert np.isfinite(huge)


@pytest.mark.parametrize("bad", [-1, -100, 7, 2**30])
def test_a_target_outside_the_vocabulary_is_nan_not_a_plausible_number(bad):
    targets = TARGETS.at[1, 4].set(bad)
    assert np.isnan(cross_entropy(LOGITS, targets, WEIGHTS)[0])
    assert np.isnan(cross_entropy(LOGITS, targets, WEIGHTS, 0.1)[0])


@pytest.mark.parametrize("ignored", [-100, 7])
def test_targets_of_weight_zero_may_be_anything(ignored):
    targets = jnp.where(WEIGHTS == 0, ignored, TARGETS)

    def loss(logits, targets):
        return cross_entropy(logits, targets, WEIGHTS, 0.1)[0]

    assert loss(LOGITS, targets) == loss(LOGITS, TARGETS)
    np.testing.assert_array_equal(jax.grad(loss)(LOGITS, targets), jax.grad(loss)(LOGITS, TARGETS))


def test_correct_counts_by_weight():
    logits = 5.0 * jnp.eye(7)[TARGETS]
    assert correct(logits, TARGETS, WEIGHTS) == 7.5
    assert correct(jnp.roll(logits, 1, -1), TARGETS, WEIGHTS) == 0.0


def test_causal_batches_pass_on_segments_and_positions():
    """Two texts packed into one row have the same logits as each text alone."""
    recipe = tiny_recipe()
    model = build_model(recipe)
    tokens = tiny_batch()["tokens"][:2]
    params = initial_params("causal_lm", recipe.model)
    packed = {
        "tokens": jnp.concatenate([tokens[:1], tokens[1:]], 1),
        "segment_ids": jnp.repeat(jnp.array([[1, 2]]), 7, 1),
        "positions": jnp.tile(jnp.arange(7), (1, 2)),
    }
    together = batch_outputs("causal_lm", model, params, packed)
    alone = batch_outputs("causal_lm", model, params, {"tokens": tokens})
    chex.assert_shape(together, (1, 14, VOCABULARY))
    np.testing.assert_allclose(together.reshape(2, 7, VOCABULARY), alone, atol=1e-5)


@pytest.mark.slow
def test_pair_batches_hide_padding_of_the_source():
    recipe = tiny_recipe("seq2seq")
    model, batch = build_model(recipe), tiny_batch("seq2seq")
    params = initial_params("seq2seq", recipe.model)
    logits = batch_outputs("seq2seq", model, params, batch)
    hidden = jnp.arange(5)[None] >= batch["source_lengths"][:, None]
    changed = batch | {"source": jnp.where(hidden, 9, batch["source"])}
    np.testing.assert_array_equal(batch_outputs("seq2seq", model, params, changed), logits)
    seen = batch | {"source": jnp.where(hidden, batch["source"], 9)}
    assert np.abs(batch_outputs("seq2seq", model, params, seen) - logits).max() > 1e-3


def test_classifier_batches_hide_padding():
    recipe = tiny_recipe(model={"output.num_classes": 3})
    model = Classifier(recipe.model, recipe.execution)
    tokens, lengths = tiny_batch()["tokens"], jnp.full(8, 4)
    params = model.init(jax.random.key(0), tokens)["params"]
    logits = batch_outputs("classifier", model, params, {"tokens": tokens, "lengths": lengths})
    changed = tokens.at[:, 4:].set(5)
    chex.assert_shape(logits, (8, 3))
    again = batch_outputs("classifier", model, params, {"tokens": changed, "lengths": lengths})
    np.testing.assert_array_equal(again, logits)


def test_dropout_only_with_a_key():
    recipe = tiny_recipe(model={"dropout_rate": 0.5})
    model, batch = build_model(recipe), tiny_batch()
    params = initial_params("causal_lm", recipe.model)
    plain = batch_outputs("causal_lm", model, params, batch)
    np.testing.assert_array_equal(plain, batch_outputs("causal_lm", model, params, batch))
    one, two = (batch_outputs("causal_lm", model, params, batch, jax.random.key(seed)) for seed in (1, 2))
    assert np.abs(one - two).max() > 1e-3


def test_ctc_sums_over_all_sequences_of_frames():
    """Every sequence of tokens is listed, merged, and compared with the targets."""
    logits = jax.random.normal(jax.random.key(3), (3, 4, 3))
    targets, target_lengths = jnp.asarray([[1, 2], [1, 1], [2, 0]]), jnp.asarray([2, 2, 1])
    lengths = jnp.asarray([4, 4, 3])
    expected = 0.0
    for row in range(3):
        log_p, total = np.asarray(jax.nn.log_softmax(logits[row])), 0.0
        wanted = targets[row, : target_lengths[row]].tolist()
        for tokens in itertools.product(range(3), repeat=int(lengths[row])):
            if [token for token, _ in itertools.groupby(tokens) if token] == wanted:
                total += np.exp(sum(log_p[frame, token] for frame, token in enumerate(tokens)))
        expected -= np.log(total)
    loss, count = ctc_loss(logits, lengths, targets, target_lengths)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert count == 5


@pytest.mark.parametrize(("targets", "fits"), [([1, 2, 1], True), ([1, 1, 2], False), ([1, 2, 1, 2], False)])
def test_ctc_of_targets_without_enough_frames_is_infinite(targets, fits):
    logits, lengths = jnp.zeros((1, 5, 3)), jnp.asarray([3])
    loss, _ = ctc_loss(logits, lengths, jnp.asarray([targets]), jnp.asarray([len(targets)]))
    assert bool(jnp.isfinite(loss)) == fits


@pytest.mark.parity
@pytest.mark.parametrize("blank", [0, 4])
def test_ctc_equals_that_of_torch(blank):
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
