"""The service for a model: the part of OpenAI's interface that it can answer, and its sizes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformer.cli._models import ModelCommand
from transformer.cli._parallel import ONE_DEVICE, Parallel
from transformer.config._checks import ConfigError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from transformer.generate._lookup import PromptLookup
    from transformer.generate._speculative import Draft
    from transformer.inference._loaded_model import LoadedModel
    from transformer.serve._http import HTTPService

USUAL_TOKENS = 2048
"""maximum number of tokens of a request, unless the model has a shorter context"""
USUAL_QUEUE = 64
"""maximum number of texts that wait"""


@dataclass(frozen=True, kw_only=True)
class ServiceCommand(ModelCommand):
    """Options of a command that answers requests."""

    slots: int = 8
    """maximum number of texts that are generated at the same time"""
    max_tokens: int | None = None
    """maximum number of tokens of a request, prompt and answer together; None: the context of the model, at most
    2048"""
    parallel: Parallel = ONE_DEVICE


def check_sizes(**sizes: int | None) -> None:
    """Raise ConfigError for values of options that are invalid with any model."""
    limits = {"port": (0, 65535), "slots": (1, 1024), "max_tokens": (16, 2**24), "cache_tokens": (16, 2**30)}
    for option, value in sizes.items():
        name = f"--{option.replace('_', '-')}"
        least, most = limits[option]
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{name} must be from {least} to {most}, got {value}.")


def report_compilation(done: int, total: int) -> None:
    """Show how many programs are compiled, on one line of a terminal."""
    if sys.stderr.isatty():
        print(f"\rcompiled {done} of {total} programs", end="\n" if done == total else "", file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Sizes and access of a service."""

    slots: int
    """maximum number of texts that are generated at a time"""
    max_tokens: int | None
    """maximum number of tokens of a request; None: the context of the model, at most `USUAL_TOKENS`"""
    api_key: str | None = None
    """key that clients must send; None: no key"""
    local_only: bool = True
    """refuse requests for other hosts than the loopback address"""
    queue: int = USUAL_QUEUE
    """maximum number of texts that wait"""
    cache_tokens: int | None = None
    """causal model: size of the paged KV cache in tokens, shared by all requests; None: `slots` times the maximum of a
    request"""
    draft: Draft | PromptLookup | None = None
    """causal model: proposes tokens for speculative decoding; None: nothing does"""
    mesh: Mesh | None = None
    """causal model: devices over which it is sharded; None: one device"""

    def common(self, opened: LoadedModel) -> dict[str, str | bool | None]:
        """Return the fields of every service."""
        return {"name": opened.directory.resolve().name, "api_key": self.api_key, "local_only": self.local_only}


def make_service(opened: LoadedModel, settings: ServiceSettings) -> HTTPService:
    """Return the service of a model: completions of a causal model, translations of an encoder-decoder, or embeddings.

    A model with the files of sentence-transformers (modules.json) is an embedding model, even if it is causal.
    """
    is_sentence_encoder = opened.pretrained is not None and (opened.directory / "modules.json").exists()
    serves = "embeddings" if is_sentence_encoder else opened.kind.serves
    if (settings.draft is not None or settings.mesh is not None) and serves != "completions":
        raise ConfigError(
            f"--draft, --lookup and --parallel need a causal model; {opened.directory} contains a model of type "
            f"{type(opened.model).__name__}. Remove them."
        )
    services = {"embeddings": _embedding_service, "completions": _causal_service, "translations": _translation_service}
    if serves in services:
        return services[serves](opened, settings)
    raise ConfigError(
        f"the server needs a causal model, an encoder-decoder for text or a text encoder; {opened.directory} contains "
        f"a model of type {type(opened.model).__name__}. Pass the directory of another model."
    )


def _causal_service(opened: LoadedModel, settings: ServiceSettings) -> HTTPService:
    from transformer.chat._prompts import ChatPrompts, default_sampling
    from transformer.chat._template_files import has_template
    from transformer.serve._attention import AnswerAttention
    from transformer.serve._engine import FEWEST_POSITIONS, Engine
    from transformer.serve._service import Service

    tokenizer, suppressed = opened.tokenizer, opened.suppressed
    positions, cache_tokens = _longest(settings.max_tokens, opened.context), settings.cache_tokens
    if positions < FEWEST_POSITIONS:
        raise ConfigError(
            f"serve needs a model with a context of at least {FEWEST_POSITIONS} tokens, got {positions} in "
            f"{opened.directory}. Pass another model."
        )
    if cache_tokens is not None and cache_tokens < positions:
        raise ConfigError(
            f"--cache-tokens must be at least {positions}, the tokens of one request, got {cache_tokens}. Pass a "
            "larger number, or a smaller --max-tokens."
        )
    files = getattr(tokenizer, "files", {})
    chat = ChatPrompts(tokenizer, longest=positions) if has_template(files) else None
    sizes = {"slots": settings.slots, "positions": positions, "cache_tokens": cache_tokens, "queue": settings.queue}
    options = {"suppress": suppressed, "draft": settings.draft, "mesh": settings.mesh}
    engine = Engine(opened.model, opened.params, tokenizer, **sizes, **options)
    return Service(
        engine=engine,
        sampling=default_sampling(files),
        eos_ids=tuple(dict.fromkeys([*(opened.eos_ids or []), *(chat.eos_ids if chat else [])])),
        chat=chat,
        suppress=suppressed,
        attention=AnswerAttention(opened=opened, chat=chat, longest=positions),
        **settings.common(opened),
    )


def _embedding_service(opened: LoadedModel, settings: ServiceSettings) -> HTTPService:
    from transformer.inference._sentences import SentenceSettings, sentence_settings
    from transformer.inference._text_inputs import text_model
    from transformer.serve._embeddings import EmbeddingService

    text_model(opened)  # raises an error if it does not read text
    sentences = SentenceSettings() if opened.pretrained is None else sentence_settings(opened.directory)
    limits = [n for n in (opened.model.config.longest_source, opened.context, sentences.max_length) if n is not None]
    longest, common = _longest(settings.max_tokens, min(limits, default=None)), settings.common(opened)
    return EmbeddingService(opened=opened, settings=sentences, longest=longest, queue=settings.queue, **common)


def _translation_service(opened: LoadedModel, settings: ServiceSettings) -> HTTPService:
    from transformer.inference._translate import USUAL_SOURCE
    from transformer.serve._translations import TranslationService

    longest, wanted = opened.model.config.longest_source, settings.max_tokens
    if wanted is None:
        wanted = min(longest or USUAL_SOURCE, USUAL_SOURCE)
    longest, common = _longest(wanted, longest), settings.common(opened)
    return TranslationService(opened=opened, longest=longest, queue=settings.queue, **common)


def _longest(max_tokens: int | None, context: int | None) -> int:
    """Return the maximum number of tokens of a request; raise ConfigError if it exceeds the context of the model."""
    if max_tokens is None:
        return min(context or USUAL_TOKENS, USUAL_TOKENS)
    if context is not None and max_tokens > context:
        raise ConfigError(f"--max-tokens must be at most {context}, the context of the model, got {max_tokens}.")
    return max_tokens
