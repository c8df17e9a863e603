"""TensorBoard event files, written in the thread of the caller."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from transformer.training._files import AppendedFile


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
