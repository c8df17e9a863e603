"""Work in other processes with limits of time and memory."""

import os
import subprocess
import sys
import threading
import time

import pytest

from transformer.config._limited import (
    AT_A_TIME,
    PROGRAM,
    Cancellation,
    CrashedError,
    LimitedProcesses,
    LimitExceededError,
)

SOURCE = """
import os, time

def prepare(values):
    def work(message):
        time.sleep(message.get("seconds", 0))
        bytearray(message.get("bytes", 0))
        exec(message.get("code", ""))
        return [os.getpid(), values, message.get("text")]

    return work
"""


@pytest.fixture
def processes(tmp_path):
    program = tmp_path / "_program.py"
    program.write_text(SOURCE)
    return LimitedProcesses(program, "values", seconds=1.0, most_bytes=2**24)


def test_a_result_comes_from_a_reused_process(processes):
    number, values, text = processes.ask({"text": "\u00e9\ud800" * 100_000})
    assert (values, text) == ("values", "\u00e9\ud800" * 100_000)
    assert processes.ask({})[0] == number != os.getpid()


def test_a_process_that_exceeds_a_limit_is_replaced(processes):
    number = processes.ask({})[0]
    with pytest.raises(LimitExceededError, match=r"^1 seconds$"):
        processes.ask({"seconds": 60})
    with pytest.raises(LimitExceededError, match=r"^16 MiB of memory$"):
        processes.ask({"bytes": 2**40})
    assert processes.ask({})[0] != number


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import no_such_module", r"ended with status 1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("os.kill(os.getpid(), 11)", "was ended by SIGSEGV"),
        ("os.write(2, b'first\\nlast \\xff.\\n'); os.abort()", "was ended by SIGABRT: last \ufffd"),
        ("os._exit(3)", "ended with status 3"),
    ],
)
def test_a_crash_is_not_reported_as_a_limit(processes, code, how):
    number = processes.ask({})[0]
    with pytest.raises(CrashedError, match=f"^{how}$"):
        processes.ask({"code": code})
    assert processes.ask({})[0] != number


@pytest.mark.parametrize(
    "code", ["raise MemoryError", "os.write(2, b'memory allocation of 9 bytes failed\\n'); os.abort()"]
)
def test_a_lack_of_memory_is_reported_as_the_limit(processes, code):
    with pytest.raises(LimitExceededError, match=r"^16 MiB of memory$"):
        processes.ask({"code": code})


def test_a_program_that_does_not_start(tmp_path):
    program = tmp_path / "_program.py"
    program.write_text("import no_such_module")
    with pytest.raises(OSError, match=r"_program.py ended with status 1: ModuleNotFoundError: No module named 'no_su"):
        LimitedProcesses(program, None, seconds=1.0, most_bytes=2**24).ask({})


def test_threads_use_a_bounded_number_of_processes(processes):
    found, answers = threading.Barrier(3 * AT_A_TIME), []

    def ask():
        found.wait(60)
        answers.append(processes.ask({"seconds": 0.05})[0])

    threads = [threading.Thread(target=ask) for _ in range(3 * AT_A_TIME)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 3 * AT_A_TIME
    assert len(set(answers)) <= AT_A_TIME


def test_a_fork_does_not_use_the_processes_of_its_parent(processes, tmp_path):
    """The answers of two programs in one pipe would be mixed up."""
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom transformer.config._limited import LimitedProcesses\n"
        "made = LimitedProcesses(Path(sys.argv[1]), None, seconds=9.0, most_bytes=2**24)\n"
        "first = made.ask({})[0]\nchild = os.fork()\n"
        "print(made.ask({})[0] == first, flush=True)\n"
        "child and os.waitpid(child, 0) and print(made.ask({})[0] == first)"
    )
    program = processes._settings["program"]
    done = subprocess.run([sys.executable, "-c", code, program], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == ["False", "True", "True"]


def test_running_work_can_be_cancelled(processes):
    processes.ask({})
    cancellation, began = Cancellation(), time.monotonic()
    threading.Timer(0.2, cancellation.cancel).start()
    with pytest.raises(LimitExceededError):
        processes.ask({"seconds": 60}, cancellation)
    assert cancellation.cancelled
    assert time.monotonic() - began < 10


def test_idle_processes_exit_with_their_owner(processes):
    processes.ask({})
    (process,) = processes._idle
    assert process.poll() is None
    processes.close()
    assert process.poll() is not None


def test_the_process_exits_with_its_parent():
    """Its standard input ends. It also must not import this package: that takes seconds."""
    code = "import sys, runpy; runpy.run_path(sys.argv[1]); print([m for m in sys.modules if m[:3] in ('jax', 'tra')])"
    done = subprocess.run([sys.executable, "-c", code, str(PROGRAM)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    process = subprocess.Popen([sys.executable, "-P", str(PROGRAM)], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    process.stdin.close()
    assert process.wait(20) == 1
