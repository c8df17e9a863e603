"""The chunked loss equals the unchunked loss, in values and gradients, on any mesh."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from training_recipes import change, compiled_step, start, tiny_batch, tiny_recipe

from transformer.config import ConfigError, HeadTransform
from transformer.data import Digits
from transformer.training import Recipe
from transformer.training._step import make_eval_step, make_train_step
from transformer.training.tasks import _chunked_loss as chunked_loss
from transformer.training.tasks._chunked_loss import loss_in_chunks, most_at_once, sum_in_chunks, tokens_at_once
from transformer.training.tasks._losses import cross_entropy

ROWS, LENGTH, WIDTH, VOCABULARY = 8, 12, 6, 11


def arrays(seed=0):
    """A head, hidden states, targets, and weights, some of which are 0."""
    random = np.random.default_rng(seed)
    hidden = random.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
    targets = random.integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
    weights = random.uniform(0, 2, (ROWS, LENGTH)).astype(np.float32) * (random.uniform(size=(ROWS, LENGTH)) > 0.3)
    params = {"kernel": random.normal(size=(WIDTH, VOCABULARY)), "bias": random.normal(size=VOCABULARY)}
    params = {name: array.astype(np.float32) for name, array in params.items()}
    targets = np.where(weights > 0, targets, np.int32(-100))
    return jax.device_put((params, hidden, targets, weights.astype(np.float32)))


def loss(params, hidden, targets, weights):
    logits = hidden @ params["kernel"] + params["bias"][None, None]
    return cross_entropy(logits, targets, weights, label_smoothing=0.1, z_loss=0.01)[0]


def in_chunks(tokens):
    return lambda params, hidden, targets, weights: loss_in_chunks(loss, params, hidden, targets, weights, tokens)


def with_gradients(function):
    """Value and gradients of three times the loss: the custom VJP must apply the cotangent."""
    return jax.jit(jax.value_and_grad(lambda *given: 3.0 * function(*given), argnums=(0, 1)))


@pytest.fixture(scope="module")
def whole():
    """The whole loss and its gradients, of `arrays()`."""
    return jax.device_get(with_gradients(loss)(*arrays()))


@pytest.mark.parametrize("tokens", [1, 8, 24, 40, 95, 1000])
def test_chunked_loss_equals_the_whole_loss(tokens, whole):
    given = arrays()
    expected, expected_gradients = whole
    value, gradients = with_gradients(in_chunks(tokens))(*given)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    chex.assert_trees_all_close(gradients, expected_gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "names"), [((2, 4), ("data", "context")), ((2, 2, 2), ("fsdp", "context", "tensor"))]
)
def test_chunked_loss_on_a_mesh_equals_the_whole_loss(shape, names, whole):
    given = arrays()
    expected, expected_gradients = whole
    with jax.set_mesh(jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))):
        value, gradients = with_gradients(in_chunks(4))(*given)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    chex.assert_trees_all_close(jax.device_get(gradients), expected_gradients, rtol=1e-5, atol=1e-6)


def test_devices_sum_their_gradients_once():
    """For any number of chunks, devices exchange only the sums, once, at the end."""
    params, *rest = arrays()
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))):
        rest = [jax.device_put(array, jax.P("data")) for array in rest]
        loops, program = with_gradients(in_chunks(2)).lower(params, *rest).compile().as_text().split("ENTRY")
    assert "all-reduce" not in loops
    assert "all-gather" not in loops + program
    assert 1 <= program.count("all-reduce(") <= 3  # the loss and two gradients


def test_supports_any_sum_over_tokens():
    def sums(params, hidden, targets, weights):
        return {"loss": loss(params, hidden, targets, weights), "weight": weights.sum()}

    params, *rest = arrays()
    found, expected = jax.jit(lambda *given: (sum_in_chunks(sums, *given, 24), sums(*given)))(params, *rest)
    chex.assert_trees_all_close(found, expected, rtol=1e-6)


def test_memory_holds_one_chunk_of_logits():
    rows, length, width, vocabulary = 2, 512, 8, 4096
    params = {"kernel": np.zeros((width, vocabulary), np.float32), "bias": np.zeros(vocabulary, np.float32)}
    hidden, weights = np.zeros((rows, length, width), np.float32), np.zeros((rows, length), np.float32)
    given = [params, hidden, weights.astype(np.int32), weights]

    def temporaries(function):
        return with_gradients(function).lower(*given).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(in_chunks(64)) < temporaries(loss) / 5


def test_a_target_outside_the_vocabulary_is_reported():
    params, hidden, targets, weights = arrays()
    targets, weights = np.array(targets), np.array(weights)
    targets[3, 4], weights[3, 4] = VOCABULARY, 1
    assert np.isnan(jax.jit(in_chunks(24))(params, hidden, targets, weights))


HEADS = {
    "tied": {},
    "own": {"embedding.tie": False, "output.bias": True},
    "mapped": {
        "output.transform": HeadTransform(activation="relu", norm=True),
        "output.bias": True,
        "output.softcap": 3,
    },
}


def whole_recipe(task="causal_lm", head=None):
    return tiny_recipe(task, model=head, label_smoothing=0.1, z_loss=0.01, loss_tokens=0)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    ("task", "head"),
    [("causal_lm", "tied"), ("causal_lm", "own"), pytest.param("seq2seq", "mapped", marks=pytest.mark.slow)],
)
def test_a_training_step_does_not_depend_on_the_chunk_size(task, head):
    recipe = whole_recipe(task, HEADS[head])
    state, step = start(recipe)
    batch = tiny_batch(task)
    expected, expected_metrics = step(state, batch)
    found, metrics = compiled_step(change(recipe, training={"loss_tokens": 16}))(state, batch)
    for name in ("loss_sum", "weight", "grad_norm"):
        np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=2e-6)
    chex.assert_trees_all_close(found.opt_state, expected.opt_state, rtol=1e-4, atol=1e-6)


@pytest.mark.cpu_only("the sizes depend on the device")
def test_many_logits_are_chunked_automatically(monkeypatch):
    recipe = whole_recipe()
    state, step = start(recipe)
    batch = tiny_batch()
    whole = [step(state, batch)[1], jax.jit(make_eval_step(recipe))(state.params, batch)]
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", {"cpu": 16 * 13})
    calls = []
    for name, user in (("loss_in_chunks", "_step"), ("sum_in_chunks", "tasks._base")):
        original = getattr(chunked_loss, name)
        monkeypatch.setattr(f"transformer.training.{user}.{name}", _counted(original, calls))
    by_itself = change(recipe, training={"loss_tokens": None})
    parts = [
        jax.jit(make_train_step(by_itself))(state, batch)[1],
        jax.jit(make_eval_step(by_itself))(state.params, batch),
    ]
    assert calls == [16, 16]
    for one, other in zip(parts, whole, strict=True):
        chex.assert_trees_all_close(one, other, rtol=2e-6)


def _counted(function, calls):
    @functools.wraps(function)
    def counting(*given):
        calls.append(given[5])  # tokens
        return function(*given)

    return counting


@pytest.mark.cpu_only("the sizes depend on the device")
def test_chooses_the_number_of_tokens_per_chunk():
    hidden = jax.ShapeDtypeStruct((16, 128, 4), jnp.float32)
    assert tokens_at_once(hidden, 1024) is None
    assert tokens_at_once(hidden, 4096) == 512
    assert tokens_at_once(hidden, 2**22) == 1
    wide = jax.ShapeDtypeStruct((16, 128, 1024), jnp.float32)
    assert tokens_at_once(wide, 4096) == 512
    assert tokens_at_once(wide, 2**17) == 256
    # On TPU at least D tokens, and more if the vocabulary is small or sharded.
    assert most_at_once("tpu", 128_256, 4096) == 4096
    assert most_at_once("tpu", 32_000, 2048) == 4194
    assert most_at_once("tpu", 128_256, 4096, vocab_ways=4) == 4185


def test_a_task_with_one_target_per_row_is_not_chunked():
    tiny = tiny_recipe(loss_tokens=8)
    with pytest.raises(ConfigError, match="loss_tokens"):
        Recipe(name="digits", model=tiny.model, data=Digits(), training=tiny.training)


@pytest.mark.parametrize(
    ("device", "tokens"), [("Tesla T4", 2**10), ("NVIDIA L4", 2**10), ("NVIDIA H100 80GB HBM3", 2**13)]
)
def test_a_gpu_with_much_memory_computes_more_logits_at_once(monkeypatch, device, tokens):
    monkeypatch.setattr("transformer.training.tasks._chunked_loss.device_kind", lambda: device)
    assert most_at_once("gpu", 2**17, 64) == tokens
    assert most_at_once("tpu", 2**17, 64) == 2**10
