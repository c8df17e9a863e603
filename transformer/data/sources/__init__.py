"""From a kind of data to its texts or numbers by split: prepared by TFDS, or read from one's own files."""

from __future__ import annotations

from transformer.data.configs import (
    SST2,
    DataConfig,
    Digits,
    ETTh1,
    ImageFile,
    JsonLines,
    LabeledText,
    MaskedSST2,
    MaskedText,
    Multi30k,
    NumberWords,
    ParallelText,
    SeriesFile,
    SST2Sentences,
    TextFile,
    TFDSTranslation,
    TinyShakespeare,
)
from transformer.data.sources.labeled import Labeled, labeled_text, sst2, sst2_sentences
from transformer.data.sources.masked import Texts, masked_sst2, masked_text
from transformer.data.sources.pairs import Pairs, multi30k, number_words, parallel_text
from transformer.data.sources.texts import Documents, local_text, tiny_shakespeare
from transformer.data.sources.translation import tfds_translation
from transformer.data.sources.vectors import Images, Series, digits, etth1, image_file, series_file

__all__ = ["Documents", "Images", "Labeled", "Pairs", "Series", "Texts", "read"]


def read(config: DataConfig) -> Documents | Pairs | Labeled | Texts | Series | Images:
    """The texts or numbers of any kind of data. FileNotFoundError, ValueError (bad input), OSError (no network, no
    room) or ImportError (a package that brings it along).
    """
    match config:
        case NumberWords():
            return number_words(config)
        case TinyShakespeare():
            return tiny_shakespeare(config)
        case TextFile() | JsonLines():
            return local_text(config)
        case Multi30k():
            return multi30k(config)
        case TFDSTranslation():
            return tfds_translation(config)
        case ParallelText():
            return parallel_text(config)
        case LabeledText():
            return labeled_text(config)
        case SST2():
            return sst2(config)
        case SST2Sentences():
            return sst2_sentences(config)
        case MaskedText():
            return masked_text(config)
        case MaskedSST2():
            return masked_sst2(config)
        case ETTh1():
            return etth1(config)
        case SeriesFile():
            return series_file(config)
        case Digits():
            return digits(config)
        case ImageFile():
            return image_file(config)
    raise ValueError(f"data must be one of the kinds in transformer.data.DATA, got {type(config).__name__}.")
