"""Calls of train.py as a user makes them, by one process or by several: started, watched, killed; and what they leave.

Everything is judged from outside, by exit codes, by what is printed and by the files that lie there afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from transformer.training import _arrays as arrays
from transformer.training._checkpoint import load_data
from transformer.training._manifest import CheckpointError, find_steps, newest_valid
from transformer.viz import read_metrics

ROOT = Path(__file__).resolve().parent.parent
STEPS, SAVE_EVERY, EVALUATE_EVERY = 300, 10, 100
OPTIONS = (
    *("--model.d-model", "32", "--model.num-layers", "1", "--model.d-ff", "64", "--model.dropout-rate", "0.1"),
    *("--data.batch-size", "32", "--training.steps", str(STEPS), "--training.ema-decay", "0.9"),
    *("--checkpoint.every", str(SAVE_EVERY), "--evaluation.every", str(EVALUATE_EVERY), "--evaluation.samples", "2"),
    *("--evaluation.exact-match-examples", "0", "--logging.every", "1"),
)
"""what scenarios give the recipe: a model that is quick, with all that has to survive (dropout, an average, texts)"""
RECIPE = "configs/number_words.py"
PATIENCE = 1800.0
"""seconds after which a call that goes on is said to hang; the longest there is takes tens of them"""
JOINING = 60
"""seconds for which a process waits for the others to come: one that is killed before never does"""
GONE = 90.0
"""seconds in which a process has to end by itself when another one of its run is gone"""

_numbers = itertools.count()


def train_words(workdir: Path, data: Path, *options: str) -> list[str]:
    """The words of a command line that trains the recipe in `workdir`, with `data` for what the dataset prepares."""
    return ["train.py", RECIPE, "--workdir", str(workdir), "--data.data-dir", str(data), *options]


def command(options: Sequence[str] = OPTIONS) -> str:
    """What is called, for the page: without the folders of one machine."""
    return shlex.join(["python", "train.py", RECIPE, "--workdir", "RUN", *options])


class Call:
    """One call of train.py, by `processes` that train together. Use it as a context manager: none outlives it.

    `log` is a folder for what they print, `compiled` one for compiled programs (None: each call compiles anew), `path`
    a folder that Python looks into first, `common` what comes before the `options`, `under` what train.py is run by,
    `variables` more of the environment.
    """

    def __init__(
        self,
        workdir: Path,
        data: Path,
        log: Path,
        *options: str,
        processes: int = 1,
        compiled: Path | None = None,
        path: Path | None = None,
        common: Sequence[str] = OPTIONS,
        under: Sequence[str] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
    ):
        self.workdir, number = workdir, next(_numbers)
        self.outputs = [log / f"{number:03}-{workdir.name}-{index}.txt" for index in range(processes)]
        self.members: list[subprocess.Popen] = []
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", **variables}
        environment["JAX_COMPILATION_CACHE_DIR"] = "" if compiled is None else str(compiled)
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        if path is not None:
            environment["PYTHONPATH"] = str(path)
        self.began = time.monotonic()
        port = free_port() if processes > 1 else None
        for index, output in enumerate(self.outputs):
            words = [sys.executable, *under, *train_words(workdir, data, *common, *options)]
            if processes > 1:
                words += ["--parallel.coordinator", f"localhost:{port}", "--parallel.num-processes", str(processes)]
                words += ["--parallel.process-id", str(index), "--parallel.patience", str(JOINING)]
            with open(output, "w", encoding="utf-8") as file:
                pipes = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
                self.members.append(subprocess.Popen(words, cwd=ROOT, env=environment, **pipes))

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.kill()

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.began

    def told(self, index: int = 0) -> str:
        """What one of the processes has printed so far, errors included."""
        return self.outputs[index].read_text(encoding="utf-8", errors="replace")

    def told_by_all(self) -> str:
        """What all of them have printed so far."""
        return "\n".join(self.told(index) for index in range(len(self.members)))

    def running(self) -> bool:
        """Whether all of them still run."""
        return all(member.poll() is None for member in self.members)

    def wait_until(self, condition: Callable[[], Any], every: float = 0.002) -> bool:
        """Whether the condition came true while all of them ran; looks `every` so many seconds.

        Raises:
            TimeoutError: neither within `PATIENCE` seconds of the start.
        """
        while self.running():
            if condition():
                return True
            if self.seconds > PATIENCE:
                raise TimeoutError(f"{self.outputs[0].name}: still there after {PATIENCE:.0f} s")
            time.sleep(every)
        return False

    def signal(self, number: int = signal.SIGTERM, index: int = 0) -> None:
        """Sends one of them a signal."""
        self.members[index].send_signal(number)

    def kill(self, *victims: int) -> None:
        """SIGKILL to these, to all where none is named; those it hits are gone afterwards."""
        for index in victims or range(len(self.members)):
            with contextlib.suppress(OSError):
                self.members[index].kill()
        for index in victims or range(len(self.members)):
            self.members[index].wait()

    def end(self, seconds: float = PATIENCE) -> list[int]:
        """The exit codes of all, once they have ended. TimeoutError when one has not within so many seconds."""
        deadline = time.monotonic() + seconds
        try:
            return [member.wait(max(deadline - time.monotonic(), 0.1)) for member in self.members]
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.outputs[0].name}: still there after {seconds:.0f} s") from None


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def checkpoints(workdir: Path) -> Path:
    """The folder of a run's checkpoints."""
    return workdir / "checkpoints"


def newest(workdir: Path) -> int:
    """The newest step whose directory is there, 0 when there is none: what a next call has to go on from."""
    return max(find_steps(checkpoints(workdir)), default=0)


def unfinished(workdir: Path) -> dict[int, int]:
    """Steps of the directories that are being written or deleted, or were when a call was killed, and the time of each
    (ns), which tells a new one from one left over.
    """
    found = {}
    for path in checkpoints(workdir).glob("*.tmp"):
        with contextlib.suppress(OSError):  # gone by now
            if path.stem.isdecimal():
                found[int(path.stem)] = path.stat().st_mtime_ns
    return found


def begun_since(before: dict[int, int], workdir: Path) -> list[int]:
    """Steps of `unfinished` that are not those of `before`."""
    return [step for step, when in unfinished(workdir).items() if before.get(step) != when]


@dataclass(frozen=True)
class Left:
    """What a run has left, without what a clock measured: two runs that did the same have equal ones."""

    step: int
    leaves: dict[str, str]
    """of the newest checkpoint: path -> SHA-256 of type, shape and bytes"""
    data: Any
    """place in the data, and sums"""
    metrics: list[dict[str, Any]]
    samples: str

    def differences(self, other: Left) -> list[str]:
        """In words, what differs from the other; [] when it is the same bit for bit."""
        if self.step != other.step:
            return [f"the newest checkpoint is of step {self.step}, expected {other.step}"]
        paths = [path for path in {**self.leaves, **other.leaves} if self.leaves.get(path) != other.leaves.get(path)]
        found = [f"{len(paths)} of {len(other.leaves)} arrays differ, the first is {paths[0]}"] if paths else []
        for name in ("data", "metrics", "samples"):
            if getattr(self, name) != getattr(other, name):
                found.append(f"{name} differ")
        return found


CLOCKS = ("seconds", "train_seconds", "tokens")  # of the ledger: tokens are counted while the clock runs


def left(workdir: Path) -> Left:
    """What lies in a workdir now. CheckpointError where no checkpoint is right to the last byte."""
    with warnings.catch_warnings():  # of others that are damaged: that is what a call says, not this one
        warnings.simplefilter("ignore")
        found = newest_valid(checkpoints(workdir), set())
    if found is None:
        raise CheckpointError(f"{workdir} has no checkpoint")
    directory, manifest = found
    wanted = {
        path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in arrays.described(manifest["state"]).items()
    }  # NumPy in, NumPy out: as it lies there
    leaves = arrays.restore(directory / "state", wanted)
    data = load_data(workdir, manifest["step"])
    data["ledger"] = {name: value for name, value in data["ledger"].items() if name not in CLOCKS}
    lines = [
        {name: value for name, value in line.items() if not name.startswith("perf/")}
        for line in read_metrics(workdir / "metrics.jsonl")
    ]
    return Left(
        step=manifest["step"],
        leaves={"/".join(path): digest(array) for path, array in leaves.items()},
        data=data,
        metrics=[line for line in lines if line.keys() > {"step"}],
        samples=(workdir / "samples.txt").read_text(encoding="utf-8"),
    )


def digest(array: np.ndarray) -> str:
    """SHA-256 of the type, shape and bytes of an array of any shape."""
    array = np.asarray(array)
    return hashlib.sha256(f"{array.dtype} {array.shape} ".encode() + array.tobytes()).hexdigest()


def went_on(told: str, step: int) -> list[str]:
    """What is wrong with the first words of a call on a workdir whose newest checkpoint is of `step` (0: it has none);
    [] also when it did not come so far.
    """
    faults = [f"it says: {line}" for line in told.splitlines() if "damaged" in line or "Traceback" in line]
    begun = [line for line in told.splitlines() if line.startswith("workdir: ")]
    expected = f"resuming from step {step}," if step else "a new run,"
    if begun and expected not in begun[0]:
        faults.append(f"expected '{expected}', got '{begun[0]}'")
    return faults


def reached(told: str, steps: int = STEPS) -> int:
    """The last step that was told, 0 before the first."""
    words = [line.split(maxsplit=2) for line in told.splitlines() if line.startswith("step ")]
    numbers = [pair[1].partition("/") for pair in words if len(pair) > 1]
    return max((int(step) for step, _, of in numbers if of == str(steps) and step.isdecimal()), default=0)


def first_fault(codes: Sequence[int], expected: Sequence[int], told: str) -> list[str]:
    """A line about exit codes that are not the expected ones, with the last thing that was said."""
    if list(codes) == list(expected):
        return []
    last = next((line for line in reversed(told.splitlines()) if line.strip()), "")
    return [f"exit codes {list(codes)}, expected {list(expected)}; last said: {last[:300]}"]
