"""Whether a program fits a device, by the compiler's word, and what it does."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from transformer.training._chips import CHIPS
from transformer.training._memory import GIB, memory_in_error
from transformer.training.plan._topologies import CompilerError, Topology


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Memory of a compiled program. Bytes are those of one device."""

    fits: bool
    """whether the compiler found room for it; where no compiler tells (a CPU), whether a device has as much"""
    memory: dict[str, int]
    """bytes by kind"""
    needed_bytes: int
    """in all"""
    available_bytes: int
    """that the compiler may use; where it fits, the HBM of a device"""


def compile_program(lowered: jax.stages.Lowered, held: Mapping[str, int], topology: Topology) -> tuple[Fit, str | None]:
    """Compiles for devices of a topology: memory, and the program's text (None: not available, or it does not fit).

    `held` are bytes by kind of what is there before.

    Raises:
        CompilerError: the compiler refuses the program, and not because a device has too little memory.
    """
    available, state = round(topology.hbm * GIB), sum(held.values())
    with tempfile.TemporaryDirectory() as folder:
        try:
            compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        except jax.errors.JaxRuntimeError as error:
            told = memory_in_error(str(error))
            if told is None:
                raise CompilerError(
                    "the compiler refuses this program, for another reason than the memory of a device. Most often "
                    "that is the attention kernel: try another, --execution.attention blockwise or reference. It says: "
                    + str(error).partition("\n")[0]
                ) from error
            needed, available = max(told[0], state), told[1]
            memory = {**held, "temporaries and the rest": needed - state}
            return Fit(fits=False, memory=memory, needed_bytes=needed, available_bytes=available), None
        text = _text(compiled, Path(folder))
    stats = compiled.memory_analysis()
    own = stats.output_size_in_bytes - stats.alias_size_in_bytes
    memory = {
        **held,
        "padding and results": stats.argument_size_in_bytes + own - state,
        "temporaries, with activations": stats.temp_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
    }
    needed = sum(memory.values())
    fits = topology.chip in CHIPS.values() or needed <= available  # compilers of other devices never refuse
    return Fit(fits=fits, memory=memory, needed_bytes=needed, available_bytes=available), text if fits else None


def _text(compiled: jax.stages.Compiled, folder: Path) -> str | None:
    """The program, as JAX prints it, or as the compiler wrote it into a folder."""
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError:  # JAX can't read some asynchronous programs of a newer compiler
        written = sorted(folder.glob("*after_optimizations.txt"), key=lambda path: path.stat().st_size)
        return written[-1].read_text() if written else None
