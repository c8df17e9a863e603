"""Tests of `make audit` without a network, and of the table of `make fuzz`."""

import http.server
import json
import subprocess
import threading
from pathlib import Path

import pytest

from reliability import audit, fuzz
from reliability.page import put

ROOT = Path(__file__).resolve().parents[2]


class Service(http.server.BaseHTTPRequestHandler):
    """A service that reports no vulnerabilities."""

    def do_POST(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *words):
        """Print nothing on stderr."""


@pytest.fixture
def service():
    """URL of a service on this machine."""
    server = http.server.HTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_audit_reports_a_missing_network(capsys):
    assert audit.main([], "http://127.0.0.1:1") == audit.NOT_RUN
    assert "skipped: http://127.0.0.1:1 can't be reached" in capsys.readouterr().out


@pytest.mark.parametrize("status", [0, 1])
def test_every_file_of_requirements_is_audited(service, monkeypatch, capsys, status):
    calls = []
    run = lambda words: calls.append(words) or subprocess.CompletedProcess(words, status)  # noqa: E731
    monkeypatch.setattr(audit.subprocess, "run", run)
    assert audit.main(["--python", "its-python"], service) == status
    assert {words[4] for words in calls} == {str(path) for path in ROOT.glob("requirements*.txt")}
    assert all(words[:3] == ["its-python", "-m", "pip_audit"] for words in calls)


def test_the_table_summarizes_fuzz_results(tmp_path):
    tests = [
        {"kind": "prompt", "read": 3, "refused": 1, "longest": 0.5, "peak": 2**20},
        {"kind": "index file", "read": 900, "refused": 600, "longest": 0.25, "peak": 2**21},
        {"kind": "prompt", "read": 2, "refused": 2, "longest": 0.125, "peak": 2**20},
    ]
    properties = "".join(f"<property name='fuzz' value='{json.dumps(test)}'/>" for test in tests)
    report = tmp_path / "report.xml"
    report.write_text(
        f"<testsuites><testsuite><testcase><properties>{properties}</properties></testcase></testsuite></testsuites>"
    )
    assert fuzz.records(report) == tests
    result = {
        "date": "2030-01-02",
        "machine": "a machine",
        "versions": {"python": "3.12"},
        "cases": 1508,
        "seed": 3,
        "seconds": 120.0,
        "peak": 2**21,
        "failed": 0,
        "kinds": fuzz.kinds(tests),
    }
    page = put("before\n<!-- fuzz -->\nold\n<!-- end of fuzz -->\nafter\n", "fuzz", fuzz.table(result))
    assert page == (
        "before\n<!-- fuzz -->\n"
        "2030-01-02, a machine, python 3.12, 2 min: `make fuzz CASES=1508`, seed 3. Nothing failed; no process took "
        "more than 2 MiB.\n\n"
        "| input | cases | read | refused | longest case |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| index file | 1,500 | 900 | 600 | 250 ms |\n"
        "| prompt | 8 | 5 | 3 | 500 ms |\n"
        "| all | 1,508 | 905 | 603 | 500 ms |\n"
        "<!-- end of fuzz -->\nafter\n"
    )
    assert "Tests that failed: 2;" in fuzz.table(result | {"failed": 2})
