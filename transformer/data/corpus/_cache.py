"""Tokenize the files of a source once, into shards on disk: in all cores, resumable, and never half a shard."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from transformer.config._local_paths import local_path
from transformer.data.corpus._files import Segment, Source
from transformer.data.corpus._shard import Facts, ShardJob, tokenize_shard
from transformer.data.tokenizers._base import Tokenizer

FORMAT = 1
"""version of the files in the cache"""
TOKENIZER = "tokenizer"
"""subfolder of the cache of a source"""
Job = TypeVar("Job")


def cache_root(folder: str | None) -> Path:
    """Return the folder of tokenized texts: `folder`, else `transformer-zoo/text` in the user's cache folder."""
    if folder is not None:
        return Path(folder).expanduser()
    caches = local_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "XDG_CACHE_HOME")
    return caches.expanduser() / "transformer-zoo" / "text"


def cache_key(*facts: object) -> str:
    """Return the name of a folder for what these facts determine."""
    return hashlib.sha256(json.dumps([FORMAT, *facts], sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Tokenized:
    """A source in the cache."""

    folder: Path
    source: Source
    shards: tuple[dict[str, Facts], ...]
    """facts of each shard, by split"""


def tokenize(source: Source, tokenizer: Tokenizer, field: str, held_out: float, root: Path) -> Tokenized:
    """Tokenize the shards of a source that the cache in `root` does not contain yet; `held_out` is a share.

    The name of the folder depends on the paths, sizes and modification times of the files, the tokenizer and the
    options. A shard is complete if its manifest exists and has the sizes of its files; the manifest is written last.
    An end token follows each document, if the tokenizer has one.
    """
    folder = root / cache_key(source.files, source.pattern, field, held_out, tokenizer.state())
    shards = source.shards()
    with cache_errors(root):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, f"tokenizes {source.pattern}"):
            missing = [number for number in range(len(shards)) if read_manifest(folder, number) is None]
            if missing:
                _check_space(folder, [shards[number] for number in missing])
                tokenizer.save_alone(folder / TOKENIZER)
                jobs = [ShardJob(folder, number, tuple(shards[number]), field, held_out) for number in missing]
                run_jobs(tokenize_shard, jobs, [job.size for job in jobs], f"tokenizing {source.pattern}")
    found = [read_manifest(folder, number) for number in range(len(shards))]
    if None in found:
        raise ValueError(f"shard {found.index(None)} in {folder} is incomplete. Delete that folder, and run again.")
    return Tokenized(folder, source, tuple(found))


def read_manifest(folder: Path, number: int) -> dict[str, Facts] | None:
    """Return the facts of a shard by split; None if it is missing or incomplete."""
    try:
        values = json.loads((folder / f"{number:05d}.json").read_text(encoding="utf-8"))
        facts = {split: Facts(**one) for split, one in values.items()}
        whole = all(
            (folder / name).stat().st_size == size for one in facts.values() for name, size in one.files.items()
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return facts if whole else None


def run_jobs(work: Callable[[Job], None], jobs: Sequence[Job], sizes: Sequence[int], title: str) -> None:
    """Call `work` for each picklable job, in as many processes as there are cores; one job runs in this process.

    The progress bar shows their sizes (bytes). Raises RuntimeError if a process was killed, or can't start.
    """
    from tqdm import tqdm

    cores = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, len(jobs))
    # No bar for work of less than two seconds, and none in a file or a pipe.
    options = {"unit": "B", "unit_scale": True, "mininterval": 0.5, "delay": 2, "disable": not sys.stderr.isatty()}
    with tqdm(total=sum(sizes), desc=title, file=sys.stderr, **options) as bar:
        if cores == 1:
            with _one_thread():
                for job, size in zip(jobs, sizes, strict=True):
                    work(job)
                    bar.update(size)
            return
        context, others = multiprocessing.get_context("spawn"), multiprocessing.active_children()
        with _one_thread(), ProcessPoolExecutor(cores, context, initializer=_end_with_parent) as pool:
            try:
                waiting = dict(zip((pool.submit(work, job) for job in jobs), sizes, strict=True))
                while waiting:
                    for one in wait(waiting, return_when=FIRST_COMPLETED).done:
                        one.result()
                        bar.update(waiting.pop(one))
            except BrokenProcessPool as error:
                raise RuntimeError(
                    f"a process that was {title} ended unexpectedly: it was killed, perhaps for lack of memory, or it "
                    "could not start. Finished shards are kept: run the command again. In a script of your own, call "
                    'prepare and train under `if __name__ == "__main__":`, because each process imports the script.'
                ) from error
            except BaseException:
                for process in multiprocessing.active_children():
                    if process not in others:
                        process.terminate()
                raise


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let the tokenizers library use one thread, in this process and in those that it starts."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _end_with_parent() -> None:
    """End this process when the process that started it ends, even if that one is killed, and not at Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def locked(folder: Path, doing: str) -> Iterator[None]:
    """Let one process at a time write to a folder. The system releases the lock when a process ends or is killed."""
    import fcntl  # not on Windows, which array_record does not support either

    with open(folder / "lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stderr.write(f"waiting for another process, which {doing} into {folder} ...\n")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def cache_errors(root: Path) -> Iterator[None]:
    """Convert errors of writing to the cache to an OSError with a remedy."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and not Path(error.filename).is_relative_to(root):
            raise  # a file of the corpus
        raise OSError(
            f"can't write tokenized text to {root}: {error}. Finished shards are kept: free disk space and run again, "
            "or use another folder (--data.cache-dir)."
        ) from error


def _check_space(folder: Path, shards: Sequence[Sequence[Segment]]) -> None:
    """Raise OSError if the disk has clearly too little space: tokens take at least a quarter of the bytes of text."""
    needed, free = sum(segment.size for shard in shards for segment in shard) // 4, shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"expected at least {needed / 1e9:.1f} GB of free disk space for the tokens, got {free / 1e9:.1f} GB"
        )
