"""Errors about a missing option, and about a path that can't be resolved."""

import pytest

from transformer.__main__ import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("average", "runs/x"), "error: --last is missing: number of checkpoints to average; "),
        (("average",), "error: WORKDIR is missing: workdir of a training run, such as runs/number_words. --help"),
        (("push", "out"), "error: --repo is missing: repository on the hub, as USER/NAME; "),
        (("push",), "error: DIR is missing: directory with config.json, safetensors and the tokenizer. --help"),
        (("score",), "error: DIR is missing: workdir of a run (runs/number_words), directory of weights"),
    ],
)
def test_names_only_the_first_missing_option_with_its_description(words, message, capsys):
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(message)
    assert "(required)" not in printed
    assert printed.endswith("--help describes each option.\n")


def test_rejects_a_symlink_loop_as_workdir(tmp_path, capsys):
    (tmp_path / "loop").symlink_to("loop")
    assert main(["report", str(tmp_path / "loop")]) == 2
    assert "is not the workdir of a run" in capsys.readouterr().err
