"""Pretrained models in and out: a directory of config.json and safetensors is a model and its parameters."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from transformer.config._checks import ConfigError, nearest
from transformer.config._model import Execution, TransformerConfig
from transformer.data._pretrained_tokenizer import PretrainedTokenizer, load_pretrained_tokenizer
from transformer.data._tokenizer import TOKENIZER_FILE
from transformer.nn._sharding import AXES, check_model, parameter_spec
from transformer.zoo._entries import ENTRIES, REFUSED
from transformer.zoo._example import MAX_EXAMPLE_BYTES, compare_example, example_dtype, make_example
from transformer.zoo._family import Family, Head, NoCounterpart, Variant, abstract_params, canonical, rename
from transformer.zoo._fields import NEUTRAL
from transformer.zoo.weights._files import WeightFiles, first_non_finite, write_weights
from transformer.zoo.weights._hub import fetch
from transformer.zoo.weights._integrity import INTEGRITY_FILE, checked, read_integrity, write_integrity
from transformer.zoo.weights._loading import (
    check_complete,
    load_params,
    parameter_dtypes,
    parameter_shapes,
    saved_tensors,
)
from transformer.zoo.weights._quantized import plain_files
from transformer.zoo.weights._rules import Link, uncovered

DTYPES = ("float32", "bfloat16", "float16")
"""types that parameters may have"""


@dataclass(frozen=True)
class Pretrained:
    """A model as its directory has it: `params` without the outer "params", `architecture` and `fields` as config.json
    has them.
    """

    model: nn.Module
    params: Any
    family: Family
    architecture: str
    fields: Mapping[str, Any]
    directory: Path
    tokenizer: PretrainedTokenizer | None
    """None: the directory has no tokenizer.json"""
    generation: Mapping[str, Any]
    """how its authors want it to write: generation_config.json, or those fields of config.json"""


def find_family(values: Mapping[str, Any]) -> Family:
    """The family of a config.json, by its model_type. ConfigError: there is none of it here."""
    kind = values.get("model_type")
    for family in ENTRIES.values():
        if kind == family.name or kind in family.aliases:
            return family
    if isinstance(kind, str) and kind in REFUSED:
        raise ConfigError(f"model_type is {kind!r} in config.json: {REFUSED[kind]}")
    names = [name for family in ENTRIES.values() for name in (family.name, *family.aliases)]
    raise ConfigError(
        f"model_type is {kind!r} in config.json, which no family here reads.{nearest(str(kind), names)} There are "
        f"{', '.join(names)} (python -m transformer list)."
    )


def find_variant(name: str) -> tuple[Family, Variant] | None:
    """The family and published sizes that go by this name, or None."""
    for family in ENTRIES.values():
        if name in family.variants:
            return family, family.variants[name]
    return None


def build(name: str, execution: Execution = Execution()) -> nn.Module:
    """The model of a named variant, without weights: `build("gpt2")`. ConfigError: no variant of that name."""
    found = find_variant(name)
    if found is None:
        names = [variant for family in ENTRIES.values() for variant in family.variants]
        raise ConfigError(f"there is no variant {name!r}.{nearest(name, names)} `python -m transformer list` has them.")
    family, variant = found
    head = family.heads[variant.architecture or next(iter(family.heads))]
    return head.model(family.read(variant.fields, head), execution)


def load_pretrained(
    source: str | os.PathLike,
    *,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    architecture: str | None = None,
    ignore_fields: Sequence[str] = (),
    revision: str | None = None,
    execution: Execution = Execution(),
) -> Pretrained:
    """Reads a directory of config.json, safetensors and perhaps tokenizer.json, or fetches one from the hub.

    Args:
        source: a directory, a hub id such as "openai-community/gpt2", or a variant such as "gpt2".
        dtype: of parameters and activations; None: what most of the file's numbers are.
        mesh: parameters are put straight onto its devices, each holding its part; None: onto the default device.
        architecture: instead of what config.json names, such as "BertModel".
        ignore_fields: of config.json that are not understood and change nothing.
        revision: branch, tag or commit on the hub.

    Raises:
        FileNotFoundError: no such directory.
        ValueError: a config.json, tensors or a tokenizer that are damaged, unsafe, incomplete or not understood, or
            that are not as `save_pretrained` wrote them; all that is wrong is listed, and nothing is loaded.
    """
    variant = find_variant(str(source)) if not Path(source).is_dir() else None
    directory = fetch(source if variant is None else variant[1].hub, revision)
    with checked(directory):
        return _load(directory, dtype, mesh, architecture, ignore_fields, execution)


def _load(
    directory: Path,
    dtype: str | None,
    mesh: Mesh | None,
    architecture: str | None,
    ignore_fields: Sequence[str],
    execution: Execution,
) -> Pretrained:
    files = plain_files(WeightFiles(directory))
    values = {name: value for name, value in files.config.items() if name not in ignore_fields}
    family = find_family(values)
    if architecture is not None:
        values = values | {"architectures": [architecture]}
    name, head = family.head_of(values)
    config = family.read(values, head)
    if config.embedding.tie and _is_untied(files, family, head):
        config = config.replace(**{"embedding.tie": False})
    dtype = _check_dtype(dtype) if dtype is not None else _usual_dtype(files)
    config = config.replace(dtype=dtype, param_dtype=dtype)
    _check_sizes(files, config)
    model = head.model(config, execution)
    tokenizer = None
    if files.place(TOKENIZER_FILE) is not None:
        tokenizer = load_pretrained_tokenizer(directory, config.vocab_size)
    generation = files.json("generation_config.json") or files.config
    params = _read_params(files, family, name, model, mesh)
    return Pretrained(model, params, family, name, files.config, directory, tokenizer, generation)


def verify(directory: str | os.PathLike) -> float:
    """Loads a directory that `save_pretrained` wrote, which compares its files with their checksums, and compares the
    logits of its example with those that it had then.

    Returns:
        The largest difference of a logit, as a share of the largest of them.

    Raises:
        ConfigError: a directory without an example.
        WeightsError: files that have changed, or logits that differ by more than the tolerance of their dtype.
    """
    values = read_integrity(directory)
    example = None if values is None else values.get("example")
    if example is None:
        raise ConfigError(
            f"{directory} has no expected logits to compare with. They are in {INTEGRITY_FILE} of directories that "
            f"transformer.save or `convert` wrote, of models with at most {MAX_EXAMPLE_BYTES // 2**30} GiB."
        )
    loaded = load_pretrained(directory, dtype=example_dtype(directory, example))
    return compare_example(directory, example, loaded.model, loaded.params)


def _is_untied(files: WeightFiles, family: Family, head: Head) -> bool:
    name = head.untied_by
    if name not in files.tensors or family.copies[name] not in files.tensors:
        return False
    return not np.array_equal(files.read(name), files.read(family.copies[name]))


def _check_sizes(files: WeightFiles, config: TransformerConfig) -> None:
    """ConfigError for a size that no axis of a tensor can have, before anything is made that is as large."""
    largest = max((math.prod(tensor.shape) for tensor in files.tensors.values()), default=0)
    sizes = {
        "vocab_size": config.vocab_size,
        "embedding.source_vocab_size": config.embedding.source_vocab_size,
        "d_model": config.d_model,
        "d_ff": config.feed_forward_width,
        "num_heads x head_dim": config.num_heads * config.size_of_head,
        "max_length": config.max_length,
        "embedding.source_max_length": config.embedding.source_max_length,
        "output.num_classes": config.output.num_classes,
    }
    # What is small enough is left to the list of all that doesn't fit.
    told = [f"{name} is {size}" for name, size in sizes.items() if size is not None and size > max(largest, 2**20)]
    if told:
        raise ConfigError(
            f"config.json in {files.directory} describes a larger model than the tensors beside it: {', '.join(told)}, "
            f"but the largest tensor has {largest} numbers. Check that the files belong together; nothing was loaded."
        )


def as_in_files(files: WeightFiles, family: Family, links: Sequence[Link]) -> tuple[list[Link], dict[str, str]]:
    """The links, and what is a copy of what, by the names that the files have: with or without a prefix, and a tied
    tensor perhaps under the name of a copy alone.
    """
    named = family.names_in(files.tensors)
    links = rename(links, named)
    copies = {named(copy): named(of) for copy, of in family.copies.items()}
    expected = {name for one in links for name in one.tensors}
    spare = {copy: of for copy, of in copies.items() if copy in files.tensors and copy not in expected}
    found = {of: copy for copy, of in spare.items() if of not in files.tensors}
    return rename(links, lambda name: found.get(name, name)), {copy: found.get(of, of) for copy, of in copies.items()}


def _read_params(files: WeightFiles, family: Family, architecture: str, model: nn.Module, mesh: Mesh | None) -> Any:
    expected_params = abstract_params(model)
    shapes = parameter_shapes(expected_params)
    # Not all are of the config's type: there are some that only float32 can hold.
    dtypes = parameter_dtypes(expected_params)
    links = family.links(model, architecture, shapes)
    if faults := uncovered(links, shapes):
        raise ConfigError(
            f"{family.title} has no tensors for these parameters of the model: {', '.join(faults)}. Its config.json "
            f"asks for something that the family doesn't have."
        )
    links, copies = as_in_files(files, family, links)
    ignored = (*family.ignored, *family.heads[architecture].ignored)
    check_complete(files, links, shapes, ignored, copies)
    if mesh is None:
        return load_params(files, links, shapes, dtypes, lambda path, array: jax.device_put(array))
    if missing := [axis for axis in AXES if axis not in mesh.shape]:
        raise ConfigError(
            f"mesh must have the axes {', '.join(AXES)}, got {', '.join(map(str, mesh.shape))}: {', '.join(missing)} "
            f"missing. Make it with transformer.nn._sharding.make_mesh."
        )
    check_model(model.config, mesh.shape)

    def place(path: str, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, parameter_spec(path, array.shape, mesh.shape)))

    return load_params(files, links, shapes, dtypes, place)


def _check_dtype(dtype: str) -> str:
    try:
        name = str(jnp.dtype(dtype))
    except TypeError:  # no dtype at all
        name = None
    if name not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    return name


def _usual_dtype(files: WeightFiles) -> str:
    numbers: Counter[str] = Counter()
    for tensor in files.tensors.values():
        numbers[str(tensor.dtype)] += int(np.prod(tensor.shape, dtype=np.int64))
    usual = [name for name, _ in numbers.most_common() if name in DTYPES]
    return usual[0] if usual else "float32"


def choose_family(model: nn.Module, family: str | None = None) -> tuple[Family, str, dict[str, Any]]:
    """The family, architecture and config.json that say what this model is; of several, the first in `ENTRIES`.

    Raises:
        NoCounterpart: none does; for the one that comes nearest, the fields that have no counterpart there.
        ConfigError: an unknown family, or one without models of this kind.
    """
    if family is not None and family not in ENTRIES:
        raise ConfigError(f"there is no family {family!r}.{nearest(family, ENTRIES)} There are {', '.join(ENTRIES)}.")
    refusals: list[NoCounterpart] = []
    for one in ENTRIES.values() if family is None else [ENTRIES[family]]:
        for name, head in one.heads.items():
            if head.model is not type(model):
                continue
            try:
                return one, name, one.write(model.config, name)
            except NoCounterpart as error:
                refusals.append(error)
    if not refusals:
        where = f"{ENTRIES[family].title} has" if family else "no family here has"
        raise ConfigError(f"{where} a model of the kind {type(model).__name__}, so that it can't be saved as one.")
    nearest_one = min(refusals, key=lambda refusal: refusal.differences)
    known = "an architecture of the transformers library that is known here"
    where = known if family is None else ENTRIES[family].title
    raise NoCounterpart(f"the model can't be saved as {where}. The nearest: {nearest_one}", nearest_one.differences)


def save_pretrained(
    model: nn.Module,
    params: Any,
    directory: str | os.PathLike,
    *,
    family: str | None = None,
    fields: Mapping[str, Any] | None = None,
    tokenizer: PretrainedTokenizer | None = None,
    max_shard_bytes: int = 5 * 2**30,
) -> Path:
    """Writes config.json, safetensors and perhaps the tokenizer, as the rest of the world reads them; gives the path.

    Beside them, integrity.json has the checksums of the files, which `load_pretrained` compares, and the logits of a
    short input, which `verify` compares.

    Args:
        params: without the outer "params".
        family: as which to save; None: the first that has all that the model has.
        fields: more of config.json, such as `eos_token_id`: what changes nothing of the computation.
        tokenizer: saved beside them.

    Raises:
        ConfigError: no family has all of it, parameters that are not the model's or not finite, fields that are not
            free.
        WeightsError: the directory is not empty.
    """
    chosen, architecture, values = choose_family(model, family)
    if strange := sorted(set(fields or {}) - NEUTRAL - {"max_position_embeddings"}):
        raise ConfigError(f"fields may only be such as change nothing of the computation, got {', '.join(strange)}.")
    shapes, given = parameter_shapes(abstract_params(model)), parameter_shapes(params)
    if shapes != given:
        faults = sorted(
            f"{path} {given.get(path)}, expected {shapes.get(path)}"
            for path in shapes.keys() | given.keys()
            if shapes.get(path) != given.get(path)
        )
        raise ConfigError(f"these are not the parameters of this model: {'; '.join(faults[:10])}.")
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    if broken := [path for path, leaf in flat.items() if first_non_finite(np.asarray(leaf)) is not None]:
        raise ConfigError(
            f"these parameters hold NaN or infinity, which nobody could load: {', '.join(broken[:10])}. Take an "
            f"earlier checkpoint."
        )
    links = chosen.links(model, architecture, shapes)
    if faults := uncovered(links, shapes):
        raise ConfigError(f"{chosen.title} has no tensors for {', '.join(faults)}.")
    if chosen.heads[architecture].base:
        links = rename(links, chosen.without_prefix)
    dtypes = Counter(str(leaf.dtype) for leaf in jax.tree.leaves(params))
    values = values | {"dtype": dtypes.most_common(1)[0][0]} | dict(fields or {})
    if canonical(chosen.read(values, chosen.heads[architecture])) != canonical(model.config):
        raise ConfigError(f"the fields {', '.join(fields or {})} change what the model is. Leave them out.")
    write_weights(directory, values, saved_tensors(links, params), max_shard_bytes=max_shard_bytes)
    if tokenizer is not None:
        tokenizer.save(directory)
    write_integrity(directory, make_example(model, params, values["dtype"]))
    return Path(directory)
