"""TPU topologies, and their devices for the TPU compiler (libtpu)."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jax.experimental import topologies

from transformer.config._checks import ConfigError
from transformer.nn._probing import library_version, matching_libtpu
from transformer.training._chips import CHIPS, Tpu
from transformer.training.plan._contract import CompilerError, Topology, probe, remove_flags

PROBE = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

device = topologies.get_topology_desc(platform="tpu", **json.loads(sys.argv[1])).devices[0]
x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=SingleDeviceSharding(device))
jax.jit(lambda x: x @ x).lower(x).compile().memory_analysis()
"""
"""program that compiles one matrix multiplication for a topology, whose options are its argument"""


@dataclass(frozen=True)
class TpuTopology(Topology):
    """One or more slices of TPU chips of one kind; `shape` is the number of chips of a slice along each axis."""

    chip: Tpu
    """the version of TPU"""
    shape: tuple[int, ...]
    num_slices: int = 1
    """number of slices, which the data-center network connects"""

    checks_memory: ClassVar[bool] = True

    def __str__(self):
        return f"{self.num_slices}*{self.slice_name}" if self.num_slices > 1 else self.slice_name

    @property
    def slice_name(self) -> str:
        """Name of one slice, such as "v5e:4x4"."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def num_chips(self) -> int:
        return self.num_slices * math.prod(self.shape)

    @property
    def smallest(self) -> str:
        return f"{self.chip.name}:{'x'.join('1' * self.chip.axes)}"

    @property
    def wraps(self) -> tuple[bool, ...]:
        """For each axis, whether a link connects its last chip to its first one, so that the axis is a ring.

        v4 and v5p slices are tori if they consist of whole cubes of 4 x 4 x 4 chips, which optical switches connect
        (Jouppi et al. 2023, arXiv 2304.01433, section 2). On chips with two axes, an axis as long as the pod is a ring.
        """
        if len(self.shape) == 3:
            return (all(size % 4 == 0 for size in self.shape),) * 3
        return tuple(size == math.isqrt(self.chip.pod) for size in self.shape)

    def devices(self) -> list[Any]:
        if importlib.util.find_spec("libtpu") is None:
            raise CompilerError('planning needs the TPU compiler, libtpu. Install it: pip install "libtpu>=0.0.51"')
        remove_flags("--xla_(cpu|gpu)_")
        bounds = [min(2, size) if size % 2 == 0 else 1 for size in self.shape[:2]] + [1]
        options = {"topology_name": self.slice_name, "chips_per_host_bounds": bounds}
        if any(self.wraps):
            options["wrap"] = [*self.wraps, False][:3]  # three entries, also for chips with two axes
        if self.num_slices > 1:
            options["num_slices"] = self.num_slices
        if self.chip.config is not None:
            options["chip_config_name"] = self.chip.config
        check_compiler(json.dumps(options))
        try:
            devices = topologies.get_topology_desc(platform="tpu", **options).devices
        except jax.errors.JaxRuntimeError as error:
            raise CompilerError(
                f"the TPU compiler does not support the topology {self}. Try {self.chip.name}:{self.chip.example}. The "
                f"compiler's message: {str(error).partition(chr(10))[0]}"
            ) from error
        return list(devices)


def check_compiler(options: str) -> None:
    """Compile a tiny program in a child process, because an incompatible libtpu crashes its process.

    `options` are those of `topologies.get_topology_desc`, as JSON. CompilerError if it crashed; the message names the
    compatible libtpu. Other errors are ignored, because they occur again in the caller.
    """
    crash, _ = probe(PROBE, options)
    if not crash:
        return
    jax_version = library_version("jax")
    raise CompilerError(
        f"{library_version('libtpu')} does not work with {jax_version}: compiling one matrix multiplication crashed "
        f"({crash}). Install the version that {jax_version} was released with: "
        f'pip install "{matching_libtpu()}"'
    )


def tpu_topology(text: str, chip: Tpu, sizes: str, num_slices: int) -> TpuTopology:
    """Return the topology `text` of a chip: the part behind its name, such as "4x4", and the number of slices.

    Raises:
        ConfigError: the sizes are invalid or larger than a pod, or the chip does not support several slices.
    """
    name = chip.name
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes) or sizes.count("x") + 1 != chip.axes:
        wanted = "x".join("ABC"[: chip.axes])
        raise ConfigError(
            f"a topology of {name} must be {name}:{wanted}, with the number of chips along {chip.axes} axes, got "
            f"{text!r}. Did you mean '{name}:{chip.example}'?"
        )
    topology = TpuTopology(chip, tuple(map(int, sizes.split("x"))), num_slices)
    chips = math.prod(topology.shape)
    if chips > chip.pod:
        raise ConfigError(
            f"{topology.slice_name} has {chips:,} chips, but a pod of {name} has only {chip.pod:,}. Pass a smaller "
            f"topology."
        )
    if topology.num_slices > 1 and chip.network_bandwidth is None:
        raise ConfigError(
            f"{name} does not support several slices, but --topology is {text!r}. Pass one slice, {topology.slice_name}"
            f", or another TPU: {', '.join(known for known, one in CHIPS.items() if one.network_bandwidth)}."
        )
    return topology
