"""The registry of data kinds. Each kind is one file with its options, its source and its reader."""

from __future__ import annotations

import dataclasses
from typing import Union

from transformer.data._config import is_path_field
from transformer.data._dataset import DataKind
from transformer.data.kinds._conversations import Conversations
from transformer.data.kinds._digits import Digits
from transformer.data.kinds._etth1 import ETTh1
from transformer.data.kinds._image_file import ImageFile
from transformer.data.kinds._image_folder import ImageFolder
from transformer.data.kinds._image_text_file import CaptionFile, ImageTextFile
from transformer.data.kinds._labeled_text import LabeledText
from transformer.data.kinds._multi30k import Multi30k
from transformer.data.kinds._number_chat import NumberChat, NumberPreferences, NumberPrompts, NumberText
from transformer.data.kinds._number_words import NumberWords
from transformer.data.kinds._parallel_text import ParallelText
from transformer.data.kinds._preferences import Preferences
from transformer.data.kinds._prompts import Prompts
from transformer.data.kinds._series_file import SeriesFile
from transformer.data.kinds._shapes import Shapes, ShapesCaptions
from transformer.data.kinds._sst2 import SST2, MaskedSST2, SST2Sentences
from transformer.data.kinds._text_file import JsonLines, MaskedText, TextFile
from transformer.data.kinds._text_files import TextFiles
from transformer.data.kinds._tfds_translation import TFDSTranslation
from transformer.data.kinds._tiny_shakespeare import TinyShakespeare

__all__ = ["DATA", "PLACES", "DataConfig"]

_KINDS: tuple[type[DataKind], ...] = (
    *(NumberWords, NumberText, NumberChat, NumberPreferences, NumberPrompts),
    *(TinyShakespeare, TextFile, TextFiles, JsonLines),
    *(ParallelText, Multi30k, TFDSTranslation),
    *(Preferences, Prompts),
    *(LabeledText, SST2, SST2Sentences, MaskedText, MaskedSST2),
    *(ETTh1, SeriesFile),
    Conversations,
    *(Digits, ImageFile, ImageFolder, ImageTextFile, CaptionFile, Shapes, ShapesCaptions),
)

DATA: dict[str, type[DataKind]] = {one.kind: one for one in _KINDS}
"""data kinds by their name in recipe.json"""

DataConfig = Union[tuple(DATA.values())]  # noqa: UP007 - built from the registry
"""type of the field `data` of a recipe"""

PLACES = frozenset(
    field.name for kind in DATA.values() for field in dataclasses.fields(kind) if is_path_field(field.name)
)
"""Fields with paths of files and folders. They may change when a run is resumed, because the fingerprint identifies the
data."""
