"""The parts of docs/reliability.md that are made of what `python -m reliability.crash` and `.soak` found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def put(text: str, name: str, made: str) -> str:
    """A page with `made` between the two marks of a name. ValueError where it has not both."""
    marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, begin, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (begin and end):
        raise ValueError(f"the page has not the lines {marks[0]} and {marks[1]}: put them where the table is to stand.")
    return f"{before}{begin}\n{made}{end}{after}"


def crash_table(result: Mapping[str, Any]) -> str:
    """What `crash.record` gives, in words: when and where, what was called, a row for each scenario."""
    lines = [
        f"{where(result)}, {round(result['seconds'] / 60)} min: `make crash KILLS={result['kills']}`, seed "
        f"{result['seed']}. Each call, by one process or by two, is",
        *_code(result["command"]),
        "| scenario | what is done | times | as expected | |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    for scenario in result["scenarios"]:
        numbers = "not run |" if scenario["not_run"] else f"{scenario['times']} | {scenario['good']}"
        faults = f"**{len(scenario['faults'])} faults**" if scenario["faults"] else ""
        remark = "; ".join(part for part in (faults, scenario["not_run"], scenario["told"]) if part)
        lines.append(f"| `{scenario['name']}` | {scenario['what']} | {numbers} | {remark} |")
    return "\n".join(lines) + "\n"


def soak_table(result: Mapping[str, Any]) -> str:
    """What `soak.record` gives, in words: when and where, what was called, how far it came, a row for each measure."""
    lines = [
        f"{where(result)}: `make soak HOURS={result['hours']:g}`, {result['steps']:,} steps, "
        f"{result['evaluations']:,} evaluations and {result['spikes']:,} spikes of the loss, of",
        *_code(result["command"]),
        "| what | second quarter | last quarter | | allowed |",
        "| --- | ---: | ---: | --- | --- |",
    ]
    for row in result["measures"]:
        told = " ".join(part for part in ("**too much**" if row["failed"] else "", row["told"]) if part)
        lines.append(f"| {row['what']} | {row['before']} | {row['after']} | {told} | {row['allowed']} |")
    lines += [f"\n**A fault**: {fault}" for fault in result["faults"]]
    lines += ["", "![Memory and speed over the time](images/soak.png)"]
    return "\n".join(lines) + "\n"


def where(result: Mapping[str, Any]) -> str:
    """When, on what machine, and with which versions a result was found."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return f"{result['date']}, {result['machine']}, {versions}"


def _code(command: str, width: int = 116) -> list[str]:
    """A block with a command over several lines, each but the last ending in a backslash."""
    first, *options = command.split(" --")
    lines = [first]
    for option in options:
        if len(lines[-1]) + len(option) + 5 > width:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" --{option}"
    return ["", "```bash", *lines, "```", ""]
