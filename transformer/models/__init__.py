"""Whole models: inputs in, logits out. `hidden` and `head` apart, so that a loss can avoid (B, T, V) at once."""

from transformer.models.base import count_parameters
from transformer.models.causal_lm import CausalLM
from transformer.models.encoders import Classifier, Embedder, MaskedLM
from transformer.models.forecaster import Forecaster
from transformer.models.seq2seq import Seq2Seq
from transformer.models.speech import SpeechToText
from transformer.models.vision import VisionClassifier

__all__ = [
    "CausalLM",
    "Classifier",
    "Embedder",
    "Forecaster",
    "MaskedLM",
    "Seq2Seq",
    "SpeechToText",
    "VisionClassifier",
    "count_parameters",
]
