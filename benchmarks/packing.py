"""Tokens a second that are no padding: Multi30k padded to the longest pair, in lengths, and packed.

Usage: python -m benchmarks.packing [--turns 6] [--batches 20] [--packed-lengths 64 128] [--RECIPE.OPTION ...]

The training step of configs/multi30k.py on batches of as many places each: pairs all padded to one length (buckets 1,
the peer), to six lengths, as the recipe has them, and several in one row (first fit; segments, positions begin anew).
One process, one state; the ways take turns of so many batches, which lie ready before the watch starts. Useful are
tokens of sources and targets that are no padding. All other options change the recipe, as train.py takes them. The last
line is a JSON object.
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
    """The recipe's data in several kinds of batches, of one tokenizer."""
    lengths = prepare(recipe.data)
    made = functools.partial(prepare, tokenizer=lengths.tokenizer)
    usual = type(recipe.data).__dataclass_fields__["buckets"].default  # beside packed_length no other may be given
    packed = {
        f"packed into {length}": made(dataclasses.replace(recipe.data, buckets=usual, packed_length=length))
        for length in packed_lengths
    }
    return {"padded": made(dataclasses.replace(recipe.data, buckets=1)), "lengths": lengths, **packed}


def counts(batches: Iterable[Batch]) -> tuple[int, int]:
    """Tokens that are no padding, and places."""
    padded, places = np.sum([padding(batch) for batch in batches], axis=0)
    return int(places - padded), int(places)


class Training:
    """A state, and the step that every batch goes through, whatever its shape."""

    def __init__(self, recipe: Recipe):
        self._placement = place(recipe)
        self._state = self._placement.spread(self._placement.new_state())

    def on(self, batches: Iterable[Batch]) -> None:
        """A step on each, done when this returns."""
        for batch in batches:
            self._state, metrics = self._placement.train_step(self._state, batch)
            float(metrics["loss_sum"])


def shapes(batches: Iterable[Batch]) -> dict[Any, Batch]:
    """A batch of each shape."""
    return {tuple(array.shape for array in batch.values()): batch for batch in batches}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--batches", type=int, default=20, help="of a turn")
    parser.add_argument("--packed-lengths", type=int, nargs="+", default=[64, 128], help="tokens a side of a row")
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
        told = ", ".join(f"{rows} x {source}+{target}" for rows, source, target in sizes)
        print(f"compiling {way}: rows x tokens {told}", flush=True)
        training.on(each.values())
    rest = {way: iter([turns[0][:1], *turns]) for way, turns in batches.items()}  # the first time is not counted
    works = {way: functools.partial(lambda turns: training.on(next(turns)), turns) for way, turns in rest.items()}
    seconds = take_turns(works, options.turns)
    # Seconds a useful token: turns differ in how much is useful
    a_token = {way: [s / n for s, n in zip(seconds[way], useful[way], strict=True)] for way in batches}
    where = machine()
    print(f"{where}; {options.turns} turns of {options.batches} steps\n")
    print("| batches | waste | useful tokens/s | places/s | of padded |\n| --- |" + " ---: |" * 4)
    figures = {}
    for way, turns in batches.items():
        kept, places = counts(batch for turn in turns for batch in turn)
        rate, ratio = 1 / statistics.median(a_token[way]), times_faster(a_token["padded"], a_token[way])
        figures[way] = {"waste": 1 - kept / places, "useful_tokens_per_second": rate, "ratio": ratio}
        all_places = places / sum(seconds[way])
        print(f"| {way} | {100 * (1 - kept / places):.1f} % | {rate:,.0f} | {all_places:,.0f} | {ratio:.2f} |")
    best = max((way for way in batches if way != "padded"), key=lambda way: figures[way]["ratio"])
    rates = [figures[way]["useful_tokens_per_second"] for way in ("padded", best)]
    print(
        last_line(
            f"training step of multi30k, {best} beside padded",
            *rates,
            figures[best]["ratio"],
            "useful tokens/s",
            where,
            all=figures,
            versions=versions("jax", "flax", "grain"),
        )
    )


if __name__ == "__main__":
    keep_freed_memory()  # as train.py does
    main()
