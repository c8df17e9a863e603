"""Ways to harm the files of a checkpoint, and the scenarios in which that, or the world around a run, is harmed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from reliability.invocations import checkpoints, first_fault, left, newest, went_on
from reliability.world import Tally, World
from transformer.training._manifest import find_steps, newest_valid

FLIPS = 20
"""places of each file at which a bit is flipped"""


def truncate(path: Path, chance: random.Random) -> None:
    """The file loses its second half."""
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path, chance: random.Random) -> None:
    """The file has nothing in it any more."""
    os.truncate(path, 0)


def delete(path: Path, chance: random.Random) -> None:
    """The file is not there any more."""
    path.unlink()


def flip(path: Path, chance: random.Random) -> None:
    """One bit of the file, anywhere, is another one."""
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


Harm = Callable[[Path, random.Random], None]
HARMS: dict[str, tuple[Harm, int]] = {
    "truncated": (truncate, 1),
    "emptied": (empty, 1),
    "deleted": (delete, 1),
    "a bit flipped": (flip, FLIPS),
}
"""how a file is harmed, and how many times each"""


def files(directory: Path) -> list[Path]:
    """Every file of a checkpoint that has anything in it, in order of name."""
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)


def damaged(world: World) -> Tally:
    """Every file of the newest checkpoint harmed in every way: found, named, the checkpoint before it used. Then a call
    of train.py for each way, on a file drawn at random, and one with no good checkpoint left.
    """
    tally = Tally("", f"each file of the newest checkpoint truncated, emptied, deleted, a bit flipped ({FLIPS} places)")
    workdir = world.base("damaged")
    chance, step = world.chance("damaged"), newest(workdir)
    before = find_steps(checkpoints(workdir))[-2]
    directory = checkpoints(workdir) / str(step)
    for path in files(directory):
        content = path.read_bytes()
        for name, (harm, times) in HARMS.items():
            for _ in range(times):
                harm(path, chance)
                tally.case(f"{path.name} {name}", found(workdir, path, before))
                path.write_bytes(content)
    tally.remarks.append(f"{len(files(directory))} files")

    for number, (name, (harm, _)) in enumerate(HARMS.items()):
        workdir = world.base(f"damaged-{number}")
        path = chance.choice(files(checkpoints(workdir) / str(step)))
        harm(path, chance)
        told, faults = world.finish(workdir)
        used = f"Using the checkpoint of step {before}, because a newer one is damaged"
        if used not in told or path.name not in told:
            faults.append(f"it does not name {path.name} and say that step {before} is used")
        tally.case(f"train.py with {path.name} {name}", faults)

    workdir = world.base("damaged-all")
    for at in find_steps(checkpoints(workdir)):
        truncate(files(checkpoints(workdir) / str(at))[0], chance)
    with world.call(workdir) as call:
        codes, told = call.end(), call.told()
    faults = first_fault(codes, [2], told)
    if "No valid checkpoint in" not in told or "A run never restarts from step 0 automatically" not in told:
        faults.append("it does not say that there is no valid checkpoint")
    tally.case("train.py with every checkpoint damaged", faults)
    tally.remarks.append("5 of these by train.py, the rest by the reader that it uses")
    return tally


def found(workdir: Path, harmed: Path, before: int) -> list[str]:
    """What is wrong with what the reader of checkpoints makes of a harmed file: it is to name it, and choose the
    checkpoint of the step `before`.
    """
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        directory, _ = newest_valid(checkpoints(workdir), set())
    faults = [] if directory.name == str(before) else [f"step {directory.name} was used, expected {before}"]
    if not any(str(harmed) in str(warning.message) or f"no {harmed.name}" in str(warning.message) for warning in told):
        faults.append(f"not named: {[str(warning.message) for warning in told]}")
    return faults


def full_disk(world: World) -> Tally:
    """A small tmpfs that fills up until the next save fails; then there is room again."""
    tally = Tally("", "the disk fills up in a run, so that a save fails in the middle; then there is room again")
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
                    time.sleep(0.002)
                codes, told = call.end(), call.told()
            faults = first_fault(codes, [1], told)
            if not any(words in told for words in ("the disk is full", "No space left on device")):
                faults.append("it does not say that the disk is full")
            tally.counts["told by the save" if "No checkpoint was written" in told else "told by another file"] += 1
            if list(checkpoints(workdir).glob("*.tmp")):
                tally.counts["with half a checkpoint left over"] += 1
            step = newest(workdir)
            ballast.unlink()
            told, more = world.finish(workdir)
            tally.case(f"{share:.0%} of a checkpoint free", faults + went_on(told, step) + more)
        finally:
            subprocess.run(["umount", str(disk)], check=True)
    return tally


def fill(ballast: Path, leave: int) -> None:
    """Makes a file grow until a disk has no more than so many bytes left."""
    room = os.statvfs(ballast.parent)
    more = room.f_bavail * room.f_frsize - leave
    if more > 0:
        with open(ballast, "ab", buffering=0) as file:
            try:
                file.write(bytes(more))
            except OSError:
                return  # somebody else was quicker: it is full


def two_runs(world: World) -> Tally:
    """A second call on a workdir where one trains, and two calls at the same moment."""
    tally = Tally("", "a second run on a workdir in use; two started at the same moment")
    expected, _ = world.reference()
    workdir = world.folder / "in-use"
    with world.call(workdir) as first:
        first.wait_until(lambda: newest(workdir))
        first.signal(signal.SIGSTOP)  # it lives, and can't end before the second one has begun
        with world.call(workdir) as second:
            faults = first_fault(second.end(), [1], second.told())
            if f"is in use by process {first.members[0].pid}" not in second.told():
                faults.append("it does not name the process that trains there")
        first.signal(signal.SIGCONT)
        faults += first_fault(first.end(), [0], first.told()) or left(workdir).differences(expected)
    tally.case("the second run", faults)
    workdir = world.folder / "at-once"
    with world.call(workdir) as first, world.call(workdir) as second:
        calls = first, second
        codes = [call.end()[0] for call in calls]
        refused = [call.told() for call, code in zip(calls, codes, strict=True) if code == 1]
    faults = [] if sorted(codes) == [0, 1] else [f"exit codes {codes}, expected one 0 and one 1"]
    if len(refused) == 1 and "is in use by process" not in refused[0]:
        faults.append("the one that was refused does not say why")
    tally.case("two at once", faults or left(workdir).differences(expected))
    return tally


def strays(world: World) -> Tally:
    """Directories and files among the checkpoints that are none, or not of the step that they are called by."""
    tally = Tally("", "stray files and directories among the checkpoints; step directories renamed and copied")
    workdir = world.base("strays")
    root, step = checkpoints(workdir), newest(workdir)
    before = find_steps(root)[-2]
    (root / "99999").mkdir()
    (root / "notes").mkdir()
    (root / "007").mkdir()
    (root / "notes.tmp").write_text("not a checkpoint")
    (root / "88888").write_text("a file where a directory should be")
    (root / f"{step + 10}.tmp").write_text("a file where the next one is written")
    (root / "77777").symlink_to(root / "nowhere")
    shutil.copytree(root / str(before), root / "66666")
    told, faults = world.finish(workdir)
    for name in ("99999 is empty", "88888", "66666/manifest.json is of step"):
        if name not in told:
            faults.append(f"it does not name {name}")
    for name in ("notes", "007", "notes.tmp"):
        if not (root / name).exists():
            faults.append(f"{name} is gone")
    tally.case("strays", faults)

    workdir = world.base("renamed")
    root = checkpoints(workdir)
    os.rename(root / str(step), root / str(step + 1000))
    told, faults = world.finish(workdir)
    if "renamed?" not in told:
        faults.append("it does not say that a directory was renamed")
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
    """File times turned round, and the clock of the next call years ahead or behind."""
    tally = Tally("", "file times turned round (newest checkpoint 1980, older ones 2037), Python's clock 20 years off")
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
        told, faults = world.finish(workdir, path=path)
        tally.case(f"the clock {name}", faults + went_on(told, step))
    return tally
