"""One writer per workdir."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAME = ".lock"
_PATIENCE = 2.0  # seconds that another process may take between making the file and writing its name into it


class WorkdirInUseError(RuntimeError):
    """Another process writes into this workdir. The message names it and says what to do."""


class WorkdirLock:
    """Context manager that holds `workdir/.lock`; makes the workdir if it is not there.

    The file says who holds it: pid, host, and when that process started, since pids are used again. Raises
    WorkdirInUseError when another process holds it, also when that is on another host, where nobody can tell whether it
    lives. A lock whose process is dead is taken over with a line on stderr, and one that stays empty, whose process
    died before it wrote its name. OSError when the workdir cannot be written.
    """

    def __init__(self, workdir: str | os.PathLike):
        self._path = Path(os.path.abspath(workdir)) / NAME
        self._record: dict[str, Any] | None = None

    def acquire(self) -> None:
        """Takes the lock, or raises."""
        record = {"pid": os.getpid(), "host": socket.gethostname(), "started": _started(os.getpid())}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + _PATIENCE
        while not (self._create(record) or self._take_over(record, time.monotonic() > deadline)):
            time.sleep(0.02)
        self._record = record

    def release(self) -> None:
        """Removes the file, if it is still ours."""
        record, self._record = self._record, None
        if record is not None:
            held = self._open()
            if held is not None:
                with held:
                    if _read(held) == record:
                        self._path.unlink()

    def __enter__(self) -> WorkdirLock:
        self.acquire()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.release()

    def _create(self, record: dict[str, Any]) -> bool:
        try:
            file = open(self._path, "x+", encoding="utf-8")  # noqa: SIM115  O_EXCL: one of several wins
        except FileExistsError:
            return False
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_size:
                return False  # so long asleep between these lines that another one took it
            _write(file, record)
        return True

    def _take_over(self, record: dict[str, Any], late: bool) -> bool:
        """Writes our name into the lock of a dead process; False: look again."""
        file = self._open()
        if file is None:
            return False  # released in this moment
        with (
            file
        ):  # flock: of several that find it stale, one writes, and the others then read the name of a living one
            holder = _read(file)
            if holder is None:
                if not late:
                    return False  # another process is just writing its name
                if os.fstat(file.fileno()).st_size:
                    raise WorkdirInUseError(
                        f"{self._path} does not say who holds it (its content is damaged). If no training runs in "
                        f"{self._path.parent}, remove it: rm {self._path}"
                    )
                whose = "a process that was killed before it wrote its name"
            else:
                self._refuse_if_held(holder, record)
                whose = f"process {holder['pid']}, which no longer runs (killed or crashed)"
            _write(file, record)
        print(f"Took over {self._path} from {whose}.", file=sys.stderr)
        return True

    def _open(self) -> Any | None:
        """The file, locked for the moment, None if it was removed meanwhile."""
        try:
            file = open(self._path, "r+", encoding="utf-8")  # noqa: SIM115
        except FileNotFoundError:
            return None
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(file.fileno()), os.stat(self._path)):
                return file
        except FileNotFoundError:
            pass
        file.close()
        return None

    def _refuse_if_held(self, holder: dict[str, Any], ours: dict[str, Any]) -> None:
        workdir, pid, host = self._path.parent, holder["pid"], holder["host"]
        if host != ours["host"]:
            raise WorkdirInUseError(
                f"{workdir} is in use by process {pid} on host {host}; this is {ours['host']}, which cannot see "
                f"whether it still runs. Stop it there, or use another workdir. If it is gone, remove the lock: "
                f"rm {self._path}"
            )
        if _started(pid) == holder["started"]:
            who = "this process" if pid == ours["pid"] else f"process {pid}"
            raise WorkdirInUseError(
                f"{workdir} is in use by {who} on host {host}. Wait for it, stop it (kill {pid}), or use another "
                "workdir."
            )


def in_use(workdir: str | os.PathLike) -> bool:
    """Whether a process that lives writes into a workdir. One on another host counts: nobody here can tell."""
    try:
        with open(Path(workdir) / NAME, encoding="utf-8") as file:
            holder = _read(file)
    except OSError:
        return False
    return holder is not None and (
        holder["host"] != socket.gethostname() or _started(holder["pid"]) == holder["started"]
    )


def _read(file: Any) -> dict[str, Any] | None:
    """The record in the file, None if there is none (yet) or it is damaged."""
    file.seek(0)
    try:
        record = json.loads(file.read())
    except ValueError:
        return None
    fields = {"pid": int, "host": str, "started": str}
    good = isinstance(record, dict) and all(isinstance(record.get(name), kind) for name, kind in fields.items())
    return record if good else None


def _write(file: Any, record: dict[str, Any]) -> None:
    file.seek(0)
    file.truncate()
    file.write(json.dumps(record) + "\n")
    file.flush()
    os.fsync(file.fileno())


def _started(pid: int) -> str | None:
    """When the process started, in the system's own words: equal for one process only. None: it does not run."""
    proc = Path("/proc")
    if not (proc / "self" / "stat").exists():  # macOS, BSD
        shown = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True)
        state, _, started = shown.stdout.strip().partition(" ")
        return started.strip() if state and not state.startswith("Z") else None
    try:
        # pid (name) state ppid ...: the name may hold spaces and parentheses; field 22 counts from the boot
        fields = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        boot = (proc / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else f"boot {boot} tick {fields[19]}"
