"""Tests of `python -m transformer report`: content of the page, and safety against injected text."""

import base64
import hashlib
import html
import itertools
import json
import os
import re
import socket
from html.parser import HTMLParser

import numpy as np
import pytest
from training_recipes import change, text_recipe

from transformer.__main__ import main
from transformer.cli._report import in_another_workdir, names_of, read_run
from transformer.training._recipe import save_recipe
from transformer.training.metrics._report import append_samples, read_calls, read_samples, record_call, versions
from transformer.training.metrics._summary import Summary, save_summary
from transformer.training.workdir._lock import WorkdirLock, in_use
from transformer.viz._report_curves import CHARTS, frame_of, kept_points, lines_of, short, svg, ticks, unit_of
from transformer.viz._report_page import RunReport, report_page, save_report

PNG = b"\x89PNG\r\n\x1a\n"
HOSTILE = "</script><b>bold</b><img src=x onerror=alert(1)>\x1b[31m\x00\ud800 & \u2028"


class Page(HTMLParser):
    """Parse a page as a browser does: elements with their attributes, and texts by enclosing element."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.elements, self.inside, self.texts = [], [], []
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "wbr":  # it has no end, and the words around it are one
            self.texts.append((tag, "\0"))
        else:
            self.inside.append(tag)

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        self.texts.append((self.inside[-1] if self.inside else "", data))

    def count(self, tag):
        return sum(name == tag for name, _ in self.elements)

    @property
    def words(self):
        words = " ".join(text for tag, text in self.texts if tag not in ("script", "style"))
        return words.replace(" \0 ", "")

    @property
    def data(self):
        """The data of all plots."""
        found = [json.loads(text) for tag, text in self.texts if tag == "script" and text.startswith("[{")]
        return [line for picture in found for line in picture]


def make_run(folder, name, *, steps=8, done=8, every=2, bad=(), **groups):
    """Create a workdir like that of a run after `done` of `steps` steps; nothing is trained."""
    recipe = change(text_recipe(folder), training={"steps": steps}, **groups)
    workdir = folder / name
    workdir.mkdir()
    save_recipe(recipe, workdir)
    record_call(workdir, 0, f"python train.py mine.py --workdir {workdir}", "device: 1 x cpu, jax 0")
    with open(workdir / "metrics.jsonl", "w") as file:
        for step in range(every, done + 1, every):
            loss = "NaN" if step in bad else 3.0 / step
            line = {"train/loss": loss, "train/grad_norm": 1.0, "train/learning_rate": 0.1, "perf/tokens_per_s": 1e4}
            file.write(json.dumps({"step": step} | line) + "\n")
            file.write(json.dumps({"step": step, "eval/loss": 3.5 / step, "eval/accuracy": step / 10}) + "\n")
            append_samples(workdir, step, f"a text of step {step}")
    if done >= steps:
        save_summary(
            Summary(name="tiny", workdir=str(workdir), command="c", step=done, steps=steps, parameters=1234), workdir
        )
    return workdir


@pytest.fixture
def run(capsys):
    """Run the command; return its exit code, stdout and stderr."""

    def call(*words):
        code = main(["report", *map(str, words)])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def no_pictures(monkeypatch):
    """Skip the PNG files, which take most of the time."""
    monkeypatch.setattr("transformer.viz._report_page.save_png", lambda chart, lines, path: None)


def page_of(*workdirs):
    return Page(report_page([read_run(workdir, workdir.name) for workdir in workdirs], title="t"))


class TestCommand:
    def test_reports_a_run(self, tmp_path, run):
        workdir = make_run(tmp_path, "run")
        code, out, err = run(workdir)
        paths = out.split()
        assert (code, err) == (0, "")
        assert paths[0] == str(workdir / "report.html")
        names = {os.path.relpath(path, workdir) for path in paths[1:]}
        assert names == {
            f"report_plots/{name}.png" for name in ("loss", "accuracy", "learning-rate", "gradient-norm", "speed")
        }
        assert all(open(path, "rb").read(8) == PNG for path in paths[1:])  # noqa: SIM115
        page = Page((workdir / "report.html").read_text(encoding="utf-8"))
        for words in (
            "finished, 8 steps",
            "a text of step 8",
            "held-out loss",
            "0.4375 nats per token, best 0.4375 at step 8",
            "model.d_model",
            f"python train.py mine.py --workdir {workdir}-again",
            f"jax=={versions()['jax']}",
            "transformer evaluate",
        ):
            assert words in page.words, words
        assert page.count("figure") == page.count("svg") == len(names)
        assert page.data[0] == {"label": "train", "steps": [2, 4, 6, 8], "values": [1.5, 0.75, 0.5, 0.375]}

    def test_two_runs_are_compared(self, tmp_path, run, no_pictures):
        one = make_run(tmp_path, "one")
        other = make_run(tmp_path, "other", model={"num_heads": 2}, optimizer={"learning_rate": 0.5})
        code, out, _ = run(one, other, "--output", tmp_path / "both" / "page.html")
        assert (code, out.splitlines()[1]) == (0, str(tmp_path / "both" / "page_plots" / "loss.png"))
        page = Page((tmp_path / "both" / "page.html").read_text(encoding="utf-8"))
        table = page.words.partition("Differences between the recipes")[2].partition("Last values")[0]
        assert re.findall(r"[a-z]+\.[a-z_.0-9]+", table) == ["model.num_heads", "optimizer.learning_rate"]
        assert [line["label"] for line in page.data[:4]] == ["one, train", "one, eval", "other, train", "other, eval"]
        assert page.count("h1") == 1

    def test_chooses_the_path_of_a_page_of_several_runs(self, tmp_path, run, no_pictures):
        one, other = make_run(tmp_path, "one"), make_run(tmp_path, "other")
        assert run(one, other)[1].split()[0] == str(one / "comparison.html")
        assert run(one, f"{one}/")[1].split()[0] == str(one / "report.html")  # the same workdir twice counts once

    def test_prints_json(self, tmp_path, run, no_pictures):
        report = json.loads(run(make_run(tmp_path, "run"), "--json")[1])
        assert report["runs"][0]["status"] == "finished, 8 steps"
        assert len(report["pictures"]) == 5

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ((), "WORKDIR is missing: workdirs of runs"),
            (("nowhere",), "nowhere is not the workdir of a run"),
            (("{run}", "--output", "{run}"), "--output must name the HTML file to write"),
            (("{run}", "--output", "x.png"), "such as report.html, got x.png"),
            (("{run}", "--outptu", "x.html"), "Did you mean '--output'?"),
        ],
    )
    def test_invalid_arguments_are_one_line_errors(self, tmp_path, run, words, message):
        workdir = make_run(tmp_path, "run")
        code, out, err = run(*(word.format(run=workdir) for word in words))
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


class TestStates:
    def test_reports_a_run_without_metrics(self, tmp_path):
        workdir = make_run(tmp_path, "run", done=0)
        page = page_of(workdir)
        assert "nothing logged yet" in page.words
        assert page.count("svg") == 0
        (workdir / "metrics.jsonl").unlink()
        assert "nothing logged yet" in page_of(workdir).words

    def test_reports_a_stopped_run(self, tmp_path):
        assert "stopped at or after step 4 of 8" in page_of(make_run(tmp_path, "run", done=4)).words

    def test_reports_a_running_run(self, tmp_path):
        workdir = make_run(tmp_path, "run", done=4)
        with WorkdirLock(workdir):
            assert in_use(workdir)
            assert "running, step 4 of 8" in page_of(workdir).words
        assert not in_use(workdir)
        holder = {"pid": 1, "host": socket.gethostname(), "started": "long ago", "since": "2026-01-02 03:04:05 UTC"}
        (workdir / ".lock").write_text(json.dumps(holder))
        assert not in_use(workdir)

    def test_skips_an_incomplete_last_line(self, tmp_path):
        workdir = make_run(tmp_path, "run", done=4)
        with open(workdir / "metrics.jsonl", "a") as file:
            file.write('{"step": 5, "train/lo')
        assert page_of(workdir).data[0]["steps"] == [2, 4]

    def test_a_broken_line_is_named(self, tmp_path, run):
        workdir = make_run(tmp_path, "run")
        text = (workdir / "metrics.jsonl").read_text()
        (workdir / "metrics.jsonl").write_text(f"oops\n{text}")
        code, _, err = run(workdir)
        assert (code, err.count("\n")) == (2, 1)
        assert "metrics.jsonl, line 1" in err

    def test_handles_non_finite_values(self, tmp_path):
        page = page_of(make_run(tmp_path, "run", bad=(4, 6)))
        assert page.data[0]["values"] == [1.5, None, None, 0.375]
        assert "train is not finite at 2 logged steps, first at step 4" in page.words
        assert sum(attributes.get("class") == "lost" for _, attributes in page.elements) == 2

    def test_handles_runs_without_finite_values(self, tmp_path):
        workdir = make_run(tmp_path, "run", done=2, bad=(2,))
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
        (workdir / "metrics.jsonl").write_text(lines[0] + "\n")
        page = page_of(workdir)
        assert "train/loss" in page.words  # in the table of last values
        assert all(line["values"] != [None] for line in page.data)

    def test_reports_runs_with_only_evaluations(self, tmp_path):
        workdir = make_run(tmp_path, "run")
        lines = [line for line in (workdir / "metrics.jsonl").read_text().splitlines() if "eval/" in line]
        (workdir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        assert [line["label"] for line in page_of(workdir).data] == ["eval", ""]

    def test_a_resumed_run_drops_its_earlier_outcome(self, tmp_path):
        workdir = make_run(tmp_path, "run")
        assert read_run(workdir, "run").outcome
        with open(workdir / "metrics.jsonl", "a") as file:
            file.write('{"step": 9, "train/loss": 1.0}\n')
        report = read_run(workdir, "run")
        assert report.outcome == ""
        assert "step 9" in report.status

    def test_reports_a_run_without_recorded_invocations(self, tmp_path):
        workdir = make_run(tmp_path, "run")
        (workdir / "calls.jsonl").unlink()
        page = page_of(workdir)
        assert "Versions" not in page.words
        assert "transformer evaluate" in page.words

    def test_reports_an_averaged_model(self, tmp_path):
        workdir = make_run(tmp_path, "run", done=0)
        (workdir / "average.json").write_text("{}")
        assert "average" in read_run(workdir, "run").status


class TestPage:
    def test_texts_are_escaped(self, tmp_path, no_pictures):
        """Generated texts and names given by the user stay text; the page runs only its own scripts."""
        texts = {HOSTILE: HOSTILE}
        hostile = RunReport(
            name=HOSTILE,
            status=HOSTILE,
            facts=texts,
            records=[{"step": 1, "train/loss": 1.0, HOSTILE: 2.0}],
            unit=HOSTILE,
            targets=HOSTILE,
            outcome=HOSTILE,
            samples=[(1, HOSTILE)],
            recipe={"name": HOSTILE},
            versions=texts,
            calls=[HOSTILE],
            commands=texts,
        )
        other = RunReport(name="b", status="", records=[{"step": 1, "train/loss": 1.0}], recipe={"name": "b"})
        plain = RunReport(name="a", status="", records=[{"step": 1, "train/loss": 1.0}], recipe={"name": "c"})
        (path, *_) = save_report([hostile, other], tmp_path / "page.html", title=HOSTILE, made=HOSTILE)
        source = path.read_text(encoding="utf-8")
        page, tame = Page(source), Page(report_page([plain, other], title="t"))
        assert (page.count("img"), page.count("script")) == (0, tame.count("script"))
        assert page.count("b") == page.count("figcaption")
        assert not {"\x1b", "\x00"} & set(source)
        assert "alert(1)" in page.words
        assert page.data[0]["label"] == f"{HOSTILE}, train"

    def test_the_page_fetches_nothing_and_runs_only_its_own_script(self):
        page = report_page([RunReport(name="a", status="", records=[{"step": 1, "train/loss": 1.0}])], title="t")
        assert not re.search(r"(src|href)\s*=|url\((?!#)|@import|https?:", page)
        script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in html.unescape(page)
        assert "default-src 'none'" in page

    def test_shortens_run_names(self, tmp_path):
        with pytest.raises(ValueError, match="there is no run to report"):
            report_page([], title="t")
        with pytest.raises(ValueError, match="two runs are called 'a'"):
            report_page([RunReport(name="a", status="")] * 2, title="t")
        assert names_of([tmp_path / "x" / "a", tmp_path / "b"]) == ["a", "b"]
        assert names_of([tmp_path / "x" / "a", tmp_path / "a"]) == [str(tmp_path / "x" / "a"), str(tmp_path / "a")]

    def test_many_points_do_not_make_a_large_page(self):
        records = [{"step": step, "train/loss": 2.0 + np.sin(step), "train/grad_norm": 1.0} for step in range(5_000)]
        assert len(report_page([RunReport(name="a", status="", records=records)], title="t")) < 150_000


class TestCurves:
    def test_subsampling_keeps_extremes(self):
        values = np.zeros(10_000)
        values[[17, 6_000]], values[9_000] = [5.0, -7.0], np.nan
        kept = kept_points(values)
        assert {0, 17, 6_000, 9_000, 9_999} <= set(kept)
        assert len(kept) <= 1_600
        assert kept_points(values[:900]) == list(range(900))

    @pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 7), (-3.5, 2), (1e-5, 3e-5), (0, 2_000), (1.6, 1.7)])
    def test_ticks_are_round_and_inside(self, low, high):
        found = ticks(low, high)
        assert 3 <= len(found) <= 11
        assert all(low - 1e-9 <= value <= high + 1e-9 for value in found)
        assert len({round(b - a, 9) for a, b in itertools.pairwise(found)}) == 1

    def test_numbers_are_short(self):
        expected = {
            0.0: "0",
            1200.0: "1,200",
            52_930.4: "52,930",
            0.25: "0.25",
            2e-5: "2e-05",
            3.1e9: "3.1e+09",
            1.23456: "1.235",
        }
        assert {number: short(number) for number in expected} == expected

    def test_points_have_the_right_coordinates(self):
        """The first and last points of a line are at the edges of the frame; a non-finite value leaves a gap."""
        chart = next(chart for chart in CHARTS if chart.name == "learning-rate")
        records = [
            {"step": step, "train/learning_rate": value} for step, value in ((0, 0.0), (5, float("nan")), (10, 2.0))
        ]
        lines = lines_of(chart, {"a": records})
        frame = frame_of(chart, lines)
        assert (frame.low, frame.right) == (0.0, 10.0)
        picture = svg(chart, lines, "key")
        assert re.findall(r'd="(M[^"]*)"', picture)[0] == "M62.0 266.0M616.0 " + f"{frame.y(2.0):.1f}"
        assert 10 < frame.y(2.0) < 40

    def test_rewards_preferences_and_answers_have_plots(self):
        names = ("reward", "kl", "entropy", "completion_length", "truncated", "equal_rewards", "reward_margin")
        records = [{"step": 5, **{f"train/{name}": 0.5 for name in names}}]
        records += [{"step": 5, "eval/exact_match": 0.25, "eval/reward": 0.5, "eval/prefers_chosen": 0.75}]
        drawn = {chart.name: lines_of(chart, {"a": records}) for chart in CHARTS}
        drawn = {name: [line.values.tolist() for line in lines] for name, lines in drawn.items() if lines}
        assert set(drawn) == {*(name.replace("_", "-") for name in names), "exact-match", "prefers-chosen"}
        assert (drawn["reward"], drawn["exact-match"], drawn["prefers-chosen"]) == ([[0.5], [0.5]], [[25.0]], [[75.0]])

    @pytest.mark.parametrize("last", [2.0, 0.001, 0.0])
    def test_every_loss_is_inside_the_plot_from_the_first_one(self, last):
        """The axis is logarithmic where the loss falls by decades; a loss of 0 is on its bottom edge."""
        records = [{"step": step, "train/loss": 10.0 + (last - 10.0) * step / 20} for step in range(21)]
        lines = lines_of(CHARTS[0], {"a": records})
        frame = frame_of(CHARTS[0], lines)
        assert frame.logarithmic == (last < 1)
        assert ("log scale" in unit_of(CHARTS[0], frame)) == (last < 1)
        heights = [frame.y(value) for value in lines[0].values]
        assert heights == sorted(heights)
        assert 10 < heights[0] < 40
        assert heights[-1] <= 266.0 + 1e-9
        assert len(frame.ticks) >= 3
        (path,) = re.findall(r'<path class="run0" d="M([^"]*)"', svg(CHARTS[0], lines, "key"))
        assert path.startswith(f"62.0 {heights[0]:.1f}L")


class TestPieces:
    def test_invocations_are_ordered_and_restart_with_a_run(self, tmp_path):
        for step in (0, 4, 8):
            record_call(tmp_path, step, "c", "d")
        assert [call["step"] for call in read_calls(tmp_path)] == [0, 4, 8]
        record_call(tmp_path, 0, "again", "d")
        (call,) = read_calls(tmp_path)
        assert call["command"] == "again"
        assert {"python", "jax", "transformer-zoo"} <= call["versions"].keys()

    def test_samples_survive_a_round_trip(self, tmp_path):
        assert read_samples(tmp_path) == []
        append_samples(tmp_path, 2, "one\n=== step by step ===")
        append_samples(tmp_path, 4, "two")
        assert read_samples(tmp_path) == [(2, "one\n=== step by step ===\n"), (4, "two\n")]

    @pytest.mark.parametrize(
        ("command", "expected"),
        [
            ("python train.py x --workdir a --seed 1", "python train.py x --workdir new --seed 1"),
            ("python train.py x --workdir=a", "python train.py x --workdir=new"),
            ("python train.py x", "python train.py x"),
            ("train(recipe, 'it's')", "train(recipe, 'it's')"),
        ],
    )
    def test_rewrites_a_command_for_another_workdir(self, command, expected):
        assert in_another_workdir(command, "new") == expected
