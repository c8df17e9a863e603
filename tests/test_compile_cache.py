"""What was compiled is kept, where the program says, unless told otherwise."""

import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import pytest

from transformer.cli import compile_cache
from transformer.cli.compile_cache import VARIABLE, keep_compiled
from transformer.training.report import cache_line

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
{first}
from transformer.cli.compile_cache import keep_compiled
keep_compiled()
import jax, jax.numpy as jnp
compiled = []
jax.monitoring.register_event_listener(lambda event, **facts: compiled.append(event))
x = jnp.ones((5, 5))
for depth in (40, 41):
    jax.jit(lambda x: [x := jnp.sin(x @ x) for _ in range(depth)][-1])(x)
print("hits", sum("cache_hits" in event for event in compiled))
"""


def call(folder, first="", **variables):
    """Hits of the cache in a program that compiles two large functions, and the files that there are."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    small = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "XDG_CACHE_HOME": str(folder)}
    words = [sys.executable, "-c", PROGRAM.format(first=first)]
    out = subprocess.run(words, env=environment | small | variables, cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    hits = int(re.search(r"hits (\d+)", out.stdout)[1])
    return hits, len(list(folder.glob("transformer-zoo/compiled/*/*-cache")))


@pytest.mark.parametrize("first", ["", "import jax"])
def test_the_second_time_nothing_is_compiled(tmp_path, first):
    hits, kept = call(tmp_path, first)
    assert hits == 0
    assert kept >= 2
    assert call(tmp_path, first) == (kept, kept)


@pytest.mark.parametrize("damage", ["cut off", "overwritten"])
def test_damaged_files_are_made_anew(tmp_path, damage):
    """After a power cut, say. JAX alone would warn in every run; here the next run finds whole files."""
    _, kept = call(tmp_path)
    for file in tmp_path.glob("transformer-zoo/compiled/*/*-cache"):
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2] if damage == "cut off" else b"x" * len(content))
    first = "from transformer.cli.errors import one_line_warnings; shown = one_line_warnings(); shown.__enter__()"
    assert call(tmp_path, first) == (0, kept)
    assert call(tmp_path, first) == (kept, kept)


def test_damage_that_is_not_seen_is_in_the_file_read_last(tmp_path):
    folder = tmp_path / "transformer-zoo" / "compiled" / "cpu"
    folder.mkdir(parents=True)
    for number, name in enumerate("abc"):
        (folder / f"{name}-cache").write_bytes(zlib.compress(b"whole"))
        (folder / f"{name}-atime").touch()
        os.utime(folder / f"{name}-atime", (0, [5, 9, 7][number]))
    warning = f"{compile_cache.READ_ERROR} for 'jit_f': ValueError: no program"
    assert compile_cache.repair_after(warning, {VARIABLE: str(folder)}) == 1
    assert sorted(file.name for file in folder.glob("*-cache")) == ["a-cache", "c-cache"]
    assert compile_cache.repair_after("another warning", {VARIABLE: str(folder)}) is None
    assert compile_cache.repair_after(warning, {VARIABLE: str(tmp_path)}) is None
    assert compile_cache.repair_after(warning, {}) is None


def test_it_can_be_turned_off(tmp_path):
    assert call(tmp_path, **{VARIABLE: ""}) == (0, 0)


@pytest.fixture
def configured():
    """JAX is afterwards as it was."""
    names = ("jax_compilation_cache_dir", "jax_compilation_cache_max_size")
    before = {name: getattr(jax.config, name) for name in (*names, "jax_persistent_cache_min_compile_time_secs")}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_what_the_user_set_stays(tmp_path, configured):
    given = {VARIABLE: "mine", "XDG_CACHE_HOME": str(tmp_path)}
    keep_compiled(environment := dict(given))
    assert environment == given
    keep_compiled(environment := {"XDG_CACHE_HOME": str(tmp_path), "JAX_COMPILATION_CACHE_MAX_SIZE": "1"})
    assert environment["JAX_COMPILATION_CACHE_MAX_SIZE"] == "1"
    assert environment[VARIABLE].startswith(str(tmp_path))


def test_without_a_folder_to_write_into_nothing_is_kept(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    keep_compiled(environment := {"XDG_CACHE_HOME": str(tmp_path / "file")})
    assert VARIABLE not in environment
    monkeypatch.setattr(compile_cache.os, "access", lambda *given: False)
    keep_compiled(environment := {"XDG_CACHE_HOME": str(tmp_path)})
    assert VARIABLE not in environment


def test_a_run_says_where(tmp_path, configured):
    jax.config.update("jax_compilation_cache_dir", None)
    assert cache_line() == ""
    keep_compiled({"XDG_CACHE_HOME": str(tmp_path)})
    assert f"are kept in {tmp_path}/transformer-zoo/compiled/" in cache_line()
    assert cache_line().endswith("(JAX_COMPILATION_CACHE_DIR= turns that off)")
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert cache_line() == ""
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
