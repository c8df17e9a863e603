"""Time to compile a training step over depth: layers scanned, and layers unrolled.

Usage: python -m benchmarks.compile [--depths 2 12 48] [--unrolled 2 12] [--turns 3]

A small CausalLM (d_model 64, 32 tokens a row), its whole step: loss, gradients, AdamW. Traced, lowered and compiled
anew each time, all caches cleared and none kept on disk; the depths take turns. A scan has one layer to compile
however many there are: the goal is at most 1.3 times as long at depth 48 as at 2. The last line is a JSON object, whose
`ratio` is the deepest scan over the shallowest.
"""

import argparse
import functools
import statistics

import jax
import jax.numpy as jnp

from benchmarks.machine import machine
from benchmarks.side_by_side import last_line, take_turns, times_faster, versions
from transformer.config import Execution, TransformerConfig
from transformer.data import TextFile
from transformer.training import OptimizerConfig, Recipe, TrainingConfig
from transformer.training._state import abstract_state
from transformer.training._step import make_train_step

ROWS, LENGTH = 2, 32
GOAL = 1.3


def recipe(depth: int, scan: bool) -> Recipe:
    """Everything but depth and scan as small as it goes without becoming something else."""
    return Recipe(
        name="benchmark",
        model=TransformerConfig(vocab_size=64, d_model=64, num_layers=depth, num_heads=2, position="rotary"),
        data=TextFile(path="none", sequence_length=LENGTH, batch_size=ROWS),
        execution=Execution(scan=scan),
        optimizer=OptimizerConfig(weight_decay=0.1),
        training=TrainingConfig(),
    )


def compile_step(depth: int, scan: bool) -> None:
    """From Python to a program, everything anew."""
    jax.clear_caches()
    of = recipe(depth, scan)
    shape = functools.partial(jax.ShapeDtypeStruct, (ROWS, LENGTH))
    batch = {"tokens": shape(jnp.int32), "targets": shape(jnp.int32), "weights": shape(jnp.float32)}
    jax.jit(make_train_step(of), donate_argnums=0).lower(abstract_state(of), batch).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 12, 48], help="with a scan")
    parser.add_argument("--unrolled", type=int, nargs="*", default=[2, 12], help="depths without one")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    ways = [(depth, True) for depth in sorted(options.depths)] + [(depth, False) for depth in sorted(options.unrolled)]
    works = {way: functools.partial(compile_step, *way) for way in ways}
    seconds = take_turns(works, options.turns)
    where = machine()
    print(f"{where}; median of {options.turns}\n")
    print("| depth | layers | s | times as long as the shallowest |\n| ---: | --- | ---: | ---: |")
    found = {}
    for depth, scan in ways:
        layers = "scanned" if scan else "unrolled"
        shallowest = seconds[min(way for way in ways if way[1] == scan)]
        times = times_faster(seconds[depth, scan], shallowest)
        found[f"{depth} {layers}"] = {"seconds": statistics.median(seconds[depth, scan]), "ratio": times}
        print(f"| {depth} | {layers} | {statistics.median(seconds[depth, scan]):.2f} | {times:.2f} |")
    first, last = f"{min(options.depths)} scanned", f"{max(options.depths)} scanned"
    ratio = found[last]["ratio"]
    print(f"\n{last}: {ratio:.2f} times {first} (goal: at most {GOAL}{'' if ratio <= GOAL else '; MISSED'})")
    print(
        last_line(
            f"compiling a training step, {last} beside {first}",
            *(found[one]["seconds"] for one in (first, last)),
            ratio,
            "seconds; ratio: ours / peer",
            where,
            all=found,
            versions=versions("jax", "flax"),
        )
    )


if __name__ == "__main__":
    main()
