"""Text embeddings: our `embed` and transformers on PyTorch, with the same weights and texts.

Usage: python -m benchmarks.encoders [--models minilm bert] [--works one many] [--turns 5] [--threads 2]

Needs the parity environment (`make peers`). The models have the sizes of MiniLM (6 layers x 384) and BERT base (12 x
768), random weights, and a WordPiece vocabulary of random words, all written by transformers. Both sides tokenize, run
the encoder in float32 on `--threads` cores, and average the hidden states of each text. The peer sorts the texts by
length, pads batches of 32 to the longest text, and uses its default attention (scaled_dot_product_attention).

A ratio is the time of the peer divided by ours, so above 1 ours is faster. The table shows the median over the turns,
and the ratio of the fastest times, which other programs on the machine disturb least. On a busy machine only
`--threads 1` is fair, because the threads of PyTorch wait for each other, which takes long if other programs use their
cores. The last line is a JSON object.
"""

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.side_by_side import ENVIRONMENTS, ROOT, Worker, last_line, serve, versions

VOCABULARY, SPECIAL, PEER_BATCH = 30_522, ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), 32
MODELS = {"minilm": (6, 384), "bert": (12, 768)}
"""(number of layers, width) by name; both have 12 heads and d_ff = 4 x width"""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Texts to embed: `calls` calls with `texts` texts each, of `shortest` to `longest` tokens."""

    calls: int
    texts: int
    shortest: int = 4
    longest: int = 60


WORKS = {
    "one": Work(calls=16, texts=1),
    "one-512": Work(calls=1, texts=1, shortest=512, longest=512),
    "32": Work(calls=1, texts=32),
    "many": Work(calls=1, texts=512),
    "many-512": Work(calls=1, texts=8, shortest=512, longest=512),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """One comparison: medians over the turns, in milliseconds per text."""

    model: str
    work: str
    environment: str
    ours_ms: float
    peer_ms: float
    ratio: float
    """median of the ratios of the turns"""
    ratio_of_fastest: float
    ours_first_s: float
    """seconds of the first call, including compilation"""
    peer_first_s: float


def vocabulary() -> list[str]:
    """Return the special tokens, followed by distinct random words of two to nine letters."""
    random, letters = np.random.default_rng(0), list("abcdefghijklmnopqrstuvwxyz")
    words: dict[str, None] = {}
    while len(words) < VOCABULARY - len(SPECIAL):
        words["".join(random.choice(letters, random.integers(2, 10)))] = None
    return [*SPECIAL, *words]


def texts(work: Work) -> list[list[str]]:
    """Return the texts of each call. The lengths of a `Work` include [CLS] and [SEP]."""
    random, words = np.random.default_rng(1), np.array(vocabulary()[len(SPECIAL) :])
    lengths = random.integers(work.shortest, work.longest + 1, (work.calls, work.texts))
    return [[" ".join(random.choice(words, length - 2)) for length in row] for row in lengths]


def prepare(folder: str) -> None:
    """Write the models and their tokenizers in the format of transformers."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    ids = {word: i for i, word in enumerate(vocabulary())}
    library = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    library.normalizer, library.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    marks = [(mark, ids[mark]) for mark in ("[CLS]", "[SEP]")]
    library.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    names = {f"{mark[1:-1].lower()}_token": mark for mark in SPECIAL}
    for name, (layers, width) in MODELS.items():
        torch.manual_seed(0)
        sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 4 * width}
        BertModel(BertConfig(vocab_size=VOCABULARY, **sizes)).save_pretrained(f"{folder}/{name}")
        PreTrainedTokenizerFast(tokenizer_object=library, **names).save_pretrained(f"{folder}/{name}")


def ours(folder: str, work: Work) -> Callable[[], Any]:
    """Return our side: `embed` with default options."""
    from transformer.inference import embed, open_model

    opened, given = open_model(folder), texts(work)
    return lambda: [embed(opened, call) for call in given]


def pytorch(folder: str, work: Work) -> Callable[[], Any]:
    """Return the peer: texts sorted by length, padded to the longest of a batch, mean over the tokens of each text."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    given = texts(work)

    @torch.inference_mode()
    def embed(call: list[str]) -> np.ndarray:
        order = sorted(range(len(call)), key=lambda number: -len(call[number]))
        vectors = np.empty((len(call), model.config.hidden_size), np.float32)
        for start in range(0, len(order), PEER_BATCH):
            numbers = order[start : start + PEER_BATCH]
            inputs = tokenizer([call[number] for number in numbers], padding=True, return_tensors="pt")
            hidden, mask = model(**inputs).last_hidden_state, inputs["attention_mask"][..., None]
            vectors[numbers] = ((hidden * mask).sum(1) / mask.sum(1)).numpy()
        return vectors

    return lambda: [embed(call) for call in given]


SIDES = {"ours": ours, "torch": pytorch}


def check(folder: str) -> float:
    """Return the largest difference between the embeddings of both sides, for a few texts of each model."""
    work = Work(calls=1, texts=5)
    found = {name: [SIDES[name](f"{folder}/{model}", work)()[0] for model in MODELS] for name in SIDES}
    return max(float(np.abs(a - b).max()) for a, b in zip(*found.values(), strict=True))


def compare(folder: str, model: str, name: str, environment: str, turns: int, threads: int) -> Result:
    """Measure both sides of one work, in two processes that take turns."""
    work, words = WORKS[name], ("benchmarks.encoders", "--works", name, "--threads", str(threads), "--worker")
    set_first = ENVIRONMENTS[environment] | {"OMP_NUM_THREADS": str(threads)}
    sides = {side: Worker(*words, side, f"{folder}/{model}", environment=set_first) for side in SIDES}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(turns):
        for side in sorted(sides, reverse=bool(turn % 2)):
            seconds[side].append(statistics.median(sides[side].run(3)) / (work.calls * work.texts))
    for worker in sides.values():
        worker.stop()
    return Result(
        model=model,
        work=name,
        environment=environment,
        ours_ms=1000 * statistics.median(seconds["ours"]),
        peer_ms=1000 * statistics.median(seconds["torch"]),
        ratio=statistics.median(p / o for p, o in zip(seconds["torch"], seconds["ours"], strict=True)),
        ratio_of_fastest=min(seconds["torch"]) / min(seconds["ours"]),
        ours_first_s=sides["ours"].facts["first"],
        peer_first_s=sides["torch"].facts["first"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--turns", type=int, default=5, help="turns of each side, three runs per turn")
    parser.add_argument("--threads", type=int, default=2, help="number of cores that each side uses")
    parser.add_argument("--environments", nargs="+", choices=ENVIRONMENTS, default=["untouched"])
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "FOLDER"), help="internal: run one side as a worker")
    options = parser.parse_args()
    if options.worker:
        side, folder = options.worker
        if side == "prepare":
            prepare(folder)
        elif side == "check":
            print(f"largest difference between the embeddings of both sides: {check(folder):.1e}")
        else:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
            serve(SIDES[side](folder, WORKS[options.works[0]]), warm_up=1)
        return

    from benchmarks.machine import machine

    where, found = machine(), []
    with tempfile.TemporaryDirectory() as folder:
        for part in ("prepare", "check"):
            command = [sys.executable, "-m", "benchmarks.encoders", "--worker", part, folder]
            subprocess.run(command, cwd=ROOT, check=True)
        print(f"{where}, {options.threads} thread(s) per side")
        print(f"{'model':>7} {'work':>9} {'setting':>10} {'ours ms':>8} {'peer ms':>8} {'ratio':>6}", end="")
        print(f" {'fastest':>8} {'first s':>8} {'peer':>6}")
        for environment in options.environments:
            for model in options.models:
                for name in options.works:
                    one = compare(folder, model, name, environment, options.turns, options.threads)
                    found.append(one)
                    print(f"{model:>7} {name:>9} {environment:>10} {one.ours_ms:8.2f} {one.peer_ms:8.2f}", end="")
                    print(f" {one.ratio:6.2f} {one.ratio_of_fastest:8.2f}", end="")
                    print(f" {one.ours_first_s:8.2f} {one.peer_first_s:6.2f}", flush=True)
    first = found[0]
    print(
        last_line(
            f"embed, {first.model}, {first.work}",
            1000 / first.peer_ms,
            1000 / first.ours_ms,
            first.ratio,
            "texts/s",
            where,
            all=[dataclasses.asdict(one) for one in found],
            versions=versions("jax", "flax", "torch", "transformers"),
        )
    )


if __name__ == "__main__":
    main()
