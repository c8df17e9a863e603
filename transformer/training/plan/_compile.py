"""Compile a program for a topology: its memory, and its text."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from transformer.training._memory import memory_in_error
from transformer.training.plan._contract import CompilerError, Topology


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Memory of a compiled program, in bytes per device."""

    fits: bool
    """whether the program fits, as reported by the TPU compiler; other compilers have no limit, so whether the needed
    bytes are available"""
    memory: dict[str, int]
    """bytes by kind"""
    needed_bytes: int
    """total"""
    available_bytes: int
    """bytes that the program may use"""
    host_memory: dict[str, int] = dataclasses.field(default_factory=dict)
    """bytes in the memory of the host for each device, by kind; empty if the program does not fit"""


def compile_program(lowered: jax.stages.Lowered, held: Mapping[str, int], topology: Topology) -> tuple[Fit, str | None]:
    """Compile a program for devices of a topology whose inputs hold these bytes per device, by kind.

    Returns the memory of the program, and its text (HLO), which is None if it is not available or the program does not
    fit. CompilerError if the compiler rejects the program for another reason than too little memory.
    """
    available, state = topology.usable_bytes, sum(held.values())
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
    fits = topology.checks_memory or needed <= available
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
