"""Pictures made from arrays and metrics files only. A name is imported when it is asked for: reading metrics needs no
matplotlib.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer.config._lazy import lazy_exports

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

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
