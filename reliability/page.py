"""Generated parts of docs/reliability.md: the results of `python -m reliability.crash`, `.soak` and `.load`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def put(text: str, name: str, made: str) -> str:
    """Return the text of a page with `made` between the two marks of a name; raise ValueError if a mark is missing."""
    marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, begin, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (begin and end):
        raise ValueError(
            f"the page must contain the lines {marks[0]} and {marks[1]}. Add them where the table belongs."
        )
    return f"{before}{begin}\n{made}{end}{after}"


def crash_table(result: Mapping[str, Any]) -> str:
    """Return the results of `crash.record` as Markdown: date and machine, command, one row per scenario."""
    lines = [
        f"{where(result)}, {round(result['seconds'] / 60)} min: `make crash KILLS={result['kills']}`, seed "
        f"{result['seed']}. Each run uses this command, in one process or in two:",
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
    """Return the results of `soak.record` as Markdown: date and machine, command, progress, one row per measure."""
    lines = [
        f"{where(result)}: `make soak HOURS={result['hours']:g}`, {result['steps']:,} steps, "
        f"{result['evaluations']:,} evaluations and {result['spikes']:,} loss spikes, with this command:",
        *_code(result["command"]),
        "| what | second quarter | last quarter | | allowed |",
        "| --- | ---: | ---: | --- | --- |",
    ]
    for row in result["measures"]:
        remark = " ".join(part for part in ("**too much**" if row["failed"] else "", row["told"]) if part)
        lines.append(f"| {row['what']} | {row['before']} | {row['after']} | {remark} | {row['allowed']} |")
    lines += [f"\n**A fault**: {fault}" for fault in result["faults"]]
    lines += ["", "![Memory and throughput by time](images/soak.png)"]
    return "\n".join(lines) + "\n"


def load_table(result: Mapping[str, Any]) -> str:
    """Return the results of `load.record` as Markdown: date and machine, what was asked, one row per measure."""
    lost = f"**{len(result['lost'])} or more lost**" if result["lost"] else "none lost"
    lines = [
        f"{where(result)}: `python -m reliability.load --minutes {result['minutes']:g} --clients {result['clients']} "
        f"--slots {result['slots']}`: {result['answered']:,} complete answers, {result['left']:,} requests left by "
        f"their clients, {lost}. The time to the first token contains the wait for one of the slots.",
        "",
        "| what | second quarter | last quarter | | allowed |",
        "| --- | ---: | ---: | --- | --- |",
    ]
    for row in result["measures"]:
        remark = " ".join(part for part in ("**too much**" if row["failed"] else "", row["told"]) if part)
        lines.append(f"| {row['what']} | {row['before']} | {row['after']} | {remark} | {row['allowed']} |")
    lines += [f"\n**A fault**: {fault}" for fault in (*result["faults"], *result["lost"])]
    return "\n".join(lines) + "\n"


def where(result: Mapping[str, Any]) -> str:
    """Return date, machine and versions of a result."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return f"{result['date']}, {result['machine']}, {versions}"


def _code(command: str, width: int = 116) -> list[str]:
    """Return a code block with a command that is wrapped with backslashes."""
    first, *options = command.split(" --")
    lines = [first]
    for option in options:
        if len(lines[-1]) + len(option) + 5 > width:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" --{option}"
    return ["", "```bash", *lines, "```", ""]
