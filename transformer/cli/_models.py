"""Options and model loading shared by the commands that use one model."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from transformer.cli._arguments import Command, PathText
from transformer.config._checks import ConfigError, nearest
from transformer.config._invocation import program
from transformer.config._local_paths import local_path
from transformer.config._recipe_files import SAVED_RECIPE

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from transformer.inference._loaded_model import LoadedModel


@dataclass(frozen=True, kw_only=True)
class ModelCommand(Command):
    """Options of a command that uses a trained or pretrained model."""

    directory: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """workdir of a run (runs/number_words), directory of weights, GGUF file (model.gguf), or variant on the Hugging
    Face Hub (gpt2)"""
    step: Literal["best", "newest"] | int = "best"
    """checkpoint of a workdir: best (held-out loss, or accuracy of a classifier), newest, or a step number"""
    adapter: Path | None = None
    """directory of a LoRA adapter in PEFT's format, which is merged into the weights"""
    tokenizer: Path | None = None
    """directory with a tokenizer.json to use instead of the tokenizer of the weights"""

    def load(self, **options: str | Mesh) -> LoadedModel:
        """Load the model, with the options `dtype` and `mesh` of `zoo.load_pretrained`."""
        from transformer.inference._opened_model import open_model
        from transformer.zoo._gguf import is_gguf

        source: str | Path = self.directory
        if self.adapter is not None and not self.adapter.is_dir():
            raise FileNotFoundError(f"adapter {self.adapter} not found. Pass a directory with adapter_config.json.")
        if not self.directory.is_dir() and not is_gguf(self.directory):
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
        if self.tokenizer is not None:
            options["tokenizer"] = self.tokenizer
        opened = open_model(source, step=self.step, **options)
        if self.adapter is None:
            return opened
        return opened.add_adapter(self.adapter, "adapter").with_adapter("adapter").merged()

    def load_sharded(self, mesh: Mesh | None) -> LoadedModel:
        """Load the model; pretrained weights are sharded over the mesh as they are read, those of a run are not."""
        from transformer.inference._load import is_workdir

        return self.load() if mesh is None or is_workdir(self.directory) else self.load(mesh=mesh)

    def load_writer(self) -> LoadedModel:
        """Load a model that generates text from a prompt; raise ConfigError for any other model."""
        opened = self.load()
        if opened.kind.writes not in ("continuation", "translation"):
            kind = type(opened.model).__name__
            other = {"MaskedLM": "embed text", "Embedder": "embed text", "Classifier": "classify text"}.get(kind)
            remedy = f" Use {program(other)} {self.directory} --text ..." if other else ""
            if opened.kind.writes in ("transcript", "characters"):
                remedy = f" Use {program('transcribe')} {self.directory} FILE"
            raise ConfigError(
                f"this command needs a causal model or an encoder-decoder for text; {self.directory} contains a model "
                f"of type {kind}.{remedy}"
            )
        return opened

    def answer_of(self, opened: LoadedModel, lines: Iterable[object], **values: object) -> None:
        """Print the lines, or with --json the values and the origin of the model."""
        self.answer(lines, opened.place() | values)


@dataclass(frozen=True, kw_only=True)
class QuantizationOptions:
    """Options of quantized weights."""

    quantize: Literal["int8", "int4"] | None = None
    """quantize the weights: int8, or int4 (layers in 4 bits, embeddings and output layer in 8)"""
    group_size: Literal[32, 64, 128] | None = None
    """number of weights that share a scale (int4); None: 32"""

    def quantization(self) -> tuple[int, int] | None:
        """Return the bits per weight and the number of 4-bit weights that share a scale; None: not quantized.

        Raises:
            ConfigError: a size of groups without int4.
        """
        if self.group_size is not None and self.quantize != "int4":
            got = "no --quantize" if self.quantize is None else f"--quantize {self.quantize}"
            raise ConfigError(
                f"--group-size {self.group_size} needs --quantize int4, got {got}. Pass --quantize int4, or remove "
                f"--group-size."
            )
        return None if self.quantize is None else (int(self.quantize.removeprefix("int")), self.group_size or 32)


@dataclass(frozen=True, kw_only=True)
class TextsCommand(ModelCommand):
    """Options of a command whose model reads texts but does not generate any."""

    text: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """input text; - reads one text per line from stdin; None: stdin"""

    def load_with_texts(self) -> tuple[LoadedModel, list[str]]:
        """Load the model and read the texts; warn about words that the tokenizer does not know."""
        from transformer.cli._texts import read_prompts, warn_of_unknown
        from transformer.inference._text_inputs import text_model

        texts = read_prompts(self.text, lines=True, option="--text")
        opened = self.load()
        text_model(opened)  # before the tokenizer, which a model of images lacks
        warn_of_unknown(opened, texts)
        return opened, texts


@dataclass(frozen=True, kw_only=True)
class ImagesCommand(ModelCommand):
    """Options of a command that reads images."""

    images: Annotated[tyro.conf.Positional[tuple[PathText, ...]], tyro.conf.arg(metavar="IMAGE")]
    """image files"""


def check_images(names: Sequence[str]) -> None:
    """Raise FileNotFoundError for a missing image, and ConfigError for a remote path, before the model is loaded."""
    for name in names:
        if not local_path(name, "--image").exists():
            raise FileNotFoundError(f"image {name} not found. Pass the path of an image file.")


def run_of_checkpoint(directory: Path) -> Path | None:
    """Return the workdir of a run if the directory is its `checkpoints` directory or one checkpoint, otherwise None."""
    path = directory.parent if directory.name.isdecimal() else directory
    return path.parent if path.name == "checkpoints" and (path.parent / SAVED_RECIPE).is_file() else None


def _nearest_model(path: Path) -> str:
    """Return a suggestion for a misspelled path: a directory next to it, or a variant on the Hugging Face Hub."""
    from transformer.zoo._pretrained import ENTRIES

    names = [variant for family in ENTRIES.values() for variant in family.variants] if path == Path(path.name) else []
    with contextlib.suppress(OSError):  # the parent directory is missing or unreadable
        names += [str(entry) for entry in itertools.islice(path.parent.iterdir(), 1000) if entry.is_dir()]
    return nearest(str(path), names)
