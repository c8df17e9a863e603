"""Run train.py as a user does, in one or several processes: start, observe and kill it, and read its results.

All checks are external: exit codes, printed lines, and the files in the workdir.
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

from reliability.pace import Limit
from transformer.training.workdir import _arrays as arrays
from transformer.training.workdir._checkpoint import load_data
from transformer.training.workdir._manifest import CheckpointError, find_steps, newest_valid
from transformer.viz import read_metrics

ROOT = Path(__file__).resolve().parent.parent
STEPS, SAVE_EVERY, EVALUATE_EVERY = 300, 10, 100
OPTIONS = (
    *("--model.d-model", "32", "--model.num-layers", "1", "--model.feed-forward.d-ff", "64"),
    *("--model.dropout-rate", "0.1"),
    *("--data.batch-size", "32", "--training.steps", str(STEPS), "--training.ema-decay", "0.9"),
    *("--checkpoint.every", str(SAVE_EVERY), "--evaluation.every", str(EVALUATE_EVERY), "--evaluation.samples", "2"),
    *("--evaluation.exact-match-examples", "0", "--logging.every", "1"),
)
"""overrides of the recipe: a fast model with all state that must survive (dropout, parameter average, samples)"""
RECIPE = "configs/number_words.py"
PATIENCE = 1800.0
"""seconds after which a run counts as hanging, on an idle machine (`Limit`); the longest run takes tens of seconds"""
JOINING = 60
"""seconds that a process waits for the others at the start; a process that was killed never joins"""
GONE = 90.0
"""seconds within which a process must exit on its own after another process of its run was killed, on an idle machine
(`Limit`)"""

_numbers = itertools.count()


def train_words(workdir: Path, data: Path, *options: str) -> list[str]:
    """Return the arguments that train the recipe in `workdir`; `data` is the directory of the prepared dataset."""
    return ["train.py", RECIPE, "--workdir", str(workdir), "--data.data-dir", str(data), *options]


def command(options: Sequence[str] = OPTIONS) -> str:
    """Return the command for the page, without machine-specific paths."""
    return shlex.join(["python", "train.py", RECIPE, "--workdir", "RUN", *options])


class Call:
    """A run of train.py in one or several processes. Use it as a context manager, which kills all processes at the end.

    Args:
        workdir: workdir of the run.
        data: directory of the prepared dataset.
        log: directory for the output of the processes.
        options: options of train.py.
        processes: number of processes that train together.
        compiled: directory of the compilation cache; None: no cache.
        path: directory that Python searches first for modules.
        common: options before `options`.
        under: options of Python before train.py, such as `-m MODULE`.
        variables: additional environment variables.
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
        self.start, self._patience = time.monotonic(), Limit(PATIENCE)
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
        """Seconds since the start."""
        return time.monotonic() - self.start

    def output(self, index: int = 0) -> str:
        """Return the output of one process so far, including errors."""
        return self.outputs[index].read_text(encoding="utf-8", errors="replace")

    def all_output(self) -> str:
        """Return the output of all processes so far."""
        return "\n".join(self.output(index) for index in range(len(self.members)))

    def running(self) -> bool:
        """Return whether all processes are running."""
        return all(member.poll() is None for member in self.members)

    def wait_until(self, condition: Callable[[], Any], every: float = 0.002) -> bool:
        """Wait until the condition is true (return True) or a process has ended (return False).

        Args:
            condition: the condition.
            every: seconds between two checks.

        Raises:
            TimeoutError: neither happened within `PATIENCE` seconds of the start, longer on a slow machine.
        """
        while self.running():
            if condition():
                return True
            self.check_patience()
            time.sleep(every)
        return False

    def signal(self, number: int = signal.SIGTERM, index: int = 0) -> None:
        """Send a signal to one process."""
        self.members[index].send_signal(number)

    def kill(self, *victims: int) -> None:
        """Kill these processes (by default, all) with SIGKILL, and wait for their end."""
        for index in victims or range(len(self.members)):
            with contextlib.suppress(OSError):
                self.members[index].kill()
        for index in victims or range(len(self.members)):
            self.members[index].wait()

    def check_patience(self) -> None:
        """Raise TimeoutError if the call has run for `PATIENCE` seconds, longer on a slow machine."""
        if self._patience.passed():
            raise TimeoutError(f"{self.outputs[0].name}: still running after {self.seconds:.0f} s")

    def end(self) -> list[int]:
        """Wait for all processes and return their exit codes; raise TimeoutError if they hang (`check_patience`)."""
        while any(member.poll() is None for member in self.members):
            self.check_patience()
            time.sleep(0.01)
        return [member.returncode for member in self.members]


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def checkpoints(workdir: Path) -> Path:
    """Return the checkpoint directory of a run."""
    return workdir / "checkpoints"


def newest(workdir: Path) -> int:
    """Return the newest step with a checkpoint directory, or 0. The next run must resume from this step."""
    return max(find_steps(checkpoints(workdir)), default=0)


def unfinished(workdir: Path) -> dict[int, int]:
    """Return the steps of temporary directories, which are being written or deleted, with their modification times
    (ns).

    A killed run may leave such a directory; the time distinguishes a new directory from an old one.
    """
    found = {}
    for path in checkpoints(workdir).glob("*.tmp"):
        with contextlib.suppress(OSError):  # deleted in the meantime
            if path.stem.isdecimal():
                found[int(path.stem)] = path.stat().st_mtime_ns
    return found


def started_since(before: dict[int, int], workdir: Path) -> list[int]:
    """Return the steps of `unfinished` directories that are new since `before`."""
    return [step for step, when in unfinished(workdir).items() if before.get(step) != when]


@dataclass(frozen=True)
class RunState:
    """Final state of a run, without measured times. Two equal runs have equal states."""

    step: int
    leaves: dict[str, str]
    """arrays of the newest checkpoint: path -> SHA-256 of dtype, shape and bytes"""
    data: Any
    """position in the data, and training statistics"""
    metrics: list[dict[str, Any]]
    samples: str

    def differences(self, other: RunState) -> list[str]:
        """Describe the differences from another state; [] if they are bit-identical."""
        if self.step != other.step:
            return [f"the newest checkpoint is of step {self.step}, expected {other.step}"]
        paths = [path for path in {**self.leaves, **other.leaves} if self.leaves.get(path) != other.leaves.get(path)]
        found = [f"{len(paths)} of {len(other.leaves)} arrays differ, the first is {paths[0]}"] if paths else []
        for name in ("data", "metrics", "samples"):
            if getattr(self, name) != getattr(other, name):
                found.append(f"{name} differ")
        return found


CLOCKS = (
    "seconds",
    "train_seconds",
    "tokens",
)  # entries of the statistics that depend on time: tokens are counted only during training time


def run_state(workdir: Path) -> RunState:
    """Read the state in a workdir; raise CheckpointError if it has no valid checkpoint."""
    with warnings.catch_warnings():  # about damaged checkpoints, which the run itself reports
        warnings.simplefilter("ignore")
        found = newest_valid(checkpoints(workdir), set())
    if found is None:
        raise CheckpointError(f"{workdir} has no checkpoint")
    directory, manifest = found
    wanted = {
        path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in arrays.described(manifest["state"]).items()
    }  # NumPy arrays: no device placement or conversion
    leaves = arrays.restore(directory / "state", wanted)
    data = load_data(workdir, manifest["step"])
    data["ledger"] = {name: value for name, value in data["ledger"].items() if name not in CLOCKS}
    lines = [
        {name: value for name, value in line.items() if not name.startswith("perf/")}
        for line in read_metrics(workdir / "metrics.jsonl")
    ]
    return RunState(
        step=manifest["step"],
        leaves={"/".join(path): digest(array) for path, array in leaves.items()},
        data=data,
        metrics=[line for line in lines if line.keys() > {"step"}],
        samples=(workdir / "samples.txt").read_text(encoding="utf-8"),
    )


def digest(array: np.ndarray) -> str:
    """Return the SHA-256 hash of dtype, shape and bytes of an array."""
    array = np.asarray(array)
    return hashlib.sha256(f"{array.dtype} {array.shape} ".encode() + array.tobytes()).hexdigest()


def check_resumed(output: str, step: int) -> list[str]:
    """Check that a run reports resuming from `step` (0: a new run); return the faults.

    The result is also [] if the run was killed before it printed this line.
    """
    faults = [f"printed: {line}" for line in output.splitlines() if "damaged" in line or "Traceback" in line]
    started = [line for line in output.splitlines() if line.startswith("workdir: ")]
    expected = f"resuming from step {step}," if step else "a new run,"
    if started and expected not in started[0]:
        faults.append(f"expected '{expected}', got '{started[0]}'")
    return faults


def reached(output: str, steps: int = STEPS) -> int:
    """Return the last step that was printed, or 0."""
    words = [line.split(maxsplit=2) for line in output.splitlines() if line.startswith("step ")]
    numbers = [pair[1].partition("/") for pair in words if len(pair) > 1]
    return max((int(step) for step, _, of in numbers if of == str(steps) and step.isdecimal()), default=0)


def first_fault(codes: Sequence[int], expected: Sequence[int], output: str) -> list[str]:
    """Return a line about unexpected exit codes with the last printed line, or []."""
    if list(codes) == list(expected):
        return []
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    return [f"exit codes {list(codes)}, expected {list(expected)}; last line: {last[:300]}"]
