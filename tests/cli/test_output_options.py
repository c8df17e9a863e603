"""Tests that output options replace only files that the program wrote."""

import pytest
from inference_parts import write_models

from transformer.__main__ import main
from transformer.viz import _style as style
from transformer.viz._output_files import check_replaceable, is_replaceable
from transformer.viz._report_page import RunReport, save_report

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")  # a conflict with pyparsing

THEIRS = "my notes, kept for years\n"


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    return str(write_models(tmp_path_factory.mktemp("models"))["writer"])


@pytest.fixture
def run(capsys):
    def call(*words):
        code = main([str(word) for word in words])
        return code, capsys.readouterr().err

    return call


def refused(path):
    return 2, (
        f"error: {path} already exists, and this program did not write it. Pass another file, or pass --overwrite to "
        "replace it.\n"
    )


@pytest.mark.programs(26, reason="masks and maps of attention are computed outside of jit")
def test_a_page_overwrites_only_pages(writer, run, tmp_path):
    page = tmp_path / "page.html"
    words = ("inspect", "text", writer, "--prompt", "the cat", "--html", page)
    page.write_text(THEIRS)
    assert run(*words) == refused(page)
    assert page.read_text() == THEIRS
    assert run(*words, "--overwrite") == (0, "")
    first = page.read_text()
    assert first.startswith("<!doctype html>")
    assert run(*words, "--max-new-tokens", 1) == (0, "")
    assert page.read_text() != first


@pytest.mark.programs(15, reason="masks and maps of attention are computed outside of jit")
def test_pictures_overwrite_only_pictures(writer, run, tmp_path):
    words = ("inspect", "text", writer, "--prompt", "the cat", "--output", tmp_path)
    assert run(*words) == (0, "")
    picture, *_ = sorted(tmp_path.glob("*.png"))
    assert run(*words) == (0, "")
    picture.write_text(THEIRS)
    assert run(*words) == refused(picture)
    assert picture.read_text() == THEIRS
    assert run(*words, "--overwrite") == (0, "")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("study", "scale"), "scale.png"),
        (("study", "positions"), "positions.png"),
        (("study", "memory"), "memory.png"),
        (("report", "runs/none"), "report.html"),
    ],
)
def test_study_and_report_check_their_output_before_starting(words, name, run, tmp_path):
    path = tmp_path / name
    path.write_text(THEIRS)
    assert run(*words, "--output", path) == refused(path)
    assert path.read_text() == THEIRS


def test_a_report_overwrites_only_its_pictures(tmp_path):
    run = RunReport(name="a", status="", facts={}, records=[{"step": step, "train/loss": 1.0} for step in (1, 2)])
    page = tmp_path / "report.html"
    paths = save_report([run], page, title="a", overwrite=False)
    assert len(paths) > 1
    assert save_report([run], page, title="b", overwrite=False) == paths
    paths[1].write_text(THEIRS)
    before = page.read_text()
    with pytest.raises(FileExistsError, match=rf"{paths[1].name}"):
        save_report([run], page, title="c", overwrite=False)
    assert (paths[1].read_text(), page.read_text()) == (THEIRS, before)
    save_report([run], page, title="c")


def test_recognizes_files_that_may_be_overwritten(tmp_path):
    missing, empty, theirs, picture = (tmp_path / name for name in ("missing", "empty", "theirs", "picture.png"))
    empty.touch()
    theirs.write_text(THEIRS + "transformer-zoo")
    style.save(style.new_figure(1, 1), picture)
    assert [is_replaceable(path) for path in (missing, empty, picture, theirs)] == [True, True, True, False]
    many = [tmp_path / f"file{i}" for i in range(7)]
    for path in many:
        path.write_text(THEIRS)
    with pytest.raises(FileExistsError, match=r"file0.*file4.*2"):
        check_replaceable([missing, *many])
