"""A workdir that a run left, or a directory of somebody's weights: opened alike, for everybody who uses a model."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer.config._checks import ConfigError
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.zoo.weights._files import WeightFiles

if TYPE_CHECKING:
    from transformer.data._tokenizer import Tokenizer
    from transformer.training._runs import Run
    from transformer.zoo._family import Family
    from transformer.zoo._pretrained import Pretrained

KEPT_FIELDS = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id"),
    *("unk_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"),
    "encoder_no_repeat_ngram_size",
    *("id2label", "label2id", "problem_type", "max_position_embeddings"),
)
"""fields of config.json that go from one directory to the next: special ids, names, limits"""

COMPANIONS = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "preprocessor_config.json",
)
"""files of settings that go from one directory to the next, beside those that modules.json names"""

RECIPE_FILE = "recipe.json"
"""what tells a workdir from a directory of weights"""


@dataclass(frozen=True)
class LoadedModel:
    """A model, ready to use: `params` without the outer "params", from `directory`. One of `run` and `pretrained` is
    where it came from.
    """

    model: nn.Module
    params: Any
    directory: Path
    vocabulary: Tokenizer | None
    """None: the directory has no tokenizer"""
    context: int | None
    """tokens that the model reads at once; None: any number"""
    bos_id: int | None
    """begins a target of a Seq2Seq"""
    run: Run | None = None
    pretrained: Pretrained | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. ConfigError: there is none, and what to do."""
        if self.vocabulary is None and self.run is not None:
            raise ConfigError(f"{self.directory} holds a {type(self.model).__name__}, which reads numbers and no text.")
        if self.vocabulary is None:
            raise ConfigError(
                f"{self.directory} has no tokenizer.json, so that no text can be read. Put the model's there: with "
                f"transformers, AutoTokenizer.from_pretrained(...).save_pretrained({str(self.directory)!r})."
            )
        return self.vocabulary

    @property
    def eos_ids(self) -> Sequence[int] | None:
        """Tokens that end a text; None: there are none."""
        tokenizer = self.tokenizer
        several = getattr(tokenizer, "eos_ids", None)
        ids = [tokenizer.eos_id] if several is None else list(several)
        return [i for i in ids if i is not None] or None

    @property
    def target_start(self) -> list[int]:
        """Tokens with which every target of a Seq2Seq begins. ConfigError: there are none."""
        if self.bos_id is None:
            raise ConfigError(
                f"config.json in {self.directory} names no decoder_start_token_id, with which a target begins. Add it."
            )
        forced = self._generation.get("forced_bos_token_id")
        begin = self._tokens("decoder_start_token_id", [self.bos_id])
        return begin if forced is None else begin + self._tokens("forced_bos_token_id", [forced])

    @property
    def suppressed(self) -> tuple[int, ...]:
        """Tokens that the authors of the weights never want written: `suppress_tokens`, and `bad_words_ids` of one
        token. (Longer ones are not held back.)
        """
        suppressed = self._tokens("suppress_tokens", self._generation.get("suppress_tokens") or [])
        bad = self._generation.get("bad_words_ids") or []
        if not isinstance(bad, list) or not all(isinstance(ids, list) for ids in bad):
            self._refuse("bad_words_ids", bad, "lists of tokens")
        single = self._tokens("bad_words_ids", [ids[0] for ids in bad if len(ids) == 1])
        return tuple(dict.fromkeys([*suppressed, *single]))

    def _tokens(self, field: str, ids: Any) -> list[int]:
        """The ids that a field gives, when they are tokens of the model."""
        size = self.model.config.vocab_size
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < size for i in ids):
            self._refuse(field, ids, f"tokens, numbers from 0 to {size - 1}")
        return ids

    def _refuse(self, field: str, value: Any, expected: str) -> NoReturn:
        raise ConfigError(
            f"{field} in {self.directory} (generation_config.json, or config.json) must give {expected}, got "
            f"{value!r:.80}. Correct it."
        )

    @property
    def _generation(self) -> Mapping[str, Any]:
        return {} if self.pretrained is None else self.pretrained.generation

    @property
    def labels(self) -> list[str]:
        """Names of a classifier's classes, by number; none where nobody named them. ConfigError: not one for each."""
        if self.run is not None:
            return list(getattr(self.run.recipe.data, "labels", ()))
        named = {} if self.pretrained is None else self.pretrained.fields.get("id2label") or {}
        classes = self.model.config.output.num_classes
        if not named or classes is None:
            return []
        numbers = [str(i) for i in range(classes)]
        names = [str(named[key]) for key in numbers if key in named] if isinstance(named, dict) else []
        if len(named) != classes or len(set(names)) != classes:
            raise ConfigError(
                f"id2label in {self.directory}/config.json must give each of the classes 0 to {classes - 1} a name of "
                f"its own, got {named!r:.200}. Correct it."
            )
        return names

    def place(self) -> dict[str, Any]:
        """Where it came from, as JSON values."""
        if self.run is not None:
            return {"workdir": str(self.directory), "step": self.run.step}
        return {"directory": str(self.directory), "architecture": self.pretrained.architecture}


def is_workdir(path: str | os.PathLike) -> bool:
    """Whether a training run wrote this directory."""
    return (Path(path) / RECIPE_FILE).exists()


def open_model(
    source: str | os.PathLike,
    *,
    step: Literal["best", "newest"] | int = "best",
    **options: Any,
) -> LoadedModel:
    """The model of a workdir (`step` says which checkpoint), or of whatever `zoo.load_pretrained` takes, with its
    `options`.

    Raises:
        FileNotFoundError: no such directory, or no checkpoint in it.
        ConfigError: a directory of neither, or options that don't belong to it.
        ValueError: something in it that can't be read or isn't understood.
    """
    if is_workdir(source):
        from transformer.training._runs import load_run
        from transformer.training._tasks import TASKS

        if options:
            raise ConfigError(f"{source} is the workdir of a run, for which there is no option {', '.join(options)}.")
        run = load_run(source, step)
        context = TASKS[run.recipe.task].context(run.recipe.model, run.recipe.data)
        begin = None if run.tokenizer is None else run.tokenizer.begin_id
        return LoadedModel(run.model, run.params, Path(source), run.tokenizer, context, begin, run=run)

    from transformer.zoo._pretrained import load_pretrained

    if Path(source).is_dir() and not (Path(source) / "config.json").exists():
        raise ConfigError(
            f"{source} holds neither a run (recipe.json) nor weights (config.json). Name the workdir of a run, such as "
            f"runs/number_words, or a directory of config.json and model.safetensors."
        )
    if step != "best":
        raise ConfigError(f"{source} is no workdir of a run: it holds one set of weights, and no step {step}.")
    found = load_pretrained(source, **options)
    context = found.model.config.max_length or _told_context(found)
    begin = found.fields.get("decoder_start_token_id")
    return LoadedModel(found.model, found.params, found.directory, found.tokenizer, context, begin, pretrained=found)


def _told_context(found: Pretrained) -> int | None:
    """max_position_embeddings, which a model without a table of positions does not need."""
    length = found.fields.get("max_position_embeddings")
    if length is not None and (type(length) is not int or length < 1):
        raise ConfigError(
            f"max_position_embeddings in {found.directory}/config.json must be an integer of at least 1, got "
            f"{length!r:.80}. Correct it."
        )
    return length


def load(source: str | os.PathLike, **options: Any) -> tuple[nn.Module, Any]:
    """Model and parameters, as `model.apply({"params": params}, ...)` takes them: of a training run's workdir (option
    `step`), or of pretrained weights in a directory or on the hub (options of `zoo.load_pretrained`: `dtype`, `mesh`,
    ...). Raises as `open_model`.
    """
    opened = open_model(source, **options)
    return opened.model, opened.params


def save(model: nn.Module, params: Any, directory: str | os.PathLike, **options: Any) -> Path:
    """Writes a model as its family's config.json and safetensors, for anybody to read; `zoo.save_pretrained` has the
    options (`family`, `fields`, `tokenizer`, ...) and what it raises.
    """
    from transformer.zoo._pretrained import save_pretrained

    return save_pretrained(model, params, directory, **options)


def _cast(model: nn.Module, params: Any) -> Any:
    """The parameters in the types that the model has them in; those that only float32 can hold stay."""
    from transformer.zoo._family import abstract_params

    beyond = []

    def cast(path: tuple, leaf: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        result = leaf.astype(wanted.dtype)
        if not jnp.isfinite(result).all() and jnp.isfinite(leaf).all():
            beyond.append("/".join(str(key.key) for key in path))
        return result

    result = jax.tree_util.tree_map_with_path(cast, params, abstract_params(model))
    if beyond:
        raise ConfigError(
            f"numbers of {', '.join(beyond[:10])} are larger than {model.config.param_dtype} can hold. Take another "
            f"dtype, such as bfloat16."
        )
    return result


def _copy_companions(source: Path, target: Path) -> None:
    """Settings that the authors keep beside the weights: of sentence vectors, of images and sound before the model."""
    files = WeightFiles(source)
    modules = files.json("modules.json", list) or []
    paths = [module["path"] for module in modules if isinstance(module, dict) and module.get("path")]
    for name in (*COMPANIONS, *(f"{path}/config.json" for path in paths)):
        values = files.json(name, list if name == "modules.json" else dict)
        if values is not None:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def export(
    opened: LoadedModel,
    directory: str | os.PathLike,
    *,
    family: str | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 2**30,
) -> Family:
    """Writes an opened model as its family's files, with special ids, names of classes and tokenizer; gives the family.

    Args:
        family: None: its own, or the first that has all that the model has.
        dtype: of the numbers; None: as they are.

    Raises:
        ConfigError: no family has all of it; the message names what has no counterpart. Or numbers that the dtype
            can't hold.
        WeightsError: the directory is not empty.
    """
    from transformer.data._tokenizer_files import as_pretrained
    from transformer.zoo._equivalents import with_equivalent
    from transformer.zoo._pretrained import choose_family, save_pretrained

    model, params = opened.model, opened.params
    if dtype is not None:
        model = model.clone(config=model.config.replace(dtype=dtype, param_dtype=dtype))
        params = _cast(model, params)
    if opened.run is not None:
        model, params = with_equivalent(model, params, family, opened.context)
    if opened.pretrained is not None:
        family = opened.pretrained.family.name if family is None else family
    tokenizer, written = opened.vocabulary, None
    if tokenizer is not None:
        try:
            written = as_pretrained(tokenizer)
        except ValueError as error:
            warnings.warn(f"the tokenizer was not written: {error}", stacklevel=2)
    save_pretrained(
        model,
        params,
        directory,
        family=family,
        fields=_fields(opened, model, family),
        tokenizer=written,
        max_shard_bytes=max_shard_bytes,
    )
    if opened.pretrained is not None:
        _copy_companions(opened.directory, Path(directory))
    return choose_family(model, family)[0]


def _fields(opened: LoadedModel, model: nn.Module, family: str | None) -> dict[str, Any]:
    """Fields of config.json beside those of the model: special ids and names of classes."""
    if opened.pretrained is not None:
        fields = {name: value for name, value in opened.pretrained.fields.items() if name in KEPT_FIELDS}
        if family != opened.pretrained.family.name:
            fields.pop("max_position_embeddings", None)  # another family may not have it
        return fields
    if opened.vocabulary is None:
        return {}
    ids = {f"{name}_token_id": getattr(opened.vocabulary, f"{name}_id") for name in ("pad", "bos", "eos", "mask")}
    fields = {name: number for name, number in ids.items() if number is not None}
    if isinstance(model, Seq2Seq):
        fields["decoder_start_token_id"] = opened.bos_id
    if names := opened.labels:
        fields["id2label"] = {str(i): name for i, name in enumerate(names)}
        fields["label2id"] = {name: i for i, name in enumerate(names)}
    return fields
