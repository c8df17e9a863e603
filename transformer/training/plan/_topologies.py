"""TPU topologies, their devices for the compiler, and programs that are compiled for them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

from transformer.config._checks import ConfigError, nearest
from transformer.nn._probing import library_version, matching_libtpu
from transformer.training._chips import CHIPS, Chip
from transformer.training._memory import GIB, memory_in_error

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

CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL}
"""signals that end a process whose libtpu is incompatible with JAX"""


class CompilerError(RuntimeError):
    """The TPU compiler is not installed, does not work with this JAX, or rejects a topology or a program."""


@dataclass(frozen=True)
class Topology:
    """One or more slices of chips of one kind; `shape` is the number of chips of a slice along each axis."""

    chip: Chip
    shape: tuple[int, ...]
    num_slices: int = 1
    """number of slices, which the data-center network connects"""

    def __str__(self):
        return f"{self.num_slices}*{self.slice_name}" if self.num_slices > 1 else self.slice_name

    @property
    def slice_name(self) -> str:
        """Name of one slice, such as "v5e:4x4"."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def num_chips(self) -> int:
        """Total number of chips in all slices."""
        return self.num_slices * math.prod(self.shape)

    @property
    def wraps(self) -> tuple[bool, ...]:
        """For each axis, whether a link connects its last chip to its first one, so that the axis is a ring.

        v4 and v5p slices are tori if they consist of whole cubes of 4 x 4 x 4 chips, which optical switches connect
        (Jouppi et al. 2023, arXiv 2304.01433, section 2). On chips with two axes, an axis as long as the pod is a ring.
        """
        if len(self.shape) == 3:
            return (all(size % 4 == 0 for size in self.shape),) * 3
        return tuple(size == math.isqrt(self.chip.pod) for size in self.shape)

    @property
    def unit(self) -> str:
        """Hardware unit that is a device in JAX, such as "chip" or "core"."""
        return self.chip.unit

    @property
    def hbm(self) -> float:
        """High-bandwidth memory of a device, in GiB."""
        return self.chip.hbm / self.chip.devices


def parse_topology(text: str) -> Topology:
    """Parse a topology such as "v5e:4x4", or "2*v5e:4x4" for two slices.

    Raises:
        ConfigError: the chip is unknown, the sizes are invalid or larger than a pod, or the chip does not support
            several slices; the message lists the chips.
    """
    examples = ", ".join(f"{name}:{chip.example}" for name, chip in CHIPS.items())
    slices, several, one = text.partition("*")
    name, _, sizes = (one if several else text).partition(":")
    if several and not re.fullmatch(r"[1-9]\d*", slices):
        raise ConfigError(
            f"the number of slices in --topology {text!r} must be an integer of at least 1, got {slices!r}. For two "
            f"slices, pass --topology '2*{one}'."
        )
    chip = CHIPS.get(name)
    if chip is None:
        near = nearest(name, CHIPS)
        close = next((known for known in CHIPS if f"'{known}'" in near), None)
        hint = f" Did you mean {f'{close}:{CHIPS[close].example}'!r}?" if close else ""
        raise ConfigError(
            f"unknown TPU {name!r} in --topology {text!r}.{hint} Known TPUs, each with a typical size: {examples}."
        )
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes) or sizes.count("x") + 1 != chip.axes:
        wanted = "x".join("ABC"[: chip.axes])
        raise ConfigError(
            f"a topology of {chip.name} must be {chip.name}:{wanted}, with the number of chips along {chip.axes} axes, "
            f"got {text!r}. Did you mean '{chip.name}:{chip.example}'?"
        )
    topology = Topology(chip, tuple(map(int, sizes.split("x"))), int(slices) if several else 1)
    chips = math.prod(topology.shape)
    if chips > chip.pod:
        raise ConfigError(
            f"{topology.slice_name} has {chips:,} chips, but a pod of {name} has only {chip.pod:,}. Pass a smaller "
            f"topology."
        )
    if topology.num_slices > 1 and chip.dcn_bandwidth is None:
        raise ConfigError(
            f"{name} does not support several slices, but --topology is {text!r}. Pass one slice, {topology.slice_name}"
            f", or another TPU: {', '.join(known for known, one in CHIPS.items() if one.dcn_bandwidth)}."
        )
    return topology


def topology_devices(topology: Topology) -> list[Any]:
    """Return the devices of a topology, to make a mesh of and compile for.

    Removes the flags for CPUs and GPUs from the environment variable `XLA_FLAGS`.

    Raises:
        CompilerError: libtpu is not installed, crashes with this JAX, or does not support the topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise CompilerError('planning needs the TPU compiler, libtpu. Install it: pip install "libtpu>=0.0.51"')
    # libtpu reads XLA_FLAGS at its first program, and ends the process if it finds an unknown flag.
    flags = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join(flag for flag in flags if not re.match("--xla_(cpu|gpu)_", flag))
    bounds = [min(2, size) if size % 2 == 0 else 1 for size in topology.shape[:2]] + [1]
    options = {"topology_name": topology.slice_name, "chips_per_host_bounds": bounds}
    if any(topology.wraps):
        options["wrap"] = [*topology.wraps, False][:3]  # three entries, also for chips with two axes
    if topology.num_slices > 1:
        options["num_slices"] = topology.num_slices
    if topology.chip.config is not None:
        options["chip_config_name"] = topology.chip.config
    check_compiler(json.dumps(options))
    try:
        devices = topologies.get_topology_desc(platform="tpu", **options).devices
    except jax.errors.JaxRuntimeError as error:
        raise CompilerError(
            f"the TPU compiler does not support the topology {topology}. Try {topology.chip.name}:"
            f"{topology.chip.example}. The compiler's message: {str(error).partition(chr(10))[0]}"
        ) from error
    return list(devices)


@functools.cache
def check_compiler(options: str) -> None:
    """Compile a tiny program in a child process, because an incompatible libtpu crashes its process.

    `options` are those of `topologies.get_topology_desc`, as JSON. CompilerError if it crashed; the message names the
    compatible libtpu. Other errors are ignored, because they occur again in the caller.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # don't query Google Cloud's metadata server
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", PROBE, options]
    code = subprocess.run(command, env=environment, capture_output=True, check=False).returncode
    if -code not in CRASHES:
        return
    jax_version = library_version("jax")
    raise CompilerError(
        f"{library_version('libtpu')} does not work with {jax_version}: compiling one matrix multiplication crashed "
        f"({signal.Signals(-code).name}). Install the version that {jax_version} was released with: "
        f'pip install "{matching_libtpu()}"'
    )


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Memory of a compiled program, in bytes per device."""

    fits: bool
    """whether the program fits, as reported by the compiler; for a CPU, whose compiler has no limit, whether the needed
    bytes are available"""
    memory: dict[str, int]
    """bytes by kind"""
    needed_bytes: int
    """total"""
    available_bytes: int
    """bytes that the compiler may use; if the program fits, the HBM of a device"""
    host_memory: dict[str, int] = dataclasses.field(default_factory=dict)
    """bytes in the memory of the host for each device, by kind; empty if the program does not fit"""


def compile_program(lowered: jax.stages.Lowered, held: Mapping[str, int], topology: Topology) -> tuple[Fit, str | None]:
    """Compile a program for devices of a topology whose inputs hold these bytes per device, by kind.

    Returns the memory of the program, and its text (HLO), which is None if it is not available or the program does not
    fit. CompilerError if the compiler rejects the program for another reason than too little memory.
    """
    available, state = round(topology.hbm * GIB), sum(held.values())
    with tempfile.TemporaryDirectory() as folder, _without_cache():
        try:
            compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        except jax.errors.JaxRuntimeError as error:
            reported = memory_in_error(str(error))
            if reported is None:
                raise CompilerError(
                    "the compiler rejects this program, but not for lack of memory. The most common cause is the "
                    "attention kernel: try --execution.attention blockwise or reference. The compiler's message: "
                    + str(error).partition("\n")[0]
                ) from error
            needed, available = max(reported[0], state), reported[1]
            memory = {**held, "temporaries and the rest": needed - state}
            return Fit(fits=False, memory=memory, needed_bytes=needed, available_bytes=available), None
        text = _text(compiled, Path(folder))
    stats = compiled.memory_analysis()
    # Outputs that reuse the memory of donated inputs (aliases) need no memory of their own.
    own = stats.output_size_in_bytes - stats.alias_size_in_bytes
    memory = {
        **held,
        "padding and results": stats.argument_size_in_bytes + own - state,
        "temporaries, with activations": stats.temp_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
    }
    needed = sum(memory.values())
    fits = topology.chip in CHIPS.values() or needed <= available  # other compilers don't check the memory
    host = {
        "state": stats.host_argument_size_in_bytes,
        "results": stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes,
        "activations": stats.host_temp_size_in_bytes,
    }
    fit = Fit(fits=fits, memory=memory, needed_bytes=needed, available_bytes=available, host_memory=host)
    return fit, text if fits else None


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Disable JAX's compilation cache, which can't load a program without its devices.

    JAX reads its setting only once, so the cache is also reset, which deletes no file.
    """
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _text(compiled: jax.stages.Compiled, folder: Path) -> str | None:
    """Return the text of the program from JAX, or from the compiler's dump in `folder` if JAX can't read it."""
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError:  # JAX can't parse some asynchronous operations of newer compilers
        written = sorted(folder.glob("*after_optimizations.txt"), key=lambda path: path.stat().st_size)
        return written[-1].read_text() if written else None
