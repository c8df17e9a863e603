"""Preprocessing of media files for pretrained models, as the authors of a model describe it next to the weights.

Images need the package pillow, sound needs soundfile and scipy. The extra `media` installs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer.config._lazy import lazy_exports

if TYPE_CHECKING:
    from transformer.media._audio import *  # noqa: F403
    from transformer.media._features import *  # noqa: F403
    from transformer.media._image_files import *  # noqa: F403
    from transformer.media._image_settings import *  # noqa: F403
    from transformer.media._images import *  # noqa: F403

_EXPORTS = {
    "_audio": ("check_file", "check_samples", "read_audio", "resample"),
    "_features": ("LogMel", "Waveform", "load_features", "mel_filters"),
    "_image_files": ("open_image",),
    "_image_settings": ("image_processor", "save_image_processor"),
    "_images": ("ImageProcessor",),
}
"""public names by the file that defines them"""

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
