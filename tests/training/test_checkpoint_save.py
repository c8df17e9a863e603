"""Failing saves: disk full, no permission, process killed during a save."""

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from transformer.training.workdir._checkpoint import Checkpointer, CheckpointSaveError

pytestmark = pytest.mark.cpu_only("starts processes that compute on the CPU")

BIG = {"x": np.zeros(2_000_000, np.float32) + np.arange(2_000_000, dtype=np.float32)}


def save_now(checkpointer, step, state):
    checkpointer.save(step, state)
    checkpointer.wait()


def check_full_disk(workdir):
    """A save on a full disk raises an error and leaves no files; the older checkpoint still works."""
    checkpointer = Checkpointer(workdir)
    with pytest.raises(CheckpointSaveError, match=r"\S+/2.*full.*8.0 MB"):
        save_now(checkpointer, 2, BIG)
    assert os.listdir(workdir / "checkpoints") == ["1"]
    assert checkpointer.restore_newest({"x": np.zeros(3)}).step == 1
    with pytest.raises(CheckpointSaveError, match="the disk is full"), checkpointer:
        checkpointer.save(2, BIG)


def test_reports_too_little_space_for_a_file(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": np.ones(3)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        check_full_disk(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def mount(path, *options):
    if subprocess.run(["mount", *options, str(path)], capture_output=True).returncode:
        pytest.skip("mounting needs root")


def test_reports_a_full_disk(tmp_path):
    mount(tmp_path, "-t", "tmpfs", "-o", "size=3m", "tmpfs")
    try:
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, {"x": np.ones(3)})
        check_full_disk(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_reports_a_read_only_disk(tmp_path):
    mount(tmp_path, "-t", "tmpfs", "-o", "size=3m", "tmpfs")
    try:
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, {"x": np.ones(3)})
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        with Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.restore_newest({"x": np.zeros(3)}).step == 1
            with pytest.raises(CheckpointSaveError, match=r"\(Read-only.*system\)"):
                save_now(checkpointer, 2, {"x": np.ones(3)})
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


FAILING = """
import logging, os, shutil, sys
import numpy as np
import orbax.checkpoint as ocp
from transformer.training.workdir._checkpoint import Checkpointer

begun, workdir = ocp.PyTreeCheckpointHandler.async_save, sys.argv[1]

async def then_it_is_gone(self, directory, args):
    commits = await begun(self, directory, args=args)
    shutil.rmtree(directory)
    (directory.parent / "state").write_text("")
    return commits

ocp.PyTreeCheckpointHandler.async_save = then_it_is_gone
try:
    with Checkpointer(workdir) as checkpointer:
        checkpointer.save(1, {str(number): np.ones(3) for number in range(50)})
finally:
    for kind in ("Task", "Future", "_GatheringFuture"):  # whichever of them asyncio reports depends on the time
        logging.getLogger("asyncio").error(f"{kind} exception was never retrieved: orbax")
"""


def test_reports_a_save_that_fails_in_several_threads_once(tmp_path):
    """Orbax logs a traceback per thread, and TensorStore prints one for every array that is written too late."""
    done = subprocess.run([sys.executable, "-c", FAILING, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "CheckpointSaveError: No checkpoint was written to" in done.stderr
    for noise in ("_SignalingThread", "Event loop is closed", "exception was never retrieved"):
        assert noise not in done.stderr


@pytest.fixture
def slow_full_disk(monkeypatch):
    """Simulate a disk that is full only after `save` has returned, when the event is set."""
    go_on = threading.Event()

    def sync_tree(path):
        go_on.wait(30)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("transformer.training.workdir._manifest.sync_tree", sync_tree)
    return go_on


@pytest.mark.parametrize(
    "call",
    [
        lambda checkpointer: checkpointer.wait(),
        lambda checkpointer: checkpointer.close(),
        lambda checkpointer: checkpointer.save(2, {"x": np.ones(3)}),
        lambda checkpointer: checkpointer.restore_newest({"x": np.ones(3)}),
    ],
    ids=["wait", "close", "save", "restore_newest"],
)
def test_reports_a_failed_save_at_the_next_call(tmp_path, slow_full_disk, call):
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.save(1, {"x": np.ones(3)})
    slow_full_disk.set()
    with pytest.raises(CheckpointSaveError, match=r"/1: the disk is full"):
        call(checkpointer)
    assert checkpointer.newest_step is None  # the same step may be saved again
    assert os.listdir(tmp_path / "checkpoints") == []


def test_the_first_error_is_reported(tmp_path, slow_full_disk):
    def loop():
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, {"x": np.ones(3)})
            slow_full_disk.set()
            raise KeyError("of the loop")

    with pytest.raises(KeyError, match="of the loop") as caught:
        loop()
    assert "No checkpoint was written" in caught.value.__notes__[0]


@pytest.mark.parametrize("file", ["workdir", "workdir/checkpoints"])
def test_reports_a_file_in_place_of_a_directory(tmp_path, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    checkpointer = Checkpointer(tmp_path / "workdir")
    with pytest.raises(CheckpointSaveError, match=r"cannot be written .* Make it writable"):
        save_now(checkpointer, 1, {"x": np.ones(3)})


def test_leftovers_are_deleted_and_foreign_files_kept(tmp_path):
    root = tmp_path / "checkpoints"
    for name in ("5.tmp", "notes"):
        (root / name / "inside").mkdir(parents=True)
    for name in ("1.tmp", "notes.tmp"):
        (root / name).write_text("a file")
    (root / "7.tmp").symlink_to(root / "notes")
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": np.ones(3)})
    assert sorted(os.listdir(root)) == ["1", "notes", "notes.tmp"]
    assert os.listdir(root / "notes") == ["inside"]


def test_a_process_killed_during_a_save_leaves_valid_checkpoints(tmp_path):
    """A rename commits the save. If the process is killed before it, the older checkpoint stays the newest."""
    script = textwrap.dedent(
        """
        import os, signal, sys
        import numpy as np
        import transformer.training.workdir._checkpoint as module
        import transformer.training.workdir._manifest as manifests
        checkpointer = module.Checkpointer(sys.argv[1])
        checkpointer.save(1, {"x": np.full(5, 1.0)})
        checkpointer.wait()
        manifests.sync_tree = lambda path: os.kill(os.getpid(), signal.SIGKILL)  # all written, nothing committed
        checkpointer.save(2, {"x": np.full(5, 2.0)})
        checkpointer.wait()
        """
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=False
    )
    assert run.returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1", "2.tmp"]
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore_newest({"x": np.zeros(5)}).state["x"][0] == 1
        checkpointer.save(2, {"x": np.full(5, 3.0)})
        checkpointer.wait()
        assert checkpointer.restore_newest({"x": np.zeros(5)}).state["x"][0] == 3
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1", "2"]
