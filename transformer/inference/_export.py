"""Saving of models in the Hugging Face format, and of low-rank updates in the format of PEFT."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from transformer.config._checks import ConfigError
from transformer.config._local_paths import local_path
from transformer.data.tokenizers._export import as_pretrained
from transformer.inference._load import is_workdir
from transformer.inference._loaded_model import LoadedModel, Params
from transformer.media._image_settings import image_processor, save_image_processor
from transformer.nn.models._kinds import kind_of
from transformer.nn.quantization._adapted import has_encoded
from transformer.zoo._adapters import save_adapter
from transformer.zoo._equivalents import with_equivalent
from transformer.zoo._family import Family, abstract_params
from transformer.zoo._formats import open_weights
from transformer.zoo._pretrained import choose_family, save_pretrained
from transformer.zoo.families import ENTRIES
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


def _cast(model: nn.Module, params: Params) -> Params:
    """Cast the parameters to the dtypes of the model, in which a few parameters are always float32."""
    beyond = []

    def cast(path: tuple, leaf: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        result = leaf.astype(wanted.dtype)
        if not jnp.isfinite(result).all() and jnp.isfinite(leaf).all():
            beyond.append("/".join(str(key.key) for key in path))
        return result

    result = jax.tree_util.tree_map_with_path(cast, params, abstract_params(model))
    if beyond:
        raise ConfigError(
            f"values of {', '.join(beyond[:10])} are outside the range of {model.config.parameters.dtype}. Pass "
            f"another dtype, such as bfloat16."
        )
    return result


def _check_not_rounded(opened: LoadedModel, dtype: str) -> None:
    """Raise ConfigError if loading rounded the values of the files, and `dtype` could represent them."""
    if opened.pretrained is None:
        return
    loaded = opened.model.config.parameters.dtype
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
    directory = local_path(directory, "directory")
    model, params = opened.model, opened.params
    if dtype is not None:
        _check_not_rounded(opened, dtype)
        model = model.clone(config=model.config.replace(dtype=dtype, **{"parameters.dtype": dtype}))
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
        more = CTC_FILES if kind_of(model).writes == "characters" else ()
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
    """Save the low-rank updates of a run in the format of PEFT, without the frozen parameters, and return the family.

    The directory must be new or empty. Module names are those of the family; None: of the model that the run started
    from. Raises ConfigError for updates that PEFT's format can't express.
    """
    from transformer.training.workdir._runs import load_updates

    directory = local_path(directory, "directory")
    if not is_workdir(local_path(workdir, "workdir")):
        raise ConfigError(f"{workdir} is not the workdir of a run, so it has no adapter. Pass a run with lora.")
    recipe, model, trained, base = load_updates(workdir, step)
    config, origin = recipe.lora, recipe.origin
    updates: dict[str, dict[str, Any]] = {}
    for path, leaf in flatten_dict(trained["updates"]).items():
        updates.setdefault("/".join(path[:-1]), {})[path[-1]] = leaf
    new = flatten_dict(trained["new"], sep="/")
    params = unflatten_dict(flatten_dict(base, sep="/") | new, sep="/")
    adapter = Adapter(updates=updates, rank=config.rank, alpha=config.alpha, rslora=config.rslora, new=new)
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
    if kind_of(model).source:
        fields["decoder_start_token_id"] = opened.bos_id
    if names := opened.labels:
        fields["id2label"] = {str(i): name for i, name in enumerate(names)}
        fields["label2id"] = {name: i for i, name in enumerate(names)}
    return fields
