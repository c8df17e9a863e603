"""Files of the user and of TFDS: texts, records, images."""

from transformer.config._lazy import lazy_exports

_EXPORTS = {"_records": ("Record", "read_records"), "_tfds": ("Download", "Prepared")}
"""module -> the public names that it defines"""

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
