"""`python -m transformer serve`: a model over HTTP, by OpenAI's interface."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformer.cli._arguments import PathText, parse
from transformer.cli._models import ModelCommand
from transformer.cli._parallel import ONE_DEVICE, Parallel
from transformer.cli._services import make_service
from transformer.cli._speculation import check_speculation, open_draft
from transformer.config._checks import ConfigError

KEY_VARIABLE = "TRANSFORMER_API_KEY"
"""environment variable with the API key, which other users of the machine can't see, unlike a command line"""


@dataclass(frozen=True, kw_only=True)
class Serve(ModelCommand):
    """Serve a model over HTTP, by OpenAI's interface: /v1/chat/completions and /v1/completions of a causal model,
    /v1/completions of an encoder-decoder (translations), /v1/embeddings of an encoder, /v1/models, /health, and
    /metrics for Prometheus.

    Many texts are generated together. Ctrl-C or SIGTERM ends the server after the texts that it has begun. Of several
    processes, process 0 listens.
    """

    host: str = "127.0.0.1"
    """address to listen on"""
    port: int = 8000
    """port to listen on; 0: a free one"""
    slots: int = 8
    """maximum number of texts that are generated at a time"""
    max_tokens: int | None = None
    """maximum number of tokens of a request, prompt and answer together; None: the context of the model, at most
    2048"""
    cache_tokens: int | None = None
    """number of tokens of all texts together whose keys and values fit into memory, in pages that texts share; None:
    --slots times --max-tokens"""
    draft: PathText | None = None
    """causal model: draft model for speculative decoding, with the same tokenizer; it does not change the texts"""
    draft_tokens: int | None = None
    """number of tokens that the draft model proposes per step; None: 4"""
    lookup: int | None = None
    """causal model: speculative decoding without a draft model: number of tokens to propose per step, those that
    followed the last tokens earlier in the text; it does not change the texts"""
    parallel: Parallel = ONE_DEVICE
    api_key: str | None = None
    """key that clients must send; None: the value of the environment variable TRANSFORMER_API_KEY, or no key"""
    allow_anyone: bool = False
    """allow another --host than the loopback address without a key"""
    json: bool = False
    """print the address and the sizes as JSON on stdout when the server is ready"""


def main(arguments: Sequence[str]) -> None:
    """Serve a model until the process is asked to end."""
    command = parse(Serve, "serve", arguments)
    sizes = {"slots": command.slots, "max_tokens": command.max_tokens, "cache_tokens": command.cache_tokens}
    check_sizes(port=command.port, **sizes)
    check_speculation(command.draft, command.draft_tokens, command.lookup)
    key = command.api_key if command.api_key is not None else os.environ.get(KEY_VARIABLE)
    from transformer.serve._server import check_address

    is_local = check_address(command.host, key, command.allow_anyone)
    with command.parallel.together("Restart the server: all processes with the same command."):
        _serve(command, api_key=key, local_only=is_local and key is None, **sizes)


def _serve(command: Serve, **options: Any) -> None:
    """Load the model and serve it until the process is asked to end, or follow process 0; options: `make_service`."""
    from transformer.serve._server import run
    from transformer.serve._slots import PAGE_SIZE
    from transformer.training._processes import is_first

    mesh = command.parallel.mesh()
    opened = command.load_sharded(mesh)
    draft = open_draft(command.draft, command.draft_tokens, command.lookup)
    service = make_service(opened, mesh=mesh, draft=draft, **options)
    if not is_first():
        service.engine.follow()
        return
    service.warm_up(report_compilation)

    def ready(url: str) -> None:
        if command.json:
            load = service.load
            found = {"slots": load.slots, "max_tokens": service.most_tokens}
            found |= {} if load.pages is None else {"cache_tokens": load.pages * PAGE_SIZE}
            command.print_json(opened, url=url, model=service.name, **found)
            sys.stdout.flush()
        print(f"serving {service.name} at {url}", file=sys.stderr, flush=True)

    run(service, command.host, command.port, ready)


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
