"""`transformer-zoo study positions`: similarity of positions by distance, for each position scheme."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer.cli._study import StudyCommand, run, table_text


@dataclass(frozen=True, kw_only=True)
class Positions(StudyCommand):
    """Show the similarity of two positions as a function of their distance, up to 100,000, for each position scheme,
    and where sinusoids repeat: a distant position then has almost the same encoding (Vaswani et al. 2017, section
    3.5).
    """

    output: Path = Path("study-positions.png")
    """PNG file to write"""


def main(command: Positions) -> None:
    run("positions", _study, command)


def _study(command: Positions) -> tuple[dict[str, Any], str]:
    from transformer.viz._study_pictures import positions_picture
    from transformer.viz.studies._positions import ALIKE, LATE, position_study

    study = position_study()

    def chosen(*parts: str) -> dict[str, Any]:
        return {name: curve for name, curve in study.curves.items() if any(part in name for part in parts)}

    stretched = chosen("x 8")
    panels = {
        "Sinusoids: mean and range around a distance": {
            name: curve for name, curve in chosen("sinusoidal", "rotary").items() if name not in stretched
        },
        "Rotary, stretched to 8 times the length: mean and range": stretched,
        "ALiBi: factor on the attention weight": chosen("ALiBi"),
    }
    positions_picture(
        panels, {width: study.width_curves[width] for width in (8, 16, 32, 64, 512)}, ALIKE, command.output
    )
    similarities = [("similarity at distance", *(f"{distance:,}" for distance in study.distances))]
    similarities += [(row.scheme, *(f"{value:.3f}" for value in row.similarity)) for row in study.similarities]
    codes = [("scheme", "distinct", "unique below", "shared from")]
    codes += [(row.scheme, f"{row.codes:,}", f"{row.single_below:,}", f"{row.alike_from:,}") for row in study.codes]
    repeats = [
        ("width", "shortest wave", "longest wave", f"returns to {ALIKE}", f"maximum from {LATE:,}", "at distance")
    ]
    for row in study.repeats:
        waves = (f"{row.features}", f"{row.shortest_wavelength:,.2f}", f"{row.longest_wavelength:,.0f}")
        returns = "never" if row.returns_at is None else f"{row.returns_at:,}"
        repeats.append((*waves, returns, f"{row.highest:.3f}", f"{row.highest_at:,}"))
    text = (
        "Similarity of two positions: cosine of their encodings (sinusoidal), normalized score of an equal query and\n"
        "key (rotary, none), factor on the attention weight (ALiBi). It depends only on the distance.\n\n"
        f"{table_text(similarities)}\n\n"
        "Schemes that assign an index to each distance (learned: to each position): number of distinct indices,\n"
        "distance below which each index is unique, and distance from which all share one index or have none.\n\n"
        f"{table_text(codes)}\n\n"
        f"Where sinusoids with base 10,000 repeat, by width (d_model; rotary: head size): wavelengths, the first\n"
        f"distance after the first minimum with a similarity of at least {ALIKE}, and the maximum similarity.\n\n"
        f"{table_text(repeats)}"
    )
    values = {
        name: [dataclasses.asdict(row) for row in getattr(study, name)] for name in ("similarities", "codes", "repeats")
    }
    return {"distances": list(study.distances), **values}, text
