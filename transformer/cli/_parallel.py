"""Options of the commands that shard a model over devices, of one process or several."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformer.cli._arguments import check_least
from transformer.config._checks import ConfigError

if TYPE_CHECKING:
    from jax.sharding import Mesh


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Devices over which a causal model is sharded, and processes, which are started with the same command except for
    --parallel.process-id.
    """

    tensor: int = 1
    """number of devices that split heads, feed-forward width and vocabulary"""
    expert: int = 1
    """number of devices that split the experts of a mixture-of-experts layer"""
    coordinator: str | None = None
    """host:port of process 0 for the connections of several processes; auto: JAX detects it; None: one process"""
    num_processes: int | None = None
    """number of processes, if a coordinator is given"""
    process_id: int | None = None
    """index of this process, from 0"""

    @property
    def has_processes(self) -> bool:
        """Whether an option asks for several processes."""
        return (self.coordinator, self.num_processes, self.process_id) != (None, None, None)

    @contextlib.contextmanager
    def together(self, again: str) -> Iterator[None]:
        """Connect this process to the others, before JAX computes anything; without a coordinator, do nothing.

        At the end of the `with` block, each process waits for the others, at most five minutes. `again` says what to do
        if a process is lost later.
        """
        if not self.has_processes:
            yield
            return
        from transformer.nn._sharding import ParallelConfig
        from transformer.training import _processes as processes

        facts = {"num_processes": self.num_processes, "process_id": self.process_id}
        with processes.together(ParallelConfig(coordinator=self.coordinator, **facts), again):
            yield
            processes.part()

    def mesh(self, *, copies: bool = False) -> Mesh | None:
        """Return the mesh of the model; None: one device.

        With `copies`, each of several processes may have a model of its own, on its own devices; a mesh larger than
        those is one of all devices.
        """
        sizes = {"tensor": self.tensor, "expert": self.expert}
        for axis, size in sizes.items():
            check_least(f"parallel.{axis}", size)
        needed = math.prod(sizes.values())
        if needed == 1 and not self.has_processes:
            return None
        import jax

        from transformer.nn._sharding import make_mesh

        devices = jax.devices()
        if needed > len(devices):
            raise ConfigError(
                f"--parallel.tensor {self.tensor} and --parallel.expert {self.expert} need {needed} devices, but there "
                f"are {len(devices)}. Pass smaller sizes. (To simulate devices on a CPU: "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={needed})"
            )
        count = jax.process_count()
        if count > 1 and needed < len(devices):
            own = jax.local_devices()
            if not copies or needed > len(own):
                or_own = f", or at most {len(own)}, the devices of one process" if copies else ""
                raise ConfigError(
                    f"the product of --parallel.tensor {self.tensor} and --parallel.expert {self.expert} must be "
                    f"{len(devices)}, the devices of all {count} processes{or_own}, got {needed}."
                )
            devices = own
        return None if needed == 1 else make_mesh(sizes, devices[:needed])


ONE_DEVICE = Parallel()
"""the default: one device of one process"""
