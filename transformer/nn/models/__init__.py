"""Complete models, from inputs to logits.

The methods `hidden` and `head` are separate, so that a loss can avoid storing all logits (B, T, V) at the same time.
"""

from transformer.nn.models._audio import SpeechEncoder, SpeechRecognizer
from transformer.nn.models._base import count_parameters
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._dual import DualEncoder
from transformer.nn.models._encoders import Classifier, Embedder, MaskedLM
from transformer.nn.models._forecaster import Forecaster
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.nn.models._speech import SpeechToText
from transformer.nn.models._vision import DistilledVisionClassifier, ImagePatches, VisionClassifier, VisionEmbedder
from transformer.nn.models._vision_language import VisionLanguageModel

__all__ = [
    "CausalLM",
    "Classifier",
    "DistilledVisionClassifier",
    "DualEncoder",
    "Embedder",
    "Forecaster",
    "ImagePatches",
    "MaskedLM",
    "Seq2Seq",
    "SpeechEncoder",
    "SpeechRecognizer",
    "SpeechToText",
    "VisionClassifier",
    "VisionEmbedder",
    "VisionLanguageModel",
    "count_parameters",
]
