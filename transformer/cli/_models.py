"""What the verbs about one model share: their first arguments, and the model opened."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from transformer.config._checks import ConfigError, nearest
from transformer.config._invocation import program

if TYPE_CHECKING:
    from transformer.inference._loading import LoadedModel


@dataclass(frozen=True, kw_only=True)
class ModelCommand:
    """A command about what a training run left, or about pretrained weights."""

    directory: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """workdir of a training run, such as runs/number_words; or a directory of weights (config.json, safetensors); or a
    variant on the Hugging Face Hub, such as gpt2"""
    step: Literal["best", "newest"] | int = "best"
    """checkpoint of a workdir: best (on held-out data), newest, or a step number"""
    json: bool = False
    """print JSON"""
    debug: bool = False
    """show the traceback of an error"""

    def load(self, **options: Any) -> LoadedModel:
        """The model, with options of `zoo.load_pretrained`.

        Raises:
            ConfigError: the directory holds checkpoints of a run, and is not the run itself.
            FileNotFoundError, ValueError: as `open_model`.
        """
        from transformer.inference._loading import open_model

        source: str | Path = self.directory
        if not self.directory.is_dir():
            from transformer.zoo._pretrained import find_variant

            source = str(self.directory)
            if find_variant(source) is None:
                raise FileNotFoundError(
                    f"there is no directory {self.directory}.{_nearest_model(self.directory)} Give the workdir of a "
                    f"training run, such as runs/number_words, a directory of weights, or a variant of "
                    f"`{program('list')}`."
                )
        elif run := run_of_checkpoint(self.directory):
            step = f" --step {self.directory.name}" if self.directory.name.isdecimal() else ""
            raise ConfigError(f"{self.directory} holds checkpoints of a run. Give the run instead: {run}{step}")
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells of every file it reads
        return open_model(source, step=self.step, **options)

    def load_writer(self) -> LoadedModel:
        """The model, which must be one that goes on from text: ConfigError else."""
        from transformer.nn.models._causal_lm import CausalLM
        from transformer.nn.models._seq2seq import Seq2Seq
        from transformer.nn.models._speech import SpeechToText

        opened = self.load()
        if not isinstance(opened.model, CausalLM | Seq2Seq) or isinstance(opened.model, SpeechToText):
            kind = type(opened.model).__name__
            verb = {"MaskedLM": "embed", "Embedder": "embed", "Classifier": "classify"}.get(kind)
            remedy = f" Use {program(verb)} {self.directory} --text ..." if verb else ""
            raise ConfigError(
                f"{self.directory} holds a model of the kind {kind}, which reads no prompt: expected a causal "
                f"model or an encoder-decoder for text.{remedy}"
            )
        return opened

    def print_json(self, opened: LoadedModel, **values: Any) -> None:
        """One JSON object on stdout, in ASCII: any pipe can carry it."""
        print(json.dumps({**opened.place(), **values}, indent=2))


@dataclass(frozen=True, kw_only=True)
class TextsCommand(ModelCommand):
    """A command about a model that reads texts and writes none."""

    text: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """text to read; repeat the option for more texts; - reads lines from stdin"""

    def load_with_texts(self) -> tuple[LoadedModel, list[str]]:
        """The model and the texts, with a warning about tokens that the model does not know."""
        from transformer.cli._texts import read_prompts, warn_of_unknown

        texts = read_prompts(self.text, lines=True, option="--text")
        opened = self.load()
        warn_of_unknown(opened, texts)
        return opened, texts


def run_of_checkpoint(directory: Path) -> Path | None:
    """The workdir of a run if the directory is its `checkpoints`, or one of them."""
    path = directory.parent if directory.name.isdecimal() else directory
    return path.parent if path.name == "checkpoints" and (path.parent / "recipe.json").is_file() else None


def _nearest_model(path: Path) -> str:
    """What the user may have meant: a directory beside the path, or a variant of the hub."""
    from transformer.zoo._pretrained import ENTRIES

    names = [variant for family in ENTRIES.values() for variant in family.variants] if path == Path(path.name) else []
    with contextlib.suppress(OSError):  # no such folder, or one that can't be read
        names += [str(entry) for entry in itertools.islice(path.parent.iterdir(), 1000) if entry.is_dir()]
    return nearest(str(path), names)
