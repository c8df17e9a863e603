"""Lock file that allows one writer per workdir."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO

NAME = ".lock"
_PATIENCE = 2.0  # maximum seconds between creating the file and writing the record
_DATE = "%Y-%m-%d %H:%M:%S UTC"


class WorkdirInUseError(RuntimeError):
    """Another process uses this workdir. The message names the process and the remedy."""


class WorkdirLock:
    """Context manager that holds `workdir/.lock`; creates the workdir if it does not exist.

    The file records the pid, the host, the start time of the process (because pids are reused) and the time of locking.
    A lock of a process that no longer runs is replaced, with a line on stderr. So is a lock file that stays empty: its
    process died before it wrote the record. With `take_over`, so is that of a process on another host, for which it is
    impossible to check whether it still runs, or one with damaged content, with a warning on stderr.

    WorkdirInUseError if another process holds the lock; a running process on this host always keeps it. OSError if the
    workdir is not writable.
    """

    def __init__(self, workdir: str | os.PathLike, take_over: bool = False):
        self._path = Path(os.path.abspath(workdir)) / NAME
        self._take_over = take_over
        self._record: dict[str, Any] | None = None

    def acquire(self) -> None:
        """Acquire the lock. Raises WorkdirInUseError if another process holds it."""
        record = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": _started(os.getpid()),
            "since": time.strftime(_DATE, time.gmtime()),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + _PATIENCE
        while not (self._create(record) or self._replace(record, time.monotonic() > deadline)):
            time.sleep(0.02)
        self._record = record

    def check(self) -> None:
        """Raise WorkdirInUseError if another process took over this lock. Call it before each checkpoint is written."""
        if self._record is None:
            return
        try:
            with open(self._path, encoding="utf-8") as file:
                holder = _read(file)
        except FileNotFoundError:
            return  # deleted by the user: no other process claims the workdir
        except OSError as error:
            raise OSError(
                f"the run cannot save into {self._path.parent}: {error.strerror} ({NAME}). Make the directory readable "
                "and writable, then rerun the command: it resumes from the newest checkpoint."
            ) from error
        if holder is not None and holder != self._record:
            raise WorkdirInUseError(
                f"{_described(holder)} has taken over {self._path.parent}. This process (process {os.getpid()} on host "
                f"{self._record['host']}) stops without saving, so that only one process writes checkpoints. Training "
                "continues there; to continue it here, stop that process, then rerun the command."
            )

    def release(self) -> None:
        """Delete the lock file if it still belongs to this process."""
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

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self.release()
        except OSError as failure:
            if error is None:
                raise
            error.add_note(str(failure))  # report the first error, not this one

    def _create(self, record: dict[str, Any]) -> bool:
        try:
            file = open(self._path, "x+", encoding="utf-8")  # noqa: SIM115  O_EXCL: only one process succeeds
        except FileExistsError:
            return False
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_size:
                return False  # another process replaced the empty file before we got its flock
            _write(file, record)
        return True

    def _replace(self, record: dict[str, Any], late: bool) -> bool:
        """Write our record into a lock that may be replaced. Return False if the caller must try again."""
        file = self._open()
        if file is None:
            return False  # released in the meantime
        with file:  # flock: if several processes see a stale lock, one writes; the others then read its record
            holder = _read(file)
            if holder is not None:
                line = self._checked(holder, record)
            elif not late:
                return False  # another process is writing its record
            else:
                line = self._without_record(os.fstat(file.fileno()).st_size == 0)
            _write(file, record)
        print(line, file=sys.stderr)
        return True

    def _open(self) -> TextIO | None:
        """Open the lock file and acquire its flock. Return None if the file was deleted in the meantime."""
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

    def _checked(self, holder: dict[str, Any], ours: dict[str, Any]) -> str:
        """Return the line to print if the lock of `holder` may be replaced; otherwise raise WorkdirInUseError."""
        workdir, who = self._path.parent, _described(holder)
        if holder["host"] != ours["host"]:
            activity = _last_activity(workdir)
            if self._take_over:
                return (
                    f"warning: took over {self._path} from {who}; {activity}. If that process still runs, it stops at "
                    "its next checkpoint."
                )
            raise WorkdirInUseError(
                f"{workdir} is in use by {who}; {activity}. This is host {ours['host']}, which cannot check whether "
                f"that process still runs. If it does, stop it or use another workdir. If its machine is gone, pass "
                f"--take-over (in Python: take_over=True)."
            )
        pid = holder["pid"]
        if _started(pid) == holder["started"]:
            who = "this process" if pid == ours["pid"] else f"process {pid}"
            no = " --take-over does not apply: it is for a process on another host." if self._take_over else ""
            raise WorkdirInUseError(
                f"{workdir} is in use by {who} on host {holder['host']}. Wait for it, stop it (kill {pid}), or use "
                f"another workdir.{no}"
            )
        return f"Took over {self._path} from process {pid}, which no longer runs (killed or crashed)."

    def _without_record(self, empty: bool) -> str:
        """Do the same as `_checked` for a lock without a valid record."""
        if empty:
            return f"Took over {self._path} from a process that was killed before it wrote its record."
        activity = _last_activity(self._path.parent)
        if self._take_over:
            return f"warning: took over {self._path}, whose content is damaged; {activity}."
        raise WorkdirInUseError(
            f"{self._path} does not say which process holds it (its content is damaged); {activity}. If no training "
            f"runs in {self._path.parent}, pass --take-over (in Python: take_over=True)."
        )


def in_use(workdir: str | os.PathLike) -> bool:
    """Return whether a running process holds the lock of a workdir. A process on another host counts as running."""
    try:
        with open(Path(workdir) / NAME, encoding="utf-8") as file:
            holder = _read(file)
    except OSError:
        return False
    return holder is not None and (
        holder["host"] != socket.gethostname() or _started(holder["pid"]) == holder["started"]
    )


def _described(holder: dict[str, Any]) -> str:
    """Describe the holder of a lock, for messages."""
    return f"process {holder['pid']} on host {holder['host']} (locked {holder['since']})"


def _last_activity(workdir: Path) -> str:
    """Describe the time of the last write to the workdir: the latest mtime of metrics, checkpoints and lock."""
    times = []
    for name in ("metrics.jsonl", "checkpoints", NAME):
        with contextlib.suppress(OSError):
            times.append(os.stat(workdir / name).st_mtime)
    seconds = max(0.0, time.time() - max(times, default=time.time()))
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"last activity {seconds // length:.0f} {unit} ago"
    return f"last activity {seconds:.0f} seconds ago"


def _read(file: TextIO) -> dict[str, Any] | None:
    """Read the record in the file; None if it is missing (not yet written) or damaged."""
    file.seek(0)
    try:
        record = json.loads(file.read())
    except ValueError:
        return None
    fields = {"pid": int, "host": str, "started": str, "since": str}
    good = isinstance(record, dict) and all(isinstance(record.get(name), kind) for name, kind in fields.items())
    return record if good else None


def _write(file: TextIO, record: dict[str, Any]) -> None:
    file.seek(0)
    file.truncate()
    file.write(json.dumps(record) + "\n")
    file.flush()
    os.fsync(file.fileno())


def _started(pid: int) -> str | None:
    """Return the start time of a process in the system's format, unique to it; None if it does not run."""
    proc = Path("/proc")
    if not (proc / "self" / "stat").exists():  # macOS, BSD
        shown = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True)
        state, _, started = shown.stdout.strip().partition(" ")
        return started.strip() if state and not state.startswith("Z") else None
    try:
        # The line is "pid (name) state ppid ...". The name may contain spaces and parentheses, so split after the last
        # parenthesis. Field 22 of the line is the start time in clock ticks since boot.
        fields = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        boot = (proc / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else f"boot {boot} tick {fields[19]}"
