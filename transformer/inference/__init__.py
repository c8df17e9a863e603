"""Use of trained models: loading, saving, embeddings, classification, scoring and translation."""

from transformer.inference._loading import LoadedModel, export, is_workdir, load, open_model, save
from transformer.inference._reading import Class, Score, classify, embed, score
from transformer.inference._sentences import SentenceSettings, sentence_settings
from transformer.inference._starting import start_from
from transformer.inference._translating import TranslatedLine, TranslatedText, translate_lines

__all__ = [
    "Class",
    "LoadedModel",
    "Score",
    "SentenceSettings",
    "TranslatedLine",
    "TranslatedText",
    "classify",
    "embed",
    "export",
    "is_workdir",
    "load",
    "open_model",
    "save",
    "score",
    "sentence_settings",
    "start_from",
    "translate_lines",
]
