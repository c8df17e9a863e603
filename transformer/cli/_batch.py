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
from transformer.cli._serve import check_sizes, report_compilation
from transformer.cli._services import make_service
from transformer.config._checks import ConfigError

if TYPE_CHECKING:
    from transformer.serve._batch import Answers, BadLine, BatchRequest, Key


@dataclass(frozen=True, kw_only=True)
class AnswerBatch(ModelCommand):
    """Answer a file of requests in OpenAI's batch form: one JSON object per line with custom_id, method, url and body,
    for the paths of `serve`. The answers are lines with custom_id, response and error, in the order of completion.

    With --output, a run that was killed is continued: requests that have an answer in the file are skipped.
    With --shard, several processes answer one file; a process that was killed is started again with the same command.
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


def main(arguments: Sequence[str]) -> None:
    """Answer the requests."""
    command = parse(AnswerBatch, "batch", arguments)
    check_sizes(slots=command.slots, max_tokens=command.max_tokens)
    from transformer.serve._batch import Answers, read_batch
    from transformer.serve._shards import Shard, answered, join_parts

    shard = None if command.shard is None else Shard.parse(command.shard)
    requests, bad = read_batch(command.requests)
    if command.output is None:
        if shard is not None:
            raise ConfigError("--shard needs --output, a file on a file system that all processes share. Add it.")
        _answer(command, requests, bad, _print)
        return
    if shard is None:
        with Answers(command.output) as answers:
            _answer_missing(command, requests, bad, answers, answers.keys)
        return
    with Answers(shard.part(command.output)) as answers:
        _answer_missing(command, shard.select(requests), shard.select(bad), answers, answered(command.output))
    is_complete = join_parts(command.output, [line.key for line in (*requests, *bad)])
    state = f"{command.output} has all answers" if is_complete else "other shards are not complete yet"
    print(f"shard {command.shard} is complete; {state}", file=sys.stderr)


def _answer_missing(
    command: AnswerBatch,
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
    _answer(command, new, new_bad, answers.write)


def _answer(
    command: AnswerBatch,
    requests: Sequence[BatchRequest],
    bad: Sequence[BadLine],
    write: Callable[[dict[str, Any]], None],
) -> None:
    """Write the answers of all lines; load the model only if there is a request."""
    from transformer.serve._batch import answer_batch
    from transformer.serve._bodies import MOST_CHOICES

    for line in bad:
        write(line.answer)
    if bad:
        print(f"{len(bad):,} lines of {command.requests} are not requests; their answers say why", file=sys.stderr)
    if not requests:
        return
    opened = command.load()
    at_once = 2 * command.slots  # while some end, others wait already
    service = make_service(
        opened,
        slots=command.slots,
        max_tokens=command.max_tokens,
        api_key=None,
        local_only=True,
        queue=at_once * MOST_CHOICES,
    )
    service.warm_up(report_compilation)
    service.start()
    started = time.monotonic()
    try:
        answer_batch(service, requests, write, at_once=at_once)
    finally:
        service.close()
    took, metrics = max(time.monotonic() - started, 1e-9), service.metrics
    print(
        f"{len(requests):,} requests in {took:.1f} s: {metrics.prompt_tokens:,} prompt tokens and "
        f"{metrics.generated_tokens:,} generated tokens, {metrics.tokens / took:,.0f} tokens/s",
        file=sys.stderr,
    )


def _print(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)
