"""Whole models: inputs in, logits out. `hidden` and `head` apart, so that a loss can avoid (B, T, V) at once."""

from transformer.nn.models._base import count_parameters
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._encoders import Classifier, Embedder, MaskedLM
from transformer.nn.models._forecaster import Forecaster
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.nn.models._speech import SpeechToText
from transformer.nn.models._vision import VisionClassifier

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
