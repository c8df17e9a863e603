"""What the scenarios share: a folder, chance, the run that nobody touched, and a tally of what was as expected."""

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

from reliability.invocations import Call, Left, checkpoints, first_fault, left, newest, reached

AIMED = 0.5
"""share of the kills that wait for a save"""
AFTER = 0.05
"""seconds after a save was seen to begin within which such a kill comes"""


@dataclass(frozen=True)
class Timing:
    """How long a whole call takes, in seconds: until the first step is done, and to its end."""

    first_step: float
    end: float

    def expected_end(self, step: int, steps: int) -> float:
        """Seconds from the start of a call that goes on from `step` to its end."""
        return self.first_step + (self.end - self.first_step) * (1 - step / steps)

    def corrected(self, seconds: float, step: int, steps: int) -> Timing:
        """By a call that went on from `step` and ended in so many seconds: the machine may be less busy by now."""
        factor = seconds / self.expected_end(step, steps)
        return Timing(self.first_step * factor, self.end * factor)


@dataclass(frozen=True)
class Moment:
    """When to kill: so many `seconds` after the start of a call and then, `aimed`, so many `after` the next save was
    seen to begin.
    """

    seconds: float
    aimed: bool
    after: float


def draw_moment(chance: random.Random, timing: Timing, step: int, steps: int) -> Moment:
    """A moment between the start of a call that goes on from `step` and its expected end, all equally likely."""
    seconds = chance.uniform(0.0, timing.expected_end(step, steps))
    return Moment(seconds, chance.random() < AIMED, chance.uniform(0.0, AFTER))


def phase(told: str, unfinished: list[int], newest_step: int, steps: int) -> str:
    """What a call was doing when it was killed, by what it had told and by the steps of the directories left
    `unfinished`.
    """
    if unfinished:
        return "in a save" if max(unfinished) > newest_step else "in a deletion"
    if "compiling the training step" not in told:
        return "at the start"
    if not reached(told, steps) and "compiled in" not in told:
        return "in compilation"
    return "at the end" if reached(told, steps) == steps else "in training"


@dataclass
class Tally:
    """The cases of a scenario, and what was not as expected."""

    name: str
    what: str
    """one sentence for the table"""
    times: int = 0
    good: int = 0
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    """remarks with numbers, "in a save": 12"""
    remarks: list[str] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)
    not_run: str = ""
    """why it could not be run here"""
    seconds: float = 0.0

    def case(self, name: str, faults: list[str]) -> None:
        """One more case; it is as expected when there are no faults."""
        self.times += 1
        self.good += not faults
        self.faults += [f"{name}: {fault}" for fault in faults]

    @property
    def failed(self) -> bool:
        """Whether anything was not as expected, or nothing was tried."""
        return bool(self.faults) or (not self.times and not self.not_run)

    @property
    def told(self) -> str:
        """The remarks, in words."""
        counted = [f"{count} {name}" for name, count in self.counts.most_common()]
        return "; ".join([*([", ".join(counted)] if counted else []), *self.remarks])


class World:
    """Where a call of the scenarios works: `folder` is theirs alone; `kills` and `seed` are the command's."""

    def __init__(self, folder: Path, kills: int, seed: int, say: Callable[[str], None]):
        self.folder, self.kills, self.seed, self.say = folder, kills, seed, say
        self.data, self.log = folder / "data", folder / "log"
        self.log.mkdir(parents=True)
        self._references: dict[int, tuple[Left, Timing]] = {}
        self._base: Path | None = None

    def chance(self, name: str) -> random.Random:
        """Random numbers of a scenario of its own: the same with the same seed, whatever ran before."""
        return random.Random(f"{self.seed} {name}")

    def call(self, workdir: Path, *options: str, processes: int = 1, compiled: bool = True, **more: Any) -> Call:
        """A call of train.py; `compiled`: programs that an earlier one compiled are used."""
        cache = self.folder / f"compiled-{processes}" if compiled else None
        data = more.pop("data", self.data)
        return Call(workdir, data, self.log, *options, processes=processes, compiled=cache, **more)

    def reference(self, processes: int = 1) -> tuple[Left, Timing]:
        """What a run leaves that nobody touches, and how long a call takes that has its programs compiled already.

        Raises:
            RuntimeError: it did not come to its end, or two of them differ.
        """
        if processes not in self._references:
            found = []
            for number in (1, 2):  # the first one compiles
                workdir = self.folder / f"untouched-{processes}-{number}"
                with self.call(workdir, processes=processes) as call:
                    call.wait_until(lambda call=call: reached(call.told()), every=0.05)
                    first_step = call.seconds
                    codes = call.end()
                    if faults := first_fault(codes, [0] * processes, call.told_by_all()):
                        raise RuntimeError(f"{workdir.name}: {faults[0]}")
                    timing = Timing(first_step, call.seconds)
                found.append(left(workdir))
            if faults := found[1].differences(found[0]):
                raise RuntimeError(f"two runs that nobody touched differ: {'; '.join(faults)}")
            self._references[processes] = found[0], timing
            self.say(f"untouched x {processes}: {timing.end:.1f} s a run, {timing.first_step:.1f} s to its first step")
        return self._references[processes]

    def base(self, name: str) -> Path:
        """A copy of a run that was killed in the middle, with at least two checkpoints, as the workdir `name`."""
        if self._base is None:
            workdir = self.folder / "base"
            with self.call(workdir) as call:
                if not call.wait_until(lambda: newest(workdir) >= 60, every=0.01):
                    raise RuntimeError(f"{workdir.name}: {first_fault(call.end(), [0], call.told())}")
                call.kill()
            for path in checkpoints(workdir).glob("*.tmp"):
                shutil.rmtree(path)
            self._base = workdir
        return Path(shutil.copytree(self._base, self.folder / name, symlinks=True))

    def finish(self, workdir: Path, processes: int = 1, **more: Any) -> tuple[str, list[str]]:
        """Lets a run go on to its end: what it said, and what is wrong with that and with what it leaves."""
        expected, _ = self.reference(processes)
        with self.call(workdir, processes=processes, **more) as call:
            codes = call.end()
            told = call.told_by_all()
        faults = first_fault(codes, [0] * processes, told)
        return told, faults or left(workdir).differences(expected)


def timed(scenario: Callable[[World], Tally], world: World, name: str) -> Tally:
    """The scenario's tally; an error in it is a fault of it, so that the others still run."""
    began = time.monotonic()
    try:
        tally = scenario(world)
    except Exception as error:
        tally = Tally(name, "")
        tally.case("the scenario itself", [f"{type(error).__name__}: {error}"])
    tally.name, tally.seconds = name, time.monotonic() - began
    return tally
