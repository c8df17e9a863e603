"""Files that the user names are not overwritten, unless this program wrote them."""

import pytest

from transformer.cli.outputs import check_replaceable
from transformer.config import ConfigError
from transformer.viz import style


def test_a_file_of_another_program_stays(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("<!doctype html><p>mine")
    with pytest.raises(
        ConfigError, match=r"--html .*page\.html exists and is no page .* Name another file, or delete it"
    ):
        check_replaceable(path, "--html")
    assert path.read_text() == "<!doctype html><p>mine"


def test_what_this_program_wrote_and_what_is_not_there_is_written(tmp_path):
    check_replaceable(None, "--html")
    check_replaceable(tmp_path / "new.html", "--html")
    (tmp_path / "empty.html").touch()
    check_replaceable(tmp_path / "empty.html", "--html")
    style.save(style.new_figure(1, 1), tmp_path / "picture.png")
    check_replaceable(tmp_path / "picture.png", "--output")
