"""Tests of the persistent compilation cache."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from transformer.cli import _compile_cache as compile_cache
from transformer.cli._compile_cache import VARIABLE, keep_compiled
from transformer.training.metrics._report import cache_line

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
{first}
from transformer.cli._compile_cache import keep_compiled
keep_compiled()
import jax, jax.numpy as jnp
compiled = []
jax.monitoring.register_event_listener(lambda event, **facts: compiled.append(event))
x = jnp.ones((5, 5))
for depth in (40, 41):
    jax.jit(lambda x: [x := jnp.sin(x @ x) for _ in range(depth)][-1])(x)
print("hits", sum("cache_hits" in event for event in compiled))
"""


def call(folder, first="", outs=None, **variables):
    """Run a program that compiles two large functions; return the number of cache hits and of files in the cache."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    small = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "XDG_CACHE_HOME": str(folder)}
    words = [sys.executable, "-c", PROGRAM.format(first=first)]
    out = subprocess.run(words, env=environment | small | variables, cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    if outs is not None:
        outs.append(out.stdout + out.stderr)
    hits = int(re.search(r"hits (\d+)", out.stdout)[1])
    return hits, len(list(folder.glob("transformer-zoo/compiled/*/*-cache")))


@pytest.mark.parametrize("first", ["", "import jax"])
def test_a_second_run_compiles_nothing(tmp_path, first):
    hits, kept = call(tmp_path, first)
    assert hits == 0
    assert kept >= 2
    assert call(tmp_path, first) == (kept, kept)


def test_damaged_files_are_recompiled(tmp_path):
    """Files may be truncated, for example by a power failure; JAX warns about each."""
    _, kept = call(tmp_path)
    files = list(tmp_path.glob("transformer-zoo/compiled/*/*-cache"))
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert call(tmp_path) == (0, kept)


def damage(folder, how):
    files = sorted(folder.glob("transformer-zoo/compiled/*/*-cache"))
    for file in files:
        match how:
            case "cut":
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
            case "empty":
                file.write_bytes(b"")
            case "flipped":
                content = bytearray(file.read_bytes())
                content[len(content) // 2] ^= 1
                file.write_bytes(content)
            case "folder":
                file.unlink()
                file.mkdir()
    return len(files)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("how", ["cut", "empty", "flipped", "folder"])
def test_damaged_files_are_replaced_and_reported_once(tmp_path, how):
    call(tmp_path)
    count = damage(tmp_path, how)
    assert count >= 2
    first = "from transformer.cli._errors import one_line_warnings; shown = one_line_warnings(); shown.__enter__()"
    outs = []
    assert call(tmp_path, first, outs=outs) == (0, count)
    assert call(tmp_path, first, outs=outs) == (count, count), "all files are intact again"
    warned = [out.count("warning: a damaged file of the compilation cache was deleted") for out in outs]
    assert warned == [1, 0]
    assert all("persistent compilation cache" not in out for out in outs), "JAX's own warning is replaced"


def test_nothing_is_deleted_in_a_folder_chosen_by_the_user(tmp_path):
    (tmp_path / "x-cache").write_bytes(b"")
    text = f"{compile_cache.WARNINGS[0]} entry for 'jit_f': error: Error -5"
    message = compile_cache.repair_cache(text, {VARIABLE: str(tmp_path)})
    assert (
        message == f"the compilation cache {tmp_path} can't be used: error: Error -5. Delete it, or set {VARIABLE}= ."
    )
    assert compile_cache.repair_cache(text, {VARIABLE: str(tmp_path)}) is None, "reported once"
    assert (tmp_path / "x-cache").exists()


def test_an_unreadable_file_is_deleted(tmp_path, configured):
    """For example a file of another user; the error names the file."""
    keep_compiled(environment := {"XDG_CACHE_HOME": str(tmp_path)})
    folder = Path(environment[VARIABLE])
    for name in ("a-cache", "a-atime", "b-cache", "b-atime"):
        (folder / name).touch()
    text = f"{compile_cache.WARNINGS[0]} entry for 'jit_f': PermissionError: [Errno 13] Permission denied: "
    assert "was deleted" in compile_cache.repair_cache(f"{text}'{folder}/a-cache'", environment)
    assert sorted(path.name for path in folder.iterdir()) == ["b-atime", "b-cache"]
    text = text.replace("reading", "writing")
    assert compile_cache.repair_cache(f"{text}'{folder}/b-atime'", environment) is None, "already reported"
    assert not list(folder.iterdir())
    message = compile_cache.repair_cache(
        f"{compile_cache.WARNINGS[1]} entry for 'jit_f': OSError: [Errno 28] Full", environment
    )
    assert f"the compilation cache {folder} can't be used: OSError: [Errno 28] Full" in message


def test_the_cache_can_be_disabled(tmp_path):
    assert call(tmp_path, **{VARIABLE: ""}) == (0, 0)


@pytest.fixture
def configured():
    """Restore the JAX configuration after the test."""
    names = ("jax_compilation_cache_dir", "jax_compilation_cache_max_size")
    before = {name: getattr(jax.config, name) for name in (*names, "jax_persistent_cache_min_compile_time_secs")}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_user_settings_are_kept(tmp_path, configured):
    given = {VARIABLE: "mine", "XDG_CACHE_HOME": str(tmp_path)}
    keep_compiled(environment := dict(given))
    assert environment == given
    keep_compiled(environment := {"XDG_CACHE_HOME": str(tmp_path), "JAX_COMPILATION_CACHE_MAX_SIZE": "1"})
    assert environment["JAX_COMPILATION_CACHE_MAX_SIZE"] == "1"
    assert environment[VARIABLE].startswith(str(tmp_path))


def test_without_a_writable_folder_nothing_is_cached(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    keep_compiled(environment := {"XDG_CACHE_HOME": str(tmp_path / "file")})
    assert VARIABLE not in environment
    monkeypatch.setattr(compile_cache.os, "access", lambda _, mode: not mode & os.R_OK)
    keep_compiled(environment := {"XDG_CACHE_HOME": str(tmp_path)})
    assert VARIABLE not in environment


def test_a_run_reports_the_cache_folder(tmp_path, configured):
    jax.config.update("jax_compilation_cache_dir", None)
    assert cache_line() == ""
    keep_compiled({"XDG_CACHE_HOME": str(tmp_path)})
    assert f"are cached in {tmp_path}/transformer-zoo/compiled/" in cache_line()
    assert cache_line().endswith("(JAX_COMPILATION_CACHE_DIR= turns this off)")
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert cache_line() == ""
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
