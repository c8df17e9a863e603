"""Options of other programs are answered with ours."""

import dataclasses

import pytest

from tests.training_recipes import tiny_recipe
from transformer.config import ConfigError
from transformer.training._overrides import OTHER_NAMES, _options, override, suggestion

pytestmark = pytest.mark.cpu_only("computes nothing on a device")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--lr", "Did you mean '--optimizer.learning-rate'?"),
        ("--steps", "Did you mean '--training.steps'?"),
        ("--learning_rate", "Did you mean '--optimizer.learning-rate'?"),
        ("--every", "Did you mean '--evaluation.every' or '--checkpoint.every' or '--logging.every'?"),
        ("--n_layer", "Did you mean '--model.num-layers'?"),
        ("--resume", "pass its workdir in place of the recipe"),
        ("--epochs", "--training.steps"),
        ("--model.num-lyers", "Did you mean '--model.num-layers'?"),
        ("--output_dir", "Did you mean '--workdir'?"),
    ],
)
def test_suggests_options_for_names_used_by_other_programs(given, expected):
    with pytest.raises(ConfigError) as raised:
        override(tiny_recipe(), [given, "3"], program="test")
    assert f"unknown option {given}. " in str(raised.value)
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--lora"], "--lora is a group of options. Pass the ones that you want to set: --lora.rank, --lora.alpha"),
        (["--model.input", "3"], "--model.input is not set in this recipe, and has no option. Set it in a recipe file"),
    ],
)
def test_a_group_name_is_not_an_option(given, expected):
    with pytest.raises(ConfigError) as raised:
        override(tiny_recipe(), given, program="test")
    assert expected in str(raised.value)


def test_every_suggested_option_exists():
    assert {f"--{ours}" for ours in OTHER_NAMES} <= set(_options(tiny_recipe()))
    names = [name for theirs in OTHER_NAMES.values() for name in theirs]
    assert len(names) == len(set(names))


def test_an_unrelated_name_gets_no_suggestion():
    assert suggestion("--zzzzzzzz", _options(tiny_recipe())) == ""


def test_an_option_that_turns_a_group_on_is_checked_together_with_the_others():
    """LoRA excludes muon; the recipe's own optimizer must not count if another option replaces it."""
    recipe = tiny_recipe()
    muon = dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, name="muon"))
    changed = override(muon, ["--lora.rank", "4", "--optimizer.name", "adamw"], program="test")
    assert (changed.lora.rank, changed.optimizer.name) == (4, "adamw")
    with pytest.raises(ConfigError, match="muon"):
        override(muon, ["--lora.rank", "4"], program="test")
