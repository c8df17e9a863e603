"""Answer a file of requests in OpenAI's batch form, through the HTTP application but without a network."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from starlette.types import ASGIApp, Message

from transformer.config._checks import ConfigError
from transformer.config._progress import counting
from transformer.config._untrusted import bounded_lines
from transformer.serve._http import HTTPService

COMPLETIONS = ("/v1/chat/completions", "/v1/completions")
URLS = (*COMPLETIONS, "/v1/embeddings")
"""paths that a request of a batch may have"""
EACH_SECONDS = 0.5
"""time between two updates of the progress"""
Key = str | int
"""what an answer belongs to: custom_id of a request, or number of a line that is not a request"""


@dataclass(frozen=True)
class BatchRequest:
    """A valid line of a batch."""

    custom_id: str
    url: str
    body: bytes
    """the body as JSON; it has a seed"""
    work: float
    """estimated number of tokens, by which the requests are sorted"""

    @property
    def key(self) -> Key:
        """Key of its answer."""
        return self.custom_id


@dataclass(frozen=True)
class BadLine:
    """A line of a batch that is not a request."""

    number: int
    """line number, starting at 1"""
    custom_id: str | None
    message: str
    """what is wrong, expected and got"""

    @property
    def key(self) -> Key:
        """Key of its answer."""
        return self.number

    @property
    def answer(self) -> dict[str, Any]:
        """The error as the answer of this line."""
        error = {"code": "invalid_line", "message": f"line {self.number}: {self.message}", "line": self.number}
        return _answer(self.custom_id, None, error)


class Answers:
    """Context manager for a file of answers that is appended to. A run that was killed is continued: its answers stay.

    A last line that was not written completely is removed. One process at a time can hold the file.

    Raises:
        ConfigError: another process writes this file, or a line of it is not an answer.
        OSError: the file can't be read or written.
    """

    def __init__(self, path: Path):
        self.keys: set[Key] = set()
        """keys of the lines that are answered"""
        self._path = path
        self._file: BinaryIO = path.open("a+b")
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def _read(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process writes {self._path}. Wait for its end, or pass another file.") from None
        self._file.seek(0)
        end = 0
        for key, line in _complete_lines(self._file, self._path):
            end += len(line)
            if key is not None:
                self.keys.add(key)
        self._file.truncate(end)

    def write(self, answer: dict[str, Any]) -> None:
        """Append an answer. It is in the file when this call returns, even if the process is then killed."""
        self._file.write(json.dumps(answer).encode() + b"\n")
        self._file.flush()


def answer_lines(path: Path) -> Iterator[tuple[Key, bytes]]:
    """Yield the key and the line of each answer of a file; without the file, nothing.

    A last line without its end is skipped: another process may be writing it.

    Raises:
        ConfigError: a line is not an answer.
        ValueError: a line is much longer than an answer.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for key, line in _complete_lines(file, path):
            if key is not None:
                yield key, line


def _complete_lines(file: BinaryIO, path: Path) -> Iterator[tuple[Key | None, bytes]]:
    """Yield each line that has an end, with the key of its answer; None: a blank line, or an answer to nothing."""
    for number, line in enumerate(bounded_lines(file, str(path)), 1):
        if not line.endswith(b"\n"):
            return
        yield _key(line, f"{path}, line {number}") if line.strip() else None, line


def _key(line: bytes, place: str) -> Key | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or not {"custom_id", "response", "error"} <= set(values):
        raise ConfigError(
            f"{place}: expected an answer with custom_id, response and error, got "
            f"{line[:60].decode(errors='replace')!r}. Pass a new file, or one that this command has written."
        )
    error = values["error"]
    if isinstance(error, dict) and isinstance(error.get("line"), int):
        return error["line"]
    return values["custom_id"] if isinstance(values["custom_id"], str) else None


def read_batch(file: BinaryIO, name: str) -> tuple[list[BatchRequest], list[BadLine]]:
    """Read the requests of a file, one JSON object per line: custom_id, method, url and body. Blank lines are skipped.

    A request without a seed gets one that depends on its custom_id only, so that a repeated run gives the same texts.
    Return the requests, and the lines that are not requests.

    Raises:
        OSError: the file can't be read.
        ValueError: a line is much longer than a request.
    """
    requests: dict[str, BatchRequest] = {}
    bad: list[BadLine] = []
    for number, line in enumerate(bounded_lines(file, name), 1):
        if not line.strip():
            continue
        custom_id = None
        try:
            values = _json_object(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
            custom_id = _custom_id(values)
            if custom_id in requests:
                raise ValueError(f"custom_id {custom_id[:80]!r} is that of an earlier line. Give each line its own.")
            requests[custom_id] = _request(custom_id, values)
        except ValueError as error:
            bad.append(BadLine(number, custom_id, str(error)))
    return list(requests.values()), bad


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"expected a JSON object, got {line[:60].decode(errors='replace')!r}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object, got {type(values).__name__}.")
    return values


def _custom_id(values: dict[str, Any]) -> str:
    name = values.get("custom_id")
    if not isinstance(name, str) or not name:
        raise ValueError(f"custom_id must be a text that is not empty, got {name!r:.80}.")
    return name


def _request(name: str, values: dict[str, Any]) -> BatchRequest:
    if values.get("method", "POST") != "POST":
        raise ValueError(f"method must be POST, got {values['method']!r:.80}.")
    url, body = values.get("url"), values.get("body")
    if url not in URLS:
        raise ValueError(f"url must be one of {', '.join(URLS)}, got {url!r:.80}.")
    if not isinstance(body, dict):
        raise ValueError(f"body must be a JSON object, got {type(body).__name__}.")
    if body.get("stream"):
        raise ValueError("body.stream must be false: an answer of a batch is one line. Remove it.")
    if url in COMPLETIONS and body.get("seed") is None:
        body = {**body, "seed": int.from_bytes(hashlib.sha256(name.encode("utf-8", "replace")).digest()[:4], "big")}
    content = json.dumps(body).encode()
    asked = [body.get(field) for field in ("max_completion_tokens", "max_tokens")]
    new = next((value for value in asked if type(value) is int), 0)
    return BatchRequest(name, url, content, len(content) / 4 + new)  # a token has about four characters


def answer_batch(
    service: HTTPService, requests: Sequence[BatchRequest], write: Callable[[dict[str, Any]], None], *, at_once: int
) -> None:
    """Answer requests, those with most work first, so that the last ones to end are short and no slot is idle.

    At most `at_once` requests are in the service, which is started, at a time. `write` is called with each answer, in
    the order in which they are complete.

    Raises:
        RuntimeError: the service has failed. Requests that were not answered are not written.
    """
    ordered = iter(sorted(requests, key=lambda request: -request.work))
    asyncio.run(_answer_all(service, ordered, len(requests), write, at_once))


async def _answer_all(
    service: HTTPService,
    requests: Iterator[BatchRequest],
    total: int,
    write: Callable[[dict[str, Any]], None],
    at_once: int,
) -> None:
    application, add = service.application(), counting("requests", total)
    started = time.monotonic()

    def speed() -> str:
        return f"{service.metrics.tokens / max(time.monotonic() - started, 1e-9):,.0f} tokens/s"

    async def work() -> None:
        for request in requests:  # shared by all workers: each takes the next one
            status, body = await _call(application, request)
            if service.failure is not None:
                raise RuntimeError(f"the model has failed ({service.failure}). Run the command again to continue.")
            response = {"status_code": status, "request_id": f"req_{secrets.token_hex(12)}", "body": body}
            write(_answer(request.custom_id, response, None))
            add(1, speed())

    async def report() -> None:
        while True:
            await asyncio.sleep(EACH_SECONDS)
            add(0, speed())

    reporter = asyncio.create_task(report())
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, total)):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        reporter.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reporter


async def _call(application: ASGIApp, request: BatchRequest) -> tuple[int, Any]:
    """Return the status and the JSON values of the answer to one request."""
    headers = {"host": "localhost", "content-type": "application/json", "content-length": str(len(request.body))}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": request.url,
        "raw_path": request.url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "server": ("localhost", 80),
    }
    unread = [{"type": "http.request", "body": request.body, "more_body": False}]
    status, parts = 0, []

    async def receive() -> Message:
        if not unread:
            await asyncio.Event().wait()  # this client never leaves
        return unread.pop()

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await application(scope, receive, send)
    return status, json.loads(b"".join(parts))


def _answer(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    name = f"batch_req_{secrets.token_hex(12)}"
    return {"id": name, "custom_id": custom_id, "response": response, "error": error}
