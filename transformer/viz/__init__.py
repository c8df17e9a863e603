"""Plots and HTML pages made from arrays and metrics files.

Public names are imported on first use, so that `read_metrics` does not need matplotlib.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer.config._lazy import lazy_exports

if TYPE_CHECKING:
    from transformer.viz._attention_maps import *  # noqa: F403
    from transformer.viz._attention_page import *  # noqa: F403
    from transformer.viz._attention_weights import *  # noqa: F403
    from transformer.viz._image_maps import *  # noqa: F403
    from transformer.viz._image_page import *  # noqa: F403
    from transformer.viz._records import *  # noqa: F403
    from transformer.viz._report_page import *  # noqa: F403
    from transformer.viz._speech_maps import *  # noqa: F403
    from transformer.viz._word_images import *  # noqa: F403

_EXPORTS = {
    "_attention_maps": ("save_attention_maps",),
    "_attention_page": ("Panel", "save_attention_page"),
    "_attention_weights": ("AttentionMap", "attention_maps", "attention_rollout"),
    "_image_maps": ("save_image_attention",),
    "_image_page": ("save_image_page",),
    "_records": ("read_metrics",),
    "_report_page": ("RunReport", "save_report"),
    "_speech_maps": ("save_speech_attention",),
    "_word_images": ("save_word_images", "save_word_page"),
}
"""public names by the file that defines them"""

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
