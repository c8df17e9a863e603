"""A dry run reports what a run would train, checks it, and leaves nothing behind."""

import ast

import pytest
from training_recipes import change, text_recipe

from transformer.cli import _train as command
from transformer.training._dry_run import dry_run
from transformer.training._memory import OutOfMemoryError

pytestmark = pytest.mark.cpu_only("computes nothing on a device")


def test_a_dry_run_reports_recipe_parameters_memory_and_the_first_batch(tmp_path):
    said = []
    dry_run(text_recipe(tmp_path), tmp_path / "run", say=said.append)
    text = "\n".join(said)
    assert "  model.d_model: 6\n" in text
    assert "  model.vocab_size: None" not in text, "the data completes the recipe"
    assert "trained parameters" in text
    assert "memory per device: " in text
    assert "first batch: tokens int32[4,8], targets int32[4,8]" in text
    shown = next(line for line in text.splitlines() if line.startswith("  tokens, first row: "))
    assert ast.literal_eval(shown.partition(": ")[2]) in (tmp_path / "text.txt").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
    assert "warning" not in text


def test_a_dry_run_warns_as_a_run_does(tmp_path):
    said = []
    recipe = text_recipe(tmp_path)
    slow = change(recipe, optimizer={"warmup_steps": recipe.training.steps + 1})
    dry_run(slow, tmp_path / "run", say=said.append)
    assert said[0].startswith("warning: the learning rate never reaches its peak")


def test_a_dry_run_rejects_what_a_run_would_reject(tmp_path):
    huge = change(text_recipe(tmp_path), model={"d_model": 2_100_000_000})
    with pytest.raises(OutOfMemoryError, match="can't fit"):
        dry_run(huge, tmp_path / "run", say=lambda text: None)
    assert not (tmp_path / "run").exists()


def test_the_command_trains_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text_recipe(tmp_path)
    options = ["--data.path", "text.txt", "--model.d-model", "8", "--model.num-layers", "1", "--model.num-heads", "2"]
    assert command.main(["text_file", *options, "--data.tokenizer.kind", "byte", "--dry-run"]) == 0
    assert "nothing was trained, and nothing was written to runs/text_file" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
