"""Cost of training steps on TPUs according to the TPU compiler, compared with MaxText.

Usage: python -m benchmarks.tpu_step [--cases llama3_8b_full ...] [--list]

Needs libtpu (`pip install "libtpu>=0.0.51"`) and no TPU: nothing runs on a device. Each case compiles the training step
of a recipe for a topology (1 to 5 minutes) and prints, per device and step: peak memory; FLOPs outside Pallas kernels;
HBM traffic; bytes sent to other devices; calls of Pallas kernels; bytes that copies move; seconds of lowering and
compilation. Loops count as often as they run. The last line is a JSON object.

The figures of MaxText are constants: they were compiled once, with the same shapes, number formats and chips (commit
e591f30, libtpu 0.0.52, November 2026). Its policy minimal_with_context stores about what our policy dots stores. Its
HBM traffic was counted before this project counted reads through nested fusions that only change a view. With those
older rules ours was 740 GB (llama3_8b_full) and 757 GB (llama3_8b_dots) on 2026-11-24.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.side_by_side import versions
from transformer.cli._plan import quiet_stderr

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Step:
    """Cost of a training step, per device."""

    peak_gib: float
    """peak memory, GiB"""
    tflops: float | None = None
    """FLOPs outside Pallas kernels, in units of 10^12"""
    hbm_gb: float | None = None
    """bytes read from and written to the HBM, in units of 10^9"""
    wire_gib: float | None = None
    """bytes sent to other devices, GiB"""
    kernels: int | None = None
    """calls of Pallas kernels"""
    copies_gib: float | None = None
    """bytes read and written by copies that are not part of another operation, GiB"""
    compile_seconds: float | None = None
    """seconds of lowering and compilation"""
    mfu: float | None = None
    """estimated model FLOPs utilization, percent"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training step to compile: recipe, topology and options, and the figures of MaxText for the same step."""

    recipe: str
    topology: str
    options: Sequence[str] = ()
    maxtext: Step | None = None


FULL = Step(peak_gib=14.5, tflops=939, hbm_gb=762, wire_gib=57, kernels=128)
DOTS = Step(peak_gib=56.6, tflops=772, hbm_gb=758, wire_gib=57, kernels=96)
WHOLE_1B = ("--lora", "None", "--execution.remat", "full")
CASES = {
    "llama3_8b_full": Case(recipe="llama3_8b", topology="v5p:4x4x4", maxtext=FULL),
    "llama3_8b_full_data4": Case(
        recipe="llama3_8b",
        topology="v5p:4x4x4",
        options=("--parallel.data", "4", "--parallel.fsdp", "16"),
        maxtext=FULL,
    ),
    "llama3_8b_dots": Case(
        recipe="llama3_8b", topology="v5p:4x4x4", options=("--execution.remat", "dots"), maxtext=DOTS
    ),
    "llama3_8b_32k": Case(
        recipe="llama3_8b",
        topology="v5p:4x4x4",
        options=("--data.sequence-length", "32768", "--data.batch-size", "32", "--data.eval-batch-size", "32")
        + ("--parallel.fsdp", "16", "--parallel.context", "4"),
    ),
    "mixtral_8x7b": Case(recipe="mixtral_8x7b", topology="v5p:4x4x4", maxtext=Step(peak_gib=23.5, compile_seconds=234)),
    "llama_1b_v5e": Case(recipe="llama_1b", topology="v5e:2x4", options=(*WHOLE_1B, "--data.batch-size", "32")),
    "llama_1b_v6e": Case(recipe="llama_1b", topology="v6e:4x4", options=(*WHOLE_1B, "--data.batch-size", "64")),
    "llama_1b_lora": Case(recipe="llama_1b", topology="v5e:1x1", options=("--execution.remat", "full")),
}
"""cases by name; the memory and the compile time of MaxText's Mixtral are the only figures known of it"""


def compiled_step(case: Case) -> Step:
    """Compile the training step of a case and count its cost; only the peak memory if it does not fit."""
    from transformer.training._overrides import find_recipe, load_recipe_file, override
    from transformer.training.plan import make_plan, parse_topology, topology_devices, without_data

    recipe, about = load_recipe_file(find_recipe(case.recipe))
    recipe, _ = without_data(override(recipe, case.options, program="tpu_step", description=about))
    topology = parse_topology(case.topology)
    with quiet_stderr():
        plan = make_plan(recipe, topology, topology_devices(topology))
    peak, cost = plan.needed_bytes / GIB, plan.cost
    if cost is None or plan.estimate is None:
        return Step(peak_gib=peak, compile_seconds=plan.seconds)
    return Step(
        peak_gib=peak,
        tflops=cost.flops / 1e12,
        hbm_gb=cost.hbm_bytes / 1e9,
        wire_gib=cost.wire_bytes / GIB,
        kernels=cost.kernels,
        copies_gib=cost.copied_bytes / GIB,
        compile_seconds=plan.seconds,
        mfu=100 * plan.estimate.mfu,
    )


def main() -> None:
    """Compile the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES], metavar="NAME", help="cases to compile")
    parser.add_argument("--list", action="store_true", help="list the cases")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{name}: {_command(case)}" for name, case in CASES.items()))
        return
    os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

    fields = [field.name for field in dataclasses.fields(Step)]
    heads = ("GiB", "TFLOP", "HBM GB", "wire GiB", "Pallas", "copies GiB", "compile s", "MFU %")
    print("| case | " + " | ".join(heads) + " |")
    print("| --- |" + " ---: |" * len(heads))
    results = {}
    for name in args.cases:
        case = CASES[name]
        ours = compiled_step(case)
        results[name] = {"command": _command(case), "ours": dataclasses.asdict(ours)}
        print(_row(name, ours, fields), flush=True)
        if case.maxtext is not None:
            results[name]["maxtext"] = dataclasses.asdict(case.maxtext)
            print(_row("  MaxText", case.maxtext, fields), flush=True)
    print(json.dumps({"results": results, "versions": versions("jax", "libtpu")}))


def _command(case: Case) -> str:
    return " ".join(["plan", "train", case.recipe, "--topology", case.topology, *case.options])


def _row(name: str, step: Step, fields: Sequence[str]) -> str:
    cells = [getattr(step, field) for field in fields]
    return f"| {name} | " + " | ".join("" if cell is None else f"{cell:.4g}" for cell in cells) + " |"


if __name__ == "__main__":
    main()
