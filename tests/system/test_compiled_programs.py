"""The compilation cache of the tests: its folder, its key, and the files that it deletes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import compiled_programs
import pytest

PROGRAM = """
import sys, jax, numpy as np
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
source = "def f(x):\\n    y = x\\n" + "    y = y @ x + {constant}\\n" * 3 + "    return y\\n"
exec(source, functions := {{}})
value = float(np.asarray(jax.jit(functions["f"])(np.ones((7, 7), np.float32)))[0, 0])
print(value, hits.count("/jax/compilation_cache/cache_hits"), hits.count("/jax/compilation_cache/cache_misses"))
"""


def run(folder: Path, constant: int, flags: str = "--xla_backend_optimization_level=0") -> list[float]:
    """Compile a function in a new process. Return its value and the numbers of hits and misses of the cache."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"XDG_CACHE_HOME": str(folder), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment.pop(compiled_programs.VARIABLE, None)
    compiled_programs.use(environment)
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(constant=constant)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [float(word) for word in done.stdout.split()]


def test_changed_code_is_compiled_again(tmp_path):
    """The name and the place of the function stay the same; only its body changes."""
    assert run(tmp_path, 1)[1:] == [0, 1]
    value, *counts = run(tmp_path, 1)
    assert counts == [1, 0]
    changed, *counts = run(tmp_path, 2)
    assert counts == [0, 1]
    assert changed != value
    assert run(tmp_path, 1, "--xla_backend_optimization_level=1")[1:] == [0, 1], "the flags belong to the key"


def environment_of(folder: Path, **variables: str) -> dict[str, str]:
    environment = {"XDG_CACHE_HOME": str(folder), **variables}
    compiled_programs.use(environment)
    return environment


def test_each_jaxlib_has_its_own_folder(tmp_path, monkeypatch):
    folders = set()
    for version in ("0.10.2", "0.12.0.1"):
        monkeypatch.setattr(compiled_programs.importlib.metadata, "version", lambda name, v=version: v)
        folders.add(environment_of(tmp_path)["JAX_COMPILATION_CACHE_DIR"])
    assert len(folders) == 2
    assert all(Path(folder).is_dir() and Path(folder).is_relative_to(tmp_path) for folder in folders)


def test_user_variables_take_precedence(tmp_path):
    assert environment_of(tmp_path, JAX_COMPILATION_CACHE_DIR="mine")["JAX_COMPILATION_CACHE_DIR"] == "mine"
    assert environment_of(tmp_path, **{compiled_programs.VARIABLE: ""})["JAX_COMPILATION_CACHE_DIR"] == ""
    chosen = tmp_path / "chosen"
    environment = environment_of(tmp_path / "other", **{compiled_programs.VARIABLE: str(chosen)})
    assert Path(environment["JAX_COMPILATION_CACHE_DIR"]).is_relative_to(chosen)
    assert not (tmp_path / "other").exists()


def test_a_read_only_folder_is_a_one_line_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stopped:
        environment_of(tmp_path / "file")
    assert str(tmp_path / "file") in str(stopped.value)
    assert compiled_programs.VARIABLE in str(stopped.value)
    assert "\n" not in str(stopped.value)
    monkeypatch.setattr(compiled_programs.os, "access", lambda path, mode: False)
    with pytest.raises(SystemExit, match="no permission"):
        environment_of(tmp_path / "closed")


def test_old_programs_are_deleted(tmp_path):
    old, new = tmp_path / "old-cache", tmp_path / "new-cache"
    for entry, days in ((old, compiled_programs.DAYS + 1), (new, compiled_programs.DAYS - 1)):
        entry.touch()
        os.utime(entry, (time.time() - days * 24 * 3600,) * 2)
    compiled_programs.delete_old(tmp_path)
    assert sorted(tmp_path.iterdir()) == [new]
