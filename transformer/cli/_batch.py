"""`python -m transformer batch`: answer a file of requests."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from transformer.cli._arguments import parse
from transformer.cli._models import ModelCommand
from transformer.cli._parallel import ONE_DEVICE, Parallel
from transformer.cli._serve import check_sizes, report_compilation
from transformer.cli._services import make_service
from transformer.cli._streams import open_input
from transformer.config._checks import ConfigError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from transformer.serve._batch import Answers, BadLine, BatchRequest, Key
    from transformer.serve._http import HTTPService
    from transformer.serve._shards import Shard

LONGEST_WAIT = 7 * 24 * 3600.0
"""seconds that a process waits for the others after its own answers"""


@dataclass(frozen=True, kw_only=True)
class AnswerBatch(ModelCommand):
    """Answer a file of requests in OpenAI's batch form: one JSON object per line with custom_id, method, url and body,
    for the paths of `serve`. The answers are lines with custom_id, response and error, in the order of completion.

    With --output, a run that was killed is continued: requests that have an answer in the file are skipped.
    With --shard, several processes answer one file; a process that was killed is started again with the same command.
    With --parallel.coordinator, connected processes share one model, or answer a shard each with a model of their own.
    """

    requests: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="REQUESTS")]
    """file of requests (.jsonl)"""
    output: Path | None = None
    """file of answers, to which the missing ones are appended; None: stdout"""
    shard: str | None = None
    """INDEX/COUNT: answer the requests of one of COUNT processes, which read the same REQUESTS and have the same
    --output on a shared file system; the last one to end joins the answers; None: all requests"""
    slots: int = 8
    """maximum number of texts that are generated at a time; each has a KV cache of --max-tokens tokens"""
    max_tokens: int | None = None
    """maximum number of tokens of a request, prompt and answer together; None: the context of the model, at most
    2048"""
    parallel: Parallel = ONE_DEVICE


def main(arguments: Sequence[str]) -> None:
    """Answer the requests."""
    command = parse(AnswerBatch, "batch", arguments)
    check_sizes(slots=command.slots, max_tokens=command.max_tokens)
    from transformer.serve._batch import Answers, read_batch
    from transformer.serve._shards import Shard

    shard = None if command.shard is None else Shard.parse(command.shard)
    _check_processes(command)
    with open_input(command.requests, "requests") as file:
        lines = read_batch(file, str(command.requests))
    if command.parallel.has_processes:
        with command.parallel.together("Start all again with the same command: what is answered stays answered."):
            _answer_together(command, command.parallel.mesh(copies=True), *lines)
        return
    mesh = command.parallel.mesh()
    if shard is not None:
        _answer_shard(command, mesh, shard, *lines)
        state = f"{command.output} has all answers" if _join(command, *lines) else "other shards are not complete yet"
        print(f"shard {command.shard} is complete; {state}", file=sys.stderr)
    elif command.output is None:
        _answer(command, mesh, *lines, _print)
    else:
        with Answers(command.output) as answers:
            _answer_missing(command, mesh, *lines, answers, answers.keys)


def _check_processes(command: AnswerBatch) -> None:
    """Raise ConfigError for options of processes that contradict each other."""
    if command.shard is not None and command.parallel.has_processes:
        raise ConfigError(
            "--shard is for processes that are not connected; connected ones (--parallel.coordinator) know their "
            "shards. Remove one of the two."
        )
    if command.output is None and (command.shard is not None or command.parallel.has_processes):
        option = "--shard" if command.shard is not None else "--parallel.coordinator"
        raise ConfigError(f"{option} needs --output, a file on a file system that all processes share. Add it.")


def _answer_together(
    command: AnswerBatch, mesh: Mesh | None, requests: Sequence[BatchRequest], bad: Sequence[BadLine]
) -> None:
    """Answer in connected processes: all with one model, for which process 0 reads and writes, or each one its shard.

    Raises:
        ConfigError: the processes do not see each other's answers.
    """
    import jax

    from transformer.serve._batch import Answers
    from transformer.serve._shards import Shard
    from transformer.training import _processes as processes

    if mesh is not None and mesh.is_multi_process:
        if processes.is_first():
            with Answers(command.output) as answers:
                _answer_missing(command, mesh, requests, bad, answers, answers.keys)
        else:
            _service(command, mesh).engine.follow()
    else:
        _answer_shard(command, mesh, Shard(jax.process_index(), jax.process_count()), requests, bad)
        processes.barrier("answered", LONGEST_WAIT)
        if processes.is_first() and not _join(command, requests, bad):
            raise ConfigError(
                f"answers of other processes are missing beside {command.output}. Start all processes again with the "
                f"same command, and an --output on a file system that they share."
            )


def _answer_shard(
    command: AnswerBatch,
    mesh: Mesh | None,
    shard: Shard,
    requests: Sequence[BatchRequest],
    bad: Sequence[BadLine],
) -> None:
    """Answer the requests of one shard, in a file of its own."""
    from transformer.serve._batch import Answers
    from transformer.serve._shards import Shard, answered
    from transformer.training import _processes as processes

    with Answers(shard.part(command.output)) as answers:
        if command.parallel.has_processes:
            processes.check_shared(Shard(0, shard.count).part(command.output), "--output")
        _answer_missing(command, mesh, shard.select(requests), shard.select(bad), answers, answered(command.output))


def _join(command: AnswerBatch, requests: Sequence[BatchRequest], bad: Sequence[BadLine]) -> bool:
    """Join the answers of all shards, if all are there; return whether they are."""
    from transformer.serve._shards import join_parts

    return join_parts(command.output, [line.key for line in (*requests, *bad)])


def _answer_missing(
    command: AnswerBatch,
    mesh: Mesh | None,
    requests: Sequence[BatchRequest],
    bad: Sequence[BadLine],
    answers: Answers,
    done: Collection[Key],
) -> None:
    """Append the answers of the lines whose key is not in `done`."""
    new = [request for request in requests if request.key not in done]
    new_bad = [line for line in bad if line.key not in done]
    total = len(requests) + len(bad)
    if skipped := total - len(new) - len(new_bad):
        print(f"{skipped:,} of {total:,} requests are answered already", file=sys.stderr)
    _answer(command, mesh, new, new_bad, answers.write)


def _answer(
    command: AnswerBatch,
    mesh: Mesh | None,
    requests: Sequence[BatchRequest],
    bad: Sequence[BadLine],
    write: Callable[[dict[str, Any]], None],
) -> None:
    """Write the answers of all lines; load the model only if there is a request, or other processes load it too."""
    from transformer.serve._batch import answer_batch

    for line in bad:
        write(line.answer)
    if bad:
        print(f"{len(bad):,} lines of {command.requests} are not requests; their answers say why", file=sys.stderr)
    if not requests and not command.parallel.has_processes:
        return
    service = _service(command, mesh)
    service.warm_up(report_compilation)
    service.start()
    started = time.monotonic()
    try:
        answer_batch(service, requests, write, at_once=2 * command.slots)
    finally:
        service.close()
    took, metrics = max(time.monotonic() - started, 1e-9), service.metrics
    print(
        f"{len(requests):,} requests in {took:.1f} s: {metrics.prompt_tokens:,} prompt tokens and "
        f"{metrics.generated_tokens:,} generated tokens, {metrics.tokens / took:,.0f} tokens/s",
        file=sys.stderr,
    )


def _service(command: AnswerBatch, mesh: Mesh | None) -> HTTPService:
    """Return the service of the model."""
    from transformer.serve._bodies import MOST_CHOICES

    return make_service(
        command.load_sharded(mesh),
        slots=command.slots,
        max_tokens=command.max_tokens,
        api_key=None,
        local_only=True,
        queue=2 * command.slots * MOST_CHOICES,  # while some end, others wait already
        mesh=mesh,
    )


def _print(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)
