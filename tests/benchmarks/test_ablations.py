"""Ablations: each run differs from the baseline in one part, and the page shows the stored results."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.ablations import RESULTS, VARIANTS, bigram_bounds, conditional_loss, pair_counts
from benchmarks.ablations_page import PAGE, filled, write_page
from transformer.config import LayerKind
from transformer.training._overrides import load_recipe_file
from transformer.training._recipe import difference, with_vocabulary
from transformer.training._state import abstract_state

ROOT = Path(__file__).resolve().parents[2]
LABELS = {name: (variant.table, variant.label) for name, variant in VARIANTS.items()}


def recipe_of(name):
    return load_recipe_file(ROOT / "configs" / f"{name}.py")[0]


def test_the_recipe_without_attention_differs_only_in_attention():
    changed, free = difference(recipe_of("shakespeare"), recipe_of("shakespeare_no_attention"))
    assert [change.field for change in changed] == ["model.stack.period.0.self_attention"]
    assert [change.field for change in free] == ["name"]
    assert recipe_of("shakespeare_no_attention").model.stack.period == (LayerKind(self_attention=False),)
    assert (
        VARIANTS["no_attention"].recipe(recipe_of("shakespeare"), "x").model
        == recipe_of("shakespeare_no_attention").model
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_trains_and_differs_only_in_its_documented_fields(name):
    base = recipe_of("shakespeare")
    recipe = VARIANTS[name].recipe(base, name)
    changed, free = difference(base, recipe)
    declared = {(group, field) for group, fields in VARIANTS[name].changes.items() for field in fields}
    fields = {tuple(change.field.split(".", 1)) for change in changed + free} - {("name",)}
    assert all(any(group == g and field.startswith(f) for g, f in declared) for group, field in fields)
    assert bool(changed) == (name != "attention")
    abstract_state(with_vocabulary(recipe, 68))


class Pairs:
    """A data set in which b or c follow a with equal probability, and a follows both of them."""

    class tokenizer:
        vocab_size = 4

    def eval_batches(self, split="validation"):
        text = np.array([0, 1, 0, 2, 0, 1, 0, 2, 0])
        weights = np.array([1, 1, 1, 1, 1, 1, 1, 1.0])
        yield {"tokens": text[None, :-1], "targets": text[None, 1:], "weights": weights[None]}
        yield {"tokens": np.full((1, 3), 3), "targets": np.full((1, 3), 3), "weights": np.zeros((1, 3))}  # padding


def test_the_bigram_entropy_is_the_entropy_given_the_current_token():
    bounds = bigram_bounds(Pairs())
    assert bounds["entropy"] == pytest.approx(np.log(2) / 2)  # one bit at every second position
    assert bounds["unigram"] == pytest.approx(1.5 * np.log(2))
    assert bounds["entropy"] < bounds["learnt"] < bounds["unigram"]


def test_no_prediction_from_the_current_token_beats_the_bigram_entropy():
    rng = np.random.default_rng(0)
    seen = rng.integers(0, 9, (5, 7)).astype(float)
    least = conditional_loss(seen, seen)
    for _ in range(20):
        assert conditional_loss(seen, seen + rng.uniform(0.01, 3, seen.shape)) > least


def test_pairs_of_weight_zero_are_not_counted():
    assert pair_counts(Pairs().eval_batches(), 4).sum() == 8


def test_the_page_shows_the_stored_results():
    """The page equals the output of --render, so that no table is edited by hand or outdated."""
    text = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert results["runs"].keys() == VARIANTS.keys()
    assert filled(text, results, LABELS) == text, "run: python -m benchmarks.ablations --render"
    other = {**results, "bounds": {**results["bounds"], "entropy": 1.0}}
    assert filled(text, other, LABELS) != text


def test_the_page_states_the_measured_gain_from_attention():
    """Without attention, losses are between the bigram entropy and the bigram frequencies; attention is far below."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    bounds, losses = results["bounds"], {name: run["eval_loss"] for name, run in results["runs"].items()}
    for name in (name for name in losses if name.startswith("no_attention")):
        assert bounds["entropy"] < losses[name] < bounds["learnt"] + 0.01, name  # tolerance for the effect of the seed
    assert losses["attention"] < bounds["entropy"] - 0.5


def test_the_page_is_written_with_its_plots(tmp_path):
    (tmp_path / PAGE).write_text("before\n<!-- made: main -->\nold\n<!-- end -->\nafter\n")
    run = {"parameters": 5, "steps": 20, "eval_loss": 2.5, "seconds": 60, "eval": [[10, 3.0], [20, 2.5]], "text": "x"}
    results = {
        "runs": dict.fromkeys(VARIANTS, run),
        "bounds": {"entropy": 2.0, "learnt": 2.1, "unigram": 3.0},
        "made": "today",
    }
    write_page(results, LABELS, tmp_path)
    text = (tmp_path / PAGE).read_text()
    assert text.startswith("before\n<!-- made: main -->\n| run |")
    assert "| `no_attention` | without attention | 5 | 20 | 2.500 | +0.500 |\n<!-- end -->\nafter\n" in text
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == [
        "ablations.png",
        "norm_and_warmup.png",
        "without_attention.png",
    ]
