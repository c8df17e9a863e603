"""Several processes that train together: how they find each other, agree, and part.

`jax.distributed` is the engine: its coordination service (in process 0) joins them and ends all when one is gone, and
collectives of the compiled step do the rest. Every process runs the same program; the first one writes.
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
"""seconds after which a process that says nothing counts as gone, and all end"""

_BARRIER_S = 1800  # for the slowest writer of a large checkpoint
_AGAIN = "Start all of them again with the same command: they go on from the newest checkpoint."
_BY_HAND = (
    "Tell each process: --parallel.coordinator HOST:PORT of process 0, --parallel.num-processes and "
    "--parallel.process-id (localhost:1234, 1 and 0 to train alone)."
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
    """Processes that train together could not find each other, or lost one."""


class _Witness:
    """A small child that says why, where this process can't: JAX ends it with abort() when others are gone."""

    def __init__(self) -> None:
        self._child: subprocess.Popen | None = None

    def expect(self, message: str) -> None:
        """What is to be told if this process ends now; "" for nothing."""
        if self._child is None:
            if not message:
                return
            # A session of its own: Ctrl-C in the terminal is not meant for it.
            command = [sys.executable, "-I", "-S", "-c", _WITNESS]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        with contextlib.suppress(OSError):  # somebody killed it: the run does not need it
            self._child.stdin.write(f"{message}\n")
            self._child.stdin.flush()


_witness = _Witness()
_passed: Counter[str] = Counter()  # barriers, by key


def launcher(environment: Mapping[str, str] = os.environ) -> str | None:
    """Who started this process as one of several: "Slurm", "Open MPI", "a TPU slice"; None: nobody that is known."""

    def several(*names: str) -> bool:
        told = next((environment[name] for name in names if name in environment), "")
        return told.isdecimal() and int(told) > 1

    # Of the step, not of the job: a shell inside an allocation is one task.
    if "SLURM_STEP_NODELIST" in environment and several("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        return "Slurm"
    if several("OMPI_COMM_WORLD_SIZE"):
        return "Open MPI"
    return "a TPU slice" if "," in environment.get("TPU_WORKER_HOSTNAMES", "") else None


def join(parallel: ParallelConfig) -> None:
    """Joins this process with the others of its run; to be called before JAX computes anything. Nothing for one alone,
    or where `jax.distributed` was initialized already.

    Raises:
        ProcessesError: the coordinator does not answer, or a cluster that JAX can't read; after `parallel.patience`
            seconds at most. Where others are missing, JAX ends the process itself.
    """
    by = launcher()
    if (parallel.coordinator is None and by is None) or jax.distributed.is_initialized():
        return
    if parallel.coordinator in (None, "auto"):
        what, place, others = f"the processes of {by or 'this cluster'}", {}, _BY_HAND
        if by == "Open MPI" and "OMPI_MCA_orte_hnp_uri" not in os.environ:
            raise ProcessesError(f"Open MPI from version 5 on does not say where rank 0 is. {_BY_HAND}")
    else:
        what = f"the {parallel.num_processes} processes at {parallel.coordinator}"
        place = {
            "coordinator_address": parallel.coordinator,
            "num_processes": parallel.num_processes,
            "process_id": parallel.process_id,
        }
        others = "Start each of them with the same command but its own --parallel.process-id."
        if parallel.process_id:
            _wait_for(parallel.coordinator, parallel.patience)
    _witness.expect(
        f"error: {what} did not all come together within {parallel.patience} s (--parallel.patience). {others} Where "
        f"one stopped with an error, mend that first."
    )
    try:
        jax.distributed.initialize(
            **place, initialization_timeout=parallel.patience, heartbeat_timeout_seconds=HEARTBEAT
        )
    except Exception as error:
        _witness.expect("")
        first = str(error).strip().partition("\n")[0].rstrip(".")
        in_use = "If its port is in use, take another for all. " if place else ""
        raise ProcessesError(f"{what} can't be joined: {first}. {in_use}{others}") from error
    atexit.register(_witness.expect, "")  # an end in order needs no explanation; abort() passes this over
    _witness.expect(
        f"error: {name()} ended in the middle of its work: another one is gone or out of reach (JAX says which, above) "
        f"or this one was killed. {_AGAIN}"
    )


def _wait_for(coordinator: str, patience: float) -> None:
    """Until process 0 listens: JAX itself would end the process with a stack trace."""
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
        f"process 0 with the same --parallel.coordinator on that host, and let its port through the firewall."
    )


def part() -> None:
    """The end of a run that went well: waits for the others to be there, too."""
    if jax.distributed.is_initialized():
        with _others_are_there():
            jax.distributed.shutdown()
        _witness.expect("")


def leave(code: int) -> None:
    """Ends a process that did not `part`, at once and with this exit code: an exit in order would wait for the others,
    who wait for it.
    """
    if jax.distributed.is_initialized():
        _witness.expect("")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def together(parallel: ParallelConfig) -> Iterator[None]:
    """`join`, and inside an error of JAX that comes of another process being gone is a ProcessesError that says so."""
    join(parallel)
    with _others_are_there():
        yield


@contextlib.contextmanager
def _others_are_there() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        said = str(error).strip()
        if jax.process_count() == 1 or not any(sign in said for sign in _SIGNS):
            raise
        first = next(iter(said.splitlines()), "")
        raise ProcessesError(f"{name()} lost the others: one is gone or out of reach ({first}). {_AGAIN}") from error


def name() -> str:
    """Which process this is, for messages: "process 1 of 2"."""
    return f"process {jax.process_index()} of {jax.process_count()}"


def is_first() -> bool:
    """Whether this process is the one that writes."""
    return jax.process_index() == 0


def barrier(key: str) -> None:
    """Waits until every process is here. Host to host, not by the devices, so that any thread may call it."""
    if jax.process_count() > 1:
        import orbax.checkpoint as ocp

        _passed[key] += 1  # the service takes each name once
        ocp.multihost.get_barrier_sync_fn()(key=f"{key} {_passed[key]}", timeout_ms=_BARRIER_S * 1000)


def check_shared(path: Path) -> None:
    """Raises ConfigError in a process that does not see what the first one has written at `path`."""
    barrier("written")
    if not path.exists():
        raise ConfigError(
            f"{name()} does not see {path}, which process 0 has just written. Give a --workdir on a disk that all "
            f"share."
        )


def first_decides(function: Callable[[], Any]) -> Any:
    """What `function` gives in the first process (a JSON value), in all of them.

    Raises:
        ValueError: the first process got an error, which it raises as it is.
    """
    if jax.process_count() == 1:
        return function()
    content, failure = b"", None
    if is_first():
        try:
            content = json.dumps({"value": function()}).encode()
        except Exception as error:  # whatever it is, the others must not wait for ever
            failure, content = error, json.dumps({"error": str(error)}).encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    padded = np.frombuffer(content.ljust(size), np.uint8)
    told = json.loads(bytes(multihost_utils.broadcast_one_to_all(padded)))
    if failure is not None:
        raise failure
    if "error" in told:
        raise ValueError(told["error"])
    return told["value"]


def check_alike(what: str, value: str) -> None:
    """Raises ConfigError where processes don't hold the same `value`, which `what` names."""
    if jax.process_count() > 1 and first_decides(lambda: value) != value:
        raise ConfigError(
            f"{name()} has other {what} than process 0. All must be started with the same command, and read the same "
            f"files."
        )


class SharedStop:
    """Whether a signal asks to stop: one that came to any of the processes counts in all, at the same point of the
    program. Call it at the same points in all of them.
    """

    def __init__(self, stop: StopSignal) -> None:
        self._stop = stop
        self._signum = 0  # that all know of
        self._asked: jax.Array | None = None
        self._alone = jax.process_count() == 1
        if not self._alone:
            mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(jax.sharding.AxisType.Auto,))
            self._spread = NamedSharding(mesh, PartitionSpec("all"))
            self._largest = jax.jit(lambda x: x.max(), out_shardings=NamedSharding(mesh, PartitionSpec()))

    @property
    def exit_code(self) -> int | None:
        """128 + signal; None without one."""
        if self._alone:
            return self._stop.exit_code
        return 128 + self._signum if self._signum else None

    def __call__(self) -> bool:
        """Whether to stop now. Waits for the other processes."""
        if self._alone:
            return self._stop.requested
        self._asked = self._ask()
        return self._told()

    def soon(self) -> bool:
        """As a call, but of what was known when it was last asked: nobody waits for a step that still runs."""
        if self._alone:
            return self._stop.requested
        told = self._told()
        self._asked = self._ask()
        return told

    def _ask(self) -> jax.Array:
        number = np.full(1, self._stop.signum or 0, np.int32)
        return self._largest(jax.make_array_from_callback((jax.device_count(),), self._spread, lambda index: number))

    def _told(self) -> bool:
        if self._asked is not None:
            self._signum = max(self._signum, int(self._asked))
        return self._signum > 0
