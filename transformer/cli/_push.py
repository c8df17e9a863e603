"""`transformer-zoo push`: upload an exported model to the Hugging Face Hub."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from transformer.cli._arguments import Command


@dataclass(frozen=True, kw_only=True)
class Push(Command):
    """Upload an exported model to the Hugging Face Hub, with a model card.

    DIR is a directory that `convert` wrote, or an adapter. Only config.json, safetensors, the tokenizer and other JSON
    and text files are uploaded, in one commit. Log in first with `hf auth login`, or set HF_TOKEN. HF_ENDPOINT selects
    another hub.
    """

    directory: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """directory with config.json, safetensors and the tokenizer"""
    repo: str
    """repository on the hub, as USER/NAME; it is created if it does not exist"""
    private: bool = False
    """create a private repository"""
    license: str | None = None
    """license in a new model card, such as apache-2.0"""
    message: str | None = None
    """message of the commit"""


def main(command: Push) -> None:
    from transformer.zoo.weights._upload import push

    options = {"private": command.private, "license_id": command.license, "message": command.message}
    done = push(command.directory, command.repo, **options)
    lines = f"{len(done.files)} files, {done.bytes:,} bytes: {', '.join(done.files)}", done.address
    command.answer(lines, dataclasses.asdict(done))
