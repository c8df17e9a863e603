"""Use of trained models: loading, saving, embeddings, classification, scoring and translation."""

from transformer.inference._classify import Class, classify, classify_images, classify_series, classify_with_labels
from transformer.inference._embed import embed, embed_images, embed_texts
from transformer.inference._export import export
from transformer.inference._grammars import GrammarConstraint, GrammarError, Grammars
from transformer.inference._harness import HarnessModel, evaluate_tasks, harness_model
from transformer.inference._image_attention import ImageAttention, image_attention
from transformer.inference._image_prompts import encode_with_images, image_prompts
from transformer.inference._initial_model import start_from
from transformer.inference._load import is_workdir, load
from transformer.inference._loaded_model import LoadedModel
from transformer.inference._opened_model import OpenedModel, open_model
from transformer.inference._reward_model import reward_model
from transformer.inference._score import Score, TextScore, score, score_text
from transformer.inference._sentences import SentenceSettings, sentence_settings
from transformer.inference._speech_attention import SpeechAttention, speech_attention
from transformer.inference._transcribe import TranscriptionOptions, sampling_rate, transcribe, transcribe_windows
from transformer.inference._transcript import Segment, TimedWord, Transcript
from transformer.inference._translate import TranslatedLine, TranslatedText, translate_lines
from transformer.zoo._pretrained import save_pretrained as save

__all__ = [
    "Class",
    "GrammarConstraint",
    "GrammarError",
    "Grammars",
    "HarnessModel",
    "ImageAttention",
    "LoadedModel",
    "OpenedModel",
    "Score",
    "Segment",
    "SentenceSettings",
    "SpeechAttention",
    "TextScore",
    "TimedWord",
    "Transcript",
    "TranscriptionOptions",
    "TranslatedLine",
    "TranslatedText",
    "classify",
    "classify_images",
    "classify_series",
    "classify_with_labels",
    "embed",
    "embed_images",
    "embed_texts",
    "encode_with_images",
    "evaluate_tasks",
    "export",
    "harness_model",
    "image_attention",
    "image_prompts",
    "is_workdir",
    "load",
    "open_model",
    "reward_model",
    "sampling_rate",
    "save",
    "score",
    "score_text",
    "sentence_settings",
    "speech_attention",
    "start_from",
    "transcribe",
    "transcribe_windows",
    "translate_lines",
]
