"""The search for the largest batch: it finds the limit with few programs, from any first guess."""

import dataclasses
import types

import jax
import pytest
from plan_recipes import BY_TOKENS, CHIPS, TEXT, parallel

from transformer.cli._plan_print import batch_lines
from transformer.config import ConfigError
from transformer.training import TrainingConfig
from transformer.training._flops import batch_rows
from transformer.training.plan import _search as module
from transformer.training.plan._search import MOST_PROGRAMS, PRECISION, best_of, largest_batch


def found(monkeypatch, needed, available, recipe=TEXT, size_of=lambda data: data.batch_size):
    """Return the batches that the search tries if a step with a batch size of `size` needs `needed(size)` bytes."""

    def plan(recipe, topology, devices):
        size = size_of(recipe.data)
        return types.SimpleNamespace(
            fits=needed(size) <= available,
            needed_bytes=needed(size),
            available_bytes=available,
            estimate=None,
            mesh="m",
            seconds=1.0,
            remedies=["b"],
        )

    monkeypatch.setattr(module, "make_plan", plan)
    return list(largest_batch(recipe, CHIPS, jax.devices()))


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9, 55, 1000])
@pytest.mark.parametrize("curve", ["line", "steps", "bent"])
def test_finds_the_largest_batch_that_fits(monkeypatch, limit, curve):
    needed = {
        "line": lambda size: 1000 + 50 * size,
        "steps": lambda size: 1000 + 400 * (size // 64),
        "bent": lambda size: 1000 + 50 * size + size**2,
    }[curve]
    tried = found(monkeypatch, needed, needed(8 * limit), parallel(TEXT, data=8))
    largest = max(size for size in range(8, 100_000, 8) if needed(size) <= needed(8 * limit))
    best = best_of(tried)
    assert best is not None
    assert best.size % 8 == 0
    assert largest - largest // PRECISION - 8 < best.size <= largest
    assert len(tried) <= MOST_PROGRAMS
    assert len({one.size for one in tried}) == len(tried)


def test_batches_by_tokens_have_whole_rows(monkeypatch):
    """75 tokens and 12 per row: the rows of a batch are multiples of 8, so 8 x 12 tokens are the smallest change."""
    tried = found(monkeypatch, lambda rows: 1000 + 50 * rows, 1000 + 50 * 40, BY_TOKENS, batch_rows)
    assert {one.size % 96 for one in tried[1:]} == {0}
    assert best_of(tried).size == 40 * 12


def test_reports_that_nothing_fits(monkeypatch):
    tried = found(monkeypatch, lambda size: 1000 + size, 500, parallel(TEXT, data=8))
    assert best_of(tried) is None
    assert tried[-1].size == 8
    lines = list(batch_lines("x", CHIPS, ["y"], "--data.batch-size", tried, None))
    assert lines[1:] == ["assumed: y", "nothing fits: --data.batch-size 8: does not fit, 1008 B", "  try b"]


def test_prints_the_result(monkeypatch):
    tried = found(monkeypatch, lambda size: 100 * size, 4000, parallel(TEXT, data=8))
    lines = list(batch_lines("x", CHIPS, [], "--data.batch-size", tried, best_of(tried)))
    assert lines[1] == "largest batch: --data.batch-size 40 (48 does not fit)"
    assert lines[2] == "  --data.batch-size 40: fits, 3.91 KiB, an estimate and not a measurement"


def test_rejects_rows_that_the_devices_cannot_divide(monkeypatch):
    by_four = dataclasses.replace(parallel(TEXT, data=8), training=TrainingConfig(accumulation=4))
    with pytest.raises(ConfigError, match=r"data.batch_size \(8\).*32.*--data.batch-size 32"):
        found(monkeypatch, lambda size: size, 1, by_four)
