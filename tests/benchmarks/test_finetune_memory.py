"""The recipes behind the table of fine-tuning memory; nothing is compiled."""

import pytest

from benchmarks.finetune_memory import METHODS, MODELS, _cell, sft_recipe
from transformer.training.plan import without_data


@pytest.mark.parametrize("method", METHODS)
def test_every_row_has_a_recipe_that_can_be_planned(method):
    for model in MODELS:
        recipe, assumed = without_data(sft_recipe(model, method, 1024, 8))
        assert (recipe.task, recipe.data.batch_size, assumed) == ("sft", 8, [])
        assert (recipe.lora is None) == (method == "full")


def test_a_row_that_does_not_fit_is_empty():
    assert [_cell(value) for value in ("LoRA", 1024, 0, None, 3.14159, 123456.7)] == [
        "LoRA", "1,024", "0", "", "3.1", "123,457",
    ]  # fmt: skip
