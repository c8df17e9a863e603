"""Uniform loading, saving and export of models, from the workdir of a training run or from pretrained weights."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from transformer.config._checks import ConfigError
from transformer.config._local_paths import local_path
from transformer.config._recipe_files import SAVED_RECIPE
from transformer.inference._opened_model import TextMethods
from transformer.media._image_settings import image_processor, save_image_processor
from transformer.nn._adapted import has_encoded
from transformer.nn.models._audio import SpeechRecognizer
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.nn.models._vision_language import VisionLanguageModel
from transformer.zoo._opening import open_weights

if TYPE_CHECKING:
    from transformer.data._tokenizer import Tokenizer
    from transformer.training.workdir._runs import Run
    from transformer.zoo._family import Family
    from transformer.zoo._pretrained import Pretrained
    from transformer.zoo.weights._adapters import Adapter

KEPT_FIELDS = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id"),
    *("unk_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"),
    "encoder_no_repeat_ngram_size",
    *("id2label", "label2id", "problem_type", "max_position_embeddings"),
    *("mask_type", "random_mask_ratio", "num_forecast_mask_patches", "channel_consistent_masking"),
    "unmasked_channel_indices",
)
"""Fields of config.json that `export` copies: special ids, class names, limits, the masking of pretraining."""

PREPROCESSING = "preprocessor_config.json"
"""Preprocessing of images and sound."""
COMPANIONS = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    PREPROCESSING,
    "processor_config.json",
    "generation_config.json",
)
"""Settings files that `export` copies, in addition to those that modules.json lists."""
CTC_FILES = ("vocab.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files with the characters of a model with CTC."""


@dataclass(frozen=True)
class LoadedModel(TextMethods):
    """A loaded model with its parameters and tokenizer. Exactly one of `run` and `pretrained` is set."""

    model: nn.Module
    params: Any
    """Parameters, without the outer "params"."""
    directory: Path
    """Workdir, directory of weights or GGUF file that was loaded."""
    vocabulary: Tokenizer | None
    """Tokenizer; None: the directory has none."""
    context: int | None
    """Context length: maximum number of tokens that the model reads; None: unlimited."""
    bos_id: int | None
    """First decoder token of a Seq2Seq."""
    run: Run | None = None
    """The training run that the model comes from."""
    pretrained: Pretrained | None = None
    """The pretrained weights that the model comes from."""
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    """Adapters for this model, by name (`add_adapter`)."""
    base: Any = None
    """Parameters without an adapter; None: `params`, because no adapter is applied."""

    def add_adapter(self, directory: str | os.PathLike, name: str | None = None) -> LoadedModel:
        """Return the model with an adapter in the format of PEFT added to `adapters`, for `with_adapter`.

        Args:
            directory: directory with adapter_config.json and adapter_model.safetensors.
            name: name of the adapter; None: the name of the directory.

        Raises:
            FileNotFoundError, WeightsError: the adapter is missing, damaged or has options that are not supported.
            ConfigError: the adapter does not fit the model; the message names the modules and their sizes.
        """
        from transformer.zoo._adapters import adapter_for

        directory = local_path(directory, "directory")
        base = self.params if self.base is None else self.base
        found = self.pretrained
        family, architecture = (None, None) if found is None else (found.family, found.architecture)
        adapter = adapter_for(self.model, base, directory, family, architecture)
        return replace(self, adapters=dict(self.adapters) | {name or Path(directory).name: adapter})

    def with_adapter(self, name: str | None) -> LoadedModel:
        """Return the model with one of its adapters applied, or with none. The weights are shared, not copied.

        Raises:
            ConfigError: no adapter has this name.
        """
        base = self.params if self.base is None else self.base
        if name is not None and name not in self.adapters:
            raise ConfigError(
                f"unknown adapter {name!r}. Choose from {', '.join(self.adapters) or 'none'}, or add it with "
                f"add_adapter(directory)."
            )
        return self._replaced(base if name is None else self.adapters[name].applied_to(base), base)

    def merged(self) -> LoadedModel:
        """Return the model with its adapter merged into the weights, which is faster to apply and can be exported."""
        from transformer.training.lora import flatten_adapted

        return self._replaced(flatten_adapted(self.params), None)

    def _replaced(self, params: Any, base: Any) -> LoadedModel:
        run = None if self.run is None else replace(self.run, params=params)
        return replace(self, params=params, base=base, run=run)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ConfigError: the directory has no tokenizer.
        """
        if self.vocabulary is None and self.run is not None:
            raise ConfigError(
                f"{self.directory} contains a {type(self.model).__name__}, which reads numeric data, not text."
            )
        if self.vocabulary is None:
            from transformer.zoo._opening import why_no_tokenizer

            raise ConfigError(why_no_tokenizer(self.directory))
        return self.vocabulary

    @property
    def eos_ids(self) -> Sequence[int] | None:
        """End-of-sequence tokens; None: the tokenizer has none."""
        tokenizer = self.tokenizer
        several = getattr(tokenizer, "eos_ids", None)
        ids = [tokenizer.eos_id] if several is None else list(several)
        return [i for i in ids if i is not None] or None

    @property
    def target_start(self) -> list[int]:
        """Decoder prompt: the tokens at the start of every target of a Seq2Seq.

        Raises:
            ConfigError: the config specifies no start token.
        """
        if self.bos_id is None:
            raise ConfigError(
                f"config.json in {self.directory} has no decoder_start_token_id, the first token of a target. Add it."
            )
        forced = self._generation.get("forced_bos_token_id")
        begin = self._tokens("decoder_start_token_id", [self.bos_id])
        return begin if forced is None else begin + self._tokens("forced_bos_token_id", [forced])

    @property
    def suppressed(self) -> tuple[int, ...]:
        """Tokens that are never generated: `suppress_tokens`, and entries of `bad_words_ids` with one token.

        Longer entries of `bad_words_ids` are not enforced.
        """
        suppressed = self._tokens("suppress_tokens", self._generation.get("suppress_tokens") or [])
        bad = self._generation.get("bad_words_ids") or []
        if not isinstance(bad, list) or not all(isinstance(ids, list) for ids in bad):
            self._refuse("bad_words_ids", bad, "lists of token ids")
        single = self._tokens("bad_words_ids", [ids[0] for ids in bad if len(ids) == 1])
        return tuple(dict.fromkeys([*suppressed, *single]))

    def _tokens(self, field: str, ids: Any) -> list[int]:
        """Return the ids of a field if they are valid tokens of the model; raise ConfigError otherwise."""
        size = self.model.config.vocab_size
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < size for i in ids):
            self._refuse(field, ids, f"token ids from 0 to {size - 1}")
        return ids

    def _refuse(self, field: str, value: Any, expected: str) -> NoReturn:
        raise ConfigError(
            f"{field} in {self.directory} (generation_config.json, or config.json) must contain {expected}, got "
            f"{value!r:.80}. Correct it."
        )

    @property
    def _generation(self) -> Mapping[str, Any]:
        return {} if self.pretrained is None else self.pretrained.generation

    @property
    def labels(self) -> list[str]:
        """Names of a classifier's classes, in order; empty if the classes have no names.

        Raises:
            ConfigError: the names are incomplete or not unique.
        """
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
                f"id2label in {self.directory}/config.json must give each of the classes 0 to {classes - 1} a "
                f"unique name, got {named!r:.200}. Correct it."
            )
        return names

    def place(self) -> dict[str, Any]:
        """Return the origin of the model, as JSON values."""
        if self.run is not None:
            return {"workdir": str(self.directory), "step": self.run.step}
        return {"directory": str(self.directory), "architecture": self.pretrained.architecture}


def is_workdir(path: str | os.PathLike) -> bool:
    """Return whether this directory is the workdir of a training run."""
    return (local_path(path, "path") / SAVED_RECIPE).exists()


def open_model(
    source: str | os.PathLike,
    *,
    step: Literal["best", "newest"] | int = "best",
    **options: Any,
) -> LoadedModel:
    """Load a model from the workdir of a training run, or from pretrained weights.

    Args:
        source: a workdir, or a source for `zoo.load_pretrained`.
        step: which checkpoint of a workdir to load.
        **options: options of `zoo.load_pretrained`.

    Raises:
        FileNotFoundError: the directory does not exist, or it has no checkpoint.
        ConfigError: the directory is neither a workdir nor a directory of weights, or the options do not apply to it.
        ValueError: a file is invalid or not supported.
    """
    local_path(source, "source")
    if is_workdir(source):
        from transformer.training.tasks._table import TASKS
        from transformer.training.workdir._runs import load_run

        if options:
            raise ConfigError(
                f"{source} is the workdir of a run, which does not support the options {', '.join(options)}."
            )
        run = load_run(source, step)
        context = TASKS[run.recipe.task].context(run.recipe.model, run.recipe.data)
        begin = None if run.tokenizer is None else run.tokenizer.begin_id
        return LoadedModel(run.model, run.params, Path(source), run.tokenizer, context, begin, run=run)

    from transformer.zoo._gemma_orbax import is_orbax
    from transformer.zoo._pretrained import load_pretrained

    if Path(source).is_dir() and not (Path(source) / "config.json").exists() and not is_orbax(source):
        raise ConfigError(
            f"{source} contains neither a run (recipe.json) nor weights (config.json). Pass the workdir of a run, such "
            f"as runs/number_words, or a directory with config.json and model.safetensors."
        )
    if step != "best":
        raise ConfigError(f"{source} is not the workdir of a run. It has a single set of weights, and no step {step}.")
    found = load_pretrained(source, **options)
    context = found.model.config.max_length or _documented_context(found)
    begin = found.fields.get("decoder_start_token_id")
    return LoadedModel(found.model, found.params, found.directory, found.tokenizer, context, begin, pretrained=found)


def _documented_context(found: Pretrained) -> int | None:
    """Return max_position_embeddings, the documented context length of a model without a position table."""
    inner = found.fields.get("text_config")  # of a vision-language model
    fields = inner if isinstance(inner, dict) and isinstance(found.model, VisionLanguageModel) else found.fields
    length = fields.get("max_position_embeddings")
    if length is not None and (type(length) is not int or length < 1):
        raise ConfigError(
            f"max_position_embeddings in {found.directory}/config.json must be an integer of at least 1, got "
            f"{length!r:.80}. Correct it."
        )
    return length


def load(source: str | os.PathLike, **options: Any) -> tuple[nn.Module, Any]:
    """Load a model and its parameters, for use as `model.apply({"params": params}, ...)`.

    Args:
        source: the workdir of a training run, a directory of pretrained weights, a GGUF file, or an id on the Hugging
            Face hub.
        **options: `step` for a workdir, or options of `zoo.load_pretrained` (`dtype`, `mesh`, ...).

    Returns:
        The model and its parameters, without the outer "params".

    Raises:
        FileNotFoundError, ConfigError, ValueError: see `open_model`.
    """
    opened = open_model(source, **options)
    return opened.model, opened.params


def save(model: nn.Module, params: Any, directory: str | os.PathLike, **options: Any) -> Path:
    """Save a model in the Hugging Face format (config.json and safetensors).

    See `zoo.save_pretrained` for the options (`family`, `fields`, `tokenizer`, ...) and the errors.

    Returns:
        The path of the directory.
    """
    from transformer.zoo._pretrained import save_pretrained

    return save_pretrained(model, params, directory, **options)


def _cast(model: nn.Module, params: Any) -> Any:
    """Cast the parameters to the dtypes of the model, in which a few parameters are always float32."""
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
            f"values of {', '.join(beyond[:10])} are outside the range of {model.config.param_dtype}. Pass another "
            f"dtype, such as bfloat16."
        )
    return result


def _check_not_rounded(opened: LoadedModel, dtype: str) -> None:
    """Raise ConfigError if loading rounded the values of the files, and `dtype` could represent them."""
    if opened.pretrained is None:
        return
    loaded = opened.model.config.param_dtype
    if jnp.finfo(loaded).nmant < min(opened.pretrained.mantissa_bits, jnp.finfo(dtype).nmant):
        raise ConfigError(
            f"the weights in {opened.directory} were rounded to {loaded} when they were loaded, so that {dtype} must "
            f"be requested before: load the model with dtype={dtype!r}, then export it."
        )


def _copy_companions(source: Path, target: Path, more: Sequence[str]) -> None:
    """Copy the settings files of the authors: for sentence embeddings, images and audio, and the files `more`."""
    files = open_weights(source)
    modules = files.json("modules.json", list) or []
    paths = [module["path"] for module in modules if isinstance(module, dict) and module.get("path")]
    for name in (*COMPANIONS, *more, *(f"{path}/config.json" for path in paths)):
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
    quantization: tuple[Literal[4, 8], int] | None = None,
) -> Family:
    """Save a loaded model in the Hugging Face format, with special ids, class names and tokenizer.

    Args:
        opened: the model.
        directory: new or empty directory.
        family: family in whose format the model is saved; None: its own family, or the first that can describe it.
        dtype: dtype of the saved parameters; None: unchanged. Load the model with the same dtype if it has more bits
            than the loaded parameters.
        max_shard_bytes: maximum size of a safetensors file.
        quantization: bits and group size with which the weights are saved (`zoo.save_pretrained`). None: the weights
            are saved as they are, and dequantized if they are quantized.

    Returns:
        The family.

    Raises:
        ConfigError: no family can describe the model (the message names the unsupported fields), values are outside
            the range of the dtype, or they were rounded to fewer bits when they were loaded.
        WeightsError: the directory is not empty.
    """
    from transformer.data._tokenizer_files import as_pretrained
    from transformer.zoo._equivalents import with_equivalent
    from transformer.zoo._pretrained import choose_family, save_pretrained

    directory = local_path(directory, "directory")
    model, params = opened.model, opened.params
    if dtype is not None:
        _check_not_rounded(opened, dtype)
        model = model.clone(config=model.config.replace(dtype=dtype, param_dtype=dtype))
    if quantization is None and has_encoded(params):
        params = _cast(model, opened.merged().params)  # from float32, in one step
    elif dtype is not None:
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
            warnings.warn(f"the tokenizer was not saved: {error}", stacklevel=2)
    save_pretrained(
        model,
        params,
        directory,
        family=family,
        fields=_fields(opened, model, family),
        tokenizer=written,
        max_shard_bytes=max_shard_bytes,
        quantization=quantization,
    )
    if opened.pretrained is not None and opened.directory.is_dir():
        more = CTC_FILES if isinstance(model, SpeechRecognizer) else ()
        _copy_companions(opened.directory, directory, more)
    elif (opened.directory / PREPROCESSING).exists():
        save_image_processor(image_processor(opened.directory), directory)
    return choose_family(model, family)[0]


def export_adapter(
    workdir: str | os.PathLike,
    directory: str | os.PathLike,
    *,
    step: Literal["best", "newest"] | int = "best",
    family: str | None = None,
) -> Family:
    """Save the low-rank updates of a run in the format of PEFT, without the frozen parameters.

    Args:
        workdir: workdir of a run with `lora`.
        directory: new or empty directory.
        step: which checkpoint to save.
        family: family whose module names are used; None: that of the model that the run started from.

    Returns:
        The family.

    Raises:
        ConfigError: not the workdir of a run with `lora`, or updates that PEFT's format can't express.
    """
    from transformer.training.workdir._runs import load_updates
    from transformer.zoo._adapters import save_adapter
    from transformer.zoo._entries import ENTRIES
    from transformer.zoo.weights._adapters import Adapter

    directory = local_path(directory, "directory")
    if not is_workdir(local_path(workdir, "workdir")):
        raise ConfigError(f"{workdir} is not the workdir of a run, so that it has no adapter. Pass a run with lora.")
    recipe, model, trained, base = load_updates(workdir, step)
    config, origin = recipe.lora, recipe.origin
    updates: dict[str, dict[str, Any]] = {}
    for path, leaf in flatten_dict(trained["updates"]).items():
        updates.setdefault("/".join(path[:-1]), {})[path[-1]] = leaf
    new = flatten_dict(trained["new"], sep="/")
    params = unflatten_dict(flatten_dict(base, sep="/") | new, sep="/")
    adapter = Adapter(
        updates=updates,
        rank=config.rank,
        alpha=config.alpha,
        rslora=config.rslora,
        new=new,
    )
    if family is None:  # that of the pretrained weights, whose title the recipe records; a run has none
        title = origin.model.partition(", ")[0]
        family = next((one.name for one in ENTRIES.values() if one.title == title), None)
    return save_adapter(model, adapter, params, directory, family, origin.source)


def _fields(opened: LoadedModel, model: nn.Module, family: str | None) -> dict[str, Any]:
    """Return fields of config.json that do not describe the model: special ids and class names."""
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
