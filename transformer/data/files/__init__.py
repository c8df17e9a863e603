"""Files of the user and of TFDS: texts, records, images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer.config._lazy import lazy_exports

if TYPE_CHECKING:
    from transformer.data.files._records import *  # noqa: F403
    from transformer.data.files._tfds import *  # noqa: F403

_EXPORTS = {"_records": ("Record", "read_records"), "_tfds": ("Download", "Prepared")}
"""module -> the public names that it defines"""

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
