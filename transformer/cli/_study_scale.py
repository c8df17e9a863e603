"""`transformer-zoo study scale`: why attention scores are divided by sqrt(d_k)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer.cli._study import StudyCommand, run, table_text


@dataclass(frozen=True, kw_only=True)
class Scale(StudyCommand):
    """Show why attention scores are divided by sqrt(d_k): their variance and the gradient of the softmax, with and
    without the division. Queries and keys have independent N(0, 1) entries; each softmax is over 64 keys (Vaswani et
    al. 2017, section 3.2.1).
    """

    output: Path = Path("study-scale.png")
    """PNG file to write"""


def main(command: Scale) -> None:
    run("scale", _study, command)


def _study(command: Scale) -> tuple[dict[str, Any], str]:
    from transformer.viz._study_pictures import scale_picture
    from transformer.viz.studies._scale import scale_study

    rows = scale_study()
    variants = {"q·k": False, "q·k / sqrt(d_k)": True}
    sizes = [row.d_k for row in rows if row.scaled]
    variances = {label: [row.variance for row in rows if row.scaled == scaled] for label, scaled in variants.items()}
    gradients = {label: [row.gradient for row in rows if row.scaled == scaled] for label, scaled in variants.items()}
    scale_picture(sizes, variances, gradients, command.output)
    table = [("d_k", "scale", "mean", "variance", "largest weight", "gradient")]
    for row in rows:
        scale = f"1/{row.d_k**0.5:g}" if row.scaled else "1"
        numbers = (f"{row.mean:z.2f}", f"{row.variance:,.2f}", f"{row.largest_weight:.3f}", f"{row.gradient:.3f}")
        table.append((f"{row.d_k:,}", scale, *numbers))
    text = (
        "Mean and variance of the scores, scale x q.k with N(0, 1) entries. Softmax over 64 scores: largest weight, "
        "and\n"
        "Frobenius norm of the Jacobian, as means over the queries.\n\n"
    )
    return {"rows": [dataclasses.asdict(row) for row in rows]}, text + table_text(table)
