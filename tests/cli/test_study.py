"""Tests of `study scale`, `positions` and `memory`: tables, JSON, plots, and error messages."""

import functools
import json
import re

import pytest
from matplotlib.image import imread

from transformer.__main__ import main
from transformer.viz.studies import _memory, _padding, _positions, _scale


@pytest.fixture
def run(capsys):
    """Run `study` with these arguments; return its exit code, stdout and stderr."""

    def call(*words):
        code = main(["study", *(str(word) for word in words)])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def fails(run):
    """Run `study` with arguments that must fail with one line on stderr; return that line."""

    def call(*words):
        code, out, err = run(*words)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert err.startswith("error: ")
        return err.removeprefix("error: ").rstrip("\n")

    return call


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Limit the studies to a few small sizes, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    sizes = {
        (_scale, "scale_study"): ((4, 1_024), 2),
        (_positions, "position_study"): (1_200,),
        (_memory, "memory_study"): ((128, 256),),
        (_padding, "number_word_lengths"): (300,),
    }
    for (module, name), arguments in sizes.items():
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), *arguments))
    return tmp_path


def tables(out):
    """Return the aligned tables of a text as lists of rows of cells."""
    blocks = [block.splitlines() for block in out.split("\n\n") if re.search(r"\S {2,}\S", block)]
    assert all(len(set(map(len, lines))) == 1 for lines in blocks), "columns are aligned"
    return [[re.split(r" {2,}", line.strip()) for line in lines] for lines in blocks]


class TestStudies:
    @pytest.mark.programs(27, reason="the study makes single measurements outside of jit")
    def test_prints_the_scale_study(self, run, small):
        code, out, err = run("scale")
        assert (code, err) == (0, "")
        (table,) = tables(out)
        assert table[0] == ["d_k", "scale", "mean", "variance", "largest weight", "gradient"]
        assert [row[:2] for row in table[1:]] == [["4", "1"], ["4", "1/2"], ["1,024", "1"], ["1,024", "1/32"]]
        assert out.splitlines()[-1] == "study-scale.png"
        assert imread(small / "study-scale.png").std() > 0.05

    @pytest.mark.programs(27, reason="the study makes single measurements outside of jit")
    def test_prints_the_scale_study_as_json(self, run, small):
        code, out, err = run("scale", "--json", "--output", "here/scale.png")
        found = json.loads(out)
        assert (code, err, found["study"], found["picture"]) == (0, "", "scale", "here/scale.png")
        assert [(row["d_k"], row["scaled"]) for row in found["rows"]] == [
            (4, False),
            (4, True),
            (1_024, False),
            (1_024, True),
        ]
        assert (small / "here" / "scale.png").is_file()
        assert not (small / "study-scale.png").exists()

    @pytest.mark.programs(70, reason="the study makes single measurements outside of jit")
    def test_prints_the_position_study(self, run, small):
        code, out, err = run("positions")
        assert (code, err) == (0, "")
        similarities, codes, repeats = tables(out)
        assert similarities[0] == ["similarity at distance", "1", "10", "100", "1,000"]
        assert {row[0] for row in similarities} >= {"sinusoidal, d_model 512", "rotary, base 500,000", "none"}
        assert ["T5, decoder", "32", "16", "113"] in codes
        assert repeats[1][:4] == ["4", "6.28", "628", "6"]
        assert imread(small / "study-positions.png").std() > 0.05
        assert out.isascii()

    def test_prints_the_memory_study(self, run, small):
        code, out, err = run("memory", "--json")
        found = json.loads(out)
        assert (code, err) == (0, "")
        assert {(row["kernel"], row["length"]) for row in found["memory"]} == {
            (kernel, length) for kernel in ("reference", "query_chunked", "blockwise") for length in (128, 256)
        }
        assert found["lengths"]["count"] == 300
        assert [row["strategy"] for row in found["padding"]][::3] == ["longest of all", "packing"]
        assert imread(small / "study-memory.png").std() > 0.05

    def test_padding_study_reads_a_text_file(self, run, small):
        (small / "text.txt").write_text("a b c d\n\na b\n" * 4)
        code, out, err = run("memory", "--lengths-of", "text.txt")
        assert (code, err) == (0, "")
        memory, padding = tables(out)
        kernels = [
            part for kernel in ("reference", "query_chunked", "blockwise") for part in (f"{kernel} MiB", "growth")
        ]
        assert memory[0] == ["length", *kernels, "reference / query_chunked", "reference / blockwise"]
        assert "8 sequences: lines of text.txt, counted in words" in out
        assert padding[1] == ["longest of all", "1", "8", "32", "8", "25.0%", "1"]
        assert padding[-1] == ["packing", "1", "6", "24", "0", "0.0%", "1"]


class TestMistakes:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("scale", "runs/x"), "unexpected argument: runs/x"),
            (("scale", "--prompt", "one"), "study scale has no option --prompt"),
            (("scale", "--lengths-of", "x"), "study scale has no option --lengths-of"),
            (("scale", "--outptu", "x"), "study scale has no option --outptu. Did you mean '--output'?"),
            (("scal",), "unknown command 'study scal'. Did you mean 'study scale'?"),
            (("--scale",), "missing command after study. Use one of study scale, "),
            (("scale", "--output"), "--output"),
        ],
    )
    def test_reports_invalid_arguments(self, words, message, fails):
        assert message in fails(*words)

    def test_reports_an_unreadable_text(self, fails, small):
        assert "no file none.txt" in fails("memory", "--lengths-of", "none.txt")
        (small / "empty.txt").write_text(" \n\n")
        assert "empty.txt is empty" in fails("memory", "--lengths-of", "empty.txt")
        (small / "latin.txt").write_bytes(b"caf\xe9")
        assert "latin.txt is not UTF-8 text: byte 3" in fails("memory", "--lengths-of", "latin.txt")
        assert f"{small} is not a file" in fails("memory", "--lengths-of", small)

    @pytest.mark.programs(27, reason="the study makes single measurements outside of jit")
    def test_rejects_a_folder_as_picture(self, fails, small):
        assert "Pass a file" in fails("scale", "--output", small)


class TestHelp:
    @pytest.mark.parametrize(("name", "own"), [("scale", ""), ("positions", ""), ("memory", "--lengths-of")])
    def test_help_of_a_study(self, name, own, capsys):
        with pytest.raises(SystemExit) as stop:
            main(["study", name, "--help"])
        out, err = capsys.readouterr()
        assert (stop.value.code or 0, err) == (0, "")
        assert f"study-{name}.png" in out
        assert ("--lengths-of" in out) == bool(own)
        assert "DIR" not in out
