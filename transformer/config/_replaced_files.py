"""Files that are replaced atomically."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: str | bytes, errors: str = "strict") -> Path:
    """Write a file, text in UTF-8: a killed process leaves the old or the new content. Returns the path."""
    partial = path.with_name(f"{path.name}.partial")
    if isinstance(content, bytes):
        partial.write_bytes(content)
    else:
        partial.write_text(content, encoding="utf-8", errors=errors)
    os.replace(partial, path)
    return path
