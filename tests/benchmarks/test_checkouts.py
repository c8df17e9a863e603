"""benchmarks/checkouts.py compares two checkouts, and rejects a folder that is not a checkout."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import checkouts

ROOT = Path(__file__).resolve().parents[2]


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["checkouts", *map(str, arguments)])
    checkouts.main()


@pytest.mark.slow
def test_a_checkout_is_compared_with_itself(monkeypatch, capsys):
    run(monkeypatch, ROOT, "--works", "import", "--turns", "1")
    *table, last = capsys.readouterr().out.splitlines()
    assert table[-1].startswith("| import | ")
    assert json.loads(last)["ratios"]["import"] > 0


def test_both_checkouts_are_run(monkeypatch):
    """The checkouts run in alternating order, each in its own folder."""
    order = []
    monkeypatch.setattr(
        checkouts, "new_process", lambda work, checkout: (lambda: order.append(checkout) or 1.0, lambda: None)
    )
    other = Path("other")
    assert checkouts.compare_checkouts("import", other, 2) == ([1.0, 1.0], [1.0, 1.0])
    assert order == [other, ROOT, ROOT, other]


def test_rejects_a_folder_that_is_not_a_checkout(monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path)
    assert "is not a checkout of this repository: it has no folder transformer/." in capsys.readouterr().err
