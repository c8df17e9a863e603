"""Losses of the same training steps in many layouts over eight devices, compared with one device.

Usage: python -m benchmarks.layouts [--steps 20]

The eight devices are simulated on a CPU, so this does not measure speed. The layouts with two processes have four
devices per process. Prints the tables in docs/scaling.md.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping

if __name__ == "__main__":  # must be set before JAX is imported
    count = 4 if "--process" in sys.argv else 8
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"

import jax
import numpy as np

from transformer.config import Execution, LayerKind, MoE, RotaryOptions, StackOptions, TransformerConfig
from transformer.data import NumberWords, TextFile
from transformer.nn import DcnConfig, ParallelConfig
from transformer.training import OptimizerConfig, Recipe, TrainingConfig, place
from transformer.training._processes import join, part
from transformer.training._state import TrainState

ALONE = ParallelConfig(devices=1)
LAYOUTS = {
    "pmap x 8": ParallelConfig(kind="pmap"),
    "data x 8": ParallelConfig(),
    "fsdp x 8": ParallelConfig(fsdp=8),
    "tensor x 4, data x 2": ParallelConfig(tensor=4),
    "context x 4, data x 2": ParallelConfig(context=4),
    "expert x 4, data x 2": ParallelConfig(expert=4),
    "fsdp x 2, tensor x 2, data x 2": ParallelConfig(fsdp=2, tensor=2),
    "two slices: fsdp x 4, data x 2 across slices": ParallelConfig(fsdp=4, dcn=DcnConfig(data=2)),
    "two slices: tensor x 2, fsdp x 4, of which 2 across slices": ParallelConfig(
        fsdp=2, tensor=2, dcn=DcnConfig(fsdp=2)
    ),
}
PROCESSES = {
    "two processes: data x 8": ParallelConfig(),
    "two processes: fsdp x 4, data x 2": ParallelConfig(fsdp=4),
    "two processes: context x 2, tensor x 4": ParallelConfig(context=2, tensor=4),
    "two processes: fsdp x 4, data x 2 across processes": ParallelConfig(fsdp=4, dcn=DcnConfig(data=2)),
}
VOCABULARY, ROWS, LENGTH, SOURCE_LENGTH = 61, 16, 32, 24


def recipe(task: str, parallel: ParallelConfig, dropout_rate: float = 0.0) -> Recipe:
    """Return a recipe: a small causal model with a mixture of experts in every second layer, or an encoder-decoder."""
    kinds = (LayerKind(), LayerKind(moe=MoE(num_experts=4, top_k=2))) if task == "causal_lm" else (LayerKind(),)
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "num_layers": 2, "num_heads": 4, "feed_forward.d_ff": 64}
    model = TransformerConfig(
        **sizes,
        position=RotaryOptions(),
        dropout_rate=dropout_rate,
        stack=StackOptions(period=kinds),
    )
    data = {
        "causal_lm": TextFile(path="-", sequence_length=LENGTH, batch_size=ROWS),
        "seq2seq": NumberWords(batch_size=ROWS),
    }[task]
    return Recipe(
        name="layouts",
        model=model,
        data=data,
        execution=Execution(scan=True),
        parallel=parallel,
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=5),
        training=TrainingConfig(steps=100),
    )


def batches(task: str, steps: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of random tokens, with rows of different lengths."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        lengths = rng.integers(1, LENGTH + 1, ROWS)
        tokens = rng.integers(3, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32)
        inside = (np.arange(LENGTH) < lengths[:, None]).astype(np.float32)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": inside}
        if task == "seq2seq":
            batch["source"] = rng.integers(3, VOCABULARY, (ROWS, SOURCE_LENGTH)).astype(np.int32)
            batch["source_lengths"] = rng.integers(1, SOURCE_LENGTH + 1, ROWS).astype(np.int32)
        yield batch


def losses(of: Recipe, given: Iterator[Mapping[str, np.ndarray]]) -> tuple[np.ndarray, TrainState]:
    """Return the loss of each step in nats per target, and the state after the last step."""
    placement = place(of)
    state, found = placement.spread(placement.new_state()), []
    for batch in given:
        own = {name: array[placement.rows(len(array))] for name, array in batch.items()}
        state, metrics = placement.train_step(state, own)
        found.append(float(metrics["loss_sum"]) / float(metrics["weight"]))
    return np.array(found), placement.whole(state)


def losses_of_two_processes(task: str, name: str, steps: int) -> np.ndarray:
    """Return the losses as `losses` does, from two processes with four devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "benchmarks.layouts", "--steps", str(steps), "--task", task, "--layout", name]
    members = [
        subprocess.Popen([*command, "--coordinator", place, "--process", str(index)], stdout=subprocess.PIPE, text=True)
        for index in (0, 1)
    ]
    outputs = [member.communicate()[0] for member in members]
    if any(member.returncode for member in members):
        raise SystemExit(f"one of the two processes failed; see its output above. Command: {' '.join(command)}")
    return np.array(json.loads(outputs[0].splitlines()[-1]))


def one_of_two(options: argparse.Namespace) -> None:
    """Run one of the two processes of a layout. The first one prints the losses."""
    join(ParallelConfig(coordinator=options.coordinator, num_processes=2, process_id=options.process))
    parallel = PROCESSES[options.layout]
    found, _ = losses(recipe(options.task, parallel, 0.1), batches(options.task, options.steps))
    if options.process == 0:
        print(f"\n{json.dumps(found.tolist())}")
    part()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    for flag in ("--task", "--layout", "--coordinator"):
        parser.add_argument(flag, help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process is not None:
        one_of_two(options)
        return
    print(f"{len(jax.devices())} x {jax.devices()[0].device_kind}, jax {jax.__version__}, {options.steps} steps\n")
    for task, title in (("causal_lm", "CausalLM, mixture of experts in every second layer"), ("seq2seq", "Seq2Seq")):
        print(f"| {title} | dropout | loss of the last step | largest relative difference to one device |")
        print("| --- | ---: | ---: | ---: |", flush=True)
        alone = {rate: losses(recipe(task, ALONE, rate), batches(task, options.steps))[0] for rate in (0.0, 0.1)}
        for name, parallel in {"one device": ALONE, **LAYOUTS}.items():
            rate = 0.0 if parallel.kind == "pmap" else 0.1  # pmap uses a different dropout mask on each device
            found, _ = losses(recipe(task, parallel, rate), batches(task, options.steps))
            print_row(name, rate, found, alone[rate])
        for name in PROCESSES:
            print_row(name, 0.1, losses_of_two_processes(task, name, options.steps), alone[0.1])
        print()


def print_row(name: str, rate: float, found: np.ndarray, alone: np.ndarray) -> None:
    """Print one row of the table."""
    print(f"| {name} | {rate} | {found[-1]:.6f} | {np.abs(found / alone - 1).max():.1e} |", flush=True)


if __name__ == "__main__":
    main()
