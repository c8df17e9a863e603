"""Throughput in non-padding tokens per second: Multi30k padded to the longest pair, in length buckets, and packed.

Usage: python -m benchmarks.packing [--turns 6] [--batches 20] [--packed-lengths 64 128] [--RECIPE.OPTION ...]

The training step of configs/multi30k.py on batches with an equal number of positions: all pairs padded to one length
(buckets 1, the baseline), six length buckets as in the recipe, and several pairs packed into one row (first fit;
attention is restricted to segments, and positions restart in each). One process, one state; the kinds of batches take
turns, and the batches of a turn are created before the timing starts. Useful tokens are the non-padding tokens of
sources and targets. All other options override fields of the recipe, as in train.py. The last line is a JSON object.
"""

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.machine import machine
from benchmarks.side_by_side import ROOT, last_line, take_turns, times_faster, versions
from transformer.cli._allocator import keep_freed_memory
from transformer.data import Batch, Dataset, prepare
from transformer.data._dataset import padding
from transformer.training import Recipe, find_recipe, load_recipe_file, override, place, with_vocabulary


def datasets(recipe: Recipe, packed_lengths: Sequence[int]) -> dict[str, Dataset]:
    """Return the data of the recipe in each kind of batches, with one tokenizer."""
    lengths = prepare(recipe.data)
    made = functools.partial(prepare, tokenizer=lengths.tokenizer)
    usual = type(recipe.data).__dataclass_fields__["buckets"].default  # packed_length requires the default
    packed = {
        f"packed into {length}": made(dataclasses.replace(recipe.data, buckets=usual, packed_length=length))
        for length in packed_lengths
    }
    return {"padded": made(dataclasses.replace(recipe.data, buckets=1)), "lengths": lengths, **packed}


def counts(batches: Iterable[Batch]) -> tuple[int, int]:
    """Return the number of non-padding tokens, and of all positions."""
    padded, positions = np.sum([padding(batch) for batch in batches], axis=0)
    return int(positions - padded), int(positions)


class Training:
    """A training state, and the training step for batches of all shapes."""

    def __init__(self, recipe: Recipe):
        self._placement = place(recipe)
        self._state = self._placement.spread(self._placement.new_state())

    def on(self, batches: Iterable[Batch]) -> None:
        """Take one step per batch, and wait for it to finish."""
        for batch in batches:
            self._state, metrics = self._placement.train_step(self._state, batch)
            float(metrics["loss_sum"])


def shapes(batches: Iterable[Batch]) -> dict[Any, Batch]:
    """Return one batch per shape."""
    return {tuple(array.shape for array in batch.values()): batch for batch in batches}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--batches", type=int, default=20, help="batches per turn")
    parser.add_argument(
        "--packed-lengths",
        type=int,
        nargs="+",
        default=[64, 128],
        help="source tokens, and target tokens, per packed row",
    )
    options, words = parser.parse_known_args()
    recipe, _ = load_recipe_file(find_recipe("multi30k", ROOT))
    recipe = override(recipe, words, program="python -m benchmarks.packing")
    found = datasets(recipe, options.packed_lengths)
    recipe = with_vocabulary(recipe, found["padded"].tokenizer.vocab_size)
    batches = {}
    for way, dataset in found.items():
        order = dataset.train_batches(recipe.training.seed)
        batches[way] = [[next(order) for _ in range(options.batches)] for _ in range(options.turns)]
    useful = {way: [counts(turn)[0] for turn in turns] for way, turns in batches.items()}
    training = Training(recipe)
    for way, turns in batches.items():
        each = shapes(batch for turn in turns for batch in turn)
        sizes = [(*batch["source"].shape, batch["tokens"].shape[1]) for batch in each.values()]
        shown = ", ".join(f"{rows} x {source}+{target}" for rows, source, target in sizes)
        print(f"compiling {way}: rows x tokens {shown}", flush=True)
        training.on(each.values())
    rest = {way: iter([turns[0][:1], *turns]) for way, turns in batches.items()}  # first item: warm-up
    works = {way: functools.partial(lambda turns: training.on(next(turns)), turns) for way, turns in rest.items()}
    seconds = take_turns(works, options.turns)
    # Seconds per useful token, because turns have different numbers of useful tokens.
    per_token = {way: [s / n for s, n in zip(seconds[way], useful[way], strict=True)] for way in batches}
    where = machine()
    print(f"{where}; {options.turns} turns of {options.batches} steps\n")
    print("| batches | padding | useful tokens/s | positions/s | ratio to padded |\n| --- |" + " ---: |" * 4)
    figures = {}
    for way, turns in batches.items():
        kept, positions = counts(batch for turn in turns for batch in turn)
        rate, ratio = 1 / statistics.median(per_token[way]), times_faster(per_token["padded"], per_token[way])
        figures[way] = {"waste": 1 - kept / positions, "useful_tokens_per_second": rate, "ratio": ratio}
        all_positions = positions / sum(seconds[way])
        print(f"| {way} | {100 * (1 - kept / positions):.1f} % | {rate:,.0f} | {all_positions:,.0f} | {ratio:.2f} |")
    best = max((way for way in batches if way != "padded"), key=lambda way: figures[way]["ratio"])
    rates = [figures[way]["useful_tokens_per_second"] for way in ("padded", best)]
    print(
        last_line(
            f"training step of multi30k, {best} compared with padded",
            *rates,
            figures[best]["ratio"],
            "useful tokens/s",
            where,
            all=figures,
            versions=versions("jax", "flax", "grain"),
        )
    )


if __name__ == "__main__":
    keep_freed_memory()  # the same allocator settings as train.py
    main()
