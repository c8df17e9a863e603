"""Objects shared by the scenarios: working directory, random numbers, reference run, and tally of the results."""

from __future__ import annotations

import dataclasses
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reliability.invocations import Call, RunState, checkpoints, first_fault, newest, reached, run_state

AIMED = 0.5
"""fraction of the kills that wait for a save"""
AFTER = 0.05
"""maximum seconds between the start of a save and such a kill"""


@dataclass(frozen=True)
class Timing:
    """Duration of a complete run in seconds: until the end of the first step, and until its end."""

    first_step: float
    end: float

    def expected_end(self, step: int, steps: int) -> float:
        """Return the expected seconds from start to end of a run that resumes from `step`."""
        return self.first_step + (self.end - self.first_step) * (1 - step / steps)

    def corrected(self, seconds: float, step: int, steps: int) -> Timing:
        """Return the timing scaled by a run that resumed from `step` and took `seconds`; the load may have changed."""
        factor = seconds / self.expected_end(step, steps)
        return Timing(self.first_step * factor, self.end * factor)


@dataclass(frozen=True)
class Moment:
    """Time of a kill: `seconds` after the start of a run; if `aimed`, it then waits for the next save and kills `after`
    seconds after its start.
    """

    seconds: float
    aimed: bool
    after: float


def draw_moment(rng: random.Random, timing: Timing, step: int, steps: int) -> Moment:
    """Draw a moment uniformly between the start of a run that resumes from `step` and its expected end."""
    seconds = rng.uniform(0.0, timing.expected_end(step, steps))
    return Moment(seconds, rng.random() < AIMED, rng.uniform(0.0, AFTER))


def phase(output: str, unfinished: list[int], newest_step: int, steps: int) -> str:
    """Return what a run was doing when it was killed, from its output and the steps of `unfinished` directories."""
    if unfinished:
        return "in a save" if max(unfinished) > newest_step else "in a deletion"
    if "compiling the training step" not in output:
        return "at the start"
    if not reached(output, steps) and "compiled in" not in output:
        return "in compilation"
    return "at the end" if reached(output, steps) == steps else "in training"


@dataclass
class Tally:
    """Cases of a scenario and their faults."""

    name: str
    what: str
    """description for the table"""
    times: int = 0
    good: int = 0
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    """remarks with counts, such as "in a save": 12"""
    remarks: list[str] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)
    not_run: str = ""
    """reason why the scenario could not run"""
    seconds: float = 0.0

    def case(self, name: str, faults: list[str]) -> None:
        """Add a case, which is as expected if there are no faults."""
        self.times += 1
        self.good += not faults
        self.faults += [f"{name}: {fault}" for fault in faults]

    @property
    def failed(self) -> bool:
        """Whether there was a fault, or no case at all."""
        return bool(self.faults) or (not self.times and not self.not_run)

    @property
    def summary(self) -> str:
        """Counts and remarks as text."""
        counted = [f"{count} {name}" for name, count in self.counts.most_common()]
        return "; ".join([*([", ".join(counted)] if counted else []), *self.remarks])


class World:
    """Environment of the scenarios: an exclusive directory, and the options `kills` and `seed` of the command."""

    def __init__(self, folder: Path, kills: int, seed: int, say: Callable[[str], None]):
        self.folder, self.kills, self.seed, self.say = folder, kills, seed, say
        self.data, self.log = folder / "data", folder / "log"
        self.log.mkdir(parents=True)
        self._references: dict[int, tuple[RunState, Timing]] = {}
        self._base: Path | None = None

    def rng(self, name: str) -> random.Random:
        """Return the random number generator of a scenario, which depends only on the seed and the name."""
        return random.Random(f"{self.seed} {name}")

    def call(self, workdir: Path, *options: str, processes: int = 1, compiled: bool = True, **more: Any) -> Call:
        """Start train.py; `compiled` uses a compilation cache shared by all runs."""
        cache = self.folder / f"compiled-{processes}" if compiled else None
        data = more.pop("data", self.data)
        return Call(workdir, data, self.log, *options, processes=processes, compiled=cache, **more)

    def reference(self, processes: int = 1) -> tuple[RunState, Timing]:
        """Return the final state of an uninterrupted run, and the timing of a run with a filled compilation cache.

        Raises:
            RuntimeError: a run failed, or two runs differ.
        """
        if processes not in self._references:
            found = []
            for number in (1, 2):  # the first run fills the compilation cache
                workdir = self.folder / f"untouched-{processes}-{number}"
                with self.call(workdir, processes=processes) as call:
                    call.wait_until(lambda call=call: reached(call.output()), every=0.05)
                    first_step = call.seconds
                    codes = call.end()
                    if faults := first_fault(codes, [0] * processes, call.all_output()):
                        raise RuntimeError(f"{workdir.name}: {faults[0]}")
                    timing = Timing(first_step, call.seconds)
                found.append(run_state(workdir))
            if faults := found[1].differences(found[0]):
                raise RuntimeError(f"two uninterrupted runs differ: {'; '.join(faults)}")
            self._references[processes] = found[0], timing
            self.say(
                f"reference x {processes}: {timing.end:.1f} s per run, {timing.first_step:.1f} s until the first step"
            )
        return self._references[processes]

    def base(self, name: str) -> Path:
        """Return a workdir `name` with a copy of a run that was killed in the middle, with at least two checkpoints."""
        if self._base is None:
            workdir = self.folder / "base"
            with self.call(workdir) as call:
                if not call.wait_until(lambda: newest(workdir) >= 60, every=0.01):
                    raise RuntimeError(f"{workdir.name}: {first_fault(call.end(), [0], call.output())}")
                call.kill()
            for path in checkpoints(workdir).glob("*.tmp"):
                shutil.rmtree(path)
            self._base = workdir
        return Path(shutil.copytree(self._base, self.folder / name, symlinks=True))

    def finish(self, workdir: Path, processes: int = 1, **more: Any) -> tuple[str, list[str]]:
        """Resume a run and wait for its end; return its output, and the faults of its exit codes and final state."""
        expected, _ = self.reference(processes)
        with self.call(workdir, processes=processes, **more) as call:
            codes = call.end()
            output = call.all_output()
        faults = first_fault(codes, [0] * processes, output)
        return output, faults or run_state(workdir).differences(expected)


def timed(scenario: Callable[[World], Tally], world: World, name: str) -> Tally:
    """Run a scenario and return its tally. An exception is a fault of it, so that the other scenarios still run."""
    start = time.monotonic()
    try:
        tally = scenario(world)
    except Exception as error:
        tally = Tally(name, "")
        tally.case("the scenario itself", [f"{type(error).__name__}: {error}"])
    tally.name, tally.seconds = name, time.monotonic() - start
    return tally
