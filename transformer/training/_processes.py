"""Multi-process training: join the processes of a run, keep their decisions consistent, and shut them down.

`jax.distributed` does the work: its coordination service in process 0 connects the processes, and terminates all of
them when one is lost. Collectives in the compiled step exchange the data. Every process runs the same program; only the
first one writes files.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from transformer.config._checks import ConfigError
from transformer.nn._sharding import ParallelConfig
from transformer.training._signals import StopSignal

HEARTBEAT = 30
"""seconds without a heartbeat after which a process counts as lost, and all processes end"""

_BARRIER_S = 1800  # long enough for the slowest writer of a large checkpoint
_AGAIN = "Restart all processes with the same command: training resumes from the newest checkpoint."
_BY_HAND = (
    "Pass to each process --parallel.coordinator (HOST:PORT of process 0), --parallel.num-processes and "
    "--parallel.process-id (localhost:1234, 1 and 0 to train with a single process)."
)
_SIGNS = ("Gloo", "gloo/", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "coordination service")
_WITNESS = """
import sys
last = ""
for line in sys.stdin:
    last = line
sys.stderr.write(last if last.strip() else "")
"""


class ProcessesError(RuntimeError):
    """The processes of a run could not connect, or lost the connection to one of them."""


class _Witness:
    """A small child process that prints an explanation if this process ends unexpectedly.

    This process can't do it itself: when other processes are lost, JAX ends it with abort(), which runs no Python code.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen | None = None

    def expect(self, message: str) -> None:
        """Set the message to print if this process ends from now on; "" for no message."""
        if self._child is None:
            if not message:
                return
            # A new session, so that Ctrl-C in the terminal does not end the child as well.
            command = [sys.executable, "-I", "-S", "-c", _WITNESS]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        with contextlib.suppress(OSError):  # the child was killed; training works without it
            self._child.stdin.write(f"{message}\n")
            self._child.stdin.flush()


_witness = _Witness()
_passed: Counter[str] = Counter()  # number of barriers passed, by key


def launcher(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return "Slurm", "Open MPI" or "a TPU slice" if it started this process as one of several; otherwise None."""

    def several(*names: str) -> bool:
        value = next((environment[name] for name in names if name in environment), "")
        return value.isdecimal() and int(value) > 1

    # The variables of the job step, not those of the job: an interactive shell in an allocation is a single task.
    if "SLURM_STEP_NODELIST" in environment and several("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        return "Slurm"
    if several("OMPI_COMM_WORLD_SIZE"):
        return "Open MPI"
    return "a TPU slice" if "," in environment.get("TPU_WORKER_HOSTNAMES", "") else None


def join(parallel: ParallelConfig, again: str = _AGAIN) -> None:
    """Connect this process to the others of its run. Call it before JAX computes anything.

    Does nothing for a single process, or if `jax.distributed` is already initialized. `again` tells in messages what to
    do if a process is lost later. ProcessesError if the coordinator does not answer within `parallel.patience` seconds,
    or JAX can't read the settings of the cluster. If other processes are missing, JAX ends this process without an
    exception.
    """
    by = launcher()
    if (parallel.coordinator is None and by is None) or jax.distributed.is_initialized():
        return
    if parallel.coordinator in (None, "auto"):
        what, place, others = f"the processes of {by or 'this cluster'}", {}, _BY_HAND
        if by == "Open MPI" and "OMPI_MCA_orte_hnp_uri" not in os.environ:
            raise ProcessesError(f"Open MPI 5 and later does not provide the address of rank 0. {_BY_HAND}")
    else:
        what = f"the {parallel.num_processes} processes at {parallel.coordinator}"
        place = {
            "coordinator_address": parallel.coordinator,
            "num_processes": parallel.num_processes,
            "process_id": parallel.process_id,
        }
        others = "Start each process with the same command, except for its own --parallel.process-id."
        if parallel.process_id:
            _wait_for(parallel.coordinator, parallel.patience)
    _witness.expect(
        f"error: {what} did not all connect within {parallel.patience} s (--parallel.patience). {others} If one of "
        f"them stopped with an error, fix that first."
    )
    try:
        jax.distributed.initialize(
            **place, initialization_timeout=parallel.patience, heartbeat_timeout_seconds=HEARTBEAT
        )
    except Exception as error:
        _witness.expect("")
        first = str(error).strip().partition("\n")[0].rstrip(".")
        in_use = "If the port is in use, choose another one for all processes. " if place else ""
        raise ProcessesError(f"could not connect to {what}: {first}. {in_use}{others}") from error
    atexit.register(_witness.expect, "")  # a normal exit needs no explanation; abort() does not run this
    _witness.expect(
        f"error: {name()} ended unexpectedly: another process is lost or unreachable (see JAX's message above), or "
        f"this one was killed. {again}"
    )


def _wait_for(coordinator: str, patience: float) -> None:
    """Wait until process 0 accepts connections; ProcessesError after `patience` seconds, not JAX's stack trace."""
    host, _, port = coordinator.rpartition(":")
    deadline, reason = time.monotonic() + patience, ""
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=min(5.0, patience)).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(0.2)
    raise ProcessesError(
        f"the coordinator at {coordinator} does not answer ({reason}; waited {patience} s, --parallel.patience). Start "
        f"process 0 with the same --parallel.coordinator on that host, and open its port in the firewall."
    )


def part() -> None:
    """Disconnect at the end of a successful run; waits until the other processes do the same."""
    if jax.distributed.is_initialized():
        with _lost_processes_explained():
            jax.distributed.shutdown()
        _witness.expect("")


def leave(code: int) -> None:
    """End a failed process immediately: a normal exit would wait for the other processes, which wait for this one."""
    if jax.distributed.is_initialized():
        _witness.expect("")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def together(parallel: ParallelConfig, again: str = _AGAIN) -> Iterator[None]:
    """Context manager that calls `join`, and turns errors about a lost process into a `ProcessesError`."""
    join(parallel, again)
    with _lost_processes_explained(again):
        yield


@contextlib.contextmanager
def _lost_processes_explained(again: str = _AGAIN) -> Iterator[None]:
    """Turn an error of JAX that is caused by the loss of another process into a `ProcessesError`."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).strip()
        if jax.process_count() == 1 or not any(sign in text for sign in _SIGNS):
            raise
        first = next(iter(text.splitlines()), "")
        raise ProcessesError(
            f"{name()} lost the connection to another process, which ended or is unreachable ({first}). {again}"
        ) from error


def name() -> str:
    """Return the name of this process for messages, such as "process 1 of 2"."""
    return f"process {jax.process_index()} of {jax.process_count()}"


def is_first() -> bool:
    """Return whether this is the process that writes files."""
    return jax.process_index() == 0


def barrier(key: str, patience: float = _BARRIER_S) -> None:
    """Wait until all processes reach this barrier, over the hosts and not the devices: any thread may call it."""
    if jax.process_count() > 1:
        import orbax.checkpoint as ocp

        _passed[key] += 1  # the coordination service accepts each name only once
        ocp.multihost.get_barrier_sync_fn()(key=f"{key} {_passed[key]}", timeout_ms=int(patience * 1000))


def check_shared(path: Path, option: str = "--workdir") -> None:
    """Raise ConfigError in a process that does not see the file that the first one has written to the path `option`."""
    barrier("written")
    if not path.exists():
        raise ConfigError(
            f"{name()} does not see {path}, which process 0 has just written. Pass {option} on a file system that "
            f"all processes share."
        )


def first_decides(function: Callable[[], Any]) -> Any:
    """Call `function` in the first process, and return its result (JSON values) or raise its error in all processes."""
    if jax.process_count() == 1:
        return function()
    content, failure = b"", None
    if is_first():
        try:
            content = json.dumps({"value": function()}).encode()
        except Exception as error:  # any error: the other processes must not wait forever
            failure, content = error, json.dumps({"error": str(error)}).encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    padded = np.frombuffer(content.ljust(size), np.uint8)
    answer = json.loads(bytes(multihost_utils.broadcast_one_to_all(padded)))
    if failure is not None:
        raise failure
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["value"]


def check_alike(what: str, value: str) -> None:
    """Raise ConfigError if this process has a different `value` than the first one; `what` names it in the message."""
    if jax.process_count() > 1 and first_decides(lambda: value) != value:
        raise ConfigError(
            f"{name()} and process 0 have different {what}. Start all processes with the same command, and let them "
            f"read the same files."
        )


class SharedStop:
    """A stop signal shared by all processes, which must call it at the same points: all stop at the same step."""

    def __init__(self, stop: StopSignal) -> None:
        self._stop = stop
        self._signum = 0  # signal that all processes know of; 0 for none
        self._asked: jax.Array | None = None
        self._alone = jax.process_count() == 1
        if not self._alone:
            mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(jax.sharding.AxisType.Auto,))
            self._spread = NamedSharding(mesh, PartitionSpec("all"))
            self._largest = jax.jit(lambda x: x.max(), out_shardings=NamedSharding(mesh, PartitionSpec()))

    @property
    def exit_code(self) -> int | None:
        """128 + number of the signal; None without a signal."""
        if self._alone:
            return self._stop.exit_code
        return 128 + self._signum if self._signum else None

    def __call__(self) -> bool:
        """Return whether to stop now; waits for the other processes."""
        if self._alone:
            return self._stop.requested
        self._asked = self._ask()
        return self._answer()

    def soon(self) -> bool:
        """Return whether to stop, from the answer to the previous call: does not wait for a step that still runs."""
        if self._alone:
            return self._stop.requested
        answer = self._answer()
        self._asked = self._ask()
        return answer

    def _ask(self) -> jax.Array:
        """Start to compute the largest signal number of all processes, on the devices; does not wait for the result."""
        number = np.full(1, self._stop.signum or 0, np.int32)
        return self._largest(jax.make_array_from_callback((jax.device_count(),), self._spread, lambda index: number))

    def _answer(self) -> bool:
        if self._asked is not None:
            self._signum = max(self._signum, int(self._asked))
        return self._signum > 0
