"""Tokenize a large corpus and read it: tokens per second and core, rows per second, and peak memory.

    python -m benchmarks.text_corpus [--gigabytes 2.0] [--folder DIR] [--packing] [--sequence-length 1024]

Writes files of JSON lines with random words (Zipf's law, 50,000 words, and numbers) into a temporary folder, learns a
BPE vocabulary of 32,000 tokens from a sample, tokenizes all files with all cores, and reads batches of 32 shuffled
rows. The peak memory (VmHWM) is that of the process that reads, which also starts the tokenization; that of the largest
tokenizing process is printed next to it. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.loading import status

WORDS = 50_000
FILES = 8
BATCHES = 500


def write(folder: Path, gigabytes: float) -> int:
    """Write JSON lines with documents of 50 to 1,000 words; return the number of bytes."""
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    shares = np.linspace(2.0, 0.2, len(letters))
    lengths = random.integers(2, 11, WORDS)
    words = np.array(["".join(random.choice(letters, n, p=shares / shares.sum())) for n in lengths], object)
    # A table of a million entries, in which the word of rank r has a share of 1 / r.
    share = 1 / np.arange(1, WORDS + 1)
    table = np.repeat(np.arange(WORDS), np.maximum(1, (share / share.sum() * 2**20).astype(int)))
    written = 0
    for number in range(FILES):
        with open(folder / f"part-{number}.jsonl", "w") as file:
            while file.tell() < gigabytes * 1e9 / FILES:
                chosen = words[table[random.integers(0, len(table), 500_000)]]
                chosen[::50] = random.integers(0, 10**7, 10_000).astype(str)
                ends = np.cumsum(random.integers(50, 1001, 900))
                for start, end in itertools.pairwise(ends):
                    file.write(json.dumps({"text": " ".join(chosen[start:end])}) + "\n")
        written += (folder / f"part-{number}.jsonl").stat().st_size
    return written


def measure(folder: Path, packing: bool, sequence_length: int) -> dict[str, float]:
    """Learn, tokenize and read in this process; return the measured numbers."""
    import grain  # noqa: F401  import before the measurement
    import jax
    import tokenizers  # noqa: F401

    from transformer.data import TextFiles, TokenizerConfig, prepare

    jax.numpy.zeros(1).block_until_ready()
    before, bpe = status("VmRSS"), TokenizerConfig(kind="bpe", vocab_size=32_000)
    config = TextFiles(
        paths=(str(folder / "*.jsonl"),),
        tokenizer=bpe,
        cache_dir=str(folder / "cache"),
        sequence_length=sequence_length,
        packing=packing,
    )
    begin = time.perf_counter()
    first = prepare(dataclasses.replace(config, paths=(str(folder / "part-0.jsonl"),)))  # learns, and tokenizes a part
    learned = time.perf_counter() - begin
    begin, used = time.perf_counter(), processor_seconds()
    dataset = prepare(config, first.tokenizer)
    seconds, used = time.perf_counter() - begin, processor_seconds() - used
    print(dataset.describe(), flush=True)
    tokens = sum(one.tokens.count for rows in (dataset._rows["train"], dataset._rows["validation"]) for one in rows)
    begin = time.perf_counter()
    again = prepare(config, first.tokenizer)
    opened = time.perf_counter() - begin
    assert again.fingerprint == dataset.fingerprint
    batches = dataset.train_batches(seed=0)
    next(batches)
    begin = time.perf_counter()
    for _ in range(BATCHES):
        next(batches)
    read = time.perf_counter() - begin
    cores = len(os.sched_getaffinity(0))
    return {
        "tokens": tokens,
        "seconds": seconds,
        "cores": cores,
        "tokens_per_s_per_core": tokens / seconds / cores,
        "tokens_per_processor_s": tokens / used,
        "learn_seconds": learned,
        "open_seconds": opened,
        "rows_per_s": BATCHES * config.batch_size / read,
        "read_tokens_per_s": BATCHES * config.batch_size * sequence_length / read,
        "imports": before,
        "peak": status("VmHWM"),
        "peak_of_a_worker": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }


def processor_seconds() -> float:
    """Return the processor time of all tokenizing processes that have ended: other programs do not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print lines of text and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, help="existing folder with space for twice the text")
    parser.add_argument("--packing", action="store_true", help="pack documents instead of reading windows")
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.packing, options.sequence_length)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        begin = time.perf_counter()
        size = write(Path(folder), options.gigabytes)
        print(f"wrote {size / 1e9:.2f} GB in {time.perf_counter() - begin:.0f} s", flush=True)
        child = [sys.executable, "-m", "benchmarks.text_corpus", "--measure", folder]
        child += ["--packing"] * options.packing + ["--sequence-length", str(options.sequence_length)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        out = subprocess.run(child, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
        stored = sum(path.stat().st_size for path in Path(folder, "cache").rglob("*") if path.is_file())
    *lines, last = out.splitlines()
    found = json.loads(last)
    print("\n".join(lines))
    print(
        f"tokenized in {found['seconds']:.0f} s by {found['cores']} processes: "
        f"{found['tokens_per_s_per_core'] / 1e6:.2f} M tokens/s per core, "
        f"{found['tokens_per_processor_s'] / 1e6:.2f} M per second of processor time; "
        f"{size / found['tokens']:.2f} bytes per token; opened again in {found['open_seconds']:.2f} s"
    )
    print(f"read {found['rows_per_s']:,.0f} rows/s, {found['read_tokens_per_s'] / 1e6:.1f} M tokens/s, in one process")
    print(
        f"peak memory {found['peak'] / 1e9:.2f} GB (after imports {found['imports'] / 1e9:.2f} GB), "
        f"{found['peak_of_a_worker'] / 1e9:.2f} GB in a tokenizing process"
    )
    print(json.dumps({"work": "text_corpus", "bytes": size, "cache_bytes": stored, **found}))


if __name__ == "__main__":
    main()
