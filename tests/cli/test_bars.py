"""Progress bars of long work: on a terminal only, and gone when the work is done."""

import io
import sys
import threading
import time

import pytest

from transformer.cli import _bars
from transformer.config._progress import counting, showing


class Terminal(io.StringIO):
    def isatty(self):
        return True


def work(seconds):
    """Count three texts, each of which takes `seconds` of the clock."""
    add = counting("texts", 3)
    for _ in range(3):
        seconds()
        add(1)


def test_library_functions_report_progress_to_listeners():
    seen = []
    with showing(lambda *progress: seen.append(progress)):
        work(lambda: None)
    assert seen == [("texts", float(done), 3, "") for done in range(4)]
    counting("texts", 3)(1)
    assert len(seen) == 4, "nobody listens any more"


def test_a_note_is_shown_next_to_the_bar(monkeypatch):
    """A note does not begin new work, although nothing is done yet."""
    monkeypatch.setattr(_bars, "DELAY", 0.1)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with _bars.bars():
        add = counting("requests", 2)
        for _ in range(8):
            time.sleep(0.1)
            add(0, "123 tokens/s")
    held = sys.stderr.getvalue()
    assert "0/2" in held
    assert "123 tokens/s" in held


@pytest.mark.parametrize(
    ("stream", "seconds", "shown"), [(Terminal, 0.6, True), (Terminal, 0.0, False), (io.StringIO, 0.6, False)]
)
def test_a_bar_appears_for_long_work_on_a_terminal(stream, seconds, shown, monkeypatch):
    monkeypatch.setattr(_bars, "DELAY", 0.1)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", stream())
    with _bars.bars():
        work(lambda: time.sleep(seconds))
    held = sys.stderr.getvalue()
    assert ("texts" in held) is shown
    assert ("0/3" in held) is shown, "it appears during the first piece"
    assert ("2/3" in held) is shown
    assert bool(held) is shown
    for timer in [one for one in threading.enumerate() if isinstance(one, threading.Timer)]:
        timer.join(5)
        assert not timer.is_alive(), "the timer ends with the work"


def test_each_task_has_its_own_progress_bar(monkeypatch):
    monkeypatch.setattr(_bars, "DELAY", 0.1)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with _bars.bars():
        counting("quick maps", 1)(1)
        add = counting("slow pages", 2)
        time.sleep(0.6)
        add(1)
    assert "quick maps" not in sys.stderr.getvalue()
    assert "slow pages" in sys.stderr.getvalue()
