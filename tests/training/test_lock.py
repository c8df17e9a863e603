"""The workdir lock: one writer, stale locks, other hosts, races, and error messages."""

import calendar
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types

import pytest
from training_recipes import text_recipe

from transformer.cli import _train as cli
from transformer.training import _loop as loop
from transformer.training.tasks import _evaluation as evaluation
from transformer.training.workdir import _lock as module
from transformer.training.workdir._lock import WorkdirInUseError, WorkdirLock

pytestmark = pytest.mark.cpu_only("starts processes that compute on the CPU")


def run(script, *arguments, **options):
    """Start a process that imports only the lock module (fast), with pipes for stdin and stdout."""
    path = os.path.abspath(module.__file__)
    head = f"import importlib.util, os, sys\nspec = importlib.util.spec_from_file_location('lock', {path!r})\n"
    head += "lock = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(lock)\n"
    command = [sys.executable, "-c", head + textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


HOLD = """
with lock.WorkdirLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.readline()
"""


def write_record(workdir, **changes):
    record = {"pid": os.getpid(), "host": socket.gethostname(), "started": module._started(os.getpid())}
    record |= {"since": "2026-01-02 03:04:05 UTC"} | changes
    workdir.mkdir(exist_ok=True)
    (workdir / ".lock").write_text(json.dumps(record))


def test_a_lock_held_by_another_process_is_reported_until_released(tmp_path):
    other = run(HOLD, tmp_path / "workdir")  # creates the directory
    assert other.stdout.readline() == "held\n"
    message = rf"in use by process {other.pid} on host {socket.gethostname()}.*kill {other.pid}.*another workdir"
    with pytest.raises(WorkdirInUseError, match=message):
        WorkdirLock(tmp_path / "workdir").acquire()
    other.communicate("go on\n")
    assert other.returncode == 0
    assert not (tmp_path / "workdir" / ".lock").exists()
    with WorkdirLock(tmp_path / "workdir"):
        pass


def test_a_lock_held_by_this_process_is_reported(tmp_path):
    with WorkdirLock(tmp_path):
        with pytest.raises(WorkdirInUseError, match="in use by this process"):
            WorkdirLock(tmp_path).acquire()
        assert (tmp_path / ".lock").exists()
    assert not (tmp_path / ".lock").exists()


def test_the_lock_of_a_killed_process_is_replaced(tmp_path, capfd):
    other = run(HOLD, tmp_path)
    assert other.stdout.readline() == "held\n"
    other.send_signal(signal.SIGKILL)
    while json.loads((tmp_path / ".lock").read_text())["pid"] != os.getpid():  # a zombie until we wait for it
        try:
            WorkdirLock(tmp_path).acquire()
        except WorkdirInUseError:
            continue
    other.communicate()
    err = capfd.readouterr().err
    assert f"Took over {tmp_path}/.lock from process {other.pid}, which no longer runs" in err
    with pytest.raises(WorkdirInUseError):
        WorkdirLock(tmp_path).acquire()


def test_the_lock_of_a_reused_pid_is_replaced(tmp_path, capfd):
    write_record(tmp_path, started="boot 0 tick 1")  # our pid, but another start time
    with WorkdirLock(tmp_path):
        assert "Took over" in capfd.readouterr().err


def test_the_lock_of_another_host_is_kept(tmp_path):
    write_record(tmp_path, pid=1234, host="far-away")
    os.utime(tmp_path / ".lock", (time.time() - 10_000,) * 2)
    message = r"by process 1234 on host far-away \(locked 2026-01-02 03:04:05 UTC\); last activity 2 hours ago\."
    with pytest.raises(WorkdirInUseError, match=rf"{message}.*--take-over \(in"):
        WorkdirLock(tmp_path).acquire()
    assert json.loads((tmp_path / ".lock").read_text())["host"] == "far-away"


@pytest.mark.parametrize(
    ("name", "seconds", "words"),
    [("metrics.jsonl", 30, "30 seconds"), ("checkpoints", 600, "10 minutes"), ("other", 600, "3 days")],
)
def test_the_last_activity_comes_from_metrics_or_checkpoints(tmp_path, name, seconds, words):
    write_record(tmp_path, host="far-away")
    os.utime(tmp_path / ".lock", (time.time() - 3 * 86_400,) * 2)
    (tmp_path / name).touch()
    os.utime(tmp_path / name, (time.time() - seconds,) * 2)
    with pytest.raises(WorkdirInUseError, match=f"{words}"):
        WorkdirLock(tmp_path).acquire()


def test_the_lock_of_another_host_is_replaced_on_request(tmp_path, capfd):
    write_record(tmp_path, pid=1234, host="far-away")
    with WorkdirLock(tmp_path, take_over=True):
        err = capfd.readouterr().err
        whose = "from process 1234 on host far-away (locked 2026-01-02 03:04:05 UTC); last activity"
        assert f"warning: took over {tmp_path}/.lock {whose}" in err
        record = json.loads((tmp_path / ".lock").read_text())
        assert (record["pid"], record["host"]) == (os.getpid(), socket.gethostname())
        assert abs(calendar.timegm(time.strptime(record["since"], "%Y-%m-%d %H:%M:%S UTC")) - time.time()) < 60
    assert not (tmp_path / ".lock").exists()


def test_the_lock_of_a_running_local_process_is_never_replaced(tmp_path):
    other = run(HOLD, tmp_path)
    assert other.stdout.readline() == "held\n"
    with pytest.raises(WorkdirInUseError, match=rf"{other.pid}.*--take-over"):
        WorkdirLock(tmp_path, take_over=True).acquire()
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == other.pid
    other.communicate("release\n")


def test_the_previous_holder_detects_a_replaced_lock(tmp_path):
    mine = WorkdirLock(tmp_path)
    mine.check()  # not held yet
    mine.acquire()
    mine.check()
    write_record(tmp_path, pid=4321, host="far-away")  # as if --take-over was passed on another host
    with pytest.raises(WorkdirInUseError, match=r"process 4321 on host far-away .* has taken over .* without saving"):
        mine.check()
    mine.release()
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == 4321


@pytest.mark.slow
def test_a_run_with_a_replaced_lock_saves_no_more_checkpoints(tmp_path, monkeypatch):
    """The new process of the workdir finds the earlier checkpoints."""
    evaluate = evaluation.evaluate_loss

    def taken_over_meanwhile(*arguments):
        write_record(tmp_path / "run", pid=4321, host="far-away")
        return evaluate(*arguments)

    recipe = text_recipe(tmp_path, training={"steps": 4}, evaluation={"every": 4}, checkpoint={"every": 2})
    monkeypatch.setattr(evaluation, "evaluate_loss", taken_over_meanwhile)
    with pytest.raises(WorkdirInUseError, match="has taken over"):
        loop.train(recipe, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]
    monkeypatch.undo()
    with pytest.raises(WorkdirInUseError, match="host far-away"):
        loop.train(recipe, tmp_path / "run")
    assert loop.train(recipe, tmp_path / "run", take_over=True).step == 4


def test_the_command_line_option_replaces_a_lock(tmp_path, monkeypatch, capfd):
    """The command to resume omits the option, because the next lock may belong to a running process."""
    monkeypatch.chdir(tmp_path)
    write_record(tmp_path / "run", pid=1234, host="far-away")
    recipe = tmp_path / "empty.py"
    recipe.write_text(
        "import pathlib, training_recipes\ndef get_config():\n    return training_recipes.text_recipe(pathlib.Path())\n"
    )
    calls = []

    def train(recipe, workdir, *, command, take_over, **_):
        with WorkdirLock(workdir, take_over):
            calls.append(command)
        return types.SimpleNamespace(exit_code=0)

    monkeypatch.setattr(loop, "train", train)
    arguments = [str(recipe), "--workdir", "run"]
    with pytest.raises(WorkdirInUseError, match="pass --take-over"):
        cli.main(arguments)
    assert cli.main([*arguments, "--take-over"]) == 0
    assert "took over" in capfd.readouterr().err
    (command,) = calls
    assert command.endswith(f"{recipe} --workdir run")


def test_the_lock_of_a_process_killed_before_writing_its_record_is_replaced(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    (tmp_path / ".lock").write_text("")
    with WorkdirLock(tmp_path):
        assert "Took over" in capfd.readouterr().err
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_filelock_never_replaces_the_lock_of_a_process_killed_before_it_wrote_its_record(tmp_path):
    """The reason for our own `WorkdirLock`: see docs/architecture.md, "Libraries, and what we wrote ourselves"."""
    filelock = pytest.importorskip("filelock", minversion="4")
    (tmp_path / ".lock").write_text("")
    os.utime(tmp_path / ".lock", (time.time() - 3600,) * 2)
    with pytest.raises(filelock.Timeout):
        filelock.SoftFileLock(tmp_path / ".lock").acquire(timeout=0.2)
    with WorkdirLock(tmp_path):
        pass


def test_a_process_delayed_before_writing_its_record_does_not_regain_the_lock(tmp_path, monkeypatch):
    flock = fcntl.flock

    def taken_meanwhile(file, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        write_record(tmp_path, pid=1, started=module._started(1))
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", taken_meanwhile)
    with pytest.raises(WorkdirInUseError, match="in use by process 1 on host"):
        WorkdirLock(tmp_path).acquire()


@pytest.mark.parametrize("content", ['{"pid": 12', "[]", '{"pid": "12", "host": "a", "started": "b", "since": "c"}'])
def test_a_damaged_lock_is_reported(tmp_path, monkeypatch, capfd, content):
    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    (tmp_path / ".lock").write_text(content)
    with pytest.raises(WorkdirInUseError, match="--take-over"):
        WorkdirLock(tmp_path).acquire()
    with WorkdirLock(tmp_path, take_over=True):
        assert "whose content is damaged; last activity" in capfd.readouterr().err


def test_waits_for_a_process_that_is_writing_its_record(tmp_path):
    (tmp_path / ".lock").write_text("")
    timer = threading.Timer(0.2, write_record, [tmp_path], {"started": "boot 0 tick 1"})
    timer.start()
    with WorkdirLock(tmp_path):  # stale as soon as it has a record
        timer.join()


def test_a_lock_may_be_released_while_it_is_read(tmp_path, monkeypatch):
    flock = fcntl.flock

    def released_meanwhile(file, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        (tmp_path / ".lock").unlink()
        flock(file, how)

    write_record(tmp_path)  # of a running process
    monkeypatch.setattr(fcntl, "flock", released_meanwhile)
    with WorkdirLock(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_a_lock_that_is_no_longer_ours_is_not_removed(tmp_path):
    mine = WorkdirLock(tmp_path)
    mine.acquire()
    write_record(tmp_path, pid=1)  # our lock was deleted, and another process created its own
    mine.release()
    assert (tmp_path / ".lock").exists()


def test_reports_a_file_in_place_of_the_lock(tmp_path):
    (tmp_path / "workdir").write_text("")
    with pytest.raises(OSError, match="workdir"):
        WorkdirLock(tmp_path / "workdir").acquire()


RACE = """
import json, random, time
workdir = sys.argv[1]
won = 0
print("ready", flush=True)
sys.stdin.readline()
end = time.monotonic() + 1.5
while time.monotonic() < end:
    try:
        held = lock.WorkdirLock(workdir)
        held.acquire()
    except lock.WorkdirInUseError:
        continue
    os.mkdir(workdir + "/inside")  # fails if the other process is inside
    won += 1
    time.sleep(random.random() * 0.002)
    os.rmdir(workdir + "/inside")
    if random.random() < 0.5:
        held.release()
    else:  # as if killed: a stale lock that both may take over
        path = workdir + "/.lock"
        record = json.load(open(path)) | {"started": "boot 0 tick 1"}
        with open(path + "." + str(os.getpid()), "w") as file:
            json.dump(record, file)
        os.rename(path + "." + str(os.getpid()), path)
print(won)
"""


def test_two_processes_never_hold_the_lock_at_once(tmp_path):
    racers = [run(RACE, tmp_path) for _ in range(2)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    results = [racer.communicate() for racer in racers]
    for racer, (out, err) in zip(racers, results, strict=True):
        assert racer.returncode == 0, err
        assert int(out) > 10


def test_a_failed_release_does_not_hide_an_earlier_error(tmp_path, monkeypatch):
    def denied(self):
        raise PermissionError(13, "Permission denied", str(tmp_path / ".lock"))

    monkeypatch.setattr(WorkdirLock, "release", denied)
    with pytest.raises(ValueError, match="the first") as error, WorkdirLock(tmp_path):
        raise ValueError("the first")
    assert "Permission denied" in error.value.__notes__[0]
    with pytest.raises(PermissionError), WorkdirLock(tmp_path / "other"):
        pass


def test_an_unreadable_lock_stops_saving_with_an_error(tmp_path, monkeypatch):
    with WorkdirLock(tmp_path) as lock:
        monkeypatch.setattr(module, "open", denied_open, raising=False)
        with pytest.raises(OSError, match=rf"{tmp_path}.*\(.lock\)"):
            lock.check()
        monkeypatch.undo()


def denied_open(path, *args, **kwargs):
    raise PermissionError(13, "Permission denied", str(path))
