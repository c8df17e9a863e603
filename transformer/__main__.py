"""The command line, `transformer-zoo COMMAND ...` or `python -m transformer COMMAND ...`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from transformer.cli._allocator import keep_freed_memory
from transformer.cli._bars import bars
from transformer.cli._commands import call, find, members, usage, versions
from transformer.cli._compile_cache import keep_compiled
from transformer.cli._errors import run_program
from transformer.cli._limits import check_address_space

__all__ = ["console", "main", "run_command"]

COMMANDS = {
    "train": "train a recipe, or resume its run",
    "generate": "generate text or a translation with a trained or pretrained model",
    "answer": "answers of a chat model to messages, each on its own",
    "chat": "hold a conversation with a chat model",
    "serve": "serve a model over HTTP, with OpenAI's interface",
    "batch": "answer a file of requests in OpenAI's batch format",
    "translate": "translate lines from stdin with beam search",
    "transcribe": "transcribe audio files with a speech model",
    "embed text": "embeddings of texts",
    "embed image": "embeddings of images",
    "classify text": "most likely classes of each text",
    "classify image": "most likely classes of each image",
    "score": "log-likelihood and perplexity of each text",
    "convert": "export a model to Hugging Face format (config.json and safetensors)",
    "adapter": "export the LoRA updates of a run in PEFT's format",
    "verify": "check an exported model",
    "push": "upload an exported model to the Hugging Face Hub, with a model card",
    "list": "list the supported pretrained families and their variants",
    "evaluate run": "evaluate a run on its held-out data: loss, plus BLEU or exact match for translation",
    "evaluate tasks": "evaluate a causal model on tasks of lm-evaluation-harness",
    "evaluate text": "loss, perplexity and bits per byte of a causal model on a text file",
    "report": "write an HTML report of one run, or compare several runs",
    "average": "average the last checkpoints of a run into one model",
    "inspect text": "draw the attention maps of a model for a text",
    "inspect chat": "draw the attention maps of a chat model for a message and its answer",
    "inspect image": "draw the attention of a model on an image",
    "inspect audio": "draw the attention of the words of a recording over time",
    "study scale": "why attention scores are divided by sqrt(d_k)",
    "study positions": "similarity of positions by distance, for each position scheme",
    "study memory": "attention memory by sequence length, and padding of batches",
    "devices": "list the accelerators of this machine and the devices of JAX",
    "plan train": "estimate memory and speed of the training step on a TPU you don't have",
    "plan decode": "estimate memory and speed of generation on a TPU you don't have",
    "plan serve": "compute the capacity of a server on a TPU you don't have",
    "plan search": "find the fastest mesh, batch size and remat policy for a TPU you don't have",
    "plan batch": "find the largest batch that fits on a TPU you don't have",
    "plan here": "estimate the training step on this machine, and measure it",
}
"""summaries of all commands, in the order of --help; `inspect text` is `cli/_inspect_text.py`, and all plans are in
`cli/_plan.py`"""


def console(arguments: Sequence[str] | None = None) -> None:
    """Run a command as the main program and exit with its exit code.

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
    """Run a command with these arguments (None: those of the process) and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_program(lambda: run_command(words), debug="--debug" in words)


def run_command(words: Sequence[str]) -> int | None:
    """Run a command from Python, for example in a notebook: `run_command(["generate", DIR, "--prompt", "One."])`.

    Errors are raised rather than printed.

    Returns:
        the exit code; None means 0.

    Raises:
        ConfigError: the command is missing or unknown. Errors of the command itself are raised unchanged.
    """
    match words:
        case ["-h" | "--help", *_]:
            print(usage(COMMANDS))
            return 0
        case ["--version", *_]:
            print(versions())
            return 0
        case ["--completion", *shell]:
            from transformer.cli._completion import completion

            print(completion(" ".join(shell), COMMANDS), end="")
            return 0
        case [group, "-h" | "--help", *_] if members(group, COMMANDS):
            print(usage(members(group, COMMANDS), group))
            return 0
    name, arguments = find(words, COMMANDS)
    if not {"-h", "--help", "--list"} & set(words):
        check_address_space()
    # Training has its own display, and a plan too.
    with contextlib.nullcontext() if words[0] in ("train", "plan") else bars():
        return call(name, arguments)


if __name__ == "__main__":
    console()
