"""Tests of the load test of the server, with simulated answers, and a slow test with a short run."""

import argparse
import ctypes
import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest

from benchmarks.serving_http import asks, write_model
from reliability import load, soak
from reliability.monitored import bytes_in_use
from reliability.page import load_table, put
from reliability.steady import MB, Sample, memory_measures, requests_measures, training_measures
from transformer.data import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1800


def samples(**changes):
    """Return samples of half an hour with 13 answers per second; each change is a function of (seconds, value)."""
    made = []
    for seconds in range(5, SECONDS + 1, 5):
        sample = Sample(
            seconds=seconds,
            in_use=150 * MB,
            resident=400 * 10**6,
            files=80,
            threads=20,
            programs=7,
            step=13 * seconds,
            speed=math.nan,
            cpu=seconds * 2.0,
        )
        made.append(
            dataclasses.replace(sample, **{name: f(seconds, getattr(sample, name)) for name, f in changes.items()})
        )
    return made


def answered(first=lambda seconds: 0.5):
    """Return a hundred answers per quarter of a minute, of which one waits 20 times as long as the others."""
    return [
        (second + 0.07 * i, first(second) * (20 if i == 99 else 1))
        for second in range(0, SECONDS, 15)
        for i in range(100)
    ]


def rows_of(**changes):
    made = samples(**changes)
    return [*memory_measures(made), *requests_measures(made, answered())]


def options(**changes):
    return argparse.Namespace(**({"minutes": 30.0, "clients": 64, "slots": 16} | changes))


def test_a_steady_server_passes():
    rows = {row.what: row for row in rows_of()}
    assert not any(row.failed for row in rows.values())
    assert (rows["memory in use"].before, rows["programs compiled"].after) == ("150.0 MB", "7")
    assert (rows["answers/s"].before, rows["answers per processor second"].after) == ("13.0", "6.5")
    assert rows["time to the first token, 50th percentile"].before == "0.50 s"
    slow = rows["time to the first token, 99th percentile"]
    assert float(slow.before.split()[0]) > 0.5
    assert not any("training" in what for what in rows)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("memory in use", {"in_use": lambda seconds, value: value + 1.5 * MB * seconds / 3600}),
        ("open files, minimum", {"files": lambda seconds, value: value + seconds // 900}),
        ("answers per processor second", {"cpu": lambda seconds, value: value * (1 + seconds / 10_000)}),
    ],
)
def test_growing_memory_or_falling_speed_fails(what, change):
    assert [row.what for row in rows_of(**change) if row.failed] == [what]


def test_answers_are_compared_by_the_quarter_in_which_they_end():
    """The warm-up and the third quarter do not count; the answers after the last sample belong to the last quarter."""

    def first(seconds):
        return {0: 9.0, 1: 1.0, 2: 7.0, 3: 3.0}[4 * seconds // SECONDS]

    late = [(SECONDS + 20.0, 3.0)] * 100
    row = requests_measures(samples(), [*answered(first), *late])[0]
    assert (row.before, row.after, row.told) == ("1.00 s", "3.00 s", "+200.0 %")


def test_a_run_without_answers_gives_no_verdict():
    with pytest.raises(ValueError, match=r"second.*got 0.*0"):
        requests_measures(samples(), [])
    with pytest.raises(ValueError, match="3 samples in a quarter of the time, got 2 in total"):
        requests_measures(samples()[:2], answered())


def test_memory_and_speed_of_training_are_separate_rows():
    """A server has no tokens/s of training: its samples are NaN, which gave a warning."""
    made = samples(speed=lambda seconds, value: 3000.0)
    assert [row.what for row in memory_measures(made)] == [
        "memory in use",
        "resident memory, maximum",
        "open files, minimum",
        "threads, minimum",
        "programs compiled",
    ]
    assert len(training_measures(made)) == 3


# The server's memory


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs Linux with glibc 2.33 or later")
@pytest.mark.programs(8, reason="the package computes single operations outside of jit")
def test_the_tokenizer_keeps_a_bounded_number_of_words(tmp_path):
    """The cache of the tokenizers library is full after 10,000 words, in the warm-up, and does not grow then."""
    write_model(tmp_path / "llama", small=True, longest=load.LONGEST)
    tokenizer = load_tokenizer(tmp_path / "llama")
    held = [bytes_in_use()]
    for seed in range(3):
        for one in asks(4000, load.LONGEST, seed=seed):
            tokenizer.encode_source(one.prompt)
        held.append(bytes_in_use())
    grown = [(after - before) / MB for before, after in itertools.pairwise(held)]
    assert 2 < grown[0] < 30
    assert max(grown[1:]) < 0.5


def test_a_client_sends_endless_different_requests():
    first, other = (list(itertools.islice(load.wishes(number), 1_000)) for number in (0, 1))
    assert len({one.prompt for one in [*first, *other]}) > 1_990
    assert first == list(itertools.islice(load.wishes(0), 1_000))


# Results


def results(seen, faults=(), **changes):
    made = samples(**changes)
    rows = [*memory_measures(made), *requests_measures(made, answered())]
    return load.record(options(), made, rows, seen, list(faults), "an abacus")


def test_the_table_reports_measured_values_and_limits():
    seen = load.Seen(answered=answered(), left=700)
    kept = json.loads(json.dumps(results(seen, files=lambda seconds, value: value + seconds // 900), allow_nan=False))
    text = load_table(kept)
    assert "an abacus" in text
    assert "`python -m reliability.load --minutes 30 --clients 64 --slots 16`: 12,000 complete answers" in text
    assert "700 requests left by their clients, none lost" in text
    assert "| open files, minimum | 80 | 81 | **too much** | no increase |" in text
    assert "| time to the first token, 50th percentile | 0.50 s | 0.50 s | +0.0 % | depends on other programs |" in text
    seen.lost += ["no end"] * 30
    text = load_table(results(seen, ["exit code 1"]))
    assert "**20 or more lost**" in text
    assert text.count("**A fault**") == 21


@pytest.mark.parametrize(
    ("faults", "lost", "growth", "code"),
    [([], [], 0.0, 0), (["exit code 1"], [], 0.0, 1), ([], ["no end"], 0.0, 1), ([], [], 2.0, 1)],
)
def test_measurements_are_stored_for_every_verdict(tmp_path, monkeypatch, capsys, faults, lost, growth, code):
    made = samples(in_use=lambda seconds, value: value + growth * MB * seconds / 3600)
    seen = load.Seen(answered(), 700, lost)
    monkeypatch.setattr(load, "serve", lambda folder, minutes, count, slots: (made, [], seen, faults))
    page = tmp_path / load.PAGE
    page.write_text("<!-- load -->\n<!-- end of load -->\n")
    assert load.main(["--output", str(tmp_path / "load.json")]) == code
    kept = json.loads((tmp_path / "load.json").read_text())
    assert kept["lost"] == lost
    assert [measure["failed"] for measure in kept["measures"]].count(True) == bool(growth)
    assert page.read_text() == f"<!-- load -->\n{load_table(kept)}<!-- end of load -->\n"
    printed = capsys.readouterr()
    assert "answers per processor second" in printed.out
    assert ("failed: " in printed.err) == bool(code)


def test_reports_a_run_too_short_for_a_verdict(monkeypatch, capsys):
    seen = load.Seen(lost=["no end"])
    monkeypatch.setattr(load, "serve", lambda *given: (samples()[:2], [], seen, ["exit code 1"]))
    assert load.main([]) == 1
    assert "got 2 in total. Run it for longer.; exit code 1; no end" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "name"), [(load, "load"), (soak, "soak")])
@pytest.mark.parametrize("text", ["", "<!-- end of {} -->\n<!-- {} -->\n"])
def test_a_page_without_markers_is_rejected_before_the_run(tmp_path, monkeypatch, capsys, command, name, text):
    monkeypatch.setattr(command, "serve" if command is load else "soak", lambda *given: pytest.fail("it runs"))
    (tmp_path / "reliability.md").write_text(text.format(name, name))
    with pytest.raises(SystemExit, match="2"):
        command.main(["--output", str(tmp_path / f"{name}.json")])
    assert f"the page must contain the lines <!-- {name} --> and <!-- end of {name} -->" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--minutes 0.5", "--minutes must be at least 1"),
        ("--clients 0", "--clients and --slots at least 1"),
        ("--output docs/load.txt", "--output must be a .json file in the directory of reliability.md"),
    ],
)
def test_rejects_invalid_options(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        load.main(words.split())
    assert message in capsys.readouterr().err


def test_the_page_equals_the_output_of_the_command():
    kept = ROOT / "docs" / "load.json"
    text = (ROOT / "docs" / load.PAGE).read_text(encoding="utf-8")
    put(text, "load", "")
    if not kept.exists():
        pytest.skip("no results are kept yet: python -m reliability.load --output docs/load.json")
    result = json.loads(kept.read_text(encoding="utf-8"))
    assert put(text, "load", load_table(result)) == text, "run: python -m reliability.load --output docs/load.json"
    assert not result["faults"]
    assert not result["lost"]


@pytest.mark.slow
def test_a_short_run_gets_all_answers_and_a_verdict(tmp_path):
    made, _, seen, faults = load.serve(tmp_path, minutes=20 / 60, count=4, slots=2, every=0.5)
    assert faults == []
    assert seen.lost == []
    assert len(seen.answered) > 20
    assert made[-1].step > 20
    rows = [*memory_measures(made), *requests_measures(made, seen.answered)]
    assert len(rows) == 9
    assert not any("nan" in f"{row.before} {row.after}" for row in rows)
    table = load_table(load.record(options(minutes=20 / 60, clients=4, slots=2), made, rows, seen, faults, "an abacus"))
    assert "none lost" in table
