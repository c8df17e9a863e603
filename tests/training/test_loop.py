"""Output and files of a run, signals at any time, and non-finite values."""

import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from training_recipes import change, few_number_words, short_recipe, text_recipe, tiny_recipe, xla_flags

import transformer
from transformer.config import FeedForwardOptions, LearnedOptions, TransformerConfig
from transformer.config._invocation import python
from transformer.training import Recipe
from transformer.training import _loop as loop
from transformer.training._loop import train
from transformer.training._parallel import MeshPlacement
from transformer.training._step import NonFiniteError
from transformer.training.metrics import _writer as metrics_writer
from transformer.training.metrics._report import append_samples, cut_samples
from transformer.training.metrics._summary import Score, Summary, read_summary, render, save_summary
from transformer.training.metrics._writer import Progress, read_metrics
from transformer.training.tasks._evaluation import evaluate_loss
from transformer.training.workdir._journal import Journal
from transformer.training.workdir._runs import load_run

ROOT = Path(__file__).resolve().parents[2]


# A translation run


@pytest.fixture(scope="module")
def translated(tmp_path_factory):
    """A few steps on two-digit numbers: the model learns nothing, but every part of a run is executed."""
    folder = tmp_path_factory.mktemp("pairs")
    recipe = short_recipe(
        "pairs",
        TransformerConfig(d_model=6, num_heads=3, num_layers=1, feed_forward=FeedForwardOptions(d_ff=5)),
        few_number_words(folder / "tfds"),
        optimizer={"warmup_steps": 2},
        training={"steps": 3},
        evaluation={"samples": 2, "exact_match_examples": 5, "translations": 3},
        logging={"every": 1, "tensorboard": True},
    )
    return train(recipe, folder / "run", command="python train.py pairs")


def test_a_run_writes_the_documented_files(translated):
    workdir = Path(translated.workdir)
    left = {path.name for path in workdir.iterdir()}
    expected = {"recipe.json", "tokenizer", "checkpoints", "metrics.jsonl", "tensorboard", "samples.txt", "loss.png"}
    assert expected | {"summary.json"} <= left
    assert ".lock" not in left or not (workdir / ".lock").read_text().strip()
    assert (workdir / "loss.png").read_bytes().startswith(b"\x89PNG")
    names = {name for line in read_metrics(workdir / "metrics.jsonl") for name in line}
    assert {"train/loss", "train/grad_norm", "train/learning_rate", "perf/tokens_per_s", "perf/step_time_s"} <= names
    assert {"eval/loss", "eval/accuracy", "eval/exact_match", "eval/exact_match/2"} <= names


def test_the_final_summary_is_complete(translated):
    screen = render(translated)
    workdir = Path(translated.workdir)
    assert len(translated.translations) == 3
    for source, _, output in translated.translations:
        assert f"  {source}\n    -> {output}" in screen
    assert translated.exact_match[""].total == translated.exact_match["2"].total == 5
    assert "exact match on unseen examples: 0 of 5 (0.0 %)" in screen
    assert "digits 2: 0 of 5" in screen
    assert translated.basics.total == 28  # 0 to 20, and 30 to 90 in tens
    assert f"eval loss: {translated.eval_loss:.4f}, best {translated.best_loss:.4f} at step 3" in screen
    assert f"loss curve: {workdir / 'loss.png'}   checkpoints: {workdir / 'checkpoints'}" in screen
    assert screen.splitlines()[-1] == f"  {python()} -m transformer generate {workdir} --prompt {translated.prompt}"
    assert len(screen.splitlines()) < 50


def test_the_final_summary_of_a_temporary_run_names_no_files(translated):
    screen = render(dataclasses.replace(translated, temporary=True))
    assert translated.workdir not in screen
    assert "eval loss: " in screen
    assert "try it:" not in screen


def test_the_summary_survives_a_round_trip(translated):
    assert read_summary(translated.workdir) == translated
    assert translated.exit_code == 0
    assert translated.finished


def test_translations_in_the_summary_equal_the_loaded_model(translated):
    from transformer.training.tasks._translation import translate

    run = load_run(translated.workdir)
    model, params = transformer.load(translated.workdir)
    assert model == run.model
    jax.tree.map(np.testing.assert_array_equal, params, run.params)
    sources = [source for source, _, _ in translated.translations]
    again = translate(run.model, run.params, run.tokenizer, sources, max_new_tokens=4)
    assert again == [output for _, _, output in translated.translations]


def test_samples_are_written_at_each_evaluation(translated):
    text = (Path(translated.workdir) / "samples.txt").read_text()
    assert text.startswith("=== step 3 ===\n")
    assert text.count(" -> ") == 2


# Summaries


def test_reports_a_best_checkpoint_earlier_than_the_last(tmp_path):
    summary = Summary(
        name="x",
        workdir=str(tmp_path),
        command="c",
        step=9,
        steps=9,
        shown_step=6,
        text="a\nb",
        prompt="it's",
        skipped=2,
    )
    screen = render(summary)
    assert "the following is from step 6, the kept checkpoint with the lowest eval loss" in screen
    for task, best in (("classifier", "highest eval accuracy"), ("grpo", "highest eval reward")):
        assert f"kept checkpoint with the {best}" in render(dataclasses.replace(summary, task=task))
    assert "  | a\n  | b" in screen
    assert "not finite: 2" in screen
    assert """--prompt 'it'"'"'s'""" in screen
    save_summary(summary, tmp_path)
    assert read_summary(tmp_path) == summary
    (tmp_path / "summary.json").write_text("{")
    assert read_summary(tmp_path) is None


def test_a_score_shows_counts_and_percentage():
    assert str(Score(2, 3)) == "2 of 3 (66.7 %)"
    assert Score(0, 0).rate == 0.0


def test_samples_of_later_steps_are_truncated(tmp_path):
    for step in (2, 4, 6):
        append_samples(tmp_path, step, f"text {step}\n=== step by step ===")
    cut_samples(tmp_path, 4)
    assert (tmp_path / "samples.txt").read_text() == (
        "=== step 2 ===\ntext 2\n=== step by step ===\n=== step 4 ===\ntext 4\n=== step by step ===\n"
    )
    cut_samples(tmp_path, 4)
    cut_samples(tmp_path / "nowhere", 4)


def test_evaluation_weighs_each_target_once():
    batches = [{"loss_sum": 6.0, "correct": 1.0, "weight": 3.0}, {"loss_sum": 1.0, "correct": 1.0, "weight": 1.0}]
    result = evaluate_loss(lambda params, batch: batch, None, batches)
    assert (result.loss, result.accuracy, result.targets) == (7 / 4, 0.5, 4.0)
    assert evaluate_loss(lambda params, batch: batch, None, batches, should_stop=lambda: True) is None
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate_loss(lambda params, batch: batch, None, [])


# Non-finite values


NOT_EVALUATED = {"every": None, "samples": 0}


def spoil(monkeypatch, *numbers):
    """Set the weights of these batches to NaN."""
    original, count = loop.check_batch, [0]

    def check(batch, *sizes):
        original(batch, *sizes)
        count[0] += 1
        if count[0] in numbers:
            batch["weights"][:] = np.nan

    monkeypatch.setattr(loop, "check_batch", check)


def test_stop_ends_the_run_with_step_and_parameter(tmp_path, monkeypatch):
    spoil(monkeypatch, 6)
    with pytest.raises(
        NonFiniteError, match=r"^step 6: the loss is nan, and the first non-finite gradient is that of decoder/"
    ):
        train(text_recipe(tmp_path, evaluation=NOT_EVALUATED), tmp_path / "run")
    assert load_run(tmp_path / "run", "newest").step == 4  # earlier checkpoints still exist


def test_skip_counts_the_step_and_continues(tmp_path, monkeypatch):
    spoil(monkeypatch, 6, 7)
    recipe = text_recipe(tmp_path, training={"nan_policy": "skip"}, evaluation=NOT_EVALUATED)
    summary = train(recipe, tmp_path / "run")
    assert summary.finished
    assert summary.skipped == 2
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "train/loss" in line]
    assert [line["train/skipped"] for line in lines] == [0, 2, 2]
    assert all(np.isfinite(line["train/loss"]) for line in lines)


def test_the_next_batch_is_transferred_before_metrics_are_read(tmp_path, monkeypatch):
    """The host runs one step ahead: it reads the metrics of a step after the next step was dispatched."""
    events = []

    def spy_on(of, name):
        original = getattr(of, name)
        monkeypatch.setattr(of, name, lambda *args: (events.append(name), original(*args))[1])

    spy_on(MeshPlacement, "train_step")
    spy_on(Journal, "_line")
    groups = {"training": {"steps": 3}, "logging": {"every": 1}, "evaluation": NOT_EVALUATED}
    train(text_recipe(tmp_path, **groups), tmp_path / "run")
    assert events == ["train_step", "train_step", "_line", "train_step", "_line", "_line"]


def test_ids_out_of_range_never_reach_the_model(tmp_path):
    recipe = text_recipe(tmp_path)
    original = loop.open_run

    def with_small_vocabulary(*args, **kwargs):
        recipe, dataset = original(*args, **kwargs)
        return change(recipe, model={"vocab_size": 9}), dataset

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "open_run", with_small_vocabulary)
        with pytest.raises(ValueError, match=r"\d+.*tokens\[\d+, \d+\].*0.*8"):
            train(recipe, tmp_path / "run")


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("seed", [2**31, 4_295])
def test_texts_are_sampled_with_every_seed(tmp_path, seed):
    """Generation uses the lower 32 bits of the number computed from seed, step and piece of the text."""
    groups = {"training": {"seed": seed, "steps": 1}, "evaluation": {"every": 1, "batches": 1}}
    train(text_recipe(tmp_path, **groups), tmp_path / "run")
    assert (tmp_path / "run" / "samples.txt").read_text()


def test_rejects_a_learned_table_too_short_for_the_data(tmp_path):
    pairs = few_number_words(tmp_path / "tfds")
    model = TransformerConfig(d_model=6, num_heads=3, num_layers=1, position=LearnedOptions(max_length=2))
    with pytest.raises(ValueError, match=r"model.position.max_length \(2\)"):
        train(Recipe(name="pairs", model=model, data=pairs), tmp_path / "run")
    sources = model.replace(**{"position.max_length": 50, "position.source_max_length": 1})
    with pytest.raises(ValueError, match=r"model.position.source_max_length \(1\)"):
        train(Recipe(name="pairs", model=sources, data=pairs), tmp_path / "run")
    longer = model.replace(**{"position.source_max_length": 50})
    with pytest.raises(ValueError, match=r"model.position.max_length \(2\)"):
        train(Recipe(name="pairs", model=longer, data=pairs), tmp_path / "run")


# Signals sent by a user


RECIPE = """
import pathlib, sys
sys.path.insert(0, {tests!r})
from training_recipes import text_recipe
def get_config():
    return text_recipe(
        pathlib.Path({folder!r}),
        training={{"steps": 2100}},
        data={{"sequence_length": 1, "eval_batch_size": 1, "validation_share": 0.9}},
        evaluation={{"every": 2000, "batches": None}},
        checkpoint={{"every": None}},
        logging={{"every": 50}},
    )
"""


class Process:
    """A process of train.py whose output is read line by line."""

    def __init__(self, command, folder):
        cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
        cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        environment = os.environ | cache | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(1)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        command = [sys.executable, "-u", *command.split()[1:]]
        self.process = subprocess.Popen(command, text=True, cwd=ROOT, env=environment, **pipes)

    def signal_at(self, words, number):
        """Send a signal as soon as a line contains these words."""
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if words in line:
                self.process.send_signal(number)
                return
        raise AssertionError(f"{words!r} did not come:\n{''.join(lines)}")

    def end(self):
        """Return the remaining output and the exit code."""
        return self.process.communicate(timeout=600)[0], self.process.returncode


@pytest.fixture
def stopped(tmp_path):
    """The command of a run that received a signal during compilation."""
    (tmp_path / "mine.py").write_text(RECIPE.format(tests=str(ROOT / "tests"), folder=str(tmp_path)))
    command = f"{python()} train.py {tmp_path}/mine.py --workdir {tmp_path}/run"
    run = Process(command, tmp_path)
    run.signal_at("compiling the training step", signal.SIGTERM)
    output, code = run.end()
    assert code == 143, output
    assert "compiled in" in output  # compilation can't be interrupted: the first step is done and saved
    assert "stopped at step 1 of 2100; everything is saved" in output
    assert output.splitlines()[-1].strip() == command
    return command


def test_a_signal_during_compilation_saves_and_explains_how_to_resume(stopped, tmp_path):
    assert load_run(tmp_path / "run", "newest").step == 1


@pytest.mark.slow
def test_a_run_stopped_by_a_signal_resumes_with_the_same_command(stopped, tmp_path):
    workdir, command = tmp_path / "run", stopped
    run = Process(command, tmp_path)
    run.signal_at("step 50/", signal.SIGINT)
    output, code = run.end()
    assert code == 130, output
    step = int(re.search(r"stopped at step (\d+) of 2100; everything is saved", output)[1])
    assert 50 < step < 2000

    run = Process(command, tmp_path)
    run.signal_at("step 2000/", signal.SIGTERM)
    output, code = run.end()
    assert code == 143, output
    assert "stopped at step 2000 of 2100" in output
    assert "eval loss" not in output

    output, code = Process(command, tmp_path).end()
    assert code == 0, output
    assert "resuming from step 2000, to step 2100" in output
    assert "step 2000: eval loss" in output
    steps = [line["step"] for line in read_metrics(workdir / "metrics.jsonl") if "train/loss" in line]
    assert steps == list(range(50, 2101, 50))


def test_the_time_left_counts_no_compilation(monkeypatch):
    """Neither of the first evaluation, nor of the step for another batch shape. Later evaluations recur, and count."""
    now, evaluations, stream = [0.0], iter([60.0, 2.0]), io.StringIO()
    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(metrics_writer, "time", clock)
    progress = Progress(100, mode="lines", stream=stream)

    def evaluate(_):
        now[0] += next(evaluations)
        return None, ""

    run = SimpleNamespace(
        step=0,
        watch=SimpleNamespace(now=None),
        placement=SimpleNamespace(eval_step=evaluate),
        task=SimpleNamespace(evaluate=evaluate),
        progress=progress,
        evaluated=False,
        _params=lambda: (None, None),
        _evaluation=lambda *_: None,
    )

    def ten_steps(step):
        now[0] += 10.0
        progress.update(step)

    ten_steps(10)
    ten_steps(20)
    loop._Training.evaluate(run)
    ten_steps(30)
    loop._Training.evaluate(run)
    ten_steps(40)
    now[0] += 30.0
    Journal(tiny_recipe(), SimpleNamespace(), None, progress, []).compiled(30.0)
    ten_steps(50)
    left = [re.search(r"  (.*) left|$", line)[1] for line in stream.getvalue().splitlines()]
    assert left == [None, "0:01:20", "0:01:10", "0:01:04", "0:00:52"]
