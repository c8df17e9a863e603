"""Options of speculative decoding: `--draft`, `--draft-tokens` and `--lookup`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformer.cli._arguments import PathText, check_least
from transformer.config._checks import ConfigError

if TYPE_CHECKING:
    from transformer.generate._lookup import PromptLookup
    from transformer.generate._speculative import Draft

USUAL_DRAFT_TOKENS = 4
"""default number of tokens that a draft model proposes per step"""


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Options of a command that decodes speculatively, which does not change the texts."""

    draft: PathText | None = None
    """causal model: draft model for speculative decoding, with the same tokenizer; it does not change the texts"""
    draft_tokens: int | None = None
    """number of tokens that the draft model proposes per step; None: 4"""
    lookup: int | None = None
    """causal model: speculative decoding without a draft model: tokens to propose per step, copied from an earlier
    match in the text; it does not change the texts"""

    def check_speculation(self) -> None:
        """Raise ConfigError for options that are invalid with any model."""
        if self.draft is not None and self.lookup is not None:
            raise ConfigError("--draft and --lookup can't be used together. Remove one of them.")
        check_least("draft-tokens", self.draft_tokens)
        check_least("lookup", self.lookup)
        if self.draft_tokens is not None and self.draft is None:
            raise ConfigError("--draft-tokens needs --draft. Pass --draft, or remove --draft-tokens.")

    def open_draft(self) -> Draft | PromptLookup | None:
        """Return what proposes tokens for speculative decoding; None: nothing."""
        from transformer.generate._lookup import PromptLookup
        from transformer.generate._speculative import Draft
        from transformer.inference._opened_model import open_model

        if self.lookup is not None:
            return PromptLookup(tokens=self.lookup)
        if self.draft is None:
            return None
        opened = open_model(self.draft)
        return Draft(model=opened.model, params=opened.params, tokens=self.draft_tokens or USUAL_DRAFT_TOKENS)
