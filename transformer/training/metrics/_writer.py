"""Write metrics to a file and to TensorBoard, and show the progress on the screen."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

from transformer.config._replaced_files import replace_file
from transformer.training.metrics._trackers import Trackers
from transformer.viz._records import metrics_lines, read_metrics


class AppendedFile:
    """File that is open for appending, without a buffer; created if it does not exist.

    A record is in the file as soon as `write` returns. A failed write leaves no buffer that would fail again when the
    file is closed. All errors of the system are OSErrors with the path and the remedy.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  closed by close()

    def write(self, content: bytes) -> None:
        """Append the content. Raises OSError, for example if the disk is full."""
        with self._explained():
            while content:  # on a nearly full disk, `write` may write only a part
                content = content[self._file.write(content) :]

    def sync(self) -> None:
        """Flush the file to disk. Raises OSError."""
        with self._explained():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = "free some space or choose another workdir, then rerun the command"
            raise OSError(error.errno, f"{error.strerror}; {remedy}", str(self._path)) from error


class BoardWriter:
    """Writer of a TensorBoard event file. TensorBoard hides older events of steps after `restored_step`.

    tensorboardX makes and encodes the events, but its writer is not used. That writer is a thread which waits by wall
    time: a clock that is set back makes it fail or sleep, and a full disk ends it with a traceback; the next writes
    then block forever.
    """

    def __init__(self, folder: Path, restored_step: int | None):
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # imported only if needed
        from tensorboardX.summary import scalar

        folder.mkdir(parents=True, exist_ok=True)
        self._event, self._scalar = Event, scalar
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = AppendedFile(folder / name)
        self._add(Event(file_version="brain.Event:2"))
        if restored_step is not None:
            self._add(Event(step=restored_step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, numbers: Mapping[str, int | float]) -> None:
        """Write the values of a step. Raises OSError."""
        for name, number in numbers.items():
            self._add(self._event(step=step, summary=self._scalar(name, number)))

    def flush(self) -> None:
        """Flush the file to disk. Raises OSError."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, event) -> None:
        """Write a record of the TFRecord format: length, its checksum, content, its checksum."""
        from tensorboardX.record_writer import masked_crc32c

        event.wall_time = time.time()
        content = event.SerializeToString()
        length = struct.pack("<Q", len(content))
        checks = [struct.pack("<I", masked_crc32c(part)) for part in (length, content)]
        self._file.write(length + checks[0] + content + checks[1])


__all__ = ["FILE", "MetricsWriter", "Progress", "read_metrics"]

FILE = "metrics.jsonl"


class MetricsWriter(contextlib.AbstractContextManager):
    """Writer of `workdir/metrics.jsonl`: one strict JSON object per line, {"step": 10, "train/loss": 2.5, ...}.

    NaN and infinities, which JSON lacks, are written as the strings "NaN", "Infinity" and "-Infinity". A run that
    resumes from `restored_step` deletes the lines after it, so that its file equals that of an uninterrupted run.
    Therefore, write all lines of step n and call `flush` before the checkpoint of step n is saved. TensorBoard files
    and trackers get the same values.

    OSError if the workdir is not writable; ValueError with its number if a line of the existing file is not valid JSON.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        *,
        restored_step: int | None = None,
        tensorboard: bool = False,
        trackers: Trackers | None = None,
    ):
        self._path = Path(workdir) / FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if restored_step is not None and self._path.exists():
            kept = [line for line, record in metrics_lines(self._path) if record["step"] <= restored_step]
        self._file = AppendedFile(replace_file(self._path, "".join(line + "\n" for line in kept)))
        self._board = BoardWriter(self._path.parent / "tensorboard", restored_step) if tensorboard else None
        self._trackers = trackers

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one line. Values are Python, NumPy or JAX scalars. The call blocks until JAX scalars are computed."""
        numbers = {name: _number(name, value) for name, value in values.items()}
        record = {"step": int(step)} | {name: _strict(number) for name, number in numbers.items()}
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        if self._board is not None:
            self._board.write(int(step), numbers)
        if self._trackers is not None:
            self._trackers.log(int(step), numbers)

    def flush(self) -> None:
        """Flush everything to disk."""
        self._file.sync()
        if self._board is not None:
            self._board.flush()

    def close(self, failed: bool = False) -> None:
        """Close the files, and finish the run in the trackers."""
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._trackers is not None:
            self._trackers.close(failed)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)


class Progress(contextlib.AbstractContextManager):
    """Progress display: a bar with step, loss, speed (`targets` per second) and remaining time, or plain lines.

    The mode is "bar", "lines" (one per `update`), "none" (only the texts of `print`), or "auto": a bar if the stream
    (default: stdout) is a terminal, otherwise lines. ValueError for another mode.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        mode: str = "auto",
        targets: str = "tokens",
        stream: io.TextIOBase | None = None,
    ):
        if mode not in ("auto", "bar", "lines", "none"):
            raise ValueError(f"progress mode must be 'auto', 'bar', 'lines' or 'none', got {mode!r}.")
        self._stream = sys.stdout if stream is None else stream
        if mode == "auto":
            terminal = self._stream.isatty() and os.environ.get("TERM") not in ("dumb", "")
            mode = "bar" if terminal else "lines"
        self._mode, self._total, self._step = mode, total_steps, start_step
        self._targets = targets
        self._began: tuple[float, int] | None = None  # time and step of the first update, which is after compilation
        if mode == "bar":
            columns = [TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[figures]}")]
            self._bar = RichProgress(*columns, console=Console(file=self._stream, force_terminal=True))
            self._task = self._bar.add_task("", total=total_steps, completed=start_step, figures="")
            self._bar.start()

    def update(
        self, step: int, *, loss: float | None = None, targets_per_s: float | None = None, mfu: float | None = None
    ) -> None:
        """Update the bar, or write a line. Call it when metrics are logged, not at every step."""
        self._step = step
        figures = [] if loss is None else [f"loss {float(loss):.4f}"]
        figures += [] if targets_per_s is None else [f"{float(targets_per_s):,.0f} {self._targets}/s"]
        figures += [] if mfu is None else [f"MFU {100 * mfu:.1f} %"]
        figures += self._left()
        if self._mode == "bar":
            self._bar.update(self._task, completed=step, figures="  ".join(figures))
        elif self._mode == "lines":
            self.print("  ".join([f"step {step}/{self._total}", *figures]))

    def advance(self, step: int) -> None:
        """Move the bar without new figures. Cheap; without a bar, it prints nothing."""
        self._step = step
        if self._mode == "bar":
            self._bar.update(self._task, completed=step)

    def exclude(self, seconds: float) -> None:
        """Exclude these last seconds, such as a compilation that does not recur, from the estimated remaining time."""
        if self._began is not None:
            self._began = self._began[0] + seconds, self._began[1]

    def print(self, text: str) -> None:
        """Print a text (samples, an evaluation) above the bar."""
        if self._mode == "bar":
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Stop the bar and leave it on the screen."""
        if self._mode == "bar":
            self._bar.stop()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()

    def _left(self) -> list[str]:
        now = time.monotonic()
        if self._began is None:
            self._began = now, self._step
        began, first = self._began
        if self._step <= first or self._step >= self._total:
            return []
        seconds = round((now - began) / (self._step - first) * (self._total - self._step))
        return [f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"]


def _number(name: str, value: Any) -> int | float:
    array = np.asarray(value)
    if name == "step" or array.ndim or array.dtype == object or array.dtype.kind in "SUc":
        raise ValueError(f"metric {name!r} must be a real number and must not be named 'step', got {value!r}.")
    if array.dtype.kind in "biu":
        return int(array)
    # Convert float32 through its shortest decimal representation: 0.1, not 0.10000000149011612.
    return float(array) if array.dtype == np.float64 else float(str(array.astype(np.float32)))


def _strict(number: int | float) -> int | float | str:
    if isinstance(number, int) or math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
