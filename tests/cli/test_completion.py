"""The completion script, run by bash."""

import contextlib
import io
import shutil
import subprocess

import pytest

from transformer.__main__ import COMMANDS, main
from transformer.config._recipe_files import recipe_files

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert main(["--completion", "bash"]) == 0
    path = tmp_path_factory.mktemp("completion") / "script"
    path.write_text(text.getvalue())
    return path


def completed(script, *words):
    """Return the completions of the last word."""
    quoted = " ".join(f"'{word}'" for word in words)
    program = f"source '{script}'; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _transformer_zoo"
    program += "; complete -p transformer-zoo >&2; printf '%s\\n' \"${COMPREPLY[@]}\""
    run = subprocess.run(["bash", "-euo", "pipefail", "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stderr == "complete -o default -F _transformer_zoo transformer-zoo\n"
    return run.stdout.split()


def test_bash_completes_commands_options_and_recipes(script):
    assert set(completed(script, "transformer-zoo", "")) >= {name.split()[0] for name in COMMANDS}
    assert completed(script, "transformer-zoo", "inspect", "i") == ["image"]
    assert completed(script, "transformer-zoo", "inspect", "chat", "--sw") == ["--switch"]
    assert completed(script, "transformer-zoo", "ser") == ["serve"]
    assert completed(script, "transformer-zoo", "generate", "DIR", "--max-n") == ["--max-new-tokens"]
    assert completed(script, "transformer-zoo", "train", "shakespeare_c") == ["shakespeare_cpu"]
    assert set(completed(script, "transformer-zoo", "train", "")) == set(recipe_files())
    options = completed(script, "transformer-zoo", "train", "etth1", "--")
    assert {"--workdir", "--fast", "--allow-change", "--training.steps", "--help-all"} <= set(options)
    assert completed(script, "transformer-zoo", "generate", "some") == [], "bash completes files"


def test_every_command_has_options(script):
    for name in COMMANDS:
        assert "--help" in completed(script, "transformer-zoo", *name.split(), "--h"), name


@pytest.mark.parametrize("words", [["fish"], []])
def test_rejects_an_unsupported_shell(words, capsys):
    assert main(["--completion", *words]) == 2
    assert f"error: --completion must be bash, got {' '.join(words)!r}." in capsys.readouterr().err
