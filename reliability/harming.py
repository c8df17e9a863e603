"""Functions that damage files of a checkpoint, and scenarios with damaged files or a faulty environment."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from reliability.invocations import check_resumed, checkpoints, first_fault, newest, run_state
from reliability.world import Tally, World
from transformer.training.workdir._manifest import find_steps, newest_valid

FLIPS = 20
"""number of positions per file at which a bit is flipped"""


def truncate(path: Path, rng: random.Random) -> None:
    """Remove the second half of the file."""
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path, rng: random.Random) -> None:
    """Remove the content of the file."""
    os.truncate(path, 0)


def delete(path: Path, rng: random.Random) -> None:
    """Delete the file."""
    path.unlink()


def flip(path: Path, rng: random.Random) -> None:
    """Flip one random bit of the file."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


Harm = Callable[[Path, random.Random], None]
HARMS: dict[str, tuple[Harm, int]] = {
    "truncated": (truncate, 1),
    "emptied": (empty, 1),
    "deleted": (delete, 1),
    "a bit flipped": (flip, FLIPS),
}
"""damaging functions by name, with the number of repetitions"""


def files(directory: Path) -> list[Path]:
    """Return the non-empty files of a checkpoint, sorted by name."""
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)


def damaged(world: World) -> Tally:
    """Damage every file of the newest checkpoint in every way.

    The reader must detect the damage, name the file and use the previous checkpoint. Then train.py runs once for each
    kind of damage, on a random file, and once without any valid checkpoint.
    """
    tally = Tally(
        "",
        f"each file of the newest checkpoint truncated, emptied, deleted, or with one bit flipped ({FLIPS} positions)",
    )
    workdir = world.base("damaged")
    rng, step = world.rng("damaged"), newest(workdir)
    before = find_steps(checkpoints(workdir))[-2]
    directory = checkpoints(workdir) / str(step)
    for path in files(directory):
        content = path.read_bytes()
        for name, (harm, times) in HARMS.items():
            for _ in range(times):
                harm(path, rng)
                tally.case(f"{path.name} {name}", found(workdir, path, before))
                path.write_bytes(content)
    tally.remarks.append(f"{len(files(directory))} files")

    for number, (name, (harm, _)) in enumerate(HARMS.items()):
        workdir = world.base(f"damaged-{number}")
        path = rng.choice(files(checkpoints(workdir) / str(step)))
        harm(path, rng)
        output, faults = world.finish(workdir)
        used = f"Using the checkpoint of step {before}, because a newer one is damaged"
        if used not in output or path.name not in output:
            faults.append(f"the output does not name {path.name} and step {before}")
        tally.case(f"train.py with {path.name} {name}", faults)

    workdir = world.base("damaged-all")
    for at in find_steps(checkpoints(workdir)):
        truncate(files(checkpoints(workdir) / str(at))[0], rng)
    with world.call(workdir) as call:
        codes, output = call.end(), call.output()
    faults = first_fault(codes, [2], output)
    if "No valid checkpoint in" not in output or "A run never restarts from step 0 automatically" not in output:
        faults.append("the output does not report that there is no valid checkpoint")
    tally.case("train.py with every checkpoint damaged", faults)
    tally.remarks.append("5 cases with train.py, the others with the checkpoint reader that it uses")
    return tally


def found(workdir: Path, harmed: Path, before: int) -> list[str]:
    """Return the faults of the checkpoint reader for a damaged file.

    The reader must name the file and select the checkpoint of step `before`.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        directory, _ = newest_valid(checkpoints(workdir), set())
    faults = [] if directory.name == str(before) else [f"step {directory.name} was used, expected {before}"]
    if not any(
        str(harmed) in str(warning.message) or f"no {harmed.name}" in str(warning.message) for warning in caught
    ):
        faults.append(f"not named: {[str(warning.message) for warning in caught]}")
    return faults


def full_disk(world: World) -> Tally:
    """Fill a small tmpfs until the next save fails; then free space and resume."""
    tally = Tally("", "the disk fills up during a run, so that a save fails; then space is freed")
    workdir = world.base("full-size")
    size = sum(path.stat().st_size for path in files(checkpoints(workdir) / str(newest(workdir))))
    for number, share in enumerate((0.0, 0.35, 0.7)):
        disk = world.folder / f"disk-{number}"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={8 * size + 2**22}", "tmpfs", str(disk)]
        mounted = subprocess.run(mount, capture_output=True, text=True)
        if mounted.returncode:
            tally.not_run = f"mounting a tmpfs needs root: {mounted.stderr.strip()}"
            return tally
        try:
            workdir, ballast = disk / "run", disk / "ballast"
            with world.call(workdir) as call:
                call.wait_until(lambda call=call, workdir=workdir: newest(workdir) >= 40, every=0.01)
                while call.running():
                    fill(ballast, int(share * size))
                    call.check_patience()
                    time.sleep(0.002)
                codes, output = call.end(), call.output()
            faults = first_fault(codes, [1], output) + check_full(output, workdir)
            tally.counts[
                "reported by the save" if "No checkpoint was written" in output else "reported for another file"
            ] += 1
            if list(checkpoints(workdir).glob("*.tmp")):
                tally.counts["with an incomplete checkpoint left"] += 1
            step = newest(workdir)
            ballast.unlink()
            output, more = world.finish(workdir)
            tally.case(f"{share:.0%} of a checkpoint free", faults + check_resumed(output, step) + more)
        finally:
            tally.faults += unmount(disk)
    return tally


def check_full(output: str, workdir: Path) -> list[str]:
    """Return the faults of the output of a run whose disk is full: one line must say so, and name the place."""
    lines = output.splitlines()
    said = [line for line in lines if "the disk is full" in line or "No space left on device" in line]
    faults = [] if len(said) == 1 else [f"{len(said)} lines report that the disk is full, expected 1"]
    faults += [f"the place is missing: {line}" for line in said if str(workdir) not in line]
    return faults + [f"printed: {line}" for line in lines if "Traceback" in line or "ERROR:" in line]


def unmount(disk: Path) -> list[str]:
    """Unmount a file system; return the faults, which name the processes that still use it.

    The file system is detached in any case, so that it does not outlive this command.
    """
    done = subprocess.run(["umount", str(disk)], capture_output=True, text=True)
    if not done.returncode:
        return []
    users = holders(disk) or ["by no process that can be seen"]
    subprocess.run(["umount", "--lazy", str(disk)], check=True)
    return [f"{done.stderr.strip()}: {'; '.join(users)}"]


def holders(folder: Path, processes: Path = Path("/proc")) -> list[str]:
    """Return the processes with open files, mapped files or a working directory in a directory, and what they use."""
    found = []
    for process in sorted(processes.glob("[0-9]*")):
        used = set()
        for link in [process / "cwd", process / "root", *_listed(process / "fd"), *_listed(process / "map_files")]:
            with contextlib.suppress(OSError):  # closed in the meantime, or of another user
                used.add(os.readlink(link).removesuffix(" (deleted)"))
        if inside := sorted(path for path in used if Path(path).is_relative_to(folder)):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found.append(f"process {process.name} ({words[:200]}) uses {inside[0]}")
    return found


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # the process has ended, or belongs to another user
        return []


def fill(ballast: Path, leave: int) -> None:
    """Extend a file until the disk has at most `leave` free bytes."""
    room = os.statvfs(ballast.parent)
    more = room.f_bavail * room.f_frsize - leave
    if more > 0:
        with open(ballast, "ab", buffering=0) as file:
            try:
                file.write(bytes(more))
            except OSError:
                return  # another process used the remaining space


def two_runs(world: World) -> Tally:
    """Start a second run in a workdir that is in use, and two runs at the same time."""
    tally = Tally("", "a second run in a workdir that is in use; two runs started at the same time")
    expected, _ = world.reference()
    workdir = world.folder / "in-use"
    with world.call(workdir) as first:
        first.wait_until(lambda: newest(workdir))
        first.signal(signal.SIGSTOP)  # it can't finish before the second run starts
        with world.call(workdir) as second:
            faults = first_fault(second.end(), [1], second.output())
            if f"is in use by process {first.members[0].pid}" not in second.output():
                faults.append("the output does not name the process that uses the workdir")
        first.signal(signal.SIGCONT)
        faults += first_fault(first.end(), [0], first.output()) or run_state(workdir).differences(expected)
    tally.case("the second run", faults)
    workdir = world.folder / "at-once"
    with world.call(workdir) as first, world.call(workdir) as second:
        calls = first, second
        codes = [call.end()[0] for call in calls]
        refused = [call.output() for call, code in zip(calls, codes, strict=True) if code == 1]
    faults = [] if sorted(codes) == [0, 1] else [f"exit codes {codes}, expected one 0 and one 1"]
    if len(refused) == 1 and "is in use by process" not in refused[0]:
        faults.append("the output of the rejected run does not give the reason")
    tally.case("two runs at the same time", faults or run_state(workdir).differences(expected))
    return tally


def strays(world: World) -> Tally:
    """Add files and directories that are not checkpoints, or belong to another step than their name."""
    tally = Tally("", "stray files and directories among the checkpoints; step directories renamed or copied")
    workdir = world.base("strays")
    root, step = checkpoints(workdir), newest(workdir)
    before = find_steps(root)[-2]
    (root / "99999").mkdir()
    (root / "notes").mkdir()
    (root / "007").mkdir()
    (root / "notes.tmp").write_text("not a checkpoint")
    (root / "88888").write_text("a file where a directory should be")
    (root / f"{step + 10}.tmp").write_text("a file at the path of the next checkpoint")
    (root / "77777").symlink_to(root / "nowhere")
    shutil.copytree(root / str(before), root / "66666")
    output, faults = world.finish(workdir)
    for name in ("99999 is empty", "88888", "66666/manifest.json is of step"):
        if name not in output:
            faults.append(f"the output does not name {name}")
    for name in ("notes", "007", "notes.tmp"):
        if not (root / name).exists():
            faults.append(f"{name} was deleted")
    tally.case("strays", faults)

    workdir = world.base("renamed")
    root = checkpoints(workdir)
    os.rename(root / str(step), root / str(step + 1000))
    output, faults = world.finish(workdir)
    if "renamed?" not in output:
        faults.append("the output does not report the renamed directory")
    tally.case("the newest renamed", faults)

    workdir = world.folder / "only-strays"
    (checkpoints(workdir) / "007").mkdir(parents=True)
    _, faults = world.finish(workdir)
    tally.case("nothing but a stray", faults)
    return tally


CLOCK = """
import time
def moved(now, shift):
    return lambda: now() + shift
time.time, time.time_ns = moved(time.time, {seconds}), moved(time.time_ns, {seconds} * 10**9)
"""


def clock_moved(world: World) -> Tally:
    """Reverse the file times, and set the clock of the next run years ahead or behind."""
    tally = Tally("", "file times reversed (newest checkpoint 1980, older ones 2037); Python's clock 20 years off")
    for name, years in (("behind", -20), ("ahead", 20)):
        workdir = world.base(f"clock-{name}")
        root, step = checkpoints(workdir), newest(workdir)
        for at in find_steps(root):
            when = 315532800 if at == step else 2114380800  # 1980, 2037
            for path in [root / str(at), *(root / str(at)).rglob("*")]:
                os.utime(path, (when, when))
        path = world.folder / f"python-{name}"
        path.mkdir()
        (path / "sitecustomize.py").write_text(CLOCK.format(seconds=years * 365 * 86400))
        output, faults = world.finish(workdir, path=path)
        tally.case(f"the clock {name}", faults + check_resumed(output, step))
    return tally
