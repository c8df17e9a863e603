"""`transformer-zoo batch`: answer a file of requests."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from transformer.cli._services import ServiceCommand, ServiceSettings, check_sizes, make_service, report_compilation
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
class AnswerBatch(ServiceCommand):
    """Answer a file of requests in OpenAI's batch format: one JSON object per line with custom_id, method, url and
    body, for the paths of `serve`. The answers are lines with custom_id, response and error, in the order of
    completion.

    With --output, a run that was killed is continued: requests that have an answer in the file are skipped.
    With --shard, several processes answer one file; a process that was killed is started again with the same command.
    With --parallel.coordinator, connected processes share one model, or each answer a shard with their own model.
    """

    requests: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="REQUESTS")]
    """file of requests (.jsonl)"""
    output: Path | None = None
    """file of answers, to which the missing ones are appended; None: stdout"""
    shard: str | None = None
    """INDEX/COUNT: answer the requests of one of COUNT processes, which read the same REQUESTS and have the same
    --output on a shared file system; the last one to end joins the answers; None: all requests"""


def main(command: AnswerBatch) -> None:
    check_sizes(slots=command.slots, max_tokens=command.max_tokens)
    from transformer.serve._batch import Answers, read_batch
    from transformer.serve._shards import Shard

    shard = None if command.shard is None else Shard.parse(command.shard)
    _check_processes(command)
    with open_input(command.requests, "requests") as file:
        lines = read_batch(file, str(command.requests))
    if command.parallel.has_processes:
        with command.parallel.together("Start all again with the same command: what is answered stays answered."):
            _Batch(command, command.parallel.mesh(copies=True), *lines).answer_together()
        return
    batch = _Batch(command, command.parallel.mesh(), *lines)
    if shard is not None:
        batch.answer_shard(shard)
        state = f"{command.output} has all answers" if batch.join() else "other shards are not complete yet"
        print(f"shard {command.shard} is complete; {state}", file=sys.stderr)
    elif command.output is None:
        batch.answer(lambda answer: print(json.dumps(answer), flush=True))
    else:
        with Answers(command.output) as answers:
            batch.answer_missing(answers, answers.keys)


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


@dataclass(frozen=True)
class _Batch:
    """The lines of a file: requests, and lines that are none."""

    command: AnswerBatch
    mesh: Mesh | None
    requests: Sequence[BatchRequest]
    bad: Sequence[BadLine]

    def answer_together(self) -> None:
        """Answer in connected processes: with one model, for which process 0 reads and writes, or each its shard."""
        import jax

        from transformer.serve._batch import Answers
        from transformer.serve._shards import Shard
        from transformer.training import _processes as processes

        output = self.command.output
        if self.mesh is not None and self.mesh.is_multi_process:
            if processes.is_first():
                with Answers(output) as answers:
                    self.answer_missing(answers, answers.keys)
            else:
                self._service().engine.follow()
            return
        self.answer_shard(Shard(jax.process_index(), jax.process_count()))
        processes.barrier("answered", LONGEST_WAIT)
        if processes.is_first() and not self.join():
            raise ConfigError(
                f"answers of other processes are missing beside {output}. Start all processes again with the same "
                f"command, and an --output on a file system that they share."
            )

    def answer_shard(self, shard: Shard) -> None:
        """Answer the requests of one shard, in a separate file."""
        from transformer.serve._batch import Answers
        from transformer.serve._shards import Shard, answered
        from transformer.training import _processes as processes

        output = self.command.output
        with Answers(shard.part(output)) as answers:
            if self.command.parallel.has_processes:
                processes.check_shared(Shard(0, shard.count).part(output), "--output")
            lines = {"requests": shard.select(self.requests), "bad": shard.select(self.bad)}
            dataclasses.replace(self, **lines).answer_missing(answers, answered(output))

    def join(self) -> bool:
        """Join the answers of all shards, if all exist; return whether they do."""
        from transformer.serve._shards import join_parts

        return join_parts(self.command.output, [line.key for line in (*self.requests, *self.bad)])

    def answer_missing(self, answers: Answers, done: Collection[Key]) -> None:
        """Append the answers of the lines whose key is not in `done`."""
        new = [request for request in self.requests if request.key not in done]
        new_bad = [line for line in self.bad if line.key not in done]
        total = len(self.requests) + len(self.bad)
        if skipped := total - len(new) - len(new_bad):
            print(f"{skipped:,} of {total:,} requests are answered already", file=sys.stderr)
        dataclasses.replace(self, requests=new, bad=new_bad).answer(answers.write)

    def answer(self, write: Callable[[dict[str, Any]], None]) -> None:
        """Write the answers of all lines; load the model only if there is a request, or other processes load it."""
        from transformer.serve._batch import answer_batch

        for line in self.bad:
            write(line.answer)
        if self.bad:
            print(
                f"{len(self.bad):,} lines of {self.command.requests} are not requests; their answers say why",
                file=sys.stderr,
            )
        if not self.requests and not self.command.parallel.has_processes:
            return
        service = self._service()
        service.warm_up(report_compilation)
        service.start()
        started = time.monotonic()
        try:
            answer_batch(service, self.requests, write, at_once=2 * self.command.slots)
        finally:
            service.close()
        took, metrics = max(time.monotonic() - started, 1e-9), service.metrics
        print(
            f"{len(self.requests):,} requests in {took:.1f} s: {metrics.prompt_tokens:,} prompt tokens and "
            f"{metrics.generated_tokens:,} generated tokens, {metrics.tokens / took:,.0f} tokens/s",
            file=sys.stderr,
        )

    def _service(self) -> HTTPService:
        from transformer.serve._bodies import MOST_CHOICES

        command = self.command
        queue = 2 * command.slots * MOST_CHOICES  # while some end, others wait already
        sizes = ServiceSettings(slots=command.slots, max_tokens=command.max_tokens, queue=queue, mesh=self.mesh)
        return make_service(command.load_sharded(self.mesh), sizes)
