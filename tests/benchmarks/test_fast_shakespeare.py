"""Ablations of shakespeare_fast: each run differs in one technique, and the page shows the stored results."""

import json

import pytest

from benchmarks.ablations_page import fill
from benchmarks.fast_shakespeare import PAGE, RESULTS, ROOT, VARIANTS, tables
from transformer.nn.models import count_parameters
from transformer.training._overrides import find_recipe, load_recipe_file
from transformer.training._recipe import difference, with_vocabulary
from transformer.training._state import abstract_state

RUNS = {
    "full": {
        "0": {"eval_loss": 1.5, "parameters": 1200, "seconds": 60},
        "1": {"eval_loss": 1.7, "parameters": 1200, "seconds": 60},
    },
    "adamw": {"1": {"eval_loss": 1.8, "parameters": 1200, "seconds": 60}},
    "gated": {"2": {"eval_loss": 1.4, "parameters": 1300, "seconds": 60}},
}


def recipe_of(name):
    return load_recipe_file(find_recipe(name, ROOT))[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_differs_only_in_its_documented_fields_and_reads_equal_text(name):
    base = recipe_of("shakespeare_fast")
    recipe = VARIANTS[name].recipe(base, base.name)
    changed, free = difference(base, recipe)
    declared = {f"{group}.{field}" for group, fields in VARIANTS[name].changes.items() for field in fields}
    found = {
        change.field: next((one for one in declared if change.field.startswith(one)), None)
        for change in [*changed, *free]
    }
    assert set(found.values()) == declared, found
    tokens, size = (
        [one.training.steps * one.data.batch_size * one.data.sequence_length for one in (base, recipe)],
        [count_parameters(abstract_state(with_vocabulary(one, 68)).params) for one in (base, recipe)],
    )
    assert tokens[0] == tokens[1]
    assert size[1] == pytest.approx(size[0], rel=0.02)


def test_the_recipe_has_the_sizes_and_text_of_shakespeare_cpu():
    slow, fast = recipe_of("shakespeare_cpu"), recipe_of("shakespeare_fast")
    assert (slow.data, slow.training) == (fast.data, fast.training)
    for field in ("num_layers", "num_heads", "d_model", "feed_forward_width", "dropout_rate"):
        assert getattr(slow.model, field) == getattr(fast.model, field)


def test_the_page_shows_the_stored_results():
    text = PAGE.read_text(encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert results["runs"].keys() <= VARIANTS.keys()
    assert fill(text, tables(results)) == text, "run: python -m benchmarks.fast_shakespeare --render"
    assert fill(text, tables(results | {"runs": RUNS})) != text


def test_differences_use_the_seeds_common_to_both_variants():
    made = tables({"runs": RUNS, "made": "today"})
    removed, added = made["removed"].splitlines(), made["added"].splitlines()
    assert removed[2] == added[2] == "| `full` | the recipe | 1,200 | 0, 1 | 1.600 ± 0.141 |  |"
    assert removed[3:] == ["| `adamw` | AdamW instead of Muon, learning rate 3e-3 | 1,200 | 1 | 1.800 | +0.100 |"]
    assert added[3].endswith("| 1,300 | 2 | 1.400 |  |")  # the recipe has no run with this seed
    assert made["when"].startswith(
        "Measured today; 4 runs, 4 minutes of training in total.\nNot trained yet: `low_rate`, `cosine`, "
    )
    assert "`adamw`" not in made["when"]
    alone = tables({"runs": {"adamw": RUNS["adamw"]}, "made": "today"})["removed"]
    assert alone.endswith("| 1 | 1.800 |  |")  # no run of the recipe to compare with
