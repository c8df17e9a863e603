"""Runs whose checkpoints are missing, `--restart`, and a workdir that is no longer writable."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from training_recipes import change, text_recipe

from transformer.__main__ import main
from transformer.training._loop import train
from transformer.training._recipe import save_recipe
from transformer.training.metrics._writer import read_metrics
from transformer.training.workdir._checkpoint import Checkpointer
from transformer.training.workdir._restart import check_not_lost, set_aside, writing_explained
from transformer.training.workdir._runs import WorkdirError, load_run

pytestmark = [
    pytest.mark.usefixtures("one_step_per_recipe"),
    pytest.mark.cpu_only("starts processes that compute on the CPU"),
]


@pytest.fixture(scope="module")
def finished(folder, one_step_per_recipe):
    """A run of six steps with checkpoints at steps 4 and 6."""
    assert train(text_recipe(folder, training={"steps": 6}), folder / "whole").finished
    return folder / "whole"


@pytest.fixture
def lost(finished, tmp_path):
    """The same run without its checkpoints, as after `rm -rf WORKDIR/checkpoints/*`."""
    workdir = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints")
    (workdir / "checkpoints").mkdir()
    return workdir


def files(workdir):
    return {path.name: path.read_bytes() for path in workdir.iterdir() if path.is_file()}


def test_a_run_without_checkpoints_is_rejected_and_unchanged(folder, lost):
    before = files(lost)
    with pytest.raises(WorkdirError) as error:
        train(text_recipe(folder, training={"steps": 6}), lost)
    text = str(error.value)
    assert re.match(rf"{lost} .*\bstep 6 \(metrics\.jsonl, samples\.txt, summary\.json", text)
    assert re.search(rf"{lost}/checkpoints .*first_checkpoint\.json.*restart=True.*{lost}/previous", text)
    assert files(lost) == before


def test_restart_starts_over_and_keeps_the_earlier_run(folder, finished, lost, capsys):
    (lost / "notes.txt").write_text("mine")
    recipe = text_recipe(folder, training={"steps": 3})
    for number in (1, 2):
        assert train(recipe, lost, restart=True).finished
        where = lost / ("previous" if number == 1 else "previous-2")
        said = capsys.readouterr().out
        assert f"restart: the earlier run is now in {where}" in said
        assert "a new run, to step 3" in said
        assert [line["step"] for line in read_metrics(lost / "metrics.jsonl")][-1] == 3
    assert files(lost / "previous") == files(finished)
    assert (lost / "notes.txt").read_text() == "mine"
    assert load_run(lost / "previous-2", "newest").step == load_run(lost, "newest").step == 3


def test_the_command_that_resumes_does_not_restart(monkeypatch, tmp_path):
    seen = {}

    def fake(recipe, workdir, **options):
        seen.update(options)
        raise SystemExit(0)

    monkeypatch.setattr("transformer.training._loop.train", fake)
    with pytest.raises(SystemExit):
        main(["train", "number_words", "--restart", "--workdir", str(tmp_path / "run")])
    assert seen["restart"] is True
    assert "--restart" not in seen["command"]


def test_a_new_run_in_the_same_workdir_needs_its_initial_model_again(tmp_path, folder):
    recipe = text_recipe(folder)
    origin = {"class": "Origin", "source": "gpt2", "model": "GPT-2", "fingerprint": "0", "new": []}
    path = save_recipe(recipe, tmp_path)
    values = json.loads(path.read_text())
    values["recipe"]["origin"] = origin
    path.write_text(json.dumps(values))
    with pytest.raises(WorkdirError, match=r"gpt2.*--init gpt2"):
        train(recipe, tmp_path, restart=True)


# The difference between a run that lost its checkpoints and one that was killed before its first checkpoint


@pytest.mark.parametrize("last_step", [0, 3, 8])
def test_a_run_killed_before_its_first_checkpoint_starts_over(folder, tmp_path, last_step):
    """Also if it continued to train while its first checkpoint was being written."""
    save_recipe(change(text_recipe(folder), checkpoint={"every": 4}), tmp_path)
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step + 1}}}\n' for step in range(last_step)))
    check_not_lost(tmp_path)


def test_a_new_workdir_starts_a_new_run(tmp_path):
    check_not_lost(tmp_path / "nowhere")
    (tmp_path / "checkpoints" / "007").mkdir(parents=True)
    check_not_lost(tmp_path)


def test_the_first_checkpoint_is_recorded_after_it_is_complete(tmp_path, monkeypatch):
    renamed = os.rename

    def rename(source, target):
        assert not (tmp_path / "first_checkpoint.json").exists()
        renamed(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(7, {})
        checkpoints.wait()
        monkeypatch.undo()
        checkpoints.save(9, {})
    assert json.loads((tmp_path / "first_checkpoint.json").read_text()) == {"step": 7}


def test_only_files_of_a_run_are_set_aside(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert set_aside(tmp_path) is None, "a folder of this name alone is no run"
    (tmp_path / "metrics.jsonl").write_text("")
    assert set_aside(tmp_path) == tmp_path / "previous"
    assert [path.name for path in tmp_path.iterdir()] == ["previous"]


# A workdir that is no longer writable


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EACCES, "Make it writable, then rerun"), (errno.ENOSPC, "Free some space, then rerun")],
)
def test_a_read_only_workdir_file_is_a_one_line_error(tmp_path, number, remedy):
    expected = rf"^the run can't write to {tmp_path}: .* \(samples.txt\). {remedy}"
    with pytest.raises(OSError, match=expected), writing_explained(tmp_path):
        raise OSError(number, os.strerror(number), str(tmp_path / "samples.txt"))
    with pytest.raises(OSError, match=r"^.Errno .*'/elsewhere/file'$"), writing_explained(tmp_path):
        raise OSError(number, os.strerror(number), "/elsewhere/file")


# root ignores file permissions unless it drops the capability.
BOUND = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


@pytest.mark.slow
def test_a_workdir_that_becomes_read_only_is_a_one_line_error(tmp_path):
    if BOUND and shutil.which(BOUND[0]) is None:
        pytest.skip("root passes over permissions, and there is no setpriv to change that")
    workdir, words = tmp_path / "run", "--training.steps 100000 --checkpoint.every 20 --evaluation.every 20"
    words += " --model.d-model 16 --model.num-layers 1 --model.feed-forward.d-ff 16 --data.batch-size 8"
    words += " --evaluation.batches 1"
    command = [*BOUND, sys.executable, "train.py", "number_words", "--workdir", str(workdir), *words.split()]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not (workdir / "first_checkpoint.json").exists() and process.poll() is None:
                time.sleep(0.05)
            workdir.chmod(0)
            _, error = process.communicate(timeout=300)
        finally:
            process.kill()
            workdir.chmod(0o755)
    assert process.returncode == 1
    (line,) = error.splitlines()
    assert line.startswith("error: ")
    assert str(workdir) in line
    assert "Permission denied" in line
