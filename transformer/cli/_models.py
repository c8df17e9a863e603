"""Options and model loading shared by the verbs that use one model."""

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
    """Options of a command that uses a trained or pretrained model."""

    directory: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """workdir of a run (runs/number_words), directory of weights, or variant on the Hugging Face Hub (gpt2)"""
    step: Literal["best", "newest"] | int = "best"
    """checkpoint of a workdir: best (held-out loss, or accuracy of a classifier), newest, or a step number"""
    json: bool = False
    """print JSON"""
    debug: bool = False
    """show the traceback of an error"""

    def load(self, **options: Any) -> LoadedModel:
        """Load the model, with options of `zoo.load_pretrained`.

        Raises:
            ConfigError: the directory is the `checkpoints` directory of a run, or one of its checkpoints.
            FileNotFoundError, ValueError: see `open_model`.
        """
        from transformer.inference._loading import open_model

        source: str | Path = self.directory
        if not self.directory.is_dir():
            from transformer.zoo._pretrained import find_variant

            source = str(self.directory)
            if find_variant(source) is None:
                raise FileNotFoundError(
                    f"directory {self.directory} not found.{_nearest_model(self.directory)} Pass the workdir of a "
                    f"training run, such as runs/number_words, a directory of weights, or a variant listed by "
                    f"`{program('list')}`."
                )
        elif run := run_of_checkpoint(self.directory):
            step = f" --step {self.directory.name}" if self.directory.name.isdecimal() else ""
            raise ConfigError(
                f"{self.directory} contains checkpoints of a run. Pass the workdir of the run instead: {run}{step}"
            )
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax logs every file that it reads
        return open_model(source, step=self.step, **options)

    def load_writer(self) -> LoadedModel:
        """Load a model that generates text from a prompt; raise ConfigError for any other model."""
        from transformer.nn.models._causal_lm import CausalLM
        from transformer.nn.models._seq2seq import Seq2Seq
        from transformer.nn.models._speech import SpeechToText

        opened = self.load()
        if not isinstance(opened.model, CausalLM | Seq2Seq) or isinstance(opened.model, SpeechToText):
            kind = type(opened.model).__name__
            verb = {"MaskedLM": "embed", "Embedder": "embed", "Classifier": "classify"}.get(kind)
            remedy = f" Use {program(verb)} {self.directory} --text ..." if verb else ""
            raise ConfigError(
                f"this verb needs a causal model or an encoder-decoder for text; {self.directory} contains a model of "
                f"type {kind}.{remedy}"
            )
        return opened

    def print_json(self, opened: LoadedModel, **values: Any) -> None:
        """Print one JSON object on stdout. Non-ASCII characters are escaped, so that any encoding can carry it."""
        print(json.dumps({**opened.place(), **values}, indent=2))


@dataclass(frozen=True, kw_only=True)
class TextsCommand(ModelCommand):
    """Options of a command whose model reads texts but does not generate any."""

    text: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """input text; repeat the option to pass several; - reads one text per line from stdin"""

    def load_with_texts(self) -> tuple[LoadedModel, list[str]]:
        """Load the model and read the texts; warn about words that the tokenizer does not know."""
        from transformer.cli._texts import read_prompts, warn_of_unknown

        texts = read_prompts(self.text, lines=True, option="--text")
        opened = self.load()
        warn_of_unknown(opened, texts)
        return opened, texts


def run_of_checkpoint(directory: Path) -> Path | None:
    """Return the workdir of a run if the directory is its `checkpoints` directory or one checkpoint, otherwise None."""
    path = directory.parent if directory.name.isdecimal() else directory
    return path.parent if path.name == "checkpoints" and (path.parent / "recipe.json").is_file() else None


def _nearest_model(path: Path) -> str:
    """Return a suggestion for a misspelled path: a directory next to it, or a variant on the Hugging Face Hub."""
    from transformer.zoo._pretrained import ENTRIES

    names = [variant for family in ENTRIES.values() for variant in family.variants] if path == Path(path.name) else []
    with contextlib.suppress(OSError):  # the parent directory is missing or unreadable
        names += [str(entry) for entry in itertools.islice(path.parent.iterdir(), 1000) if entry.is_dir()]
    return nearest(str(path), names)
