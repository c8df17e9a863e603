"""A server of two processes, each with some of the devices: the answers of one device."""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from chat_parts import write_chat_model
from training_recipes import xla_flags

from transformer.serve._lockstep import PING, STOP, Lockstep

ROOT = Path(__file__).resolve().parents[2]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Server:
    """Processes of a server; process 0 prints its URL."""

    def __init__(self, model, folder, *flags, devices=(1, 1), options=()):
        port, self.members = free_port(), []
        for index, count in enumerate(devices):
            command = [sys.executable, "-m", "transformer", "serve", str(model), "--json", "--port", "0", *options]
            command += ["--slots", "2", "--max-tokens", "64", *flags]
            if len(devices) > 1:
                command += ["--parallel.coordinator", f"localhost:{port}", "--parallel.process-id", str(index)]
                command += ["--parallel.num-processes", str(len(devices))]
            environment = os.environ | {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": xla_flags(count),
                "PYTHONPATH": str(ROOT),
                "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            }
            with open(folder / f"{len(devices)}-{index}.txt", "w") as errors:
                outputs = {"stdout": subprocess.PIPE, "stderr": errors}
                self.members.append(subprocess.Popen(command, env=environment, text=True, **outputs))
        lines = queue.Queue()
        threading.Thread(target=lambda: lines.put(self._started()), daemon=True).start()
        try:
            self.url = lines.get(timeout=120)
        except queue.Empty:
            self.kill()
            raise

    def _started(self):
        text = ""
        for line in self.members[0].stdout:
            text += line
            with contextlib.suppress(ValueError):
                return json.loads(text[text.find("{") :])["url"]  # Gloo prints its connections before
        return ""

    def complete(self, **body):
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/completions", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return [one["text"] for one in json.load(answer)["choices"]]

    def kill(self):
        for member in self.members:
            with contextlib.suppress(OSError):
                member.kill()


BODIES = [
    {"prompt": ["a b c a b c a b", "x", "hello"], "max_tokens": 30, "temperature": 0},
    {"prompt": "a", "n": 3, "max_tokens": 20, "temperature": 0.9, "seed": 5},
]


@pytest.mark.slow
def test_several_processes_give_the_answers_of_one(tmp_path):
    model = write_chat_model(tmp_path / "tiny")
    found = []
    for devices, flags in (((1,), ()), ((1, 1), ("--parallel.tensor", "2"))):
        server = Server(model, tmp_path, *flags, devices=devices, options=("--lookup", "2"))
        try:
            assert server.url, (tmp_path / f"{len(devices)}-0.txt").read_text()
            found.append([server.complete(**body) for body in BODIES])
            if len(devices) > 1:  # longer than the other process waits without a ping
                time.sleep(7)
                found.append([server.complete(**body) for body in BODIES])
            server.members[0].send_signal(signal.SIGTERM)
            assert [member.wait(timeout=60) for member in server.members] == [0] * len(devices)
        finally:
            server.kill()
    assert found[0] == found[1] == found[2]


def test_one_process_sends_nothing():
    lockstep = Lockstep(is_shared=False)
    lockstep.send("read", {})


def test_messages_arrive_in_order_with_their_arrays(monkeypatch):
    """Without other processes: what process 0 broadcasts is kept, and then followed."""
    kept, calls = [], []
    monkeypatch.setattr("transformer.serve._lockstep._broadcast", lambda value: (kept.append(value), value)[1])
    lockstep = Lockstep(is_shared=True)
    arrays = {"tokens": np.arange(3000), "flag": np.bool_(True)}
    for name, given in (("read", arrays), (PING, None), ("start", {"slot": np.int32(2)}), (STOP, None), ("late", {})):
        lockstep.send(name, given)
    waiting = iter(kept)
    monkeypatch.setattr("transformer.serve._lockstep._broadcast", lambda value: next(waiting))
    Lockstep(is_shared=True).follow(lambda name, arrays: calls.append((name, arrays)))
    assert [name for name, _ in calls] == ["read", "start"]
    np.testing.assert_equal(calls[0][1], arrays)
    assert calls[1][1] == {"slot": 2}
    assert next(waiting, None) is None  # nothing is sent after the stop
    assert {len(value) for value in kept if np.ndim(value)} == {4096, 32768}  # few sizes: few programs
