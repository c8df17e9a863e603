"""Draw docs/images/layers.svg, the layers of the package, from the table in docs/architecture.md.

Usage: python docs/layers.py
"""

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
PICTURE = HERE / "images" / "layers.svg"
ROW = re.compile(r"^\| `([\w/]+(?:\.py|/))` \| (\d+) \|", re.MULTILINE)

WIDTH, HEIGHT, GAP = 132, 26, 8  # size of a box, and gap between boxes
LEFT, TOP = 46, 62
CORE, OTHER = "#cfe0fb", "#e6e6e6"


def layers() -> dict[int, list[str]]:
    """Return the files and folders of each level, in the order of the table, highest level first."""
    found: dict[int, list[str]] = {}
    for name, level in ROW.findall((HERE / "architecture.md").read_text(encoding="utf-8")):
        found.setdefault(int(level), []).append(name)
    return dict(sorted(found.items(), reverse=True))


def is_core(name: str) -> bool:
    """Return whether a file or folder needs only jax, flax, numpy and jaxtyping (docs/architecture.md)."""
    return name.startswith(("nn/", "config/", "generate/"))


def picture(rows: dict[int, list[str]]) -> str:
    """Return the SVG. The highest level is at the top, so imports go downwards."""
    wide = LEFT + max(map(len, rows.values())) * (WIDTH + GAP) + GAP
    tall = TOP + len(rows) * (HEIGHT + GAP) + GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" width="{wide}" height="{tall}" '
        'font-family="sans-serif" font-size="12" text-anchor="middle">',
        f'<rect width="{wide}" height="{tall}" rx="6" fill="#ffffff"/>',
        '<g text-anchor="start" fill="#222222">',
        f'<text x="{GAP}" y="20">Imports go to lower rows only; files of one folder may import each other.</text>',
        f'<rect x="{GAP}" y="32" width="14" height="14" fill="{CORE}"/>',
        f'<text x="{GAP + 20}" y="44">needs jax, flax, numpy and jaxtyping alone</text>',
        f'<rect x="300" y="32" width="14" height="14" fill="{OTHER}"/>',
        '<text x="320" y="44">may need the extras of pyproject.toml</text>',
        "</g>",
    ]
    for place, (level, names) in enumerate(rows.items()):
        y = TOP + place * (HEIGHT + GAP)
        lines.append(f'<text x="{LEFT / 2:g}" y="{y + 17}" fill="#777777">{level}</text>')
        for column, name in enumerate(names):
            x = LEFT + column * (WIDTH + GAP)
            color = CORE if is_core(name) else OTHER
            lines.append(f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="3" fill="{color}"/>')
            lines.append(f'<text x="{x + WIDTH // 2}" y="{y + 17}" fill="#111111">{name}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(layers()), encoding="utf-8")
