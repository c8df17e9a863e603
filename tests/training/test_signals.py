import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from transformer.training import _signals as module
from transformer.training._signals import StopSignal

pytestmark = pytest.mark.cpu_only("starts processes that compute on the CPU")


def start(body):
    """Start a process that imports only this module and runs inside StopSignal; it prints "ready" first."""
    path = os.path.abspath(module.__file__)
    script = f"""
import importlib.util, os, signal, sys, time
spec = importlib.util.spec_from_file_location("signals", {path!r})
signals = importlib.util.module_from_spec(spec)
spec.loader.exec_module(signals)
with signals.StopSignal() as stop:
    print("ready", flush=True)
{textwrap.indent(textwrap.dedent(body), "    ")}
print("saved", flush=True)
sys.exit(stop.exit_code)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


LOOP = """
while not stop.requested:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_the_current_step_finish(number):
    process = start(LOOP)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (out, process.returncode) == ("saved\n", 128 + number)
    assert re.fullmatch(f"{number.name}: .*\n", err)


@pytest.mark.parametrize(("first", "second"), [("SIGINT", "SIGINT"), ("SIGTERM", "SIGINT"), ("SIGINT", "SIGTERM")])
def test_the_second_signal_exits_immediately(first, second):
    process = start("while True: time.sleep(0.01)")
    process.send_signal(signal.Signals[first])
    assert "will save and stop" in process.stderr.readline()
    process.send_signal(signal.Signals[second])
    out, _ = process.communicate(timeout=20)
    assert (out, process.returncode) == ("", 128 + signal.Signals[second])


# A call that does not return to Python in spite of a signal, like a compilation, but lets other threads run.
LONG_CALL = """
import ctypes
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
libc.pthread_mutex_init(mutex, None)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)
"""


def test_the_second_signal_exits_even_within_a_blocking_call():
    process = start(LONG_CALL)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert "will save and stop" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=15)
    assert (out, process.returncode) == ("", 130)


def test_previous_handlers_are_restored():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        mine = signal.getsignal(signal.SIGTERM)
        interrupt = signal.getsignal(signal.SIGINT)
        with StopSignal() as stop:
            assert not stop.requested
            assert stop.exit_code is None
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGINT) is interrupt
        assert signal.set_wakeup_fd(-1) == -1
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_flag_is_set_and_no_exception_raised(capfd):
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        deadline = time.monotonic() + 10
        while not stop.requested and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (stop.requested, stop.signum, stop.exit_code) == (True, signal.SIGINT, 130)
    assert (stop.requested, stop.exit_code) == (True, 130)  # still available after the end
    assert "SIGINT: will save and stop" in capfd.readouterr().err


def test_other_signals_are_not_handled():
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        with StopSignal() as stop:
            signal.raise_signal(signal.SIGUSR1)
            time.sleep(0.1)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_outside_the_main_thread_no_handler_is_installed():
    before, requested = signal.getsignal(signal.SIGINT), []

    def work():
        with StopSignal() as stop:
            requested.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert requested == [False]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_a_single_process_is_killed_by_sigterm_with_only_jax_s_sync_point():
    """The reason for this module: JAX's sync point only handles SIGTERM in distributed programs."""
    script = """
import time
from jax.experimental.multihost_utils import reached_preemption_sync_point
step = 0
print("ready", reached_preemption_sync_point(step), flush=True)
while not reached_preemption_sync_point(step):
    step += 1
    time.sleep(0.01)
print("would save")
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready False\n"
    process.send_signal(signal.SIGTERM)
    assert (process.wait(timeout=60), process.stdout.read()) == (-signal.SIGTERM, "")
