"""Pictures made from arrays and metrics files only. A name is imported when it is asked for: reading metrics needs no
matplotlib.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer.viz._attention_maps import *  # noqa: F403
    from transformer.viz._attention_page import *  # noqa: F403
    from transformer.viz._attention_weights import *  # noqa: F403
    from transformer.viz._records import *  # noqa: F403
    from transformer.viz._report_page import *  # noqa: F403

_EXPORTS = {
    "_attention_maps": ("save_attention_maps",),
    "_attention_page": (
        "Panel",
        "save_attention_page",
    ),
    "_attention_weights": (
        "AttentionMap",
        "attention_maps",
        "attention_rollout",
    ),
    "_records": ("read_metrics",),
    "_report_page": (
        "RunReport",
        "save_report",
    ),
}
"""file -> the public names that it defines"""

__all__ = sorted([name for names in _EXPORTS.values() for name in names])


def __getattr__(name: str) -> Any:
    """Imports the file of a public name when the name is asked for."""
    for module, names in _EXPORTS.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
