"""Text generation: one prefill call reads the prompts, then a compiled loop generates one token per step."""

from transformer.generate._batches import beam_search_all
from transformer.generate._beam import Beam, Hypothesis, beam_search
from transformer.generate._constraints import Constraint
from transformer.generate._generation import generate
from transformer.generate._lookup import PromptLookup
from transformer.generate._pages import OutOfPagesError, PageAllocator
from transformer.generate._rules import Rules
from transformer.generate._sampling import Sampling, sample
from transformer.generate._speculative import Draft
from transformer.generate._streaming import Piece, TokenStream

__all__ = [
    "Beam",
    "Constraint",
    "Draft",
    "Hypothesis",
    "OutOfPagesError",
    "PageAllocator",
    "Piece",
    "PromptLookup",
    "Rules",
    "Sampling",
    "TokenStream",
    "beam_search",
    "beam_search_all",
    "generate",
    "sample",
]
