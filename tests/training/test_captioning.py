"""Captions to write: rows, loss, exact match, devices, the run's files, resuming, and refused options."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from numeric_parts import random_values
from PIL import Image
from training_recipes import assert_equals_resumed_run, change, record_drawn_run, six_steps

from transformer.__main__ import main
from transformer.config import (
    ConfigError,
    FeedForwardOptions,
    ImageTokens,
    LayerKind,
    LearnedOptions,
    MoE,
    Patches,
    RotaryOptions,
    TransformerConfig,
)
from transformer.data import ShapesCaptions, load_tokenizer, prepare
from transformer.nn import VisionLanguageModel
from transformer.training._completion import complete_recipe
from transformer.training._loop import train
from transformer.training._parallel import place
from transformer.training._recipe import build_model
from transformer.training._state import abstract_state
from transformer.training._step import compiled_eval_step
from transformer.training.tasks._captions import write_captions
from transformer.training.tasks._table import TASKS
from transformer.training.workdir._runs import load_run

SIZES = {"d_model": 16, "num_heads": 4, "feed_forward.d_ff": 24}
DATA = {
    "train_examples": 64,
    "validation_examples": 20,
    "test_examples": 24,
    "batch_size": 16,
    "eval_batch_size": 12,
    "image_tokens": 4,
    "max_length": 26,
    "prompt": "a",
}


def captioning_recipe(attention="causal", **groups):
    patches = Patches(image_height=32, image_width=32, patch_size=16, class_token=False)
    encoder = TransformerConfig(
        **SIZES,
        num_layers=1,
        feed_forward=FeedForwardOptions(activation="gelu_tanh"),
        position=LearnedOptions(),
        input=patches,
    )
    images = ImageTokens(encoder=encoder, attention=attention)
    model = TransformerConfig(**SIZES, num_layers=1, position=RotaryOptions(), input=images)
    return change(six_steps("captions", model, ShapesCaptions(**DATA)), **groups)


@pytest.fixture(scope="module")
def dataset():
    return prepare(ShapesCaptions(**DATA))


def drawn(recipe):
    return random_values(abstract_state(recipe).params)


def test_only_the_caption_and_its_end_token_are_trained(dataset):
    batch, tokenizer = dataset.eval_batches("test")[0], dataset.tokenizer
    for row, example in enumerate(dataset.examples("test", limit=None)[:12]):
        tokens, targets = batch["tokens"][row], batch["targets"][row]
        counted = targets[batch["weights"][row] > 0]
        assert tokenizer.decode(counted[:-1]) == example.target
        assert counted[-1] == tokenizer.eos_id
        first = int(np.argmax(batch["weights"][row] > 0))
        assert batch["prefix_lengths"][row] == first + 1
        assert tokenizer.tokens(tokens[: first + 1]) == ["<image>"] * 4 + ["a"]
        np.testing.assert_array_equal(tokens[first + 1 : batch["lengths"][row]], counted[:-1])
    assert dataset.describe().startswith("shapes_captions: 64 train, 20 validation, 24 test pairs of an image (32 x 32")


def test_a_caption_that_is_too_long_has_no_end_token():
    data = prepare(ShapesCaptions(**DATA | {"max_length": 10}))
    batch = data.eval_batches("test")[0]
    assert (batch["lengths"] == 10).all()
    assert data.tokenizer.eos_id not in batch["targets"][batch["weights"] > 0]
    assert "(108 truncated)" in data.describe()


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("attention", ["causal", "image", "prefix"])
def test_the_loss_equals_the_model_on_the_same_rows(attention, dataset):
    """Padding, and the tokens of the image and the prompt, are no targets."""
    recipe = complete_recipe(captioning_recipe(attention), data=dataset)
    params, batch = drawn(recipe), dataset.eval_batches("test")[0]
    evaluate = compiled_eval_step(recipe)
    found = evaluate(params, batch)
    arguments = {"images": batch["values"][:, None]}
    if attention == "prefix":
        arguments["prefix_lengths"] = np.full(12, len(dataset.prefix))
    logits = jax.jit(build_model(recipe).apply)({"params": params}, batch["tokens"], **arguments)
    logits = np.float64(logits)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(log_p, batch["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(found["loss_sum"], -(chosen * batch["weights"]).sum(), rtol=1e-5)
    assert found["answers"] == 12
    noise = np.where(np.arange(26) >= batch["lengths"][:, None], 7, batch["tokens"])
    again = evaluate(params, batch | {"tokens": noise.astype(np.int32)})
    np.testing.assert_allclose(again["loss_sum"], found["loss_sum"], rtol=1e-5)
    other = evaluate(params, batch | {"values": -batch["values"]})
    assert abs(float(other["loss_sum"]) - float(found["loss_sum"])) > 1e-3


def test_exact_match_without_generation_equals_generated_captions(dataset):
    """The captions that greedy decoding writes, as targets, are all exact; with one other token, one is not."""
    recipe = complete_recipe(captioning_recipe(), data=dataset)
    params, model, batch = drawn(recipe), build_model(recipe), dataset.eval_batches("test")[0]
    texts = write_captions(model, params, dataset, "test", range(12), batch_size=5)
    assert len(set(texts)) > 1
    ids = np.array([(dataset.tokenizer.encode(text) + [0] * 26)[:22] for text in texts])
    tokens, targets = batch["tokens"].copy(), batch["targets"].copy()
    start = len(dataset.prefix)
    written = 20
    tokens[:, start : start + written], targets[:, start - 1 : start - 1 + written] = ids[:, :written], ids[:, :written]
    weights = np.zeros_like(batch["weights"])
    weights[:, start - 1 : start - 1 + written] = 1
    complete = [len(dataset.tokenizer.encode(text)) >= written for text in texts]
    changed = batch | {"tokens": tokens, "targets": targets, "weights": weights * np.array(complete)[:, None]}
    found = compiled_eval_step(recipe)(params, changed)
    assert found["exact_answers"] == found["answers"] == sum(complete) > 1
    targets[complete.index(True), start + 3] ^= 1
    assert compiled_eval_step(recipe)(params, changed)["exact_answers"] == sum(complete) - 1


@pytest.mark.slow
def test_eight_devices_compute_the_losses_of_one_device(dataset):
    found = []
    for parallel in ({"devices": 1}, {"devices": 8, "fsdp": 2, "tensor": 2}):
        recipe = complete_recipe(captioning_recipe(parallel=parallel), data=dataset)
        placement, batches = place(recipe), dataset.train_batches(seed=0)
        state, losses = placement.spread(placement.new_state()), []
        for _ in range(3):
            state, metrics = placement.train_step(state, next(batches))
            losses.append([float(metrics[name]) for name in ("loss_sum", "weight", "grad_norm")])
        found.append(losses)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


@pytest.mark.cpu_only("needs eight devices")
def test_a_mesh_must_divide_the_encoder_of_images(dataset):
    recipe = complete_recipe(captioning_recipe(parallel={"devices": 8, "tensor": 4}), data=dataset)
    images = dataclasses.replace(recipe.model.image_tokens, encoder=recipe.model.image_encoder.replace(num_heads=2))
    with pytest.raises(ConfigError, match=r"model.input.encoder.num_heads \(2\).*parallel.tensor"):
        place(change(recipe, model={"input": images}))


def test_experts_do_not_see_padding(dataset):
    moe = {"stack.period": (LayerKind(moe=MoE(num_experts=2, top_k=2)),)}
    recipe = captioning_recipe()
    recipe = dataclasses.replace(recipe, model=recipe.model.replace(**moe))
    batch = jax.device_put(dict(dataset.eval_batches("test")[0]))
    assert "mask" in TASKS["captioning"].inputs(recipe.model, batch)
    assert "mask" not in TASKS["captioning"].inputs(captioning_recipe().model, batch)


@pytest.mark.programs(11, reason="the command generate compiles programs for one token at a time")
def test_a_run_is_loaded_from_its_own_files(tmp_path, dataset, capsys):
    """The workdir has a tokenizer with the image token and the preprocessing, so that `generate --image` works."""
    workdir = record_drawn_run(complete_recipe(captioning_recipe(), data=dataset), tmp_path / "run", [6])
    run = load_run(workdir)
    texts = write_captions(run.model, run.params, dataset, "test", range(12), batch_size=12)
    place, expected = max(enumerate(texts), key=lambda item: len(item[1]))
    picture = dataset.picture_file("test", place, workdir / "pictures")
    pixels = dataset.values("test", [place])[0]
    np.testing.assert_allclose(np.asarray(Image.open(picture)) / 127.5 - 1, pixels, atol=1e-6)
    assert "<image>" in load_tokenizer(workdir / "tokenizer").special_tokens
    options = ["--prompt", "a", "--temperature", "0", "--json", "--max-new-tokens", "8"]
    assert main(["generate", str(workdir), "--image", str(picture), *options]) == 0
    output = json.loads(capsys.readouterr().out)["results"][0]["output"]
    assert output.split() == expected.split()[:8] != []


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_and_reports_captions(tmp_path):
    recipe = captioning_recipe(evaluation={"every": 3, "samples": 2})
    summary = train(recipe, tmp_path / "run")
    assert_equals_resumed_run(tmp_path / "run", recipe, 3, tmp_path / "other")
    assert summary.exact_match[""].total == 24
    assert sum(summary.exact_match[group].total for group in ("1", "2")) == 24
    assert len(summary.translations) > 1
    for file, sentence, _ in summary.translations:
        assert Image.open(file).size == (32, 32)
        assert sentence.startswith("a ")
    assert summary.prompt.endswith(".png")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {0 <= line["eval/exact_match"] <= 1 for line in lines if "eval/exact_match" in line} == {True}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"data": {"image_tokens": 9}}, r"data.image_tokens \(9\).*4"),
        ({"parallel": {"context": 2}}, "can't split the sequences of the task captioning"),
        ({"model": {"input": None}}, r"model.input"),
        ({"data": {"max_length": 4}}, r"max_length \(4\).*image_tokens \(4\)"),
    ],
)
def test_unsupported_options_of_the_task_are_errors(groups, message):
    with pytest.raises(ConfigError, match=message):
        change(captioning_recipe(), **groups)


def test_settings_that_contradict_the_data_are_errors(dataset, tmp_path):
    recipe = captioning_recipe()
    images = dataclasses.replace(recipe.model.image_tokens, token_id=2)
    with pytest.raises(ConfigError, match=r"model.input.token_id.*2"):
        complete_recipe(change(recipe, model={"input": images}), data=dataset)
    with pytest.raises(ConfigError, match=r"model.input.*image_height 32 \(data.*40\)"):
        train(change(recipe, data={"image_size": 40}), tmp_path)
    with pytest.raises(ValueError, match=r"max_length \(5\).*5"):
        prepare(ShapesCaptions(**DATA | {"max_length": 5}))
    with pytest.raises(ConfigError, match=r"input.token_id"):
        VisionLanguageModel(recipe.model.replace(vocab_size=9)).init(jax.random.key(0), np.zeros((1, 1), int))
