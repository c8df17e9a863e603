"""The command line, `transformer-zoo VERB ...` or `python -m transformer VERB ...`.

Each verb imports only the modules that it needs: `--help` and `--version` do not import JAX.
"""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata

from transformer.cli._allocator import keep_freed_memory
from transformer.cli._bars import bars
from transformer.cli._compile_cache import keep_compiled
from transformer.cli._errors import run_command
from transformer.cli._limits import check_address_space
from transformer.config._invocation import program

__all__ = ["console", "main", "run_verb"]


def _train(arguments: Sequence[str]) -> int | None:
    from transformer.cli._train import main

    return main(arguments)


def _generate(arguments: Sequence[str]) -> int | None:
    from transformer.cli._generate import main

    return main(arguments)


def _chat(arguments: Sequence[str]) -> int | None:
    from transformer.cli._chat import main

    return main(arguments)


def _serve(arguments: Sequence[str]) -> int | None:
    from transformer.cli._serve import main

    return main(arguments)


def _batch(arguments: Sequence[str]) -> int | None:
    from transformer.cli._batch import main

    return main(arguments)


def _translate(arguments: Sequence[str]) -> int | None:
    from transformer.cli._translate import main

    return main(arguments)


def _transcribe(arguments: Sequence[str]) -> int | None:
    from transformer.cli._transcribe import main

    return main(arguments)


def _evaluate(arguments: Sequence[str]) -> int | None:
    from transformer.cli._evaluate_run import main

    return main(arguments)


def _average(arguments: Sequence[str]) -> int | None:
    from transformer.cli._average import main

    return main(arguments)


def _inspect(arguments: Sequence[str]) -> int | None:
    from transformer.cli._study import main

    return main(arguments)


def _plan(arguments: Sequence[str]) -> int | None:
    from transformer.cli._plan import main

    return main(arguments)


def _report(arguments: Sequence[str]) -> int | None:
    from transformer.cli._report import main

    return main(arguments)


def _embed(arguments: Sequence[str]) -> int | None:
    from transformer.cli._embed import main

    return main(arguments)


def _classify(arguments: Sequence[str]) -> int | None:
    from transformer.cli._classify import main

    return main(arguments)


def _score(arguments: Sequence[str]) -> int | None:
    from transformer.cli._score import main

    return main(arguments)


def _convert(arguments: Sequence[str]) -> int | None:
    from transformer.cli._convert import main

    return main(arguments)


def _push(arguments: Sequence[str]) -> int | None:
    from transformer.cli._push import main

    return main(arguments)


def _list(arguments: Sequence[str]) -> int | None:
    from transformer.cli._list import main

    return main(arguments)


def _devices(arguments: Sequence[str]) -> int | None:
    from transformer.cli._devices import main

    return main(arguments)


@dataclass(frozen=True)
class Verb:
    """A command: `run` takes the arguments after the verb and returns the exit code (None: 0); `help` is a summary."""

    run: Callable[[Sequence[str]], int | None]
    help: str


VERBS = {
    "train": Verb(_train, "train a recipe, or resume its run"),
    "generate": Verb(_generate, "generate text or a translation with a trained or pretrained model"),
    "chat": Verb(_chat, "talk to a chat model"),
    "serve": Verb(_serve, "serve a model over HTTP, by OpenAI's interface"),
    "batch": Verb(_batch, "answer a file of requests in OpenAI's batch form"),
    "translate": Verb(_translate, "translate lines from stdin with beam search"),
    "transcribe": Verb(_transcribe, "text of audio files, with a speech model"),
    "embed": Verb(_embed, "embeddings of texts or images"),
    "classify": Verb(_classify, "most likely classes of each text or image"),
    "score": Verb(_score, "log-likelihood and perplexity of each text"),
    "convert": Verb(_convert, "export a model to Hugging Face format (config.json and safetensors)"),
    "push": Verb(_push, "upload an exported model to the Hugging Face Hub, with a model card"),
    "list": Verb(_list, "list the supported pretrained families and their variants"),
    "evaluate": Verb(_evaluate, "evaluate a trained model: loss, plus BLEU or exact match for translation"),
    "report": Verb(_report, "write an HTML report of one run, or compare several runs"),
    "average": Verb(_average, "average the last checkpoints of a run into one model"),
    "inspect": Verb(_inspect, "draw attention maps of a model; without a model: --scale, --positions, --memory"),
    "devices": Verb(_devices, "list the accelerators of this machine and the devices of JAX"),
    "plan": Verb(_plan, "estimate memory and speed on a TPU you don't have"),
}
"""all verbs by name, in the order in which --help lists them"""


def usage() -> str:
    """Return the text that --help prints."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:{width}}  {verb.help}" for name, verb in VERBS.items())
    called = program("")
    return (
        f"usage: {called} VERB ...\n\n{verbs}\n\n"
        f"{called} VERB --help lists the options of a verb; {called} --version prints versions; "
        f"{called} --completion bash prints a completion script."
    )


def versions() -> str:
    """Return the text that --version prints: the versions of this package, Python and the numeric libraries."""
    from transformer import __version__

    lines = [f"transformer-zoo {__version__}", f"python {platform.python_version()}"]
    for name in ("jax", "jaxlib", "flax"):
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{name} not installed")
    return "\n".join(lines)


def console(arguments: Sequence[str] | None = None) -> None:
    """Run a verb as the main program and exit with its exit code.

    The process restarts once to set its memory allocator (`cli/_allocator.py`). The restart repeats the whole command
    line of the process.

    Args:
        arguments: the arguments after the program name; None: those of the process.
    """
    keep_compiled()
    keep_freed_memory()
    code = main(arguments)
    if "transformer.training._processes" in sys.modules:  # only if this run may be part of a multi-process run
        sys.modules["transformer.training._processes"].leave(code)
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb with these arguments (None: those of the process) and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_command(lambda: run_verb(words), debug="--debug" in words)


def run_verb(words: Sequence[str]) -> int | None:
    """Run a verb from Python, for example in a notebook: `run_verb(["generate", DIR, "--prompt", "One."])`.

    Errors are raised rather than printed.

    Returns:
        the exit code; None means 0.

    Raises:
        ConfigError: the verb is missing or unknown. Errors of the verb itself are raised unchanged.
    """
    from transformer.config._checks import ConfigError, nearest

    if not words:
        raise ConfigError(f"a verb is missing. Use one of {', '.join(VERBS)}; {program('')} --help explains them.")
    if words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] == "--version":
        print(versions())
        return 0
    if words[0] == "--completion":
        from transformer.cli._completion import completion

        print(completion(" ".join(words[1:]), {name: verb.run for name, verb in VERBS.items()}), end="")
        return 0
    if words[0] not in VERBS:
        raise ConfigError(
            f"unknown verb {words[0]!r}.{nearest(words[0], VERBS)} Verbs: {', '.join(VERBS)}; "
            f"{program('')} --help explains them."
        )
    if not {"-h", "--help", "--list"} & set(words):
        check_address_space()
    # Training has its own display, and a plan too.
    with contextlib.nullcontext() if words[0] in ("train", "plan") else bars():
        return VERBS[words[0]].run(words[1:])


if __name__ == "__main__":
    console()
