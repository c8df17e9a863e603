"""Every shell block of README.md, CONTRIBUTING.md and docs/ works: bash runs each one, whole and as it stands.

By default the programs that it calls stand in for themselves: they write down how they were called, and each of our own
programs then reads those words with its own parser, up to where its work would begin. So a wrong recipe, verb, option,
value, target or quote is seen, and nothing is trained. The blocks of RUN are run in earnest by a slow test, too;
PARSED says why those of other pages are not. There is no third kind.
"""

import argparse
import ast
import contextlib
import functools
import importlib
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import tyro

import train
from transformer.__main__ import VERBS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"bash", "console", "json", "math", "python", "text"}

RUN = {
    "README.md": ("generate runs/number_words", "inspect --scale"),
    "docs/tutorial.md": ("",),
}
"""pages whose blocks are run in earnest: those that begin with a command which has one of these parts"""

PARSED = {
    "README.md": "installs, trains for minutes on data that is downloaded, or fetches GPT-2",
    "CONTRIBUTING.md": "runs these very tests",
    "docs/decoding.md": "DIR is a model of the reader's",
    "docs/fine-tuning.md": "BERT and SST-2 are not here",
    "docs/index.md": "trains, as the tutorial does",
    "docs/inspect.md": "the tutorial runs the same",
    "docs/long-sequences.md": "trains for hours on a CPU, or needs the TPU compiler",
    "docs/pretrained.md": "fetches GPT-2, or DIR is a model of the reader's",
    "docs/reliability.md": "kills runs for hours",
    "docs/report.md": "needs longer runs, and xprof",
    "docs/scaling.md": "needs several devices or hosts, or the TPU compiler",
    "docs/shakespeare-fast.md": "trains for an hour",
    "docs/translation.md": "trains for hours, on data that is downloaded",
    "docs/vectors.md": "trains on data that is downloaded",
    "docs/without-attention.md": "trains for two hours",
}
"""pages with blocks that are not run in earnest, and why"""

FOREIGN = {"git", "hf", "pip", "sacrebleu", "srun", "xprof"}
"""programs of others: that they are called is all that is looked at"""
OURS = (".venv/bin/python", ".venv/bin/transformer-zoo", "python", "transformer-zoo", "make", ".ci/run")

# Writes down its name and words, each ended by a byte that no word has, in one piece, as others may write at the same
# time; `git clone` makes its folder, `srun` calls what it is to start.
STAND_IN = """#!/bin/bash
name=${0#"$BLOCK_ROOT"/bin/}; name=${name#"$BLOCK_ROOT"/}
printf '%s\\037' "$name" "$@" $'\\036' >> "$BLOCK_ROOT/calls"
case "$name $1" in
  "git clone") mkdir -p "${@: -1}" ;;
  srun*) while [[ $# -gt 0 && $1 != python ]]; do shift; done; exec "$@" ;;
esac
"""
# In earnest: the tests' Python, and of make the two targets that a reader begins with.
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
        """The command that it begins with."""
        return self.script.partition("\n")[0]

    @property
    def runs(self) -> bool:
        """Whether it is run in earnest."""
        return any(part in self.first for part in RUN.get(self.page, ()))


def fences(path: Path) -> list[tuple[int, str, str]]:
    """(line, language, text) of every fenced block of a page."""
    text = path.read_text(encoding="utf-8")
    found = re.finditer(r"^```([^\n]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start()].count("\n") + 1, match[1], match[2]) for match in found]


def typed(session: str) -> str:
    """What was typed in a session: lines after `$ `, with those that go on behind a backslash."""
    return "".join(match[1] for match in re.finditer(r"^\$ ((?:.*\\\n)*.*\n)", session, re.MULTILINE))


BLOCKS = [
    Block(str(page.relative_to(ROOT)), line, text if language == "bash" else typed(text))
    for page in PAGES
    for line, language, text in fences(page)
    if language in ("bash", "console")
]
each_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{Path(block.page).stem}:{block.line}")


def run(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """A block in bash, stopping at its first error, with `folder`/bin before all other programs."""
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **environment}
    command = ["bash", "-euo", "pipefail", "-c", script]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def calls(script: str, folder: Path) -> list[list[str]]:
    """The programs that a block calls, with their words; none of them does anything."""
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
    """Raised by a parser that has read all words."""


@contextlib.contextmanager
def parsing_only(monkeypatch, folder):
    """Inside, our programs start in this folder and end where they have read their words."""

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
        except SystemExit as stop:  # --help ends so
            if stop.code:
                raise


def check_call(words: list[str], folder: Path, monkeypatch) -> None:
    """Fails, with the program's own message, unless the words are such as it takes."""
    match words:
        case [("python" | ".venv/bin/python"), *rest]:
            check_python(rest, folder, monkeypatch)
        case [("transformer-zoo" | ".venv/bin/transformer-zoo"), *rest]:
            check_python(["-m", "transformer", *rest], folder, monkeypatch)
        case ["make", target, *rest]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"make has no {target}"
            settings = re.findall(r"^ *'?(\w+)[ =?]", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert all(word.partition("=")[0] in settings for word in rest), f"make knows no {rest}"
        case [program, *_]:
            assert program in FOREIGN or os.access(ROOT / program, os.X_OK), f"there is no {program}"


def check_python(words: list[str], folder: Path, monkeypatch) -> None:
    with parsing_only(monkeypatch, folder) as patch:
        match words:
            case ["train.py", *rest]:
                train.main(rest)
            case ["-m", "transformer", ("--help" | "--version")]:
                pass
            case ["-m", "transformer", verb, *rest]:
                VERBS[verb].run(rest)
            case ["-m", module, *rest]:
                assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), f"there is no {module}"
                patch.setattr(sys, "argv", [module, *rest])
                importlib.import_module(module).main()
            case ["-c", code]:
                ast.parse(code)
            case _:
                pytest.fail(f"python {words}: say in this test how these words are checked")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_says_what_it_is(page):
    """What has no language is neither run nor known to be output."""
    assert {language for _, language, _ in fences(page)} <= LANGUAGES


def test_every_block_is_run_or_not_for_a_reason():
    asleep = {block.page for block in BLOCKS if not block.runs}
    assert PARSED.keys() == asleep, "say in PARSED why blocks of a page are not run, or run them"
    for page, parts in RUN.items():
        for part in parts:
            assert any(part in block.first for block in BLOCKS if block.page == page), (page, part)


@each_block
def test_the_programs_understand_every_block(block, tmp_path, monkeypatch):
    made = calls(block.script, tmp_path)
    assert made
    for words in made:
        check_call(words, tmp_path, monkeypatch)


WRONG = {
    "recipe": "python train.py shakespear",
    "option": "python train.py shakespeare --optimizer.learningrate 3",
    "value": "python train.py shakespeare --training.steps many",
    "verb": "python -m transformer generat DIR",
    "verb of the command": "transformer-zoo generat DIR",
    "recipe of the command": "transformer-zoo train shakespear",
    "option of a verb": "python -m transformer generate DIR --promt x",
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
def test_what_is_wrong_is_seen(script, tmp_path, monkeypatch, capsys):
    def check():
        for words in calls(script, tmp_path):
            check_call(words, tmp_path, monkeypatch)

    with pytest.raises((Exception, SystemExit, pytest.fail.Exception)):
        check()


def test_what_was_typed_in_a_session_is_found():
    session = "$ python a.py \\\n    --b 1\nprinted\n  $ no prompt\n$ make c\n"
    assert typed(session) == "python a.py \\\n    --b 1\nmake c\n"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder in which everything lies as in the repository, but for what runs write."""
    folder = tmp_path_factory.mktemp("checkout")
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


@pytest.mark.slow
def test_blocks_run_as_they_stand(checkout):
    """The tutorial's before the README's, which take the model that it trains."""
    for block in sorted(BLOCKS, key=lambda block: block.page, reverse=True):
        if block.runs:
            done = run(block.script, checkout, BLOCK_ROOT=str(checkout), TFDS_DATA_DIR=str(checkout / "prepared"))
            told = f"{block.page}:{block.line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            assert done.returncode == 0, told
