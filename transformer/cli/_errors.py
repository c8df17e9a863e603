"""Exit codes and error messages of commands: one line on stderr with the problem and the remedy."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator

from transformer.cli._compile_cache import WARNINGS, repair_cache
from transformer.cli._streams import prepare_streams, redirect_to_null
from transformer.config._invocation import program
from transformer.config._recipe_files import bundled

DONE, FAULT, BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141
"""exit codes: the last two are 128 + SIGINT and 128 + SIGPIPE, as a shell reports them"""

LONGEST = 8000
"""longest error line, in characters"""

MOST_FAULTS = 5
"""largest number of listed faults in an error line"""

_BAD_INPUT = (ValueError, FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError)
_MISTAKES = (TypeError, AttributeError, LookupError, AssertionError, NameError, NotImplementedError)
_UNMAPPED = ("failed to map segment", "annot allocate memory", "cannot create shared object descriptor")
_REMEDIES = {
    errno.ENOSPC: "Free some disk space, or use another path.",
    errno.EDQUOT: "Free some of your disk quota, or use another path.",
    errno.EROFS: "Use a path that is writable.",
    errno.EACCES: "Change its permissions, or use another path.",
    errno.EPERM: "Change its permissions, or use another path.",
    errno.EEXIST: "Use another path.",
    errno.ENOENT: "Check the path.",
    errno.ENOTDIR: "Pass a directory.",
    errno.EISDIR: "Pass a file.",
    errno.EMFILE: "Allow more open files: ulimit -n 4096",
}


def run_program(main: Callable[[], int | None], debug: bool) -> int:
    """Run a command and return the exit code of the process: the result of `main` (None: 0), or the code of its
    error.

    Exit codes: 2 for bad input (ValueError, file not found), 1 for an environment problem or a bug of this program, 130
    for Ctrl-C, 141 if the reader of stdout was closed. An error is printed as one line on stderr, after its traceback
    with `debug`; a warning is one line too. SystemExit passes through (argparse and tyro raise it after --help).
    """
    try:
        with one_line_warnings():
            prepare_streams()
            code = main()
            _flush_stdout()
            return DONE if code is None else code
    except BrokenPipeError:
        _abandon_stdout()
        return BROKEN_PIPE
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        _say(describe(error))
        try:
            _flush_stdout()  # write earlier output before the error, unless stdout itself failed
        except OSError:
            _abandon_stdout()
        return exit_code(error)


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if _in_start_of_jax(error):  # checked first: some of these errors are ValueErrors
        return FAULT
    return BAD_INPUT if isinstance(error, _BAD_INPUT) or _is_unfit(error) else FAULT


def describe(error: BaseException) -> str:
    """Describe an error in one line without control characters: "error: what is wrong. What to do."

    The length is limited, because an error may quote an argument of a million characters.
    """
    line = one_line(f"error: {_joined(_message(error))}" if not isinstance(error, KeyboardInterrupt) else "interrupted")
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ... (and {len(line) - LONGEST} characters more)"


def one_line(text: str) -> str:
    """Join lines and repeated spaces into single spaces, and escape other unprintable characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))


@contextlib.contextmanager
def one_line_warnings() -> Iterator[None]:
    """Print warnings as one line on stderr, without the code location, while the context is active."""

    def show(message: Warning | str, *where: object, **options: object) -> None:
        text: str | None = str(message)
        if text.startswith(WARNINGS):
            text = repair_cache(text)
        if text is not None:
            _say(one_line(f"warning: {text}"))

    with warnings.catch_warnings():
        for beginning in WARNINGS:  # a list, because the same text may come from different files
            warnings.filterwarnings("always", message=beginning)
        warnings.showwarning = show
        yield


def _message(error: BaseException) -> str:
    text = str(error).strip()
    if _in_start_of_jax(error):
        return _no_device(_first_line(text))
    if _is_unfit(error):
        return (
            f"the parameters do not fit the model of this directory: {_flax_shapes(text)} The checkpoint may belong to "
            "another run: put this run's checkpoint back, or choose another one with --step."
        )
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return _of_system(error)
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("transformer"):
        return _not_installed(error.name.partition(".")[0])
    if (shortage := _shortage(error, text)) is not None:
        return shortage
    if isinstance(error, _BAD_INPUT) or (text and type(error).__module__.partition(".")[0] == "transformer"):
        return text or f"{type(error).__name__} without a message; --debug shows the traceback"
    if isinstance(error, RuntimeError | OSError | ArithmeticError) and text and not isinstance(error, _MISTAKES):
        return _first_line(text)
    return f"{type(error).__name__}: {_first_line(text)} (a bug in this program: --debug shows the traceback)"


def _not_installed(package: str) -> str:
    group = {"PIL": "media", "soundfile": "media", "starlette": "serve", "uvicorn": "serve"}.get(package, "train")
    extra = f"pip install 'transformer-zoo[{group}]'"
    if bundled().name == "configs":  # a checkout
        extra = f"`make setup`, or pip install -e '.[{group}]', in the folder of this checkout"
    return f"the package {package} is not installed. Install the dependencies of this command: {extra}."


def _shortage(error: BaseException, text: str) -> str | None:
    """Describe an error that is caused by a lack of memory or threads; None for other errors."""
    first = _first_line(text)
    if isinstance(error, ImportError) and any(sign in text for sign in _UNMAPPED):
        remedy = "Free some memory, or raise the limit: ulimit -v unlimited"
        return f"out of memory while loading a library ({first}). {remedy}"
    if isinstance(error, RuntimeError) and text == "can't start new thread":
        return "the system cannot start another thread. Raise the limits: ulimit -u unlimited, ulimit -v unlimited"
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        return f"out of memory{first and f' ({first})'}. Use a smaller batch size, a smaller model, or fewer prompts."
    return None


def _joined(text: str) -> str:
    """Join a list of faults (lines that start with "- ") into one line: "a; b; c.", at most five."""
    head, *faults = re.split(r"\.?\n- ", text)
    if not faults or not head.endswith(":"):
        return text
    last = re.match(r"and (\d+) more", faults[-1])
    hidden = int(last[1]) if last else 0
    faults = faults[:-1] if last else faults
    hidden += max(len(faults) - MOST_FAULTS, 0)
    more = f"; and {hidden} more" if hidden else ""
    return f"{head} {'; '.join(faults[:MOST_FAULTS]).rstrip('.')}{more}."


def _in_start_of_jax(error: BaseException) -> bool:
    """Return whether JAX failed while listing its devices.

    If a platform is missing, JAX fails in many ways, for example with an assertion without a message.
    """
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name in ("backends", "_init_backend") and code.co_filename.endswith("xla_bridge.py"):
            return True
        trace = trace.tb_next
    return False


def _no_device(reason: str) -> str:
    platforms = os.environ.get("JAX_PLATFORMS", "")
    what = f"JAX found no device for JAX_PLATFORMS={platforms}" if platforms else "JAX cannot start its devices"
    remedy = "Unset JAX_PLATFORMS, or set it to cpu" if platforms else "Set JAX_PLATFORMS=cpu to use the CPU"
    return f"{what}{reason and f' ({reason})'}. {remedy}; {program('devices')} lists the devices of this machine."


def _is_unfit(error: BaseException) -> bool:
    """Return whether Flax received the parameters of another model."""
    names = ("ScopeParamShapeError", "ScopeParamNotFoundError")
    return type(error).__module__ == "flax.errors" and type(error).__name__ in names


def _flax_shapes(text: str) -> str:
    """Shorten Flax's message about a parameter shape."""
    found = re.search(r'parameter "([^"]*)" in "([^"]*)".*?shape (\([^)]*\)).*?shape (\([^)]*\))', text, re.DOTALL)
    if found is None:
        return _first_line(text).partition(" (https:")[0]
    name, module, expected, got = found.groups()
    return f"{module}/{name}: expected shape {expected}, got {got}."


def _of_system(error: OSError) -> str:
    remedy = _REMEDIES.get(error.errno, "")
    names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    what = f"{names}: {error.strerror}" if names else error.strerror
    return f"{what}. {remedy}".strip()


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _say(line: str) -> None:
    with contextlib.suppress(BrokenPipeError, ValueError):  # the reader of stderr was closed, or stderr is closed
        print(line, file=sys.stderr, flush=True)


def _flush_stdout() -> None:
    if sys.stdout is None:  # closed
        return
    try:
        sys.stdout.flush()
    except OSError as error:  # for a closed reader, this makes a BrokenPipeError again
        raise OSError(error.errno, error.strerror, "stdout") from error


def _abandon_stdout() -> None:
    """Redirect stdout to the null device, for the interpreter's flush at exit to succeed."""
    with contextlib.suppress(ValueError, AttributeError):  # closed, or replaced
        redirect_to_null(sys.stdout.fileno())
