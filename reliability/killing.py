"""Scenarios in which a run is killed or stopped repeatedly, and must end like an uninterrupted run."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from reliability.invocations import (
    EVALUATE_EVERY,
    GONE,
    STEPS,
    Call,
    check_resumed,
    first_fault,
    newest,
    reached,
    run_state,
    started_since,
    unfinished,
)
from reliability.pace import Limit
from reliability.world import Moment, Tally, World, draw_moment, phase

TERMINATED = 128 + signal.SIGTERM
"""exit code of a run that was stopped by SIGTERM and saved its state"""
PREPARING = 4.0
"""maximum seconds between the creation of the dataset directory and the kill"""


def one_process(world: World) -> Tally:
    """Kill one process at random times, some of them during saves."""
    return _killed(world, 1)


def two_processes(world: World) -> Tally:
    """Kill one or both of two processes that train together; a remaining process must exit on its own."""
    return _killed(world, 2)


def _killed(world: World, processes: int) -> Tally:
    tally = Tally("", "SIGKILL at random times, half of them within 50 ms after the start of a save")
    tally.what += "; two processes, one or both of them killed" if processes > 1 else ""
    expected, timing = world.reference(processes)
    rng = world.rng(f"kill {processes}")
    runs, again, slowest = 0, 0, 0.0
    workdir: Path | None = None
    while tally.times < world.kills:
        if workdir is None:
            runs += 1
            workdir = world.folder / f"killed-{processes}-{runs}"
        before, stale = newest(workdir), unfinished(workdir)
        moment = draw_moment(rng, timing, before, STEPS)
        victims = _victims(rng, processes)
        with world.call(workdir, processes=processes) as call:
            if not _comes(call, moment, stale):  # the run finished before the kill
                faults = first_fault(call.end(), [0] * processes, call.all_output())
                tally.faults += [f"{workdir.name}: {f}" for f in faults or run_state(workdir).differences(expected)]
                tally.counts["runs finished before the kill"] += 1
                timing = timing.corrected(call.seconds, before, STEPS)
                workdir = None
                continue
            call.kill(*victims)
            fresh = started_since(stale, workdir)
            faults, seconds = _survivors(call, victims)
            slowest = max(slowest, seconds)
            output = call.output()
            faults += check_resumed(output, before)
            tally.counts[phase(output, fresh, newest(workdir), STEPS)] += 1
            again = max(again, reached(output) - newest(workdir))
            tally.case(f"kill {tally.times + 1} of {workdir.name}", faults)
            world.say(f"  kill {tally.times} of {world.kills}: step {reached(output)}, newest {newest(workdir)}")
    if workdir is not None:
        _, faults = world.finish(workdir, processes)
        tally.faults += [f"{workdir.name}: {fault}" for fault in faults]
    tally.remarks.append(f"{runs} runs, at most {again} steps repeated after a kill")
    if processes > 1:
        tally.remarks.append(f"the other process exited within {slowest:.0f} s")
    return tally


def _victims(rng: random.Random, processes: int) -> tuple[int, ...]:
    """Select the processes to kill: with probability 0.5 all of them, otherwise one."""
    everybody = tuple(range(processes))
    return everybody if processes == 1 or rng.random() < 0.5 else (rng.choice(everybody),)


def _comes(call: Call, moment: Moment, stale: dict[int, int]) -> bool:
    """Wait for the moment; return False if the run ended before it."""
    if not call.wait_until(lambda: call.seconds >= moment.seconds):
        return False
    if not moment.aimed:
        return True
    if not call.wait_until(lambda: started_since(stale, call.workdir), every=0.0005):
        return False
    time.sleep(moment.after)
    return call.running()


def _survivors(call: Call, victims: tuple[int, ...]) -> tuple[list[str], float]:
    """Return the faults of the processes that were not killed, and the seconds until they exited."""
    faults, start = [], time.monotonic()
    for index in sorted({*range(len(call.members))} - {*victims}):
        limit, member = Limit(GONE), call.members[index]
        if not limit.wait(lambda member=member: member.poll() is not None):
            faults.append(f"process {index} was still running {limit.seconds:.0f} s after another process was killed")
            continue
        if member.returncode == 0 and reached(call.output()) < STEPS:
            faults.append(f"process {index} exited with 0 although another process was killed")
    return faults, time.monotonic() - start


def preparing(world: World) -> Tally:
    """Kill a run while the dataset is prepared for the first time."""
    tally = Tally("", "SIGKILL while the dataset is prepared for the first time")
    world.reference()
    rng, data = world.rng("data"), world.folder / "data-killed"
    workdir = world.folder / "prepared"
    for number in range(max(2, world.kills // 10)):
        with world.call(workdir, data=data) as call:
            exists = call.wait_until(data.exists)
            moment = call.seconds + rng.uniform(0.0, PREPARING)
            if not (exists and call.wait_until(lambda call=call, moment=moment: call.seconds >= moment)):
                break
            tally.counts[
                "after the dataset was prepared" if "data: " in call.output() else "before the dataset was prepared"
            ] += 1
            call.kill()
            tally.case(f"kill {number + 1}", check_resumed(call.output(), newest(workdir)))
    _, faults = world.finish(workdir, data=data)
    tally.faults += [f"{workdir.name}: {fault}" for fault in faults]
    return tally


def terminated(world: World) -> Tally:
    """Send SIGTERM during compilation, a step, a save and an evaluation of one run; then twice; then to one of two
    processes.
    """
    tally = Tally("", "SIGTERM during compilation, a step, an evaluation and a save; twice; to one of two processes")
    workdir = world.folder / "terminated"
    stale: dict[int, int] = {}
    evaluated = f"step {EVALUATE_EVERY}/"
    moments = {
        "compilation": lambda call: "compiling the training step" in call.output(),
        "a step": lambda call: reached(call.output()) > newest(workdir) + 3,
        "a save": lambda call: started_since(stale, workdir),
        "an evaluation": lambda call: evaluated in call.output(),
    }
    for name, condition in moments.items():
        before = newest(workdir)
        stale = unfinished(workdir)
        with world.call(workdir, compiled=False) as call:
            if call.wait_until(lambda call=call, condition=condition: condition(call)):
                call.signal()
            codes, output = call.end(), call.output()
        faults = first_fault(codes, [TERMINATED], output) + check_resumed(output, before)
        if not faults and f"stopped at step {newest(workdir)} of {STEPS}; everything is saved" not in output:
            faults.append(
                f"the output does not report that the run stopped at step {newest(workdir)} and saved everything"
            )
        if name == "an evaluation" and f"step {EVALUATE_EVERY}: eval" in output:
            tally.counts["evaluations ended before the signal"] += 1
        tally.case(f"SIGTERM in {name}", faults)

    before = newest(workdir)
    with world.call(workdir) as call:
        call.wait_until(lambda: reached(call.output()))
        call.signal()
        call.wait_until(lambda: "Send it again to exit immediately" in call.output())
        limit = Limit(10.0)
        if call.running():
            call.signal()
        late = not limit.wait(lambda: not call.running())
        codes, output = call.end(), call.output()
    faults = first_fault(codes, [TERMINATED], output) + check_resumed(output, before)
    tally.case("SIGTERM twice", faults + ([f"the exit took more than {limit.seconds:.0f} s"] if late else []))
    _, faults = world.finish(workdir)
    tally.faults += [f"{workdir.name}: {fault}" for fault in faults]

    workdir = world.folder / "terminated-two"
    with world.call(workdir, processes=2) as call:
        call.wait_until(lambda: newest(workdir))
        call.signal(index=1)
        codes, output = call.end(), call.all_output()
    faults = first_fault(codes, [TERMINATED] * 2, output)
    if f"stopped at step {newest(workdir)} of {STEPS}" not in output:
        faults.append(f"the output does not report that the run stopped at step {newest(workdir)}")
    _, more = world.finish(workdir, 2)
    tally.case("SIGTERM to one of two", faults + more)
    return tally
