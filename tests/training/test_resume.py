"""A run that was stopped, interrupted and crashed gives exactly the result of an uninterrupted run."""

import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from training_recipes import text_recipe

from transformer.training import _loop as loop
from transformer.training._loop import train
from transformer.training._recipe import with_vocabulary
from transformer.training._signals import StopSignal
from transformer.training._state import abstract_state
from transformer.training.metrics._report import cut_samples
from transformer.training.metrics._writer import read_metrics
from transformer.training.tasks import _evaluation as evaluation
from transformer.training.workdir._checkpoint import Checkpointer
from transformer.training.workdir._lock import WorkdirInUseError
from transformer.training.workdir._runs import WorkdirError, has_checkpoints, load_run

pytestmark = pytest.mark.usefixtures("one_step_per_recipe")


@pytest.fixture(scope="module")
def finished(folder, one_step_per_recipe):
    """An uninterrupted run."""
    summary = train(text_recipe(folder), folder / "whole")
    assert summary.finished
    return folder / "whole"


def final_state(recipe, workdir, step=12):
    """Return the state and data of exactly this checkpoint, even if there are others."""
    with tempfile.TemporaryDirectory() as alone:
        shutil.copytree(workdir / "checkpoints" / str(step), Path(alone) / "checkpoints" / str(step))
        with Checkpointer(alone) as checkpoints:
            restored = checkpoints.restore_newest(abstract_state(with_vocabulary(recipe, vocabulary(workdir))))
            return jax.device_get(restored.state), restored.data, restored.metric


def vocabulary(workdir):
    return json.loads((workdir / "recipe.json").read_text())["recipe"]["model"]["vocab_size"]


def lines(workdir):
    """Return the metrics without the measured times."""
    return [
        {name: value for name, value in line.items() if not name.startswith("perf/")}
        for line in read_metrics(workdir / "metrics.jsonl")
    ]


def timeless(ledger):
    return {name: value for name, value in ledger.items() if name not in ("seconds", "train_seconds", "tokens")}


class Trouble:
    """Trigger an action at the n-th batch, evaluation or save of a call of `train`."""

    def __init__(self, monkeypatch):
        self.at = {}
        monkeypatch.setattr(loop, "StopSignal", self._remembered)
        self.count = {"batch": 0, "evaluation": 0, "save": 0}
        self._wrap(monkeypatch, loop, "check_batch", "batch")
        self._wrap(monkeypatch, evaluation, "evaluate_loss", "evaluation")
        self._wrap(monkeypatch, Checkpointer, "save", "save")

    def send(self, number):
        """Send a signal, and wait until the listening thread has noticed it."""
        os.kill(os.getpid(), number)
        while not self.stop.requested:
            time.sleep(0.001)

    def _remembered(self):
        self.stop = StopSignal()
        return self.stop

    def plan(self, kind, number, action):
        self.count = dict.fromkeys(self.count, 0)
        self.at = {(kind, number): action}

    def _wrap(self, monkeypatch, owner, name, kind):
        original = getattr(owner, name)

        def wrapped(*args, **kwargs):
            self.count[kind] += 1
            if action := self.at.pop((kind, self.count[kind]), None):
                action()
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)


def crash():
    raise MemoryError("the machine is gone")


@pytest.mark.cpu_only("sums on a GPU have no fixed order")
def test_a_run_stopped_at_any_step_resumes_bit_for_bit(folder, finished, monkeypatch, capsys):
    recipe, workdir = text_recipe(folder), folder / "stopped"
    trouble = Trouble(monkeypatch)

    trouble.plan("save", 1, lambda: trouble.send(signal.SIGTERM))  # while step 4 is saved
    summary = train(recipe, workdir, command="the command")
    assert (summary.step, summary.exit_code, summary.stopped) == (4, 143, True)
    said = capsys.readouterr().out
    assert "stopped at step 4 of 12; everything is saved" in said
    assert said.rstrip().endswith("the command")

    trouble.plan("evaluation", 1, lambda: trouble.send(signal.SIGINT))  # at step 6; the resumed run evaluates again
    summary = train(recipe, workdir)
    assert (summary.step, summary.exit_code) == (6, 130)
    assert "resuming from step 4" in capsys.readouterr().out
    assert [line["step"] for line in lines(workdir) if "eval/loss" in line] == [3]

    trouble.plan("batch", 1, lambda: trouble.send(signal.SIGTERM))  # at step 7, between two lines of metrics
    assert train(recipe, workdir).step == 7
    evaluation = [line for line in lines(workdir) if "eval/loss" in line][-1]
    assert evaluation["step"] == 6
    _, data, metric = final_state(recipe, workdir, step=6)
    assert metric == data["ledger"]["eval_loss"] == evaluation["eval/loss"]

    trouble.plan("batch", 5, crash)  # after steps 8 to 11 and the samples of step 9: back to step 8
    with pytest.raises(MemoryError):
        train(recipe, workdir)
    assert lines(workdir)[-1]["step"] == 10
    trouble.plan("save", 2, lambda: trouble.send(signal.SIGTERM))  # during the last save: only the report is missing
    summary = train(recipe, workdir)
    said = capsys.readouterr().out
    assert "resuming from step 8" in said
    assert (summary.step, summary.exit_code) == (12, 143)
    assert "training is finished and saved, but the report was interrupted. To see it:" in said

    summary = train(recipe, workdir)
    assert summary.finished
    assert summary.exit_code == 0
    assert "generated text:" in capsys.readouterr().out

    (state, data, metric), (expected, expected_data, expected_metric) = (
        final_state(recipe, place) for place in (workdir, finished)
    )
    chex.assert_trees_all_equal(state, expected)
    assert data["batches"] == expected_data["batches"]
    assert timeless(data["ledger"]) == timeless(expected_data["ledger"])
    assert metric == expected_metric
    assert lines(workdir) == lines(finished)
    assert (workdir / "samples.txt").read_text() == (finished / "samples.txt").read_text()


def test_logged_values_are_means_over_their_steps(folder, finished):
    recipe = text_recipe(folder, logging={"every": 1}, evaluation={"every": None, "samples": 0})
    train(recipe, folder / "each")
    each = [line["train/loss"] for line in lines(folder / "each") if "train/loss" in line]
    grouped = {line["step"]: line["train/loss"] for line in lines(finished) if "train/loss" in line}
    assert len(each) == 12
    np.testing.assert_allclose(
        [grouped[5], grouped[10], grouped[12]],
        [np.mean(each[:5]), np.mean(each[5:10]), np.mean(each[10:])],
        rtol=1e-6,  # all batches have the same weight here
    )


def test_a_saved_state_belongs_to_its_step(folder, finished, monkeypatch):
    """The next step reuses the buffers of the state that is being saved, so a copy must be made before."""
    recipe = text_recipe(folder)
    trouble = Trouble(monkeypatch)
    trouble.plan("batch", 8, lambda: trouble.send(signal.SIGTERM))
    assert train(recipe, folder / "short").step == 8
    expected, *_ = final_state(recipe, folder / "short", step=8)
    state, *_ = final_state(recipe, finished, step=8)
    chex.assert_trees_all_equal(state, expected)


def test_a_finished_run_explains_how_to_extend_it(folder, finished, capsys):
    before = lines(finished)
    summary = train(text_recipe(folder), finished, command="python train.py tiny")
    said = capsys.readouterr().out
    assert summary.finished
    assert "this run is finished: 12 of 12 steps are done" in said
    assert "python train.py tiny --training.steps 24" in said
    assert "eval loss" in said
    assert lines(finished) == before


def test_a_script_of_several_runs_notices_a_signal(folder, finished, monkeypatch):
    """`train` returns after a signal, even if the run was finished before, or a signal comes after its report."""

    class Signaled(StopSignal):
        def __enter__(self):
            self.requested, self.signum = True, signal.SIGTERM
            return self

    summary = train(text_recipe(folder), finished)
    assert not summary.stopped
    summary.exit_if_stopped()
    monkeypatch.setattr(loop, "StopSignal", Signaled)
    summary = train(text_recipe(folder), finished)
    assert (summary.finished, summary.stopped) == (True, True)
    with pytest.raises(SystemExit) as ended:
        summary.exit_if_stopped()
    assert ended.value.code == 143
    assert not train_stats_say_stopped(finished)


def train_stats_say_stopped(workdir):
    """Return whether summary.json records a signal, which would be printed by later calls."""
    return json.loads((workdir / "summary.json").read_text())["stop_code"] is not None


def test_more_steps_resume_the_run_and_changes_are_printed(folder, finished, capsys):
    workdir = folder / "longer"
    shutil.copytree(finished, workdir)
    recipe = text_recipe(folder, training={"steps": 14}, logging={"every": 2})
    assert train(recipe, workdir).step == 14
    said = capsys.readouterr().out
    assert "resuming from step 12" in said
    for change_ in ("training.steps: 12 -> 14", "logging.every: 5 -> 2"):
        assert f"changed since the previous training run: {change_}" in said


@pytest.mark.parametrize("group", ["model", "training", "optimizer", "data"])
@pytest.mark.parametrize("keep_json", [True, False])
def test_a_different_recipe_is_rejected_with_the_difference(folder, finished, group, keep_json, tmp_path):
    """Detected by recipe.json or, if it is missing, by the recipe of the checkpoint."""
    fields, difference = {
        "model": ({"feed_forward.d_ff": 7}, "model.feed_forward.d_ff: 5 -> 7"),
        "training": ({"seed": 1}, "training.seed: 0 -> 1"),
        "optimizer": ({"learning_rate": 0.5}, "optimizer.learning_rate: 0.01 -> 0.5"),
        "data": ({"batch_size": 8}, "data.batch_size: 4 -> 8"),
    }[group]
    expected = f"differs from this command in {difference}. .*Remove these overrides"
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    if not keep_json:
        (workdir / "recipe.json").unlink()
    with pytest.raises(ValueError, match=expected):
        train(text_recipe(folder, **{group: fields}), workdir)


def test_changed_data_is_refused(folder, finished, tmp_path):
    text = (folder / "text.txt").read_text()
    (tmp_path / "text.txt").write_text(text.replace("line 7 ", "line 8 "))
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    other = text_recipe(folder, data={"path": str(tmp_path / "text.txt")})
    with pytest.raises(WorkdirError, match="the data has changed since"):
        train(other, workdir)


def test_appended_text_with_new_characters_is_reported_as_changed_data(folder, finished, tmp_path):
    """The run's tokenizer does not know them; a new run of the same data would."""
    (tmp_path / "text.txt").write_text((folder / "text.txt").read_text() + "ж")
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    other = text_recipe(folder, data={"path": str(tmp_path / "text.txt")})
    with pytest.raises(
        WorkdirError, match=r"does not fit the run in .*'ж'.*appended to a file, restore it, or pass another"
    ):
        train(other, workdir)


def test_a_changed_tokenizer_is_refused_by_its_name(folder, finished, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    path = workdir / "tokenizer" / "tokenizer.json"
    state = json.loads(path.read_text())
    state["vocabulary"][:2] = state["vocabulary"][1::-1]
    path.write_text(json.dumps(state))
    with pytest.raises(WorkdirError, match=f"{workdir}/tokenizer"):
        train(text_recipe(folder), workdir)
    state |= {"kind": "byte", "vocabulary": []}  # more tokens than the model's vocabulary
    path.write_text(json.dumps(state))
    with pytest.raises(WorkdirError, match=f"{workdir}/tokenizer"):
        train(text_recipe(folder), workdir)


def test_an_edited_recipe_file_is_refused_by_its_name(folder, finished, tmp_path):
    """The command is unchanged, so the message must not suggest to change it."""
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    path = workdir / "recipe.json"
    path.write_text(path.read_text().replace('"num_heads": 3', '"num_heads": 1'))
    with pytest.raises(WorkdirError, match=r"recipe.json.*num_heads.*3 -> 1"):
        train(text_recipe(folder), workdir)


def test_a_copied_run_names_its_new_workdir(folder, finished, tmp_path, capsys):
    workdir = tmp_path / "copied"
    shutil.copytree(finished, workdir)
    summary = train(text_recipe(folder), workdir)
    assert summary.workdir == str(workdir)
    said = capsys.readouterr().out
    assert f"checkpoints: {workdir / 'checkpoints'}" in said
    assert str(finished) not in said


def test_samples_that_are_not_valid_text_do_not_stop_a_run(tmp_path):
    path = tmp_path / "samples.txt"
    path.write_bytes(b"=== step 1 ===\n\xff\n=== step 2 ===\nb\n")
    cut_samples(tmp_path, 1)
    assert path.read_bytes() == b"=== step 1 ===\n\xff\n"


def test_moved_data_is_recognized_as_the_same_data(folder, finished, tmp_path, capsys):
    shutil.copy(folder / "text.txt", tmp_path / "moved.txt")
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    train(text_recipe(folder, data={"path": str(tmp_path / "moved.txt")}), workdir)
    said = capsys.readouterr().out
    assert "changed since the previous training run: data.path" in said
    assert "this run is finished" in said


def test_a_directory_not_named_as_a_step_is_not_a_checkpoint(tmp_path):
    """Otherwise the run would look for a checkpoint to resume from, and find none."""
    for name in ("007", "notes", "20.tmp", "٣"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert not has_checkpoints(tmp_path)
    (tmp_path / "checkpoints" / "20").mkdir()
    assert has_checkpoints(tmp_path)


def test_a_workdir_in_use_is_refused(folder, finished):
    with loop.WorkdirLock(finished), pytest.raises(WorkdirInUseError):
        train(text_recipe(folder), finished)


def test_the_trained_parameters_are_loaded(folder, finished):
    best = load_run(finished)
    state, *_ = final_state(text_recipe(folder), finished)
    newest = load_run(finished, "newest")
    assert newest.step == 12
    chex.assert_trees_all_equal(newest.params, state.ema)
    assert best.step in (3, 6, 9, 12)
    assert load_run(finished, 12).step == 12
    assert best.recipe.model.vocab_size == best.tokenizer.vocab_size
    tokens = np.asarray([best.tokenizer.encode("line")])
    logits = jax.jit(lambda params, tokens: best.model.apply({"params": params}, tokens))(best.params, tokens)
    assert logits.shape == (1, 4, best.tokenizer.vocab_size)
    with pytest.raises(FileNotFoundError, match="is not the workdir of a run"):
        load_run(folder / "nowhere")


def test_without_a_best_checkpoint_the_newest_is_loaded_with_a_warning(folder, tmp_path, monkeypatch):
    trouble = Trouble(monkeypatch)
    trouble.plan("batch", 3, lambda: trouble.send(signal.SIGTERM))
    train(text_recipe(folder), tmp_path / "run")
    with pytest.warns(UserWarning, match="Using the newest valid checkpoint"):
        assert load_run(tmp_path / "run").step == 3
