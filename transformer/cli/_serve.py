"""`python -m transformer serve`: a language model over HTTP, by OpenAI's interface."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformer.cli._arguments import parse
from transformer.cli._models import ModelCommand
from transformer.config._checks import ConfigError

if TYPE_CHECKING:
    from transformer.chat._prompts import ChatPrompts
    from transformer.inference._loading import LoadedModel
    from transformer.serve._service import Service

USUAL_TOKENS = 2048
"""maximum number of tokens of a request, unless the model has a shorter context"""
KEY_VARIABLE = "TRANSFORMER_API_KEY"
"""environment variable with the API key, which other users of the machine can't see, unlike a command line"""


@dataclass(frozen=True, kw_only=True)
class Serve(ModelCommand):
    """Serve a language model over HTTP: /v1/chat/completions, /v1/completions and /v1/models of OpenAI's interface,
    /health, and /metrics for Prometheus.

    Many texts are generated together. Ctrl-C or SIGTERM ends the server after the texts that it has begun.
    """

    host: str = "127.0.0.1"
    """address to listen on"""
    port: int = 8000
    """port to listen on; 0: a free one"""
    slots: int = 8
    """maximum number of texts that are generated at a time; each has a KV cache of --max-tokens tokens"""
    max_tokens: int | None = None
    """maximum number of tokens of a request, prompt and answer together; None: the context of the model, at most
    2048"""
    api_key: str | None = None
    """key that clients must send; None: the value of the environment variable TRANSFORMER_API_KEY, or no key"""
    allow_anyone: bool = False
    """allow another --host than the loopback address without a key"""
    json: bool = False
    """print the address and the sizes as JSON on stdout when the server is ready"""


def main(arguments: Sequence[str]) -> None:
    """Serve a model until the process is asked to end."""
    command = parse(Serve, "serve", arguments)
    _check(command)
    key = command.api_key if command.api_key is not None else os.environ.get(KEY_VARIABLE)
    from transformer.serve._server import check_address, run

    is_local = check_address(command.host, key, command.allow_anyone)
    opened = command.load_writer()
    service = make_service(
        opened, slots=command.slots, max_tokens=command.max_tokens, api_key=key, local_only=is_local and key is None
    )
    service.engine.warm_up(_report)

    def ready(url: str) -> None:
        sizes = {"slots": service.engine.slots, "max_tokens": service.engine.positions}
        if command.json:
            command.print_json(opened, url=url, model=service.name, **sizes)
            sys.stdout.flush()
        print(f"serving {service.name} at {url}", file=sys.stderr, flush=True)

    run(service, command.host, command.port, ready)


def make_service(
    opened: LoadedModel, *, slots: int, max_tokens: int | None, api_key: str | None, local_only: bool
) -> Service:
    """Return the service of a model.

    Raises:
        ConfigError: the model is not a causal model, or the sizes do not fit it.
    """
    from transformer.chat._prompts import default_sampling
    from transformer.nn.models._causal_lm import CausalLM
    from transformer.serve._engine import FEWEST_POSITIONS, Engine
    from transformer.serve._service import Service

    if not isinstance(opened.model, CausalLM):
        kind = type(opened.model).__name__
        raise ConfigError(
            f"serve needs a causal model; {opened.directory} contains a model of type {kind}. Pass the directory of a "
            "causal model."
        )
    if max_tokens is None:
        max_tokens = min(opened.context or USUAL_TOKENS, USUAL_TOKENS)
    if opened.context is not None and max_tokens > opened.context:
        raise ConfigError(f"--max-tokens must be at most {opened.context}, the context of the model, got {max_tokens}.")
    if max_tokens < FEWEST_POSITIONS:
        raise ConfigError(
            f"serve needs a model with a context of at least {FEWEST_POSITIONS} tokens, got {max_tokens} in "
            f"{opened.directory}. Pass another model."
        )
    tokenizer, chat = opened.tokenizer, _chat_prompts(opened)
    suppressed = opened.suppressed
    engine = Engine(opened.model, opened.params, tokenizer, slots=slots, positions=max_tokens, suppress=suppressed)
    return Service(
        engine=engine,
        name=opened.directory.resolve().name,
        sampling=default_sampling(getattr(tokenizer, "files", {})),
        eos_ids=tuple(dict.fromkeys([*(opened.eos_ids or []), *(chat.eos_ids if chat else [])])),
        chat=chat,
        suppress=suppressed,
        api_key=api_key,
        local_only=local_only,
    )


def _chat_prompts(opened: LoadedModel) -> ChatPrompts | None:
    """Return the chat template of a model; None: it has none."""
    from transformer.chat._prompts import ChatPrompts
    from transformer.chat._template import has_template

    files = getattr(opened.tokenizer, "files", {})
    return ChatPrompts(opened.tokenizer) if has_template(files) else None


def _check(command: Serve) -> None:
    """Raise ConfigError for values that are invalid with any model."""
    for name, value, least, most in (
        ("--port", command.port, 0, 65535),
        ("--slots", command.slots, 1, 1024),
        ("--max-tokens", command.max_tokens, 16, 2**24),
    ):
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{name} must be from {least} to {most}, got {value}.")


def _report(done: int, total: int) -> None:
    """Show how many programs are compiled, on one line of a terminal."""
    if sys.stderr.isatty():
        print(f"\rcompiled {done} of {total} programs", end="\n" if done == total else "", file=sys.stderr, flush=True)
