"""The cases of the benchmark of TPU steps, and its rows; nothing is compiled."""

import pytest

from benchmarks.tpu_step import CASES, Step, _row
from transformer.data._config import shared_rows
from transformer.nn._sharding import check_batch_sizes, check_model, mesh_sizes
from transformer.training._overrides import find_recipe, load_recipe_file, override
from transformer.training.plan import parse_topology, without_data


@pytest.mark.parametrize("name", CASES)
def test_recipe_and_options_fit_the_topology(name):
    case = CASES[name]
    recipe, _ = load_recipe_file(find_recipe(case.recipe))
    recipe, _ = without_data(override(recipe, case.options, program="test"))
    sizes = mesh_sizes(recipe.parallel.sizes, parse_topology(case.topology).num_chips)
    check_model(recipe.model, sizes)
    check_batch_sizes(*shared_rows(recipe.data), recipe.training.accumulation, sizes, recipe.data.sequence_length)


def test_unknown_figures_are_empty():
    assert _row("x", Step(peak_gib=23.456), ["peak_gib", "tflops"]) == "| x | 23.46 |  |"
