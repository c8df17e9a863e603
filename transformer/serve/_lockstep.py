"""Several processes of one server: process 0 broadcasts each call of the devices, and the others make the same call."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping

import numpy as np
from jax.experimental import multihost_utils

PING, STOP = "ping", "stop"
"""calls without arrays: nothing is computed, and the last call"""


class Lockstep:
    """Sends the calls of process 0 to the other processes; if none has a part of the devices, nothing."""

    def __init__(self, is_shared: bool) -> None:
        self.is_shared = is_shared
        """whether other processes make the same calls"""
        self._stopped = False

    def send(self, name: str, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Broadcast the next call, in process 0. After `STOP`, nothing is sent any more."""
        if not self.is_shared or self._stopped:
            return
        self._stopped = name == STOP
        buffer = io.BytesIO()
        np.savez(buffer, **{CALL: np.array(name)}, **(arrays or {}))
        found = np.frombuffer(buffer.getvalue(), np.uint8)
        _broadcast(np.int32(len(found)))
        _broadcast(np.pad(found, (0, _padded(len(found)) - len(found))))

    def follow(self, call: Callable[..., object]) -> None:
        """Make the calls of process 0, in another process, until it stops: `call(name, arrays)`.

        A lost connection to process 0 is a RuntimeError, unless JAX ends this process first.
        """
        while True:
            size = int(_broadcast(np.int32(0)))
            found = _broadcast(np.zeros((_padded(size),), np.uint8))
            with np.load(io.BytesIO(found[:size].tobytes()), allow_pickle=False) as arrays:
                given = {name: arrays[name] for name in arrays.files}
            name = str(given.pop(CALL))
            if name == STOP:
                return
            if name != PING:
                call(name, given)


CALL = "call"
"""name of the array with the name of a call"""


def _broadcast(value: np.ndarray | np.int32) -> np.ndarray:
    return np.asarray(multihost_utils.broadcast_one_to_all(value))


def _padded(size: int) -> int:
    """Return the size of a message: a power of two, so that few programs are compiled."""
    return max(4096, 1 << (size - 1).bit_length())
