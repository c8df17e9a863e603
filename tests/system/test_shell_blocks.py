"""Every shell block of README.md, CONTRIBUTING.md and docs/ works: bash runs each complete block.

By default, the called programs are replaced by stand-ins that record their arguments. Then each of our programs parses
these arguments with its own parser, up to the point where its work would begin. This finds wrong recipes, commands,
options, values, targets and quotes without training anything. A slow test actually runs the blocks in RUN; PARSED gives
the reason why the blocks of other pages are only parsed. Every page with blocks is in one of the two tables.
"""

import argparse
import ast
import contextlib
import functools
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import tyro
from shared_folders import copy_once_made
from training_recipes import xla_flags

import train
from transformer.__main__ import run_command

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"bash", "console", "json", "math", "python", "text"}

RUN = {
    "README.md": ("generate runs/number_words",),
    "docs/inspect.md": ("study scale",),
    "docs/tutorial.md": ("",),
}
"""pages with blocks that are actually run: those whose first command contains one of these strings"""

PARSED = {
    "README.md": "installs packages, trains for minutes on downloaded data, or downloads GPT-2",
    "CONTRIBUTING.md": "runs these tests",
    "docs/audio.md": "DIR and the recordings are those of the reader",
    "docs/chat.md": "DIR is a model of the reader",
    "docs/data.md": "trains on files of the reader",
    "docs/decoding.md": "DIR is a model of the reader",
    "docs/fine-tuning.md": "needs BERT and SST-2",
    "docs/index.md": "trains the same model as the tutorial",
    "docs/inspect.md": "the tutorial runs the same commands",
    "docs/long-sequences.md": "trains for hours on a CPU, or needs the TPU compiler",
    "docs/pretrained.md": "downloads GPT-2, or DIR is a model of the reader",
    "docs/quantization.md": "trains for half an hour",
    "docs/reliability.md": "kills runs for hours",
    "docs/recipes.md": "trains for minutes on downloaded data",
    "docs/report.md": "needs longer runs, and xprof",
    "docs/scaling.md": "needs several devices or hosts, or the compiler for TPUs or GPUs",
    "docs/serving.md": "DIR is a model of the reader, and a server does not end",
    "docs/shakespeare-fast.md": "trains for an hour",
    "docs/translation.md": "trains for hours on downloaded data",
    "docs/vectors.md": "trains on downloaded data",
    "docs/vision.md": "downloads models of several gigabytes",
    "docs/without-attention.md": "trains for two hours",
}
"""pages with blocks that are only parsed, with the reason"""

FOREIGN = {"git", "hf", "pip", "sacrebleu", "srun", "xprof"}
"""programs of other projects: their arguments are not checked"""
OURS = (".venv/bin/python", ".venv/bin/transformer-zoo", "python", "transformer-zoo", "make", ".ci/run")

# Records its name and arguments, each followed by a separator byte. It uses a single write, because other stand-ins may
# write at the same time. `git clone` creates its folder, and `srun` calls the program that it would start.
STAND_IN = """#!/bin/bash
name=${0#"$BLOCK_ROOT"/bin/}; name=${name#"$BLOCK_ROOT"/}
printf '%s\\037' "$name" "$@" $'\\036' >> "$BLOCK_ROOT/calls"
case "$name $1" in
  "git clone") mkdir -p "${@: -1}" ;;
  srun*) while [[ $# -gt 0 && $1 != python ]]; do shift; done; exec "$@" ;;
esac
"""
# For the blocks that are actually run: the Python of the tests, and the targets `setup` and `train` of make.
PYTHON = '#!/bin/bash\nexec "{python}" "$@"\n'
COMMAND = '#!/bin/bash\nexec python -m transformer "$@"\n'
MAKE = '#!/bin/bash\n[ "$1" != train ] || exec python train.py configs/number_words.py\n'


@dataclass(frozen=True)
class Block:
    """A shell block: its page, its line there, and its commands."""

    page: str
    line: int
    script: str

    @property
    def first(self) -> str:
        """The first command."""
        return self.script.partition("\n")[0]

    @property
    def runs(self) -> bool:
        """Whether the block is actually run."""
        return any(part in self.first for part in RUN.get(self.page, ()))


def fences(path: Path) -> list[tuple[int, str, str]]:
    """Return (line, language, text) of every fenced block of a page."""
    text = path.read_text(encoding="utf-8")
    found = re.finditer(r"^```([^\n]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start()].count("\n") + 1, match[1], match[2]) for match in found]


def typed(session: str) -> str:
    """Return the input lines of a session: lines after `$ `, with their continuation lines after a backslash."""
    return "".join(match[1] for match in re.finditer(r"^\$ ((?:.*\\\n)*.*\n)", session, re.MULTILINE))


BLOCKS = [
    Block(str(page.relative_to(ROOT)), line, text if language == "bash" else typed(text))
    for page in PAGES
    for line, language, text in fences(page)
    if language in ("bash", "console")
]
each_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{Path(block.page).stem}:{block.line}")


def run(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run a block in bash until its first error, with `folder`/bin first in PATH."""
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **environment}
    command = ["bash", "-euo", "pipefail", "-c", script]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def calls(script: str, folder: Path) -> list[list[str]]:
    """Return the programs that a block calls with their arguments, using stand-ins that do nothing."""
    for name in (*OURS, *FOREIGN):
        place = folder / (name if "/" in name else f"bin/{name}")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(STAND_IN)
        place.chmod(0o755)
    for name in re.findall(r" < (\S+)", script):
        (folder / name).touch()
    done = run(script, folder, BLOCK_ROOT=str(folder))
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return [call.split("\x1f")[:-1] for call in (folder / "calls").read_text().split("\x1e\x1f")[:-1]]


class Understood(BaseException):
    """Raised by a parser that has parsed all arguments."""


@contextlib.contextmanager
def parsing_only(monkeypatch, folder):
    """Return a context in which our programs run in this folder, and end after parsing their arguments."""

    def ends_behind(parse):
        @functools.wraps(parse)
        def parsed(*arguments, **options):
            raise Understood(parse(*arguments, **options))

        return parsed

    with monkeypatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(tyro, "cli", ends_behind(tyro.cli))
        patch.setattr(argparse.ArgumentParser, "parse_args", ends_behind(argparse.ArgumentParser.parse_args))
        patch.chdir(folder)
        try:
            yield patch
        except Understood:
            return
        except SystemExit as stop:  # --help exits
            if stop.code:
                raise


def check_call(words: list[str], folder: Path, monkeypatch) -> None:
    """Fail with the error of the program if it does not accept these arguments."""
    match words:
        case [("python" | ".venv/bin/python"), *rest]:
            check_python(rest, folder, monkeypatch)
        case [("transformer-zoo" | ".venv/bin/transformer-zoo"), *rest]:
            check_python(["-m", "transformer", *rest], folder, monkeypatch)
        case ["make", target, *rest]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"make has no {target}"
            settings = re.findall(r"^ *'?(\w+)[ =?]", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert all(word.partition("=")[0] in settings for word in rest), f"make has no variable for {rest}"
        case [program, *_]:
            assert program in FOREIGN or os.access(ROOT / program, os.X_OK), f"unknown program {program}"


def check_python(words: list[str], folder: Path, monkeypatch) -> None:
    with parsing_only(monkeypatch, folder) as patch:
        match words:
            case ["train.py", *rest]:
                train.main(rest)
            case ["-m", "transformer", ("--help" | "--version")]:
                pass
            case ["-m", "transformer", *rest]:
                run_command(rest)
            case ["-m", module, *rest]:
                assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), f"module {module} does not exist"
                patch.setattr(sys, "argv", [module, *rest])
                importlib.import_module(module).main()
            case ["-c", code]:
                ast.parse(code)
            case _:
                pytest.fail(f"python {words}: add a check for these arguments to this test")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_declares_its_language(page):
    """Every fenced block has a known language, so that it is known to be input or output."""
    assert {language for _, language, _ in fences(page)} <= LANGUAGES


def test_every_block_is_run_or_has_a_reason_not_to():
    asleep = {block.page for block in BLOCKS if not block.runs}
    assert PARSED.keys() == asleep, "add the reason why a page is only parsed to PARSED, or add the page to RUN"
    for page, parts in RUN.items():
        for part in parts:
            assert any(part in block.first for block in BLOCKS if block.page == page), (page, part)


@each_block
def test_the_commands_parse_every_block(block, tmp_path, monkeypatch):
    made = calls(block.script, tmp_path)
    assert made
    for words in made:
        check_call(words, tmp_path, monkeypatch)


WRONG = {
    "recipe": "python train.py shakespear",
    "option": "python train.py shakespeare --optimizer.learningrate 3",
    "value": "python train.py shakespeare --training.steps many",
    "command": "python -m transformer generat DIR",
    "command of the script": "transformer-zoo generat DIR",
    "recipe of the script": "transformer-zoo train shakespear",
    "option of a command": "python -m transformer generate DIR --promt x",
    "option of a benchmark": "python -m benchmarks.fast_shakespeare --seed 1 --nonsense",
    "module": "python -m benchmarks.nothing",
    "target": "make tea",
    "variable": "make crash KILL=3",
    "program": "brew install jax",
    "quote": "python -m transformer generate DIR --prompt 'x",
    "file": ".ci/runn",
    "in a loop": "for i in 0 1; do python train.py nothing & done; wait",
}


@pytest.mark.parametrize("script", WRONG.values(), ids=WRONG.keys())
def test_invalid_blocks_are_detected(script, tmp_path, monkeypatch, capsys):
    def check():
        for words in calls(script, tmp_path):
            check_call(words, tmp_path, monkeypatch)

    with pytest.raises((Exception, SystemExit, pytest.fail.Exception)):
        check()


def test_commands_of_a_console_session_are_extracted():
    session = "$ python a.py \\\n    --b 1\nprinted\n  $ no prompt\n$ make c\n"
    assert typed(session) == "python a.py \\\n    --b 1\nmake c\n"


def checkout(folder: Path) -> Path:
    """Fill a folder with links to all files of the repository, except for outputs of runs."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".") and entry.name not in ("runs", "data", "site"):
            (folder / entry.name).symlink_to(entry)
    programs = {".venv/bin/python": PYTHON, "bin/python": PYTHON, "bin/make": MAKE, "bin/git": STAND_IN}
    programs |= dict.fromkeys([".venv/bin/transformer-zoo", "bin/transformer-zoo"], COMMAND)
    for name, text in programs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.format(python=sys.executable) if text is PYTHON else text)
        (folder / name).chmod(0o755)
    return folder


def run_block(block: Block, folder: Path) -> None:
    prepared = str(folder / "runs" / ".prepared")  # beside the run, because blocks that use the run need its data
    done = run(block.script, folder, BLOCK_ROOT=str(folder), TFDS_DATA_DIR=prepared, XLA_FLAGS=xla_flags(1))
    output = f"{block.page}:{block.line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert done.returncode == 0, output


(TRAINING,) = (block for block in BLOCKS if block.runs and block.script.endswith("train.py number_words\n"))
"""the block that trains the model of the other blocks"""
ALONE = [[block] for block in BLOCKS if block.runs and "dates" not in block.script]
TOGETHER = [[block for block in BLOCKS if block.runs and "dates" in block.script], *ALONE]
"""blocks that run in one folder: those that train and use the model of dates, and each other block alone"""


@pytest.mark.slow
@pytest.mark.parametrize("blocks", TOGETHER, ids=lambda blocks: f"{Path(blocks[0].page).stem}:{blocks[0].line}")
def test_blocks_run_unchanged(blocks, tmp_path):
    def train_once(folder):
        with tempfile.TemporaryDirectory() as place:
            run_block(TRAINING, checkout(Path(place)))
            shutil.copytree(Path(place, "runs"), folder, dirs_exist_ok=True)

    checkout(tmp_path)
    if any("runs/number_words" in block.script or "train.py number_words" in block.script for block in blocks):
        copy_once_made(TRAINING.script, train_once, tmp_path / "runs")
    for block in blocks:
        if block != TRAINING:
            run_block(block, tmp_path)
