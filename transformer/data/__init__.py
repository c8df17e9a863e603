"""Training data: `prepare(config)` returns a dataset with batches, a tokenizer and a fingerprint."""

from transformer.data._config import TokenizerConfig
from transformer.data._dataset import Batch, DataKind, Dataset, Example
from transformer.data._pipeline import prepare
from transformer.data._series import from_model, to_model
from transformer.data.kinds import DATA, DataConfig
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
from transformer.data.tokenizers._base import Tokenizer
from transformer.data.tokenizers._kinds import load_tokenizer

__all__ = [
    "DATA",
    "SST2",
    "Batch",
    "CaptionFile",
    "Conversations",
    "DataConfig",
    "DataKind",
    "Dataset",
    "Digits",
    "ETTh1",
    "Example",
    "ImageFile",
    "ImageFolder",
    "ImageTextFile",
    "JsonLines",
    "LabeledText",
    "MaskedSST2",
    "MaskedText",
    "Multi30k",
    "NumberChat",
    "NumberPreferences",
    "NumberPrompts",
    "NumberText",
    "NumberWords",
    "ParallelText",
    "Preferences",
    "Prompts",
    "SST2Sentences",
    "SeriesFile",
    "Shapes",
    "ShapesCaptions",
    "TFDSTranslation",
    "TextFile",
    "TextFiles",
    "TinyShakespeare",
    "Tokenizer",
    "TokenizerConfig",
    "from_model",
    "load_tokenizer",
    "prepare",
    "to_model",
]
