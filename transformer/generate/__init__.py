"""Text out of a trained model: prefill of the prompts in one call, then one compiled loop, one token a step."""

from transformer.generate.generation import generate
from transformer.generate.sampling import Sampling, sample

__all__ = ["Sampling", "generate", "sample"]
