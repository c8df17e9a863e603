"""Grammars that need much time or memory: they are found out in another process, which is ended."""

import json
import threading
import time
from pathlib import Path

import pytest

from transformer.config._limited import Cancellation
from transformer.data.tokenizers._vocabularies import ByteTokenizer
from transformer.inference import GrammarError, Grammars, _grammar_checks
from transformer.inference._grammar_checks import GrammarChecks

pytest.importorskip("llguidance")

HUGE = {"type": "integer", "multipleOf": 123456789, "minimum": -(10**18), "maximum": 10**18}
"""needs gigabytes and minutes, and more than either limit of the tests"""
UNLIMITED = {"SECONDS": 60.0, "MOST_BYTES": 2**40}


def grammar_of(schema):
    return json.dumps({"grammars": [{"json_schema": schema}]})


def checks():
    tokens = [bytes([one]) for one in range(256)] + [b"<eos>"]
    return GrammarChecks(tokens, [256], None, [256])


def size_of(process="self"):
    """Bytes of memory that a process has in use."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096


@pytest.fixture
def limits(monkeypatch):
    def change(**values):
        for name, value in values.items():
            monkeypatch.setattr(_grammar_checks, name, value)

    return change


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is limited on Linux only")
def test_a_schema_that_needs_gigabytes_is_rejected_and_the_next_accepted():
    grammars = Grammars(ByteTokenizer())
    grammars.regex("a")
    before = size_of()
    for _ in range(3):
        with pytest.raises(GrammarError, match="JSON schema can't be used: it does not compile within 24 MiB"):
            grammars.json_schema(HUGE)
    assert size_of() - before < 10e6
    assert grammars.json_schema({"type": "integer"}).allowed().any()


def test_the_time_is_limited(limits):
    limits(MOST_BYTES=2**40, SECONDS=0.2)
    grammars, began = Grammars(ByteTokenizer()), time.monotonic()
    with pytest.raises(GrammarError, match=r"does not compile within 0.2 seconds. Simplify it\.$"):
        grammars.json_schema(HUGE)
    assert time.monotonic() - began < 10  # alone, it takes minutes


def test_simple_grammars_do_not_wait_for_a_costly_one(limits):
    limits(**UNLIMITED)
    made, cancellation, reasons = checks(), Cancellation(), []
    thread = threading.Thread(target=lambda: reasons.append(made.reason_against(grammar_of(HUGE), cancellation)))
    thread.start()
    for _ in range(3):
        assert made.reason_against(grammar_of({"type": "integer"}), Cancellation()) is None
    assert thread.is_alive()
    cancellation.cancel()
    thread.join(20)  # alone, it takes minutes
    assert reasons == ["its check was cancelled"]


def test_a_check_can_be_cancelled_before_it_starts():
    cancellation = Cancellation()
    cancellation.cancel()
    assert checks().reason_against(grammar_of({"type": "integer"}), cancellation) == "its check was cancelled"


def test_a_crash_is_reported_as_one(tmp_path, monkeypatch):
    program = tmp_path / "_program.py"
    program.write_text("import os\ndef prepare(_):\n    return lambda message: os.kill(os.getpid(), 11)")
    monkeypatch.setattr(_grammar_checks, "PROGRAM", program)
    reason = checks().reason_against(grammar_of({}), Cancellation())
    assert reason == "the process that compiles it was ended by SIGSEGV. Simplify it"


def test_a_process_is_reused_and_exits_with_its_owner():
    made = checks()
    for number in range(3):
        assert made.reason_against(grammar_of({"const": number}), Cancellation()) is None
    (process,) = made._processes._idle
    assert process.poll() is None
    del made
    assert process.poll() is not None


def test_reports_an_unusable_vocabulary():
    made = GrammarChecks([b"a"], [], None, [5])
    with pytest.raises(OSError, match=r"the process that runs _grammar_worker.py ended with status"):
        made.reason_against(grammar_of({}), Cancellation())
