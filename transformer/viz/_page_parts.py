"""Parts of the self-contained HTML pages: their assembly, their content security policy, and arrays as text."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def fill_page(name: str, title: str, program: str, data: Mapping[str, Any]) -> str:
    """Return the ASCII page with the body NAME.html of this directory, a program, NAME.css, and the data."""
    # Its content security policy allows exactly this program and this style sheet, and no network access.
    style = part(f"{name}.css")
    policy = f"default-src 'none'; img-src data:; style-src {digest(style)}; script-src {digest(program)}"
    parts = {
        "policy": html.escape(policy, quote=False),
        "title": html.escape(title).encode("ascii", "xmlcharrefreplace").decode(),
        "style": style,
        "program": program,
        # Inside a script element, only "<" can start a tag or a comment.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    page = f"{part('page_head.html')}\n{part(f'{name}.html')}"
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], page)


def part(file: str) -> str:
    """Return the text of a file of this directory, without the last line end."""
    return Path(__file__).with_name(file).read_text(encoding="ascii").rstrip("\n")


def encoded(array: np.ndarray) -> str:
    """Return the bytes of an array as base64."""
    return base64.b64encode(array.tobytes()).decode("ascii")


def digest(text: str) -> str:
    """Return the hash by which a content security policy allows an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
