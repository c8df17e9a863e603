"""Experiment trackers besides TensorBoard: Weights & Biases, MLflow and Trackio, imported only if a recipe uses them.

A run in a workdir keeps its id in each tracker (`trackers.json`), so that a resumed run appends to the same curves.
"""

from __future__ import annotations

import importlib
import json
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

from transformer.config._checks import ConfigError
from transformer.config._replaced_files import replace_file
from transformer.config._untrusted import parse_json, read_bounded
from transformer.training._recipe import Recipe, to_json

FILE = "trackers.json"
"""file of a workdir with the id of the run in each tracker"""

LONGEST = 300
"""longest quoted error, in characters"""

Numbers = Mapping[str, int | float]


class TrackerError(RuntimeError):
    """A tracker can't be started: it is not logged in, or its server can't be reached."""


def _package(name: str) -> ModuleType:
    """Import the package of a tracker. MLflow alone does not import its entities."""
    importlib.import_module("mlflow.entities" if name == "mlflow" else name)
    return sys.modules[name]


class Tracker(Protocol):
    """A run in a tracker."""

    id: str

    def log(self, step: int, numbers: Numbers) -> None:
        """Record the values of a step."""

    def close(self, failed: bool) -> None:
        """Finish the run."""


class WandB:
    """A run of Weights & Biases. Its environment variables (`WANDB_MODE`, `WANDB_ENTITY`) apply."""

    def __init__(self, recipe: Recipe, workdir: Path, known: str | None):
        self.id = known or secrets.token_hex(4)
        self._run = _package("wandb").init(
            project=recipe.logging.project,
            name=recipe.name,
            id=self.id,
            resume="allow",
            dir=str(workdir),
            config=to_json(recipe)["recipe"],
            allow_val_change=True,  # the number of steps may differ on resume
        )

    def log(self, step: int, numbers: Numbers) -> None:
        """Record the values of a step; W&B ignores steps that it has already."""
        self._run.log(dict(numbers), step=step)

    def close(self, failed: bool) -> None:
        """Upload what is left."""
        self._run.finish(exit_code=int(failed))


class MLflow:
    """A run of MLflow, in the store that `MLFLOW_TRACKING_URI` names."""

    def __init__(self, recipe: Recipe, workdir: Path, known: str | None):
        mlflow = _package("mlflow")
        self._metric, self._client = mlflow.entities.Metric, mlflow.MlflowClient()
        if known is None:
            project = recipe.logging.project
            experiment = self._client.get_experiment_by_name(project)
            number = self._client.create_experiment(project) if experiment is None else experiment.experiment_id
            self.id = self._client.create_run(number, run_name=recipe.name).info.run_id
        else:
            self.id = known
            self._client.update_run(self.id, status="RUNNING")
        self._client.log_dict(self.id, to_json(recipe)["recipe"], "recipe.json")

    def log(self, step: int, numbers: Numbers) -> None:
        """Record the values of a step."""
        now = int(time.time() * 1000)
        values = [self._metric(name, float(number), now, step) for name, number in numbers.items()]
        self._client.log_batch(self.id, metrics=values)

    def close(self, failed: bool) -> None:
        """Set the final status of the run."""
        self._client.set_terminated(self.id, status="FAILED" if failed else "FINISHED")


class Trackio(WandB):
    """A run of Trackio, like W&B's but identified by its name. `TRACKIO_SPACE_ID` sends it to a Space."""

    def __init__(self, recipe: Recipe, workdir: Path, known: str | None):
        self.id = known or f"{recipe.name}-{secrets.token_hex(4)}"
        config = to_json(recipe)["recipe"]
        self._run = _package("trackio").init(
            project=recipe.logging.project, name=self.id, resume="allow", config=config, embed=False
        )

    def close(self, failed: bool) -> None:
        """Send what is left."""
        self._run.finish()


TRACKERS: dict[str, type[WandB] | type[MLflow]] = {"wandb": WandB, "mlflow": MLflow, "trackio": Trackio}
"""trackers by the name in `logging.writers`, which is also that of the module and of the extra"""

_LOGIN = {
    "wandb": "Log in with `wandb login`, or set WANDB_MODE=offline",
    "mlflow": "Check MLFLOW_TRACKING_URI",
    "trackio": "Check TRACKIO_SPACE_ID and TRACKIO_SERVER_URL",
}


def check_installed(names: Sequence[str]) -> None:
    """Import the packages of these trackers; ConfigError if one is not installed."""
    for name in names:
        try:
            _package(name)
        except ImportError as error:
            raise ConfigError(
                f"logging.writers {name} needs the package {name}, which can't be imported ({_reason(error)}). "
                f"Install it: pip install 'transformer-zoo[{name}]', or remove {name} from --logging.writers."
            ) from error


class Trackers:
    """All trackers of a run. A tracker that fails later is dropped with a warning, because training matters more.

    A run that resumes (`restored_step`) keeps its ids in the workdir. TrackerError if a tracker can't be started.
    """

    def __init__(self, recipe: Recipe, workdir: Path, restored_step: int | None):
        names = recipe.logging.writers
        known = _read_ids(workdir) if restored_step is not None else {}
        self._open: dict[str, Tracker] = {}
        for name in names:
            try:
                self._open[name] = TRACKERS[name](recipe, workdir, known.get(name))
            except Exception as error:  # each package has errors of its own, and those of its HTTP client
                self.close(failed=True)
                raise TrackerError(
                    f"{name} can't start a run: {_reason(error)}. {_LOGIN[name]}, or "
                    f"remove {name} from --logging.writers."
                ) from error
        if names:
            ids = known | {name: tracker.id for name, tracker in self._open.items()}
            replace_file(workdir / FILE, json.dumps(ids, indent=2) + "\n")

    def log(self, step: int, numbers: Numbers) -> None:
        """Record the values of a step in all trackers."""
        for name, tracker in list(self._open.items()):
            self._attempt(name, lambda tracker=tracker: tracker.log(step, numbers), f"at step {step}")

    def close(self, failed: bool) -> None:
        """Finish the run in all trackers. The call may wait for uploads."""
        for name, tracker in list(self._open.items()):
            self._attempt(name, lambda tracker=tracker: tracker.close(failed), "at the end")
        self._open.clear()

    def _attempt(self, name: str, action: Callable[[], None], when: str) -> None:
        try:
            action()
        except Exception as error:  # as above
            del self._open[name]
            warnings.warn(
                f"{name} failed {when} and gets no more metrics: {_reason(error)}. metrics.jsonl has all of them.",
                stacklevel=2,
            )


def _reason(error: Exception) -> str:
    """Return the message of an error in one line."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _read_ids(workdir: Path) -> dict[str, str]:
    """Return the ids of the run by tracker; {} without a file."""
    if not (workdir / FILE).exists():
        return {}
    ids = parse_json(read_bounded(workdir, FILE))
    if not isinstance(ids, dict) or not all(isinstance(value, str) for value in ids.values()):
        raise ConfigError(f"{workdir / FILE} must be an object of strings, got {ids!r:.80}. Remove it for new ids.")
    return ids
