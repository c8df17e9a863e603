"""Options of speculative decoding: `--draft`, `--draft-tokens` and `--lookup`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer.config._checks import ConfigError

if TYPE_CHECKING:
    from transformer.generate._lookup import PromptLookup
    from transformer.generate._speculative import Draft

USUAL_DRAFT_TOKENS = 4
"""default number of tokens that a draft model proposes per step"""


def check_speculation(draft: str | None, draft_tokens: int | None, lookup: int | None) -> None:
    """Raise ConfigError for options of speculative decoding that are invalid with any model."""
    if draft is not None and lookup is not None:
        raise ConfigError("--draft and --lookup can't be used together. Remove one of them.")
    for option, value in (("--draft-tokens", draft_tokens), ("--lookup", lookup)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} must be at least 1, got {value}.")
    if draft_tokens is not None and draft is None:
        raise ConfigError("--draft-tokens needs --draft. Pass --draft, or remove --draft-tokens.")


def open_draft(draft: str | None, draft_tokens: int | None, lookup: int | None) -> Draft | PromptLookup | None:
    """Return what proposes tokens for speculative decoding; None: nothing."""
    from transformer.generate._lookup import PromptLookup
    from transformer.generate._speculative import Draft
    from transformer.inference._opened_model import open_model

    if lookup is not None:
        return PromptLookup(tokens=lookup)
    if draft is None:
        return None
    opened = open_model(draft)
    return Draft(model=opened.model, params=opened.params, tokens=draft_tokens or USUAL_DRAFT_TOKENS)
