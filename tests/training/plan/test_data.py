"""Plans for each kind of data and for LoRA, and data that a recipe can't be trained on."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from plan_recipes import CHIPS, SMALL, parallel
from training_recipes import change, tiny_recipe

from transformer.config import ConfigError, LearnedOptions
from transformer.data import MaskedSST2, ParallelText, SST2Sentences
from transformer.data._pipeline import check_batch
from transformer.nn.models import count_parameters
from transformer.training._flops import batch_shapes, counted, step_tokens
from transformer.training._overrides import load_recipe_file
from transformer.training._state import abstract_state
from transformer.training.lora import LoRA
from transformer.training.plan import Generation, without_data
from transformer.training.plan import _decode_plan as decoding
from transformer.training.plan._measurement import made_up_batch
from transformer.training.plan._train_plan import program

PAIRS = ParallelText(source_path="a", max_source_length=12, max_target_length=10, batch_size=8)


def recipe_of(name):
    return load_recipe_file(Path(__file__).resolve().parents[3] / "configs" / f"{name}.py")[0]


def reading(data, **groups):
    return change(dataclasses.replace(tiny_recipe(), data=data), **groups)


@pytest.mark.parametrize("kind", [SST2Sentences, MaskedSST2])
def test_synthetic_texts_fill_their_rows_and_labels_are_valid(kind):
    classes = 2 if kind is SST2Sentences else None
    recipe = reading(kind(max_length=20), model={"output.num_classes": classes})
    batch = made_up_batch(recipe)
    np.testing.assert_array_equal(batch["lengths"], 20)
    check_batch(batch, recipe.model.vocab_size, num_classes=2)  # otherwise it raises an error


@pytest.mark.parametrize(
    ("name", "tokens", "told"),
    [("etth1", 4 * 7 * 21, (4 * 7 * 96, "forecast values")), ("digits_vit", 4 * 17, (4, "images"))],
)
def test_tokens_of_a_step_are_patches_where_the_data_is_numbers(name, tokens, told):
    """Speed is reported in the units that training counts."""
    recipe = change(recipe_of(name), data={"batch_size": 4})
    assert step_tokens(recipe) == tokens
    assert counted(recipe) == told
    assert counted(reading(PAIRS)) == (8 * (12 + 10), "tokens")
    assert step_tokens(reading(PAIRS)) == 8 * (12 + 10)


def test_rejects_rows_that_do_not_fit_the_model_or_mesh():
    packed = dataclasses.replace(PAIRS, batch_size=128, batch_tokens=512, packed_length=32)
    with pytest.raises(ConfigError, match=r"packed_length \(32\).*model.position.max_length \(20\)"):
        reading(packed, model={"position": LearnedOptions(max_length=20)})
    buckets = dataclasses.replace(packed, packed_length=None)
    with pytest.raises(ConfigError, match=r"context \(2\) needs rows of a fixed length"):
        reading(buckets, parallel={"context": 2})
    assert reading(packed, parallel={"context": 2}).parallel.context == 2


@pytest.mark.parametrize("field", ["label_smoothing", "z_loss"])
def test_a_forecast_has_no_probabilities_to_smooth(field):
    with pytest.raises(ConfigError, match=r"label_smoothing.*training\.z_loss"):
        change(recipe_of("etth1"), training={field: 0.1})


@pytest.mark.parametrize("kind", ["mesh", "pmap"])
def test_low_rank_updates_are_trained_and_the_other_parameters_frozen(kind):
    recipe, assumed = without_data(parallel(dataclasses.replace(SMALL, lora=LoRA(rank=2)), devices=1, kind=kind))
    assert assumed == []
    one = program(recipe, jax.devices(), batch_shapes(recipe))
    whole = count_parameters(abstract_state(SMALL).params)
    updates = 2 * (32 + 4 * 8) + 2 * (32 + 2 * 8)  # rank x (inputs + outputs), for queries and values
    assert count_parameters(one.params) == whole
    assert (one.held["frozen parameters"], one.held["trained parameters (LoRA)"]) == (4 * whole, 4 * updates)
    assert one.held["optimizer state"] == pytest.approx(8 * updates, abs=16)  # two moments, and step counters


def test_generation_is_planned_with_merged_parameters():
    recipe = parallel(dataclasses.replace(SMALL, lora=LoRA(rank=2)), devices=1)
    plan = decoding.make_decode_plan(recipe, Generation(2, 8, 8), CHIPS, jax.devices())
    assert plan.num_parameters == count_parameters(abstract_state(SMALL).params)
