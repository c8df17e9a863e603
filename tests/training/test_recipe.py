"""Recipes: JSON and back, fields that may change on resume, and one-line errors for command-line mistakes."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from training_recipes import change, tiny_recipe

from transformer import training
from transformer.config import (
    AttentionOptions,
    ConfigError,
    FeedForwardOptions,
    Images,
    ImageTokens,
    LayerKind,
    LearnedOptions,
    OutputOptions,
    Patches,
    QKNorm,
    RotaryOptions,
    RotaryScaling,
    StackOptions,
    TransformerConfig,
)
from transformer.data import DATA, JsonLines, NumberWords, ParallelText
from transformer.nn.models import CausalLM, Seq2Seq
from transformer.training import OptimizerConfig, Recipe, build_model, difference, from_json, load_recipe, to_json
from transformer.training._overrides import fast, override
from transformer.training._recipe import FILE, MAY_CHANGE, Origin, save_recipe, with_vocabulary
from transformer.training._serial import flatten
from transformer.training._settings import schedule_warning
from transformer.training.tasks._distillation import Distill
from transformer.training.tasks._policy_gradient import GRPO

pytestmark = pytest.mark.cpu_only("computes nothing on a device")

IMAGE_ENCODER = TransformerConfig(
    d_model=12, num_layers=1, num_heads=3, feed_forward=FeedForwardOptions(d_ff=24), position=None
)
LINES = JsonLines(path="a.jsonl", field="body")
PAIRS = ParallelText(source_path="a", target_path="b", batch_size=12)
ALL_DATA = [LINES, PAIRS]
for kind in DATA.values():
    needed = [field for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    given = {field.name: 4 if field.type == "int" else field.name for field in needed}
    ALL_DATA.append(kind(**{name: (name,) if name == "paths" else value for name, value in given.items()}))


def rich_recipe(data=None):
    scaling = RotaryScaling(kind="yarn", factor=4.0)
    model = TransformerConfig(
        d_model=12,
        num_layers=4,
        num_heads=3,
        position=RotaryOptions(scaling=scaling),
        stack=StackOptions(
            prefix=(LayerKind(window=7),),
            period=(LayerKind(rotary_base=5.0), LayerKind(rotary_scaling=scaling)),
            suffix=(LayerKind(),),
        ),
    )
    data = data or NumberWords()
    if data.task == "contrastive":
        encoder = IMAGE_ENCODER.replace(input=Patches(image_height=32, image_width=32, patch_size=8))
        images = Images(encoder=encoder, features=6)
        attention, output = AttentionOptions(causal=True), OutputOptions(pooling="last")
        model = model.replace(input=images, attention=attention, output=output)
    if data.task == "captioning":
        encoder = IMAGE_ENCODER.replace(input=Patches(image_height=32, image_width=32, patch_size=16))
        model = model.replace(input=ImageTokens(encoder=encoder))
    grpo = GRPO(rewards=("rewards.py:length",)) if data.task == "grpo" else None
    return Recipe(name="rich", model=model, data=data, grpo=grpo)


def test_the_name_of_a_position_scheme_is_an_option():
    recipe = Recipe(name="r", model=TransformerConfig(**{"attention.qk_norm": QKNorm()}), data=LINES)

    def overridden(*words):
        return override(recipe, words, program="p").model

    assert overridden("--model.position", "rotary", "--model.position.base", "7.0").position == RotaryOptions(base=7.0)
    assert overridden("--model.position=learned", "--model.position.max-length", "512").max_length == 512
    assert overridden("--model.position", "none").position is None
    with pytest.raises(ConfigError, match=r"--model.position.*got 'rotery'.*'rotary'\?"):
        overridden("--model.position", "rotery")
    assert overridden("--model.attention.qk-norm", "None").attention.qk_norm is None
    recipe = dataclasses.replace(recipe, model=TransformerConfig())
    assert overridden("--model.attention.qk-norm.scope", "all").attention.qk_norm == QKNorm(scope="all")


# JSON


@pytest.mark.parametrize("data", ALL_DATA, ids=lambda data: data.kind)
def test_a_recipe_survives_a_json_round_trip(data):
    recipe = rich_recipe(data)
    again = from_json(json.loads(json.dumps(to_json(recipe), allow_nan=False)))
    assert again == recipe
    assert type(again.data) is type(data)


def test_json_contains_kind_and_version():
    values = to_json(rich_recipe())
    assert (values["format"], values["version"]) == ("transformer recipe", 1)
    assert values["recipe"]["data"]["class"] == "number_words"
    assert values["recipe"]["model"]["stack"]["period"][1]["rotary_scaling"]["class"] == "RotaryScaling"


def broken(edit):
    values = json.loads(json.dumps(to_json(rich_recipe())))
    edit(values)
    return values


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda v: v["recipe"]["model"].update(d_modell=3), r"recipe.model.*'d_modell'.*'d_model'"),
        (
            lambda v: v["recipe"]["model"]["stack"]["period"][1]["rotary_scaling"].pop("kind"),
            r"recipe.model.stack.period\[1\].rotary_scaling lacks kind: it was written by a different version",
        ),
        (lambda v: v["recipe"]["model"].update(d_model="x"), r"recipe.model.d_model.*got 'x'"),
        (lambda v: v["recipe"]["model"].update(d_model=True), r"recipe.model.d_model"),
        (lambda v: v["recipe"]["model"]["norm"].update(kind="rms"), r"recipe.model.norm.kind.*layer_norm.*rms_norm"),
        (lambda v: v["recipe"]["model"]["stack"].update(period={}), r"recipe.model.stack.period"),
        (
            lambda v: v["recipe"]["model"]["stack"]["period"][0].update(window="x"),
            r"recipe.model.stack.period\[0\].window",
        ),
        (lambda v: v["recipe"]["data"].update({"class": "numbers"}), r"'numbers'.*'number_words'"),
        (lambda v: v["recipe"]["data"].pop("class"), r"recipe.data.*'class'"),
        (lambda v: v["recipe"].update(training=None), r"recipe.training.*'class'"),
        (lambda v: v["recipe"]["optimizer"].update(clip_norm="1"), r"recipe.optimizer.clip_norm"),
        (lambda v: v.update(version=2), "recipe version 2, but this program reads version 1"),
        (lambda v: v.pop("format"), "recipe is not a recipe"),
    ],
)
def test_broken_json_is_an_error_with_its_position(edit, message):
    with pytest.raises(ConfigError, match=message):
        from_json(broken(edit))


def test_a_missing_field_takes_its_default():
    """So a file can be read after its class has got another field."""
    values = broken(lambda v: [v["recipe"].pop("lora"), v["recipe"]["model"]["norm"].pop("epsilon")])
    assert from_json(values) == rich_recipe()


def test_integers_are_accepted_for_floats():
    values = broken(lambda v: v["recipe"]["optimizer"].update(clip_norm=2, learning_rate=1))
    optimizer = from_json(values).optimizer
    assert (optimizer.clip_norm, optimizer.learning_rate) == (2.0, 1.0)
    assert isinstance(optimizer.learning_rate, float)


def test_a_workdir_keeps_its_recipe(tmp_path):
    recipe = rich_recipe()
    assert save_recipe(recipe, tmp_path) == tmp_path / FILE
    assert load_recipe(tmp_path) == recipe
    (tmp_path / FILE).write_text((tmp_path / FILE).read_text()[:-40])
    with pytest.raises(ConfigError, match=r"recipe.json"):
        load_recipe(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"is not the workdir of a run"):
        load_recipe(tmp_path / "nowhere")


# Fields that must be consistent


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: OptimizerConfig(name="adam"),
            r"optimizer.name.*schedule_free_adamw.*got 'adam'.*'adamw'",
        ),
        (lambda: OptimizerConfig(schedule="cos"), r"optimizer.schedule"),
        (
            lambda: OptimizerConfig(learning_rate=-1.0),
            r"optimizer.learning_rate.*0.*got -1",
        ),
        (
            lambda: OptimizerConfig(beta2=1.0),
            r"optimizer.beta2.*0.*1.*got 1.0",
        ),
        (lambda: OptimizerConfig(clip_norm=0.0), r"optimizer.clip_norm.*0.*got 0.0"),
        (
            lambda: OptimizerConfig(schedule="noam", warmup_steps=0),
            r"optimizer.warmup_steps.*1",
        ),
        (lambda: training.TrainingConfig(steps=0), r"training.steps.*1.*got 0"),
        (lambda: training.TrainingConfig(label_smoothing=1.0), "training.label_smoothing"),
        (lambda: training.TrainingConfig(ema_decay=1.0), "training.ema_decay"),
        (lambda: training.TrainingConfig(nan_policy="go"), r"training.nan_policy"),
        (lambda: training.EvaluationConfig(every=0), r"evaluation.every.*1"),
        (lambda: training.EvaluationConfig(temperature=-0.1), "evaluation.temperature"),
        (lambda: training.CheckpointConfig(keep_last=0), "checkpoint.keep_last"),
        (lambda: training.LoggingConfig(every=None), r"logging.every.*1"),
        (
            lambda: tiny_recipe(accumulation=3),
            r"data.batch_size \(8\).*training.accumulation \(3\)",
        ),
        (
            lambda: tiny_recipe(model={"position": LearnedOptions(max_length=5)}),
            r"data.sequence_length \(7\).*model.position.max_length \(5\)",
        ),
        (lambda: dataclasses.replace(tiny_recipe(), name="a/b"), "name must be a plain name"),
        (lambda: build_model(tiny_recipe(model={"vocab_size": None})), r"model.vocab_size"),
        (lambda: with_vocabulary(tiny_recipe(), 14), r"model.vocab_size \(13\).*14"),
    ],
)
def test_rejects_invalid_options(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_data_determines_model_fields():
    assert isinstance(build_model(tiny_recipe("causal_lm")), CausalLM)
    assert isinstance(build_model(tiny_recipe("seq2seq")), Seq2Seq)
    assert with_vocabulary(tiny_recipe(model={"vocab_size": None}), 9).model.vocab_size == 9
    assert with_vocabulary(tiny_recipe(), 9).model.vocab_size == 13


# Fields that may change on resume


def names(changes):
    return {item.field for item in changes}


def test_the_difference_separates_fields_that_affect_the_result():
    old = tiny_recipe("seq2seq")
    new = change(
        old,
        model={"feed_forward.d_ff": 7},
        optimizer={"learning_rate": 0.1},
        training={
            "seed": 3,
            "label_smoothing": 0.1,
            "ema_decay": 0.9,
            "steps": 99,
            "accumulation": 2,
            "nan_policy": "skip",
        },
        data={"batch_size": 4, "data_dir": "/elsewhere", "eval_batch_size": 3},
        execution={"scan": True},
        evaluation={"every": 3},
        checkpoint={"keep_last": 5},
        logging={"every": 1},
    )
    must_match, may_change = difference(old, dataclasses.replace(new, name="other"))
    assert names(must_match) == {
        "model.feed_forward.d_ff",
        "optimizer.learning_rate",
        "training.seed",
        "training.label_smoothing",
        "training.ema_decay",
        "data.batch_size",
    }
    assert names(may_change) == {
        "name",
        "training.steps",
        "training.accumulation",
        "training.nan_policy",
        "data.data_dir",
        "data.eval_batch_size",
        "execution.scan",
        "evaluation.every",
        "checkpoint.keep_last",
        "logging.every",
    }
    assert str(must_match[0]) == "model.feed_forward.d_ff: 5 -> 7"
    assert difference(old, old) == ([], [])


def test_resuming_requires_the_same_data_kind():
    old = tiny_recipe("causal_lm")
    must_match, _ = difference(old, dataclasses.replace(old, data=LINES))
    assert {"data", "data.field"} <= names(must_match)


def test_resuming_requires_the_same_layer_pattern():
    old = rich_recipe()
    new = change(old, model={"stack.period": (LayerKind(rotary_base=6.0), LayerKind())})
    assert {"model.stack.period.0.rotary_base", "model.stack.period.1.rotary_scaling"} <= names(difference(old, new)[0])


def test_fields_that_may_change_exist():
    """A renamed field must not silently disappear from the list."""
    origin = flatten(Origin(source="", model="", fingerprint=""), "origin")
    distill = flatten(Distill(teacher="runs/teacher"), "distill")
    known = set(origin).union(distill, *(flatten(rich_recipe(data)) for data in ALL_DATA))
    for entry in MAY_CHANGE:
        assert any(field == entry or field.startswith(f"{entry}.") for field in known), entry


# The command line


def test_overrides_have_types():
    arguments = "--model.num-layers 3 --optimizer.clip-norm None --data.max_digits=4 --execution.scan True"
    recipe = override(tiny_recipe("seq2seq"), arguments.split(), program="train.py")
    assert recipe.model.num_layers == 3
    assert recipe.optimizer.clip_norm is None
    assert recipe.data.max_digits == 4
    assert recipe.execution.scan is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model.num-layer 3", r"--model.num-layer.*'--model.num-layers'"),
        ("--modle.num-layers 3", r"--modle.num-layers.*'--model.num-layers'"),
        ("--data.field x", r"--data.field"),
        ("--model.num-layers three", r"--model.num-layers.*int.*'three'"),
        ("--training.ema-decay x", "^--training.ema-decay: expected FLOAT, got 'x'"),
        ("--model.num-layers", r"'--model.num-layers'"),
        ("--model.norm.kind rms", r"'rms'.*'--model.norm.kind'.*'rms_norm'"),
        ("--execution.scan yes", r"'yes'.*'--execution.scan'"),
        ("--model.num-heads 4", r"d_model \(6\).*num_heads \(4\)"),
        ("--training.steps 0", "^training.steps must be an integer of at least 1, got 0"),
        ("--training.seed 4294967296", "^training.seed must be at most 4294967295, got 4294967296"),
        ("--training.seed 9223372036854775808", "^training.seed must be at most 4294967295, got 9223372036854775808"),
        ("--training.steps 5000000000", "^training.steps must be at most 2147483647, got 5000000000"),
        ("--data.batch-size 2147483648", "^data.batch_size must be at most 2147483647, got 2147483648"),
        ("--logging.every 2147483648", "^logging.every must be at most 2147483647"),
        ("--checkpoint.every 2147483648", "^checkpoint.every must be at most 2147483647"),
        ("--training.accumulation 3", "^data.batch_size .* must be a multiple of training.accumulation"),
        ("what", "unexpected argument: what"),
    ],
)
def test_an_invalid_override_is_a_one_line_error_with_a_remedy(arguments, message, capsys):
    with pytest.raises(ConfigError, match=message) as error:
        override(tiny_recipe(), arguments.split(), program="train.py")
    assert "\n" not in str(error.value)
    assert "│" not in str(error.value)
    assert capsys.readouterr() == ("", "")


def test_every_field_has_help_text(capsys):
    """tyro takes the help text from the docstring below a field; without one it shows only the default."""
    for data in ALL_DATA:
        with pytest.raises(SystemExit) as stop:
            override(rich_recipe(data), ["--help"], program="train.py")
        assert stop.value.code == 0
        text = capsys.readouterr().out
        missing = [line for line in help_entries(text) if line[1].startswith("(default")]
        assert not missing
        assert len(help_entries(text)) > 60


def help_entries(text):
    """Return pairs of an option and the first words of its help text."""
    plain = [line.strip("│ ").strip() for line in text.splitlines()]
    entries = []
    for place, line in enumerate(plain):
        if line.startswith("--"):
            option, _, rest = line.partition("  ")
            entries.append((option, rest.strip() or plain[place + 1]))
    return entries


def test_a_path_that_is_empty_is_an_error():
    """An empty path would mean the current directory, or silently the default."""
    with pytest.raises(ConfigError, match=r"^data.data_dir must name a file or a folder, got ''. Remove it"):
        override(tiny_recipe("seq2seq"), ["--data.data-dir", ""], program="train.py")
    with pytest.raises(ConfigError, match=r"path.*got ''"):
        override(tiny_recipe(), ["--data.path", ""], program="train.py")


def test_the_largest_seed_and_number_of_steps_are_allowed():
    recipe = tiny_recipe(seed=2**32 - 1, steps=2**31 - 1)
    first, second = (jax.random.key_data(jax.random.key(seed)) for seed in (recipe.training.seed, 0))
    assert not np.array_equal(first, second)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ({"warmup_steps": 1000}, "never reaches its peak: the warm-up has 1000 steps .*, the run 300"),
        ({"warmup_steps": 300}, None),
        ({"warmup_steps": 9, "schedule": "cosine", "decay_steps": 9}, "drops to its final value .* step 9 .* step 9"),
        ({"warmup_steps": 9, "schedule": "wsd", "decay_steps": 10}, None),
        ({"warmup_steps": 9, "schedule": "constant", "decay_steps": 5}, None),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_is_a_warning(optimizer, words):
    warning = schedule_warning(OptimizerConfig(**optimizer), 300)
    assert warning is None if words is None else re.search(words, warning)


def test_fast_runs_a_few_steps_of_everything():
    recipe = fast(rich_recipe())
    assert recipe.training.steps == 4
    assert recipe.evaluation.every == recipe.checkpoint.every == 2
    assert recipe.evaluation.samples == 1
    assert recipe.model == rich_recipe().model
