"""Tests of exit codes and of the error line on stderr."""

import argparse
import errno
import os
import sys
import types
import warnings

import pytest
from flax.errors import ScopeParamShapeError

from transformer import __main__ as program
from transformer.cli._errors import run_program
from transformer.cli._train import _remove_temporary, _workdir
from transformer.config import ConfigError
from transformer.training.workdir._lock import WorkdirInUseError


class TestRunCommand:
    """Exit code and line on stderr for each kind of exception."""

    def raising(self, error, capsys, debug=False):
        def command():
            raise error

        code = run_program(command, debug)
        out, err = capsys.readouterr()
        assert out == ""
        return code, err

    @pytest.mark.parametrize(
        ("error", "code", "line"),
        [
            (ConfigError("d_model is odd. Make it even."), 2, "error: d_model is odd. Make it even."),
            (ValueError("two\n  lines\x1b[31m"), 2, "error: two lines\\x1b[31m"),
            (ValueError("x" * 9000), 2, f"error: {'x' * 7993} ... (and 1007 characters more)"),
            (FileNotFoundError("no x. Make one."), 2, "error: no x. Make one."),
            (FileNotFoundError(errno.ENOENT, "Gone", "a/b"), 2, "error: a/b: Gone. Check the path."),
            (NotADirectoryError(errno.ENOTDIR, "No directory", "a"), 2, "error: a: No directory. Pass a directory."),
            (WorkdirInUseError("runs/x is in use."), 1, "error: runs/x is in use."),
            (
                PermissionError(errno.EACCES, "Permission denied", "a"),
                1,
                "error: a: Permission denied. Change its permissions, or use another path.",
            ),
            (
                OSError(errno.ENOSPC, "No space left on device", "a"),
                1,
                "error: a: No space left on device. Free some disk space, or use another path.",
            ),
            (
                ModuleNotFoundError("No module named 'tyro'", name="tyro.conf"),
                1,
                "error: the package tyro is not installed. Install the dependencies of this command: `make setup`, or "
                "pip install -e '.[train]', in the folder of this checkout.",
            ),
            (
                RuntimeError("RESOURCE_EXHAUSTED: 9 GiB\nmore"),
                1,
                "error: out of memory (RESOURCE_EXHAUSTED: 9 GiB). Use a smaller batch size, a smaller model, or fewer "
                "prompts.",
            ),
            (RuntimeError("backend is away\nstack"), 1, "error: backend is away"),
            (IndexError("x\ny"), 1, "error: IndexError: x (a bug in this program: --debug shows the traceback)"),
            (
                NotImplementedError("z"),
                1,
                "error: NotImplementedError: z (a bug in this program: --debug shows the traceback)",
            ),
            (
                ImportError("libjax_common.so: failed to map segment from shared object"),
                1,
                "error: out of memory while loading a library (libjax_common.so: failed to map segment from shared "
                "object). Free some memory, or raise the limit: ulimit -v unlimited",
            ),
            (
                RuntimeError("can't start new thread"),
                1,
                "error: the system cannot start another thread. Raise the limits: ulimit -u unlimited, ulimit -v "
                "unlimited",
            ),
            (
                ScopeParamShapeError("embedding", "/encoder", (5, 2), (5, 3)),
                2,
                "error: the parameters do not fit the model of this directory: /encoder/embedding: expected shape "
                "(5, 3), got (5, 2). The checkpoint may belong to another run: put this run's checkpoint back, or "
                "choose another one with --step.",
            ),
            (ValueError("x is broken:\n- a is there.\n- b is not."), 2, "error: x is broken: a is there; b is not."),
            (
                ValueError("x:\n- a.\n- b.\n- c.\n- d.\n- e.\n- f.\n- g.\n- and 12 more."),
                2,
                "error: x: a; b; c; d; e; and 14 more.",
            ),
            (ValueError("5\n- 3"), 2, "error: 5 - 3"),
            (KeyboardInterrupt(), 130, "interrupted"),
        ],
    )
    def test_an_error_is_one_line(self, error, code, line, capsys):
        assert self.raising(error, capsys) == (code, line + "\n")

    def test_debug_shows_the_traceback_before_the_line(self, capsys):
        code, err = self.raising(ValueError("bad"), capsys, debug=True)
        assert code == 2
        assert err.startswith("Traceback (most recent call last):")
        assert err.endswith("\nerror: bad\n")

    @pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (143, 143)])
    def test_the_return_value_of_a_command_is_the_exit_code(self, returned, code, capsys):
        assert run_program(lambda: returned, False) == code
        assert capsys.readouterr() == ("", "")

    def test_a_warning_is_one_line(self, capsys):
        before = warnings.showwarning
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            shown = warnings.showwarning
            assert run_program(lambda: warnings.warn("step 3 is\nbroken", stacklevel=1), False) == 0
            assert warnings.showwarning is shown
        assert capsys.readouterr().err == "warning: step 3 is broken\n"
        assert warnings.showwarning is before

    def test_a_closed_reader_of_stdout_is_not_an_error(self, monkeypatch, capsys):
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "w") as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            assert run_program(lambda: print("text"), False) == 141
        assert capsys.readouterr().err == ""

    def test_help_exits_with_status_0(self):
        with pytest.raises(SystemExit):
            run_program(lambda: sys.exit(0), False)


def test_main_returns_the_exit_code_of_a_multi_process_run(monkeypatch):
    left = []
    name = "transformer.training._processes"
    for unused in ("keep_compiled", "keep_freed_memory"):
        monkeypatch.setattr(program, unused, lambda: None)
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(leave=left.append))
    with pytest.raises(SystemExit) as ended:
        program.console(["no-such-command"])
    assert left == [ended.value.code] == [2]


def test_only_a_fast_run_without_workdir_is_temporary(tmp_path, capsys):
    own = argparse.Namespace(fast=True, workdir=None, dry_run=False)
    recipe = types.SimpleNamespace(name="number_words")
    workdir = _workdir(recipe, own)
    assert os.path.isdir(workdir)
    _remove_temporary(workdir, own, 1)
    assert os.path.isdir(workdir)  # a run that failed keeps its files
    _remove_temporary(workdir, own, 0)
    assert not os.path.exists(workdir)
    assert workdir in capsys.readouterr().out
    for other in ({"workdir": str(tmp_path)}, {"fast": False}, {"dry_run": True}):
        kept = argparse.Namespace(**{**vars(own), **other})
        assert _workdir(recipe, kept) == (kept.workdir or "runs/number_words")
        _remove_temporary(str(tmp_path), kept, 0)
        assert tmp_path.is_dir()
