"""Text out of a trained model: prefill of the prompts in one call, then one compiled loop, one token a step."""

from transformer.generate.batches import beam_search_all
from transformer.generate.beam import Beam, Hypothesis, beam_search
from transformer.generate.generation import generate
from transformer.generate.sampling import Sampling, sample

__all__ = ["Beam", "Hypothesis", "Sampling", "beam_search", "beam_search_all", "generate", "sample"]
