"""Experiment trackers: the calls that each package gets, run ids on resume, and failures.

The packages are stand-ins with the signatures of wandb 0.31, mlflow 3.17 and trackio 0.43. The last test uses the real
packages, where they are installed.
"""

import json
import os
import re
import sys
import types

import pytest
from training_recipes import change, text_recipe

from transformer.config import ConfigError
from transformer.training._loop import train
from transformer.training.metrics import _trackers
from transformer.training.metrics._trackers import TrackerError, Trackers, check_installed
from transformer.training.metrics._writer import read_metrics

pytestmark = pytest.mark.cpu_only("computes nothing on a device")


class WandBRun:
    def __init__(self, log):
        self.calls = log

    def log(self, data, step=None, commit=None):
        self.calls.append(("log", step, data))

    def finish(self, exit_code=None):
        self.calls.append(("finish", exit_code))


class TrackioRun:
    def __init__(self, log):
        self.calls = log

    def log(self, metrics, step=None):
        self.calls.append(("log", step, metrics))

    def finish(self):
        self.calls.append(("finish", 0))


class Metric:
    def __init__(self, key, value, timestamp, step):
        self.key, self.value, self.timestamp, self.step = key, value, timestamp, step


class MlflowClient:
    calls: list

    def __init__(self, tracking_uri=None):
        self.experiments = {}

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name, artifact_location=None, tags=None):
        return f"experiment of {name}"

    def create_run(self, experiment_id, start_time=None, tags=None, run_name=None):
        self.calls.append(("create", experiment_id, run_name))
        number = sum(call[0] == "create" for call in self.calls)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"mlflow-{number}"))

    def update_run(self, run_id, status=None, name=None):
        self.calls.append(("resume", run_id, status))

    def log_dict(self, run_id, dictionary, artifact_file):
        json.dumps(dictionary)
        self.calls.append(("config", run_id, artifact_file))

    def log_batch(self, run_id, metrics=(), params=(), tags=(), synchronous=None):
        assert {metric.timestamp // 10**12 for metric in metrics} == {1}, "milliseconds"
        self.calls.append(("log", metrics[0].step, {metric.key: metric.value for metric in metrics}))

    def set_terminated(self, run_id, status=None, end_time=None):
        self.calls.append(("finish", int(status != "FINISHED")))


@pytest.fixture
def packages(monkeypatch):
    """Put stand-ins of all packages into sys.modules; return their calls by package."""
    calls = {"wandb": [], "mlflow": [], "trackio": []}

    def wandb_init(
        project=None, dir=None, id=None, name=None, config=None, allow_val_change=None, resume=None, mode=None
    ):
        json.dumps(config)
        calls["wandb"].append(("init", project, id, resume))
        return WandBRun(calls["wandb"])

    def trackio_init(project, name=None, config=None, resume="never", embed=True):
        json.dumps(config)
        calls["trackio"].append(("init", project, name, resume))
        return TrackioRun(calls["trackio"])

    client = type("MlflowClient", (MlflowClient,), {"calls": calls["mlflow"]})
    entities = types.ModuleType("mlflow.entities")
    entities.Metric = Metric
    made = {
        "wandb": {"init": wandb_init},
        "trackio": {"init": trackio_init},
        "mlflow": {"MlflowClient": client, "entities": entities, "__path__": []},
    }
    for name, contents in made.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return calls


def tracked(folder, *names, **groups):
    return change(text_recipe(folder, **groups), logging={"writers": names, "project": "p", "every": 2})


def logged(calls):
    """Return (step, name) -> value of all logged numbers."""
    return {(call[1], name): value for call in calls if call[0] == "log" for name, value in call[2].items()}


@pytest.mark.slow
def test_every_tracker_gets_the_numbers_of_metrics_jsonl_and_keeps_its_run_on_resume(folder, packages):
    workdir = folder / "tracked"
    names = ("wandb", "mlflow", "trackio")
    train(tracked(folder, *names, training={"steps": 6}), workdir)
    ids = json.loads((workdir / "trackers.json").read_text())
    assert ids.keys() == set(names)
    train(tracked(folder, *names), workdir)
    assert json.loads((workdir / "trackers.json").read_text()) == ids
    lines = read_metrics(workdir / "metrics.jsonl")
    expected = {(line["step"], name): value for line in lines for name, value in line.items() if name != "step"}
    for name, calls in packages.items():
        assert {key: value for key, value in logged(calls).items() if key in expected} == expected, name
        assert [call[1] for call in calls if call[0] == "finish"] == [0, 0]
    assert [call for call in packages["wandb"] if call[0] == "init"] == [("init", "p", ids["wandb"], "allow")] * 2
    assert [call for call in packages["trackio"] if call[0] == "init"] == [("init", "p", ids["trackio"], "allow")] * 2
    assert ("create", "experiment of p", "tiny") in packages["mlflow"]
    assert ("resume", "mlflow-1", "RUNNING") in packages["mlflow"]
    assert sum(call[0] == "create" for call in packages["mlflow"]) == 1
    train(tracked(folder, *names, training={"steps": 3}), workdir, restart=True)
    assert set(json.loads((workdir / "trackers.json").read_text()).values()).isdisjoint(ids.values()), "a new run"
    assert json.loads((workdir / "previous" / "trackers.json").read_text()) == ids


def test_a_tracker_that_fails_later_does_not_stop_the_run(folder, packages, monkeypatch):
    def fail(self, data, step=None):
        if step >= 4:
            raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(WandBRun, "log", fail)
    with pytest.warns(UserWarning, match=r"4.*metrics\.jsonl"):
        train(tracked(folder, "wandb", "trackio", training={"steps": 6}), folder / "later")
    assert {step for step, _ in logged(packages["trackio"])} >= {2, 4, 6}


def test_a_tracker_that_cannot_start_is_one_error_and_others_are_closed(folder, packages, tmp_path):
    def fail(**_):
        raise ValueError("api_key not configured (no-tty).\ncall wandb login [your_api_key]")

    sys.modules["wandb"].init = fail
    with pytest.raises(TrackerError) as caught:
        Trackers(tracked(folder, "trackio", "wandb"), tmp_path, None)
    reason = re.escape("api_key not configured (no-tty). call wandb login [your_api_key].")
    assert re.fullmatch(
        f"wandb .*: {reason} .*`wandb login`.*WANDB_MODE=offline.*--logging\\.writers\\.", str(caught.value)
    )
    assert packages["trackio"][-1] == ("finish", 0)
    assert not (tmp_path / "trackers.json").exists()


def test_a_run_that_fails_is_marked(folder, packages, tmp_path):
    for failed in (False, True):
        Trackers(tracked(folder, "wandb", "mlflow"), tmp_path, None).close(failed)
        assert packages["wandb"][-1] == packages["mlflow"][-1] == ("finish", int(failed))


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_missing_package_is_an_error_before_the_run(name, folder, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, name, None)
    message = rf"logging\.writers {name} needs the package {name}.* pip install 'transformer-zoo\[{name}\]'"
    with pytest.raises(ConfigError, match=message):
        train(tracked(folder, name), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"writers": ("wand",)}, r"logging\.writers.*got 'wand'"),
        ({"writers": ("wandb", "wandb")}, r"logging\.writers"),
        ({"project": " "}, r"logging\.project"),
    ],
)
def test_wrong_fields_are_errors(fields, message, folder):
    with pytest.raises(ConfigError, match=message):
        change(text_recipe(folder), logging=fields)


def test_a_damaged_file_of_ids_is_an_error(folder, packages, tmp_path):
    (tmp_path / "trackers.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"trackers\.json.*got \[1\]"):
        Trackers(tracked(folder, "wandb"), tmp_path, 3)


def test_no_package_is_imported_without_need(folder, tmp_path, monkeypatch):
    for name in _trackers.TRACKERS:
        monkeypatch.setitem(sys.modules, name, None)
    check_installed(())
    Trackers(text_recipe(folder), tmp_path, None).log(1, {"x": 1})
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_the_real_package_accepts_these_calls(name, folder, tmp_path, monkeypatch):
    """Offline, with files below the temporary folder."""
    pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    os.makedirs(tmp_path / "run")
    ids = []
    for restored in (None, 4):
        trackers = Trackers(tracked(folder, name), tmp_path / "run", restored)
        trackers.log(5, {"train/loss": 1.5, "eval/exact_match/2": float("nan")})
        trackers.close(failed=False)
        ids.append(json.loads((tmp_path / "run" / "trackers.json").read_text()))
    assert ids[0] == ids[1]
