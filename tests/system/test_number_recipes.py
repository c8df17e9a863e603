"""The four recipes about numbers follow each other: each trains two steps from the run of the stage before it."""

import functools
import json
from pathlib import Path

import pytest

from transformer.__main__ import run_command
from transformer.inference import open_model, start_from
from transformer.training import exact_answer, load_recipe_file, override, train
from transformer.viz import read_metrics

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--training.steps=2", "--optimizer.warmup-steps=0", "--evaluation.every=2", "--evaluation.samples=1"]
TINY += ["--logging.tensorboard=False", "--logging.progress=none", "--logging.every=1", "--parallel.devices=1"]
TINY += ["--data.train-examples=60", "--data.validation-examples=20", "--data.test-examples=20"]
TINY += ["--data.batch-size=2", "--data.eval-batch-size=4"]
SMALL = ["--model.d-model=8", "--model.num-heads=2", "--model.num-layers=1", "--evaluation.sample-tokens=4"]
BEFORE = {"number_text": None, "number_chat": "number_text", "number_dpo": "number_chat", "number_grpo": "number_chat"}


def recipe_of(name, *words):
    return override(load_recipe_file(ROOT / "configs" / f"{name}.py")[0], [*TINY, *words], program=name)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function from the name of a recipe to the workdir and the summary of its run; earlier stages run first."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def run(name):
        before = BEFORE[name]
        recipe = recipe_of(name, *(SMALL if before is None else []))
        start = None if before is None else start_from(run(before)[0], recipe)
        return folder / name, train(recipe, folder / name, start=start)

    return run


def measures_of(workdir):
    """Return the names of all measures in the metrics of a run."""
    return set().union(*(line.keys() for line in read_metrics(workdir / "metrics.jsonl")))


@pytest.mark.slow
def test_conversation_training_starts_from_the_text_run_and_its_tokenizer(trained):
    (text, first), (chat, second) = map(trained, ("number_text", "number_chat"))
    assert (first.step, second.step) == (2, 2)
    one, other = open_model(text), open_model(chat)
    assert one.model.config == other.model.config
    assert one.tokenizer.state() == other.tokenizer.state()
    assert "eval/exact_match" in measures_of(chat)


@pytest.mark.slow
def test_evaluate_prints_the_exact_match_of_the_test_answers(trained, capsys):
    workdir, summary = trained("number_chat")
    assert summary.split == "test"
    expected = summary.held_out.others["exact_match"]
    capsys.readouterr()
    run_command(["evaluate", "run", str(workdir)])
    assert f"exact match {100 * expected:.2f} % of the answers" in capsys.readouterr().out
    run_command(["evaluate", "run", str(workdir), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["split"], found["exact_match"]) == ("test", expected)


@pytest.mark.slow
def test_preference_training_follows_and_reports_both_models(trained):
    workdir, summary = trained("number_dpo")
    assert (summary.step, summary.split) == (2, "test")
    assert {"eval/prefers_chosen", "eval/reference_prefers_chosen"} <= measures_of(workdir)
    assert {"prefers_chosen", "reference_prefers_chosen"} <= summary.held_out.others.keys()


@pytest.mark.slow
def test_reward_training_follows_and_plots_its_curves(trained, capsys):
    """Reward, KL divergence, length and entropy are in the metrics, in TensorBoard's events and in the report."""
    workdir, summary = trained("number_grpo")
    assert (summary.step, summary.split) == (2, "test")
    assert "eval/exact_match" in measures_of(workdir)
    names = {f"train/{name}" for name in ("reward", "kl", "completion_length", "entropy", "truncated")}
    assert names <= measures_of(workdir)
    run_command(["report", str(workdir)])
    for name in (*names, "eval/exact_match", "eval/reward"):
        assert (workdir / "report_plots" / f"{name.partition('/')[2].replace('_', '-')}.png").exists()
    capsys.readouterr()
    run_command(["evaluate", "run", str(workdir), "--trust-rewards", "--json"])
    assert json.loads(capsys.readouterr().out)["exact_match"] == summary.held_out.accuracy


def test_the_reward_is_one_only_for_the_exact_answer():
    assert exact_answer(completion=" 42\n", answer="42", prompt="What is 12 plus 30?") == 1.0
    assert exact_answer(completion="42", answer=42) == 1.0
    assert exact_answer(completion="142", answer="42") == 0.0
