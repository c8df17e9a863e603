"""Fuzz tests: generated inputs are read in a sandbox that checks opened files, resources, exceptions and messages.

A test calls `fuzz` with its share of 100,000 cases. The default run generates 2,000 cases in total, always the same
ones. `make fuzz CASES=100000` (`reliability/fuzz.py`) generates the requested number, from a seed.
"""

import contextlib
import copy
import faulthandler
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from reliability.pace import Limit, pace
from transformer.cli._errors import BAD_INPUT, LONGEST, describe, exit_code

ALL = 115_000
"""sum of the shares of all tests"""
CASES = int(os.environ.get("FUZZ_CASES", "2000"))
SECONDS = 5
"""maximum processor time of a case on an idle machine (`reliability.pace`); waiting does not count"""
HANGS = 60
"""seconds of real time after which a case counts as hanging, on an idle machine"""
MEMORY = 2**31
"""maximum additional address space of a case in bytes"""

ROOT = Path(__file__).resolve().parents[1]
# Directories in which Python itself opens files: late imports, and source code for tracebacks.
_PYTHON = tuple(
    f"{os.path.realpath(place)}{os.sep}"
    for place in {sys.prefix, sys.base_prefix, ROOT / "transformer", ROOT / "tests"}
)
# Audit events of Python that reading a file must never cause.
_NEVER = {
    *("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "pty.spawn", "socket.connect"),
    *("socket.getaddrinfo", "pickle.find_class", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink"),
    *("os.link", "os.chmod", "os.truncate", "shutil.rmtree", "shutil.move", "webbrowser.open", "os.kill"),
}
_LISTED = {"open", "os.listdir", "os.scandir"}


class Cage:
    """Record files opened outside `folder`, and forbidden operations, while `folder` is set."""

    folder: str | None = None
    offences: list[str]
    installed = False

    def hook(self, event: str, arguments: tuple) -> None:
        """Audit hook. It can't be removed, but does nothing while `folder` is None."""
        if self.folder is None:
            return
        if event in _NEVER:
            self.offences.append(f"{event}{arguments!r:.200}")
        elif event in _LISTED and not isinstance(arguments[0], int):
            path = os.path.realpath(os.fsdecode(arguments[0] or "."))
            writes = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            inside = path == self.folder or path.startswith(self.folder + os.sep)
            if not f"{path}{os.sep}".startswith(_PYTHON) and (writes or not inside):
                self.offences.append(f"{event} {path}")

    @contextlib.contextmanager
    def closed(self, folder: Path) -> Iterator[None]:
        """Limit memory and activate the hook inside the context."""
        if not self.installed:
            sys.addaudithook(self.hook)
            self.installed = True
        self.offences = []
        with _little_memory():
            self.folder = os.path.realpath(folder)
            try:
                yield
            finally:
                self.folder = None
        assert not self.offences, f"opened or done outside of {folder}: {self.offences}"


CAGE = Cage()


class Watchdog:
    """End the process with a traceback if `alive` is not called for `HANGS` seconds, because a case hangs."""

    def __init__(self):
        self._started, self._hangs = -math.inf, HANGS

    def alive(self) -> None:
        """Restart the timer; not at each call, because it is a thread, whose start takes longer than most cases."""
        if time.monotonic() - self._started > HANGS / 12:
            self._hangs = max(self._hangs, 2 * HANGS * pace())
            faulthandler.dump_traceback_later(self._hangs, exit=True, file=sys.__stderr__)
            self._started = time.monotonic()


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """Limit the process to `MEMORY` additional bytes inside the context; only on Linux."""
    if sys.platform != "linux":
        yield
        return
    import resource

    old = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


def _peak() -> int:
    """Return the peak memory of the process in bytes, or 0 if the system does not report it."""
    if sys.platform != "linux":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check_refusal(error: BaseException) -> None:
    """Check that the command line reports an error with exit code 2 and one printable line of bounded length."""
    line = describe(error)
    assert exit_code(error) == BAD_INPUT
    assert line.startswith("error: ")
    assert line.isprintable()
    assert len(line) < 2 * LONGEST


Fuzz = Callable[..., None]


@pytest.fixture
def fuzz(tmp_path: Path, record_property: Callable[[str, object], None]) -> Fuzz:
    """Fixture `fuzz(kind, share, inputs, read)`: for each input, `read(folder, input)` must return or raise `refusals`.

    `put(folder, input)` writes files before, outside the sandbox. `folder` (None: a new one) is the only directory that
    `read` may open.
    """

    def run(
        kind: str,
        share: int,
        inputs: st.SearchStrategy,
        read: Callable[[Path, Any], object],
        *,
        put: Callable[[Path, Any], None] = lambda folder, value: None,
        refusals: tuple[type[BaseException], ...] = (ValueError, FileNotFoundError),
        folder: Path | None = None,
    ) -> None:
        place = tmp_path / "inside" if folder is None else folder
        place.mkdir(exist_ok=True)
        counts = {"read": 0, "refused": 0}
        longest = 0.0
        watchdog = Watchdog()

        # The default run generates the same cases every time.
        @settings(
            max_examples=max(4, round(CASES * share / ALL)),
            deadline=None,
            derandomize="FUZZ_CASES" not in os.environ,
            database=None,
            phases=(Phase.explicit, Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(inputs)
        def case(value: Any) -> None:
            nonlocal longest
            watchdog.alive()
            put(place, value)
            limit, began = Limit(SECONDS, time.process_time), time.process_time()
            try:
                with CAGE.closed(place):
                    read(place, value)
                counts["read"] += 1
            except refusals as error:
                counts["refused"] += 1
                check_refusal(error)
            seconds = time.process_time() - began
            assert not limit.passed(), f"took {seconds:.1f} s, more than {limit.seconds:.1f} s"
            longest = max(longest, seconds)

        try:
            case()
        finally:
            faulthandler.cancel_dump_traceback_later()
        record_property("fuzz", json.dumps(counts | {"kind": kind, "longest": longest, "peak": _peak()}))
        if sum(counts.values()) >= 50:
            assert all(counts.values()), f"all inputs had the same result: {counts}; expected valid and invalid inputs"

    return run


def cleared(folder: Path) -> Path:
    """Empty a directory and return it."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return folder


# JSON that json.dumps can't write; it replaces these placeholders afterwards.
_RAW = {
    '"@deep"': b"[" * 100_000 + b"]" * 100_000,
    '"@nested"': b'{"a":[' * 400 + b"1" + b"]}" * 400,
    '"@digits"': b"9" * 5000,
    '"@large"': b"9" * 400,
    '"@huge"': b"1e999",
    '"@long"': b'"%s"' % (b"x" * 30_000),
    '"@twice"': b'{"a":1,"a":2}',
}
NAMES = ["", "a", "class", "0", "../../x", "/etc/passwd", "\0", "\ud800", "\x1b[2J", "é", "model_type", "content"]
ODD = st.one_of(
    st.sampled_from([None, True, False, 0, -1, 1, 2, 3, 5, 2**31 - 1, 2**31, 2**63, -(2**63), 2**64]),
    st.sampled_from([0.5, 1e308, 5e-324, -0.0, float("nan"), float("inf"), float("-inf")]),
    st.sampled_from([*NAMES, "\n", "true", "3", *(word.strip('"') for word in _RAW)]),
    st.sampled_from([[], {}, [[]], [0], [-1], ["x"], [None], [{}], {"": 0}, {"a": {}}, [1, 2, 3], {"class": []}]),
    st.integers(-10, 10**6),
    st.text(max_size=8),
)
"""JSON values that are rarely valid"""
JSON_EDITS = st.lists(
    st.tuples(
        st.integers(0, 2000),
        st.sampled_from(["near", "near", "near", "put", "put", "drop", "rename", "add", "again"]),
        ODD,
        st.sampled_from(NAMES),
    ),
    max_size=3,
)
BYTE_EDITS = st.lists(
    st.tuples(
        st.integers(0, 1_000_000),
        st.sampled_from(["flip", "cut", "insert", "write", "drop", "swap", "repeat"]),
        st.sampled_from([b"-1", b"NaN", b'"', b"{", b"}", b"[", b"\\", b"\0", b"\xff", b"../", b"1e999", b"null", b","])
        | st.binary(min_size=1, max_size=9),
    ),
    max_size=4,
)


def rewritten(tree: Any, edits: list) -> Any:
    """Return an edited copy of a JSON tree: values are changed, replaced, deleted, renamed, added or duplicated."""
    root = [copy.deepcopy(tree)]
    for place, action, value, name in edits:
        spots = list(_spots(root))
        container, key = spots[place % len(spots)]
        inside, value = container[key], copy.deepcopy(value)
        if action == "near" and not isinstance(inside, dict | list):
            container[key] = _near(inside, place % 7 - 3)
        elif action == "put" or container is root:
            container[key] = value
        elif action == "drop":
            del container[key]
        elif action == "rename" and isinstance(container, dict):
            container[name] = container.pop(key)
        elif action == "add" and isinstance(inside, dict | list):
            inside.update({name: value}) if isinstance(inside, dict) else inside.append(value)
        elif isinstance(container, list):
            container.append(copy.deepcopy(inside))
        else:
            container[f"{key}{name}"] = copy.deepcopy(inside)
    return root[0]


def _near(value: Any, step: int) -> Any:
    """Return another value of the same type, which may be valid."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + step if step % 2 else value * step
    return value


def _spots(container: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(container) if isinstance(container, dict) else range(len(container)):
        yield container, key
        if isinstance(container[key], dict | list):
            yield from _spots(container[key])


def written(tree: Any) -> bytes:
    """Return the JSON of a tree, with NaN, lone surrogates, and JSON that json.dumps can't write."""
    raw = json.dumps(tree).encode("ascii")
    for word, content in _RAW.items():
        raw = raw.replace(word.encode(), content)
    return raw


def damaged(raw: bytes, edits: list) -> bytes:
    """Return the bytes with edits: flipped, truncated, inserted, overwritten, deleted, swapped or duplicated."""
    for place, action, piece in edits:
        at, size = place % (len(raw) + 1), len(piece)
        before, behind = raw[:at], raw[at:]
        match action:
            case "flip":
                raw = before + bytes(byte ^ piece[0] for byte in behind[:1]) + behind[1:]
            case "cut":
                raw = before
            case "insert":
                raw = before + piece + behind
            case "write":
                raw = before + piece + behind[size:]
            case "drop":
                raw = before + behind[size:]
            case "swap":
                raw = before + behind[size : 2 * size] + behind[:size] + behind[2 * size :]
            case "repeat":
                raw = before + behind[: 8 * size] * 2 + behind[8 * size :]
    return raw


def files_of(trees: list[Any]) -> st.SearchStrategy[bytes]:
    """Return a strategy for contents of a JSON file: a valid file with changed values or bytes, or random bytes."""
    valid = st.sampled_from(trees)
    changed = st.builds(lambda tree, edits: written(rewritten(tree, edits)), valid, JSON_EDITS)
    broken = st.builds(lambda tree, edits: damaged(written(tree), edits), valid, BYTE_EDITS)
    return changed | changed | broken | st.binary(max_size=60)
