"""Throughput for prompts of different lengths: one batch or continuous batching in slots; and speculative decoding.

Usage: python -m benchmarks.serving [--prompts 1 8 64] [--slots 4 8 16 32] [--turns 3] [--small]
                                    [--target WORKDIR --draft WORKDIR] [--guesses 2 4 8]

Slots: a model like GPT-2 with 12 layers and d_model 512 (--small: 2 and 64), random weights, in float32; prompts of 8
to 64 tokens. Several token ids end a text, so that one sampled token in 48 does: texts have 48 new tokens on average,
and at most 192; a single text always has 192. `generate` without slots keeps every row in the batch until the last one
ends; with `slots`, the next prompt takes the place of a finished row.

Draft: two trained models with the same tokenizer, a large and a small one, for example:
    python train.py configs/shakespeare_fast.py --workdir runs/large --model.num-layers 6 --model.d-model 256
    python train.py configs/shakespeare_fast.py --workdir runs/small --model.num-layers 1
Batch size 1, greedy and with sampling, within the context length of the training. The table also shows the acceptance
rate of the draft tokens. The last line is a JSON object.
"""

import argparse
import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import machine
from benchmarks.side_by_side import last_line, take_turns, times_faster, versions
from transformer import CausalLM, FeedForwardOptions, ParameterOptions, TransformerConfig
from transformer.cli._allocator import keep_freed_memory
from transformer.config import EmbeddingOptions, LearnedOptions
from transformer.generate import Draft, Sampling, generate
from transformer.generate._loop import decode
from transformer.generate._prompts import bucket, pad
from transformer.generate._sampling import SamplerParams
from transformer.generate._speculative import Proposer
from transformer.inference import LoadedModel, open_model

VOCABULARY, ENDS, MOST = 8_208, 171, 192
"""vocabulary size, number of token ids that end a row, and maximum new tokens per row"""
LINES = ("ROMEO:\n", "First Citizen:\n", "KING RICHARD II:\n", "What ", "The king", "O, ", "My lord, ", "And ")
"""prompts for speculative decoding"""
TEMPERATURES = (0.0, 0.8)


def random_model(small: bool) -> tuple[CausalLM, Any]:
    """Return an untrained model and its parameters."""
    sizes = {"d_model": 64, "num_layers": 2, "num_heads": 2} if small else {}
    sizes = {"d_model": 512, "num_layers": 12, "num_heads": 8} | sizes
    model = CausalLM(
        TransformerConfig(
            vocab_size=VOCABULARY,
            feed_forward=FeedForwardOptions(activation="gelu_tanh"),
            position=LearnedOptions(max_length=1_024),
            embedding=EmbeddingOptions(scale=False),
            parameters=ParameterOptions(initializer_range=0.02),
            **sizes,
        )
    )
    return model, jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]


def slots(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Print a table of tokens per second by number of prompts and slots, and return its values."""
    model, params = random_model(options.small)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{parameters:,} parameters; {VOCABULARY // ENDS} new tokens per text on average, at most {MOST}\n")
    print("| prompts | batch | new tokens | positions used | tokens/s | ratio to all at once | equal rows |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    random, found = np.random.default_rng(0), {}
    for count in options.prompts:
        prompts = [random.integers(ENDS, VOCABULARY, length).tolist() for length in random.integers(8, 65, count)]
        ends = range(ENDS) if count > 1 else None  # a single text of random length would not be representative
        write = functools.partial(
            generate, model, params, prompts, max_new_tokens=MOST, eos_id=ends, sampling=Sampling(), seed=1
        )
        sizes = [None, *(size for size in options.slots if size < count)]
        rows = {size: write(slots=size) for size in sizes}
        seconds = take_turns({size: functools.partial(write, slots=size) for size in sizes}, options.turns)
        tokens = {size: sum(map(len, rows[size])) for size in sizes}
        per_token = {size: [second / tokens[size] for second in seconds[size]] for size in sizes}
        for size in sizes:
            # Rounding depends on the batch size and can change a sampled token; from there on the rows differ.
            alike = statistics.mean(ours == peer for ours, peer in zip(rows[size], rows[None], strict=True))
            rate, ratio = 1 / statistics.median(per_token[size]), times_faster(per_token[None], per_token[size])
            used = "" if size else f"{100 * tokens[size] / (count * max(map(len, rows[size]))):.0f} %"
            name = f"{size} slots" if size else "all"
            peer = 1 / statistics.median(per_token[None])
            row = {"tokens_per_second": rate, "peer": peer, "ratio": ratio, "alike": alike}
            found[f"{count} prompts, {name}"] = row
            cells = [
                f"{count}",
                name,
                f"{tokens[size]:,}",
                used,
                f"{rate:,.0f}",
                f"{ratio:.2f}",
                f"{100 * alike:.0f} %",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)
    return found


def guesses(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Print a table of tokens per second of a model without and with a draft model, and return its values."""
    target, small = open_model(options.target), open_model(options.draft)
    size, less = (sum(leaf.size for leaf in jax.tree.leaves(one.params)) for one in (target, small))
    prompts = [target.tokenizer.encode(line) for line in LINES]
    new = (target.context or 256) - max(map(len, prompts))
    print(f"\n{size:,} parameters, draft model: {less:,}; {len(prompts)} texts of {new} tokens, batch size 1\n")
    print("| temperature | draft tokens | acceptance rate | tokens per round | tokens/s | speedup | equal rows |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    found = {}
    for temperature in TEMPERATURES:
        sampling = Sampling(temperature=temperature)
        drafts = {count: Draft(model=small.model, params=small.params, tokens=count) for count in options.guesses}

        def write(draft, sampling=sampling):
            given = {"max_new_tokens": new, "sampling": sampling, "draft": draft}
            return [generate(target.model, target.params, [prompt], **given)[0] for prompt in prompts]

        ways = {None: None} | drafts
        rows = {count: write(draft) for count, draft in ways.items()}
        works = {count: functools.partial(write, draft) for count, draft in ways.items()}
        seconds = take_turns(works, options.turns)
        for count, draft in ways.items():
            alike = statistics.mean(ours == peer for ours, peer in zip(rows[count], rows[None], strict=True))
            rate, peer = (len(prompts) * new / statistics.median(seconds[way]) for way in (count, None))
            ratio = times_faster(seconds[None], seconds[count])
            row = {"tokens_per_second": rate, "peer": peer, "ratio": ratio, "alike": alike}
            taken, each = "", "1.00"
            if draft is not None:
                rounds = sum(rounds_of(target, draft, prompt, new, sampling) for prompt in prompts)
                row["tokens_a_round"] = len(prompts) * (new - 1) / rounds  # the prefill gives the first token
                row["taken"] = (row["tokens_a_round"] - 1) / count
                taken, each = f"{100 * row['taken']:.0f} %", f"{row['tokens_a_round']:.2f}"
            found[f"temperature {temperature}, {count or 'no'} guesses"] = row
            cells = [f"{temperature}", f"{count or ''}", taken, each, f"{rate:,.0f}", f"{ratio:.2f}"]
            print(f"| {' | '.join(cells)} | {100 * alike:.0f} % |", flush=True)
    return found


def rounds_of(target: LoadedModel, draft: Draft, prompt: list[int], new: int, sampling: Sampling) -> int:
    """Return the number of decoding steps of the large model for one row, which `generate` does not return."""
    width, room = bucket(len(prompt)), bucket(new)
    rows, keys = pad([np.array(prompt)], width), jax.random.split(jax.random.key(0), 1)
    how = SamplerParams.of(sampling, target.model.config.vocab_size), np.array([-1], np.int32), np.int32(new)
    slots = {"cache_slots": width + room + bucket(draft.tokens), "new_slots": room}
    proposals = {"proposer": Proposer.of(draft), "draft_params": draft.params}
    result = decode(target.model, target.params, rows, None, keys, *how, **slots, **proposals)
    return int(result.steps.max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prompts",
        type=int,
        nargs="*",
        default=[1, 8, 64],
        help="numbers of prompts; without a value: skip the part about slots",
    )
    parser.add_argument(
        "--slots",
        type=int,
        nargs="+",
        default=[4, 8, 16, 32],
        help="numbers of slots; those below the number of prompts are used",
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="use a tiny model, to test this program")
    parser.add_argument("--target", help="workdir of the large model")
    parser.add_argument("--draft", help="workdir of the small model")
    parser.add_argument("--guesses", type=int, nargs="+", default=[2, 4, 8], help="numbers of draft tokens per round")
    options = parser.parse_args()
    if (options.target is None) != (options.draft is None):
        parser.error("--target and --draft must be used together. Pass both or none.")
    if not options.prompts and options.target is None:
        parser.error("nothing to measure. Pass --prompts, or --target and --draft.")
    where = machine()
    print(where)
    found: dict[str, dict[str, dict[str, float]]] = {}
    if options.prompts:
        found["slots"] = slots(options)
    if options.target is not None:
        found["draft"] = guesses(options)
    part = "slots" if "slots" in found else "draft"
    names = [name for name in found[part] if not name.endswith(("all", "no guesses"))] or list(found[part])
    best = max(names, key=lambda name: found[part][name]["ratio"])
    print(
        last_line(
            f"{best} compared with {'all at once' if part == 'slots' else 'no draft model'}",
            found[part][best]["peer"],
            found[part][best]["tokens_per_second"],
            found[part][best]["ratio"],
            "tokens/s",
            where,
            all=found,
            versions=versions("jax", "flax"),
        )
    )


if __name__ == "__main__":
    keep_freed_memory()  # the same allocator settings as python -m transformer
    main()
