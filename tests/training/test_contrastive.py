"""Contrastive training: losses, devices, the limit of the factor, evaluation, resuming and refused options."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from numeric_parts import random_values
from training_recipes import assert_equals_resumed_run, change, six_steps

from transformer.config import (
    AttentionOptions,
    ConfigError,
    FeedForwardOptions,
    Images,
    LearnedOptions,
    OutputOptions,
    Patches,
    TransformerConfig,
)
from transformer.data import Shapes, prepare
from transformer.nn._sharding import place_batch
from transformer.training._loop import train
from transformer.training._parallel import place
from transformer.training._recipe import build_model, with_vocabulary
from transformer.training._state import abstract_state
from transformer.training._step import compiled_eval_step, training_loss
from transformer.training.tasks._evaluation import evaluate_loss
from transformer.training.tasks._losses import matched_by_sigmoid, matched_by_softmax, matches

SIZES = {"d_model": 16, "num_layers": 1, "num_heads": 4, "feed_forward.d_ff": 24}
DATA = {
    "train_examples": 64,
    "validation_examples": 21,
    "test_examples": 24,
    "batch_size": 16,
    "eval_batch_size": 12,
    "max_length": 18,
}


def contrastive_recipe(similarity="softmax", dropout=0.0, **groups):
    encoder = TransformerConfig(
        **SIZES,
        feed_forward=FeedForwardOptions(activation="gelu_tanh"),
        position=LearnedOptions(),
        output=OutputOptions(pooling="attention" if similarity == "sigmoid" else "first"),
        input=Patches(image_height=32, image_width=32, patch_size=8),
    )
    projections = "text" if similarity == "sigmoid" else "both"
    images = Images(encoder=encoder, features=16, similarity=similarity, projections=projections)
    model = TransformerConfig(
        **SIZES,
        position=LearnedOptions(max_length=18),
        dropout_rate=dropout,
        attention=AttentionOptions(causal=True),
        output=OutputOptions(pooling="last"),
        input=images,
    )
    return change(six_steps("pairs", model, Shapes(**DATA)), **groups)


@pytest.fixture(scope="module")
def dataset():
    return prepare(Shapes(**DATA))


def logits_and_weights(rows=7, seed=0):
    random = np.random.default_rng(seed)
    weights = np.ones(rows, np.float32)
    weights[[2, 5]] = 0
    return random.normal(0, 4, (rows, rows)).astype(np.float32), weights


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("loss", [matched_by_softmax, matched_by_sigmoid])
def test_a_pair_of_weight_0_has_no_effect(loss):
    """It is no target and no negative: the loss is that of the other pairs alone, and so is the gradient."""
    logits, weights = logits_and_weights()
    inside = weights > 0
    alone, ones = logits[inside][:, inside], np.ones(5, np.float32)
    logits = np.where(np.outer(inside, inside), logits, np.float32(50))

    @jax.jit
    def computed(logits, alone, weights, ones):
        with_gradient = jax.value_and_grad(loss, has_aux=True)
        return with_gradient(logits, weights), with_gradient(alone, ones), loss(logits, jnp.zeros(7))

    (found, gradient), (expected, expected_gradient), nothing = jax.device_get(computed(logits, alone, weights, ones))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient[inside][:, inside], expected_gradient, atol=1e-6)
    assert not gradient[~np.outer(inside, inside)].any()
    assert np.isfinite(nothing).all()


def test_losses_equal_their_definitions():
    logits, _ = logits_and_weights()
    ones = np.ones(7, np.float32)
    exact = np.float64(logits)
    own = np.diag(exact)
    rows, columns = (np.log(np.exp(exact).sum(axis)) - own for axis in (1, 0))
    losses = jax.jit(lambda logits, ones: [loss(logits, ones)[0] for loss in (matched_by_softmax, matched_by_sigmoid)])
    by_softmax, by_sigmoid = losses(logits, ones)
    np.testing.assert_allclose(by_softmax, (rows + columns).sum() / 2, rtol=1e-6)
    signs = 2 * np.eye(7) - 1
    np.testing.assert_allclose(by_sigmoid, np.log1p(np.exp(-signs * exact)).sum(), rtol=1e-6)
    rounded = logits.astype(jnp.bfloat16)
    np.testing.assert_array_equal(losses(rounded, ones), losses(rounded.astype(np.float32), ones))  # in float32


def test_matches_count_both_directions():
    logits = np.array([[3.0, 1.0, 0.0], [4.0, 2.0, 0.0], [0.0, 0.0, 9.0]], np.float32)
    count = jax.jit(matches)
    assert tuple(map(float, count(logits, np.ones(3, np.float32)))) == (2, 2)
    assert tuple(map(float, count(logits, np.array([1, 1, 0], np.float32)))) == (1, 1)
    logits[1, 2] = 5.0
    assert tuple(map(float, count(logits, np.array([1, 0, 1], np.float32)))) == (2, 2)


LAYOUTS = {
    "data x8": {},
    "fsdp x8": {"fsdp": 8},
    "tensor x4, data x2": {"tensor": 4},
    "fsdp x2, tensor x2, data x2": {"fsdp": 2, "tensor": 2},
}


def steps(recipe, dataset, count=3):
    recipe = with_vocabulary(recipe, dataset.tokenizer.vocab_size)
    placement, batches, found = place(recipe), dataset.train_batches(seed=0), []
    state = placement.spread(placement.new_state())
    for _ in range(count):
        state, metrics = placement.train_step(state, next(batches))
        found.append([float(metrics[name]) for name in ("loss_sum", "weight", "grad_norm")])
    return np.array(found)


@pytest.fixture(scope="module")
def alone(dataset):
    """Return the first steps on one device, computed once for each loss."""
    names = "softmax", "sigmoid"
    return {name: steps(contrastive_recipe(name, parallel={"devices": 1}), dataset) for name in names}


@pytest.mark.parametrize("similarity", ["softmax", "sigmoid"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.slow
def test_all_devices_compare_all_pairs(layout, similarity, dataset, alone):
    """Losses and gradient norms on eight devices, each with a part of the pairs, equal those of one device."""
    recipe = contrastive_recipe(similarity, parallel={"devices": 8} | LAYOUTS[layout])
    np.testing.assert_allclose(steps(recipe, dataset), alone[similarity], rtol=1e-4)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("similarity", ["softmax", "sigmoid"])
def test_gradients_on_eight_devices_equal_one_device(similarity, dataset):
    recipe = with_vocabulary(contrastive_recipe(similarity), dataset.tokenizer.vocab_size)
    batch = next(dataset.train_batches(seed=0))
    params, found = random_values(abstract_state(recipe).params), {}
    for devices in (1, 8):
        placement = place(change(recipe, parallel={"devices": devices}))
        found[devices] = gradients(recipe, placement.mesh, params)
    one, eight = (gradient(batch) for gradient in found.values())
    assert one.keys() == eight.keys()
    largest = max(np.abs(gradient).max() for gradient in one.values())
    for path, gradient in one.items():
        np.testing.assert_allclose(eight[path], gradient, atol=1e-6 * largest, rtol=1e-4, err_msg=path)
    half = batch | {"weights": np.where(np.arange(16) < 8, batch["weights"], np.float32(0))}
    other = found[8](half)["logit_scale"]
    assert np.abs(other * 2 - one["logit_scale"]).max() > 1e-2  # the negatives of half a batch are others


def gradients(recipe, mesh, params):
    """Return a function from a batch to the gradient of each parameter, computed on the devices of a mesh."""
    model = build_model(recipe)

    @jax.jit
    def compute(params, batch):
        return jax.grad(lambda params: training_loss(recipe.task, model, params, batch, recipe.training, None)[0])(
            params
        )

    def of_batch(batch):
        with jax.set_mesh(mesh):
            return flatten_dict(jax.device_get(compute(params, place_batch(batch, mesh))), sep="/")

    return of_batch


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(("similarity", "limited"), [("softmax", True), ("sigmoid", False)])
def test_the_clip_logit_scale_is_at_most_100(similarity, limited, dataset):
    recipe = contrastive_recipe(similarity, optimizer={"learning_rate": 1e-3})
    recipe = with_vocabulary(recipe, dataset.tokenizer.vocab_size)
    placement = place(recipe)
    # The initial state of the optimizer is 0.
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), placement.abstract_state())
    state = state.replace(params=random_values(state.params) | {"logit_scale": np.full(1, 7.0, np.float32)})
    state, _ = placement.train_step(state, next(dataset.train_batches(seed=0)))
    (factor,) = np.exp(np.asarray(state.params["logit_scale"]))
    assert math.isclose(factor, 100.0, rel_tol=1e-5) == limited
    assert limited or factor > 1000


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_and_reports_retrieval(tmp_path):
    recipe = contrastive_recipe(dropout=0.1)
    summary = train(recipe, tmp_path / "run")
    assert_equals_resumed_run(tmp_path / "run", recipe, 3, tmp_path / "other")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "eval/image_to_text" in line][-1]
    assert 0 <= last["eval/image_to_text"] <= 1
    assert math.isclose(last["eval/accuracy"], (last["eval/image_to_text"] + last["eval/text_to_image"]) / 2)
    assert summary.split == "test"
    assert summary.held_out.targets == 24


@pytest.mark.slow
def test_evaluation_on_devices_ignores_padding_rows(dataset):
    """Batches of 12 rows are filled up to 16 for eight devices, and 21 pairs make batches of 11 and 10."""
    recipe = with_vocabulary(contrastive_recipe(parallel={"devices": 8}), dataset.tokenizer.vocab_size)
    placement = place(recipe)
    params = placement.new_state().params
    found = evaluate_loss(placement.eval_step, params, dataset.eval_batches())
    expected = evaluate_loss(compiled_eval_step(recipe), jax.device_get(params), dataset.eval_batches())
    assert found.targets == 21
    assert math.isclose(found.loss, expected.loss, rel_tol=1e-5)
    assert found.others == expected.others


def test_padding_of_a_causal_text_encoder_changes_nothing(dataset):
    recipe = with_vocabulary(contrastive_recipe(), dataset.tokenizer.vocab_size)
    batch = dataset.eval_batches()[0]
    params = random_values(abstract_state(recipe).params)
    padding = np.arange(18) >= batch["lengths"][:, None]
    batches = batch, dict(batch, tokens=np.where(padding, 7, batch["tokens"]).astype(np.int32))
    one, other = (compiled_eval_step(recipe)(params, each)["loss_sum"] for each in batches)
    np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"training": {"accumulation": 2}}, "compares all pairs of a step"),
        ({"training": {"label_smoothing": 0.1}}, "the task contrastive does not have"),
        ({"parallel": {"kind": "pmap"}}, "a replica does not see the pairs of the others"),
        ({"parallel": {"context": 2}}, "can't split the sequences of the task contrastive"),
        ({"data": {"max_length": 17}, "model": {"attention": AttentionOptions()}}, "also reads the padding"),
        ({"model": {"input": None}}, r"model.input"),
    ],
)
def test_unsupported_options_of_the_task_are_errors(groups, message):
    recipe = contrastive_recipe()
    with pytest.raises(ConfigError, match=message):
        change(recipe, **groups)


def test_images_of_a_different_size_are_an_error(tmp_path):
    recipe = contrastive_recipe(data={"image_size": 40})
    with pytest.raises(ConfigError, match=r"model.input.*image_height 32 \(data.*40\)"):
        train(recipe, tmp_path)


@pytest.mark.cpu_only("needs eight devices")
def test_the_mesh_must_also_divide_the_image_encoder(dataset):
    model = contrastive_recipe().model
    images = dataclasses.replace(model.images, encoder=model.image_encoder.replace(num_heads=2))
    recipe = contrastive_recipe(model={"input": images}, parallel={"devices": 8, "tensor": 4})
    with pytest.raises(ConfigError, match=r"model.input.encoder.num_heads \(2\).*parallel.tensor"):
        place(with_vocabulary(recipe, dataset.tokenizer.vocab_size))
