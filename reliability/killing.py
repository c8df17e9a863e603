"""Scenarios in which a run is killed or asked to stop, again and again, and ends as one that was never touched."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

from reliability.invocations import (
    EVALUATE_EVERY,
    GONE,
    STEPS,
    Call,
    begun_since,
    first_fault,
    left,
    newest,
    reached,
    unfinished,
    went_on,
)
from reliability.world import Moment, Tally, World, draw_moment, phase

TERMINATED = 128 + signal.SIGTERM
"""exit code of a run that SIGTERM has stopped in order"""
PREPARING = 4.0
"""seconds after the folder of a new data set was seen within which a call is killed"""


def one_process(world: World) -> Tally:
    """SIGKILL at random moments, a share of them aimed at saves."""
    return _killed(world, 1)


def two_processes(world: World) -> Tally:
    """The same for two processes that train together; both are killed, or one, and the other has to end by itself."""
    return _killed(world, 2)


def _killed(world: World, processes: int) -> Tally:
    tally = Tally("", "SIGKILL at random moments, half of them within 50 ms of the beginning of a save")
    tally.what += "; two processes, both or one of them killed" if processes > 1 else ""
    expected, timing = world.reference(processes)
    chance = world.chance(f"kill {processes}")
    runs, again, slowest = 0, 0, 0.0
    workdir: Path | None = None
    while tally.times < world.kills:
        if workdir is None:
            runs += 1
            workdir = world.folder / f"killed-{processes}-{runs}"
        before, stale = newest(workdir), unfinished(workdir)
        moment = draw_moment(chance, timing, before, STEPS)
        victims = _victims(chance, processes)
        with world.call(workdir, processes=processes) as call:
            if not _comes(call, moment, stale):  # it ended before
                faults = first_fault(call.end(), [0] * processes, call.told_by_all())
                tally.faults += [f"{workdir.name}: {f}" for f in faults or left(workdir).differences(expected)]
                tally.counts["runs ended in between"] += 1
                timing = timing.corrected(call.seconds, before, STEPS)
                workdir = None
                continue
            call.kill(*victims)
            fresh = begun_since(stale, workdir)
            faults, seconds = _survivors(call, victims)
            slowest = max(slowest, seconds)
            told = call.told()
            faults += went_on(told, before)
            tally.counts[phase(told, fresh, newest(workdir), STEPS)] += 1
            again = max(again, reached(told) - newest(workdir))
            tally.case(f"kill {tally.times + 1} of {workdir.name}", faults)
            world.say(f"  kill {tally.times} of {world.kills}: step {reached(told)}, newest {newest(workdir)}")
    if workdir is not None:
        _, faults = world.finish(workdir, processes)
        tally.faults += [f"{workdir.name}: {fault}" for fault in faults]
    tally.remarks.append(f"{runs} runs, at most {again} steps done again after a kill")
    if processes > 1:
        tally.remarks.append(f"the other process ended by itself within {slowest:.0f} s")
    return tally


def _victims(chance: random.Random, processes: int) -> tuple[int, ...]:
    """Whom to kill: all of them half of the time, else one."""
    everybody = tuple(range(processes))
    return everybody if processes == 1 or chance.random() < 0.5 else (chance.choice(everybody),)


def _comes(call: Call, moment: Moment, stale: dict[int, int]) -> bool:
    """Waits for the moment; False: the call has ended before."""
    if not call.wait_until(lambda: call.seconds >= moment.seconds):
        return False
    if not moment.aimed:
        return True
    if not call.wait_until(lambda: begun_since(stale, call.workdir), every=0.0005):
        return False
    time.sleep(moment.after)
    return call.running()


def _survivors(call: Call, victims: tuple[int, ...]) -> tuple[list[str], float]:
    """What is wrong with those that were not killed, and in how many seconds they ended."""
    faults, began = [], time.monotonic()
    for index in sorted({*range(len(call.members))} - {*victims}):
        try:
            code = call.members[index].wait(GONE)
        except subprocess.TimeoutExpired:
            faults.append(f"process {index} still runs {GONE:.0f} s after another one was killed")
            continue
        if code == 0 and reached(call.told()) < STEPS:
            faults.append(f"process {index} ended with 0 though another one was killed")
    return faults, time.monotonic() - began


def preparing(world: World) -> Tally:
    """SIGKILL while the data set is prepared for the first time."""
    tally = Tally("", "SIGKILL while the data is prepared for the first time")
    world.reference()
    chance, data = world.chance("data"), world.folder / "data-killed"
    workdir = world.folder / "prepared"
    for number in range(max(2, world.kills // 10)):
        with world.call(workdir, data=data) as call:
            there = call.wait_until(data.exists)
            moment = call.seconds + chance.uniform(0.0, PREPARING)
            if not (there and call.wait_until(lambda call=call, moment=moment: call.seconds >= moment)):
                break
            tally.counts["after it was prepared" if "data: " in call.told() else "before it was prepared"] += 1
            call.kill()
            tally.case(f"kill {number + 1}", went_on(call.told(), newest(workdir)))
    _, faults = world.finish(workdir, data=data)
    tally.faults += [f"{workdir.name}: {fault}" for fault in faults]
    return tally


def terminated(world: World) -> Tally:
    """SIGTERM while the step is compiled, in a step, in an evaluation and in a save, one after the other in one run;
    then twice; then to one of two processes.
    """
    tally = Tally("", "SIGTERM while compiling, in a step, in an evaluation, in a save; twice; to one of two processes")
    workdir = world.folder / "terminated"
    stale: dict[int, int] = {}
    evaluated = f"step {EVALUATE_EVERY}/"
    moments = {
        "compilation": lambda call: "compiling the training step" in call.told(),
        "a step": lambda call: reached(call.told()) > newest(workdir) + 3,
        "a save": lambda call: begun_since(stale, workdir),
        "an evaluation": lambda call: evaluated in call.told(),
    }
    for name, condition in moments.items():
        before = newest(workdir)
        stale = unfinished(workdir)
        with world.call(workdir, compiled=False) as call:
            if call.wait_until(lambda call=call, condition=condition: condition(call)):
                call.signal()
            codes, told = call.end(), call.told()
        faults = first_fault(codes, [TERMINATED], told) + went_on(told, before)
        if not faults and f"stopped at step {newest(workdir)} of {STEPS}; everything is saved" not in told:
            faults.append(f"it does not say that it stopped at step {newest(workdir)} and saved everything")
        if name == "an evaluation" and f"step {EVALUATE_EVERY}: eval" in told:
            tally.counts["evaluation was over before the signal came"] += 1
        tally.case(f"SIGTERM in {name}", faults)

    before = newest(workdir)
    with world.call(workdir) as call:
        call.wait_until(lambda: reached(call.told()))
        call.signal()
        call.wait_until(lambda: "Send it again to exit immediately" in call.told())
        began = time.monotonic()
        if call.running():
            call.signal()
        codes, told = call.end(), call.told()
    seconds = time.monotonic() - began
    faults = first_fault(codes, [TERMINATED], told) + went_on(told, before)
    tally.case("SIGTERM twice", faults + ([f"it took {seconds:.1f} s to leave"] if seconds > 10 else []))
    _, faults = world.finish(workdir)
    tally.faults += [f"{workdir.name}: {fault}" for fault in faults]

    workdir = world.folder / "terminated-two"
    with world.call(workdir, processes=2) as call:
        call.wait_until(lambda: newest(workdir))
        call.signal(index=1)
        codes, told = call.end(), call.told_by_all()
    faults = first_fault(codes, [TERMINATED] * 2, told)
    if f"stopped at step {newest(workdir)} of {STEPS}" not in told:
        faults.append(f"it does not say that it stopped at step {newest(workdir)}")
    _, more = world.finish(workdir, 2)
    tally.case("SIGTERM to one of two", faults + more)
    return tally
