"""Memory reported by the compiler: the program fits, does not fit, or is rejected for another reason."""

import jax
import jax.numpy as jnp
import pytest

from transformer.training._memory import memory_in_error
from transformer.training.plan import CHIPS, Chip, CompilerError, TpuTopology, parse_topology
from transformer.training.plan._compile import compile_program
from transformer.training.plan._measurement import PresentDevices


@pytest.mark.parametrize(
    ("message", "sizes"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 60.91G of 15.75G hbm.", (60.91, 15.75)),
        ("total memory required for HLO temporaries (60.91G) exceeds available HBM (15.75G)", (60.91, 15.75)),
    ],
)
def test_reads_memory_sizes_from_the_compiler_error(message, sizes):
    assert memory_in_error(message) == tuple(round(size * 2**30) for size in sizes)
    assert memory_in_error("RESOURCE_EXHAUSTED: something") is None


class Refused:
    """A program that the compiler rejects."""

    def __init__(self, message):
        self.message = message

    def compile(self, compiler_options):
        raise jax.errors.JaxRuntimeError(self.message)


def test_an_out_of_memory_compilation_is_a_result():
    lowered = Refused("RESOURCE_EXHAUSTED: Ran out of memory. Used 60.5G of 15.75G hbm.")
    fit, text = compile_program(lowered, {"parameters": 2**30}, parse_topology("v5e:1x1"))
    assert (fit.fits, text, fit.needed_bytes, fit.available_bytes) == (False, None, 60.5 * 2**30, 15.75 * 2**30)
    assert fit.memory == {"parameters": 2**30, "temporaries and the rest": 59.5 * 2**30}


@pytest.mark.parametrize(
    "message",
    ["RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 16.13M of 16.00M vmem.", "INTERNAL: no"],
)
def test_any_other_compiler_error_is_raised(message):
    told = rf"rejects this program.*--execution\.attention blockwise or reference\. The compiler's message: {message}$"
    with pytest.raises(CompilerError, match=told):
        compile_program(Refused(message + "\nand more"), {"parameters": 2**30}, parse_topology("v5e:1x1"))


@pytest.mark.parametrize(("needed", "fits"), [(0.9, True), (1.1, False)])
def test_handles_a_compiler_without_memory_limit(needed, fits):
    """For devices other than known TPUs, the needed memory is compared with the available memory."""
    numbers = 2**14
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((numbers,), jnp.float32))
    chip = Chip(
        name="x",
        flops=1,
        hbm=8 * numbers / needed / 2**30,
        hbm_bandwidth=1,
        link_bandwidth=1,
    )
    fit, text = compile_program(lowered, {"parameters": 4 * numbers}, PresentDevices(chip, 1))
    assert (fit.fits, text is not None) == (fits, fits)
    assert fit.needed_bytes == 8 * numbers
    assert compile_program(lowered, {}, TpuTopology(CHIPS["v5e"], (1, 1)))[0].fits
