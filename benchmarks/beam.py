"""Throughput of beam search with beam size 4, in sentences per second: ours and `generate` of transformers.

Usage: python -m benchmarks.beam [--sentences 1000] [--new 16] [--peer-batch 64] [--turns 3]

Needs the parity environment (`make peers`). Both sides use the same random weights of a Marian model with the size of
configs/multi30k.py (d_model 128, 4 + 4 layers, d_ff 512, vocabulary 6,000). The sources have the length of captions (5
to 30 tokens). No hypothesis ends early, so both sides generate the same number of tokens. Both sort the sentences by
length; ours chooses its batches, the peer uses batches of `--peer-batch`. The last line is a JSON object.
"""

import argparse
import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.side_by_side import ENVIRONMENTS, ROOT, compare, last_line, serve, versions
from transformer.cli._allocator import keep_freed_memory

VOCABULARY, BEAM, ALPHA, PAD = 6_000, 4, 0.6, 5_999


def sources(count: int) -> list[list[int]]:
    """Return the token ids of each sentence."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.normal(13, 4.5, count).round(), 5, 30).astype(int)
    return [random.integers(1, VOCABULARY - 1, length).tolist() for length in lengths]


def prepare(folder: str) -> None:
    """Write the model in the format of transformers."""
    from transformers import MarianConfig, MarianMTModel

    layers = {f"{part}_layers": 4 for part in ("encoder", "decoder")}
    heads = {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
    hidden = {f"{part}_ffn_dim": 512 for part in ("encoder", "decoder")}
    config = MarianConfig(
        vocab_size=VOCABULARY,
        d_model=128,
        activation_function="relu",
        max_position_embeddings=128,
        pad_token_id=PAD,
        eos_token_id=0,
        decoder_start_token_id=PAD,
        forced_eos_token_id=None,
        init_std=0.1,
        **layers,
        **heads,
        **hidden,
    )
    MarianMTModel(config).save_pretrained(folder)


def ours(folder: str, count: int, new: int, batch: int) -> Callable[[], Any]:
    """Return our beam search with default options except for the beam."""
    import transformer
    from transformer.generate import Beam, beam_search_all

    model, params = transformer.load(folder)
    rows, beam = sources(count), Beam(size=BEAM, alpha=ALPHA)

    def run():
        found = beam_search_all(model, params, rows, begin=[PAD], eos_id=None, beam=beam, max_new_tokens=new)
        assert all(len(best[0].tokens) == new for best in found)

    return run


def pytorch(folder: str, count: int, new: int, batch: int) -> Callable[[], Any]:
    """Return the beam search of transformers, with the sentences sorted by length."""
    import torch
    from transformers import MarianMTModel

    model = MarianMTModel.from_pretrained(folder).eval()
    rows = sorted(sources(count), key=len)
    options = {"num_beams": BEAM, "length_penalty": ALPHA, "early_stopping": True, "do_sample": False}
    options |= {"max_new_tokens": new, "min_new_tokens": new, "eos_token_id": None, "pad_token_id": PAD}

    def run():
        for start in range(0, count, batch):
            part = rows[start : start + batch]
            longest = max(map(len, part))
            ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in part])
            with torch.no_grad():
                found = model.generate(ids, attention_mask=(ids != PAD).long(), **options)
            assert found.shape == (len(part), 1 + new)

    return run


SIDES = {"ours": ours, "torch": pytorch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--new", type=int, default=16, help="generated tokens per translation")
    parser.add_argument("--peer-batch", type=int, default=64, help="batch size of the peer")
    parser.add_argument("--environments", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    parser.add_argument("--turns", type=int, default=3, help="turns of each side")
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "FOLDER"), help="internal: run one side as a worker")
    options = parser.parse_args()
    if options.worker:
        if options.worker[0] == "ours":
            keep_freed_memory()  # the same allocator settings as train.py and python -m transformer
        side, folder = options.worker
        if side == "prepare":
            prepare(folder)
        else:
            serve(SIDES[side](folder, options.sentences, options.new, options.peer_batch), warm_up=0)
        return

    from benchmarks.machine import machine

    where, module = machine(), "benchmarks.beam"
    found = []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", module, "--worker", "prepare", folder], cwd=ROOT, check=True)
        print(f"{where}\n{'setting':>10} {'ours sentences/s':>17} {'peer sentences/s':>17} {'ours / peer':>12}")
        for environment in options.environments:
            sizes = ("--sentences", "--new", "--peer-batch")
            values = (options.sentences, options.new, options.peer_batch)
            words = [word for name, value in zip(sizes, values, strict=True) for word in (name, str(value))]
            sides = [(module, *words, "--worker", side, folder) for side in SIDES]
            one = compare("beam 4", "transformers", *sides, environment=environment, turns=options.turns, times=1)
            found.append(one)
            rates = [options.sentences / seconds for seconds in (one.ours_seconds, one.peer_seconds)]
            print(f"{environment:>10} {rates[0]:17.1f} {rates[1]:17.1f} {one.ratio:12.2f}", flush=True)
    print(
        last_line(
            f"beam {BEAM}, {options.sentences} sentences, Marian with the size of Multi30k",
            *(options.sentences / seconds for seconds in (found[0].peer_seconds, found[0].ours_seconds)),
            found[0].ratio,
            "sentences/s",
            where,
            all=[dataclasses.asdict(one) for one in found],
            versions=versions("jax", "flax", "torch", "transformers"),
        )
    )


if __name__ == "__main__":
    main()
