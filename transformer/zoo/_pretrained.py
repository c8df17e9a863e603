"""Loading and saving of pretrained models as directories of config.json, safetensors and tokenizer files."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from transformer.config._checks import ConfigError, nearest, shortened
from transformer.config._execution import Execution
from transformer.config._local_paths import local_path
from transformer.config._model import TransformerConfig
from transformer.data.tokenizers._pretrained import PretrainedTokenizer
from transformer.nn._sharding import AXES, check_model, parameter_spec
from transformer.nn.quantization._adapted import has_encoded
from transformer.nn.quantization._int8 import quantize
from transformer.zoo._example import MAX_EXAMPLE_BYTES, compare_example, example_dtype, make_example
from transformer.zoo._family import Family, Head, NoCounterpart, Variant, abstract_params, canonical, rename, rules_of
from transformer.zoo._fields import NEUTRAL
from transformer.zoo._formats import open_tokenizer, open_weights
from transformer.zoo._gguf import is_gguf
from transformer.zoo._quantized_models import arrays_by_name, load_quantized, quantization_fields, quantization_of
from transformer.zoo.families import ENTRIES
from transformer.zoo.weights._conversion import (
    check_complete,
    load_params,
    parameter_dtypes,
    parameter_shapes,
    saved_tensors,
)
from transformer.zoo.weights._files import TensorInfo, WeightFiles, first_non_finite, write_weights
from transformer.zoo.weights._hub import fetch
from transformer.zoo.weights._integrity import INTEGRITY_FILE, checked, read_integrity, write_integrity
from transformer.zoo.weights._quantized import FIELD
from transformer.zoo.weights._rules import Link, Rule, uncovered

DTYPES = ("float32", "bfloat16", "float16")
"""Supported dtypes of parameters."""

MAX_TRIED = 8
"""Maximum number of families that an error message lists."""


@dataclass(frozen=True)
class Pretrained:
    """A model that was loaded from a directory of pretrained weights, or from a GGUF file."""

    model: nn.Module
    params: PyTree
    """Parameters, without the outer "params"."""
    family: Family
    architecture: str
    """Architecture name, as in config.json."""
    fields: Mapping[str, Any]
    """The contents of config.json; for a GGUF file, those that describe the same model."""
    directory: Path
    """The directory, or the GGUF file."""
    tokenizer: PretrainedTokenizer | None
    """None: the directory has no tokenizer.json, or the GGUF file no tokenizer of a supported kind."""
    generation: Mapping[str, Any]
    """Generation options of the authors: generation_config.json, or config.json if it is missing."""
    mantissa_bits: int = 0
    """Largest number of mantissa bits of the tensors that were read; `params` of a dtype with fewer are rounded."""


def find_family(values: Mapping[str, Any]) -> Family:
    """Return the family of a config.json, according to its model_type.

    Raises:
        ConfigError: no family supports this model_type.
    """
    kind = values.get("model_type")
    for family in ENTRIES.values():
        if kind == family.name or kind in family.aliases:
            return family
    families = list(ENTRIES.values())
    if isinstance(values.get("vision_config"), dict) and values.get("text_config") is not None:
        families = [one for one in families if one.image_text is not None]
    names = [name for family in families for name in (family.name, *family.aliases)]
    what = "Supported with text and images" if len(families) < len(ENTRIES) else "Supported"
    raise ConfigError(
        f"model_type is {kind!r:.80} in config.json, which is not supported.{nearest(str(kind), names)} {what} are "
        f"{', '.join(names)} (python -m transformer list)."
    )


def find_variant(name: str) -> tuple[Family, Variant] | None:
    """Return the family and the variant of this name, or None."""
    for family in ENTRIES.values():
        if name in family.variants:
            return family, family.variants[name]
    return None


def build(name: str, execution: Execution = Execution()) -> nn.Module:
    """Return the model of a named variant, without weights, such as `build("gpt2")`.

    Raises:
        ConfigError: no variant has this name.
    """
    found = find_variant(name)
    if found is None:
        names = [variant for family in ENTRIES.values() for variant in family.variants]
        raise ConfigError(
            f"unknown variant {name!r}.{nearest(name, names)} `python -m transformer list` prints all variants."
        )
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
    tokenizer: str | os.PathLike | None = None,
) -> Pretrained:
    """Load a pretrained model from a directory, from a GGUF file or from the Hugging Face hub.

    The directory contains config.json, safetensors files and optionally tokenizer.json. Without safetensors files,
    flax_model.msgpack is read, the file of transformers' Flax classes, or an Orbax checkpoint of gemma.

    Args:
        source: a directory, a file whose name ends in .gguf, a hub id such as "openai-community/gpt2", or a variant
            such as "gpt2".
        dtype: dtype of parameters and activations; None: the dtype of most numbers in the files.
        mesh: device mesh on which the parameters are sharded as they are loaded; None: the default device.
        architecture: overrides the architecture in config.json, such as "BertModel".
        ignore_fields: unknown fields of config.json that do not affect the computation.
        revision: branch, tag or commit on the hub.
        execution: execution options of the model.
        tokenizer: directory with a tokenizer to use instead of that of the source.

    Raises:
        FileNotFoundError: the directory does not exist.
        ValueError: a config.json, tensors or a tokenizer that are damaged, unsafe, incomplete or unsupported, or that
            have changed since `save_pretrained` wrote them. The message lists all problems; nothing is loaded.
    """
    local_path(source, "source")
    if tokenizer is not None:
        local_path(tokenizer, "tokenizer")
    if is_gguf(source):
        directory, check = source, contextlib.nullcontext()
    else:
        variant = find_variant(str(source)) if not Path(source).is_dir() else None
        variants = [name for family in ENTRIES.values() for name in family.variants]
        directory = fetch(source if variant is None else variant[1].hub, revision, known=variants)
        check = checked(directory)
    with check:
        files = open_weights(directory, ignore_fields)
        return _load(files, dtype, mesh, architecture, ignore_fields, execution, tokenizer)


def _load(
    files: WeightFiles,
    dtype: str | None,
    mesh: Mesh | None,
    architecture: str | None,
    ignore_fields: Sequence[str],
    execution: Execution,
    tokenizer: str | os.PathLike | None,
) -> Pretrained:
    packed = quantization_of(files.config)
    ignore_fields = [*ignore_fields, *([] if packed is None else [FIELD])]
    values = {name: value for name, value in files.config.items() if name not in ignore_fields}
    family = find_family(values)
    if architecture is not None:
        values = values | {"architectures": [architecture]}
    name, head = family.head_of(values)
    if _is_untied(files, family, head):
        values = values | {"tie_word_embeddings": False}
    if architecture is None and (base := _base_of(files, family, values, head)) is not None:
        name, head = base
    config = family.with_optional(family.read(values, head), head, files.tensors)
    usual = usual_dtype(files.tensors) if packed is None else values.get("dtype", "float32")
    dtype = check_dtype(usual if dtype is None else dtype)
    config = config.replace(dtype=dtype, **{"parameters.dtype": dtype})
    _check_sizes(files, config)
    model = head.model(config, execution)
    read = open_tokenizer(files, config.vocab_size, tokenizer)
    generation = files.json("generation_config.json") or files.config
    if packed is not None and mesh is not None:
        raise ConfigError(
            f"the weights in {files.directory} are quantized, and quantized weights are not sharded. Omit mesh, or "
            f"load the original weights."
        )
    params = _read_params(files, family, name, model, mesh) if packed is None else load_quantized(files, model, *packed)
    return Pretrained(
        model, params, family, name, files.config, files.directory, read, generation, mantissa_bits(files)
    )


def verify(directory: str | os.PathLike) -> float:
    """Check that a directory written by `save_pretrained` still gives the same logits.

    Loading compares the files with their checksums. Then the logits of the stored example are recomputed.

    Returns:
        The largest difference of a logit, relative to the largest expected logit.

    Raises:
        ConfigError: the directory has no example.
        WeightsError: files have changed, or logits differ by more than the tolerance of their dtype.
    """
    values = read_integrity(local_path(directory, "directory"))
    example = None if values is None else values.get("example")
    if example is None:
        raise ConfigError(
            f"{directory} has no expected logits to compare with. transformer.save and `convert` write them to "
            f"{INTEGRITY_FILE} for models of at most {MAX_EXAMPLE_BYTES // 2**30} GiB."
        )
    loaded = load_pretrained(directory, dtype=example_dtype(directory, example))
    return compare_example(directory, example, loaded.model, loaded.params)


def _base_of(files: WeightFiles, family: Family, values: Mapping[str, Any], head: Head) -> tuple[str, Head] | None:
    """Return the base model and its name, if the files contain a base model under the name of one with a head.

    An example is Qwen/Qwen3-Embedding-8B. A language model with tied embeddings needs no own tensors.
    """
    bases = [(name, one) for name, one in family.heads.items() if one.base]
    config = family.read(values, head)
    if len(bases) != 1 or config.embedding.tie:
        return None
    own = _tensors_of(head.rules)
    others = {family.without_prefix(name) for name in _tensors_of(rules_of(family.rules, config))}
    has_prefix = any(name.startswith(family.prefix) for name in files.tensors)
    if has_prefix or not own or not own.isdisjoint(files.tensors) or others.isdisjoint(files.tensors):
        return None
    warnings.warn(
        f"{files.directory} has no {', '.join(sorted(own))}, so it is loaded as {bases[0][0]}, which has no head: for "
        "embeddings. Pass architecture= for another one.",
        stacklevel=2,
    )
    return bases[0]


def _tensors_of(rules: Sequence[Rule]) -> set[str]:
    return {name for one in rules for name in ([one.tensors] if isinstance(one.tensors, str) else one.tensors)}


def _is_untied(files: WeightFiles, family: Family, head: Head) -> bool:
    """Return whether the files have their own output kernel, regardless of config.json.

    transformers 5 writes `tie_word_embeddings: true` for all models of T5, mT5 and umT5. An output map of its own is
    that of version 1.1, whose inputs are not scaled, unless config.json has a field for the scaling.
    """
    name = head.untied_by
    if name not in files.tensors or family.copies[name] not in files.tensors:
        return False
    return not np.array_equal(files.read(name), files.read(family.copies[name]))


def _check_sizes(files: WeightFiles, config: TransformerConfig) -> None:
    """Raise ConfigError for sizes that exceed every tensor, before anything of that size is allocated."""
    largest = max((math.prod(tensor.shape) for tensor in files.tensors.values()), default=0)
    sizes = {
        "vocab_size": config.vocab_size,
        "embedding.source_vocab_size": config.embedding.source_vocab_size,
        "d_model": config.d_model,
        "feed_forward.d_ff": config.feed_forward_width,
        "num_heads x head_dim": config.num_heads * config.size_of_head,
        "position.max_length": config.max_length,
        "position.source_max_length": config.longest_source,
        "output.num_classes": config.output.num_classes,
    }
    # Smaller mismatches are reported by `check_complete`, which lists every tensor that does not fit.
    exceeding = [f"{name} is {size}" for name, size in sizes.items() if size is not None and size > max(largest, 2**20)]
    if exceeding:
        raise ConfigError(
            f"{files.config_file} in {files.directory} describes a larger model than its tensors: "
            f"{', '.join(exceeding)}, but the largest tensor has {largest} elements. Check that the files belong "
            f"together. Nothing was loaded."
        )


def as_in_files(files: WeightFiles, family: Family, links: Sequence[Link]) -> tuple[list[Link], dict[str, str]]:
    """Return the links and the copies of tied tensors, renamed to the names in the files.

    Files may omit the family's prefix, and may store a tied tensor only under the name of its copy.
    """
    named = family.names_in(files.tensors)
    links = rename(links, named)
    copies = {named(copy): named(of) for copy, of in family.copies.items()}
    expected = {name for one in links for name in one.tensors}
    spare = {copy: of for copy, of in copies.items() if copy in files.tensors and copy not in expected}
    found = {of: copy for copy, of in spare.items() if of not in files.tensors}
    return rename(links, lambda name: found.get(name, name)), {copy: found.get(of, of) for copy, of in copies.items()}


def _read_params(files: WeightFiles, family: Family, architecture: str, model: nn.Module, mesh: Mesh | None) -> PyTree:
    expected_params = abstract_params(model)
    shapes = parameter_shapes(expected_params)
    # Dtypes per parameter: a few parameters need float32 whatever the dtype of the config is.
    dtypes = parameter_dtypes(expected_params)
    links = family.links(model, architecture, shapes)
    if faults := uncovered(links, shapes):
        raise ConfigError(
            f"{family.title} has no tensors for these parameters of the model: {', '.join(faults)}. config.json "
            f"specifies a feature that the family does not have."
        )
    links, copies = as_in_files(files, family, links)
    ignored = (*family.ignored, *family.heads[architecture].ignored)
    check_complete(files, links, shapes, ignored, copies)
    if mesh is None:
        return load_params(files, links, shapes, dtypes, lambda path, array: jax.device_put(array))
    if missing := [axis for axis in AXES if axis not in mesh.shape]:
        raise ConfigError(
            f"mesh must have the axes {', '.join(AXES)}, got {', '.join(map(str, mesh.shape))}: {', '.join(missing)} "
            f"missing. Create it with transformer.nn._sharding.make_mesh."
        )
    check_model(model.config, mesh.shape)

    def place(path: str, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, parameter_spec(path, array.shape, mesh.shape)))

    return load_params(files, links, shapes, dtypes, place)


def check_dtype(dtype: str) -> str:
    """Return the name of a dtype that parameters may have; raise ConfigError for any other."""
    try:
        name = str(jnp.dtype(dtype))
    except TypeError:  # not a dtype
        name = None
    if name not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    return name


def usual_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """Return the dtype of most numbers in these tensors."""
    numbers: Counter[str] = Counter()
    for tensor in tensors.values():
        numbers[str(tensor.dtype)] += int(np.prod(tensor.shape, dtype=np.int64))
    usual = [name for name, _ in numbers.most_common() if name in DTYPES]
    return usual[0] if usual else "float32"


def mantissa_bits(files: WeightFiles) -> int:
    """Return the largest number of mantissa bits of the floating-point tensors, after dequantization."""
    dtypes = {files.dtype_read(name) for name in files.tensors}
    return max((jnp.finfo(dtype).nmant for dtype in dtypes if dtype.kind not in "biuc"), default=0)


def choose_family(model: nn.Module, family: str | None = None) -> tuple[Family, str, dict[str, Any]]:
    """Return the family, architecture and config.json that describe this model.

    If several families can describe it, the first in `ENTRIES` is chosen.

    Args:
        model: the model to describe.
        family: name of the family; None: any family.

    Raises:
        NoCounterpart: no family can describe the model; the message names the unsupported fields of the closest one.
        ConfigError: an unknown family, or a family without models of this class.
    """
    if family is not None and family not in ENTRIES:
        raise ConfigError(f"unknown family {family!r}.{nearest(family, ENTRIES)} Supported are {', '.join(ENTRIES)}.")
    refusals: list[NoCounterpart] = []
    tried: list[str] = []
    for one in ENTRIES.values() if family is None else [ENTRIES[family]]:
        for name, head in one.heads.items():
            if head.model is not type(model):
                continue
            try:
                return one, name, one.write(model.config, name)
            except NoCounterpart as error:
                refusals.append(error)
                tried += [] if one.title in tried else [one.title]
    if not refusals:
        where = f"{ENTRIES[family].title} has no" if family else "no family has a"
        raise ConfigError(f"{where} model of the class {type(model).__name__}, so this model can't be saved.")
    closest = min(refusals, key=lambda refusal: refusal.differences)
    known = "any supported architecture of the transformers library"
    where = known if family is None else ENTRIES[family].title
    raise NoCounterpart(
        f"the model can't be saved as {where}. The closest: {closest} Tried: {shortened(tried, MAX_TRIED)}. "
        f"Train with a config that one of them has. family= lists the differences to one family.",
        closest.differences,
    )


def save_pretrained(
    model: nn.Module,
    params: PyTree,
    directory: str | os.PathLike,
    *,
    family: str | None = None,
    fields: Mapping[str, Any] | None = None,
    tokenizer: PretrainedTokenizer | None = None,
    max_shard_bytes: int = 5 * 2**30,
    quantization: tuple[Literal[4, 8], int] | None = None,
) -> Path:
    """Save a model in the Hugging Face format: config.json, safetensors and optionally the tokenizer.

    The file integrity.json is written, too. It holds checksums of the files, which `load_pretrained` compares, and the
    logits of a short input, which `verify` compares.

    Args:
        model: the model to save.
        params: its parameters, without the outer "params".
        directory: new or empty directory.
        family: family in whose format the model is saved; None: the first one that can describe the model.
        fields: additional fields of config.json that do not affect the computation, such as `eos_token_id`.
        tokenizer: tokenizer to save with the model.
        max_shard_bytes: maximum size of a safetensors file.
        quantization: bits and group size of `nn.quantize`, with which the weights are saved and loaded; other programs
            can't read them. None: the weights are saved as they are.

    Returns:
        The path of the directory.

    Raises:
        ConfigError: no family can describe the model, the parameters do not fit the model or are not finite, or
            `fields` contains a field that affects the computation.
        WeightsError: the directory is not empty.
    """
    directory = local_path(directory, "directory")
    chosen, architecture, values = choose_family(model, family)
    if strange := sorted(set(fields or {}) - NEUTRAL - {"max_position_embeddings"}):
        raise ConfigError(f"fields must not affect the computation, got {', '.join(strange)}. Leave them out.")
    shapes = _check_params(model, params)
    links = chosen.links(model, architecture, shapes)
    if faults := uncovered(links, shapes):
        raise ConfigError(f"{chosen.title} has no tensors for these parameters: {', '.join(faults)}.")
    if chosen.heads[architecture].base:
        links = rename(links, chosen.without_prefix)
    dtypes = Counter(str(leaf.dtype) for leaf in jax.tree.leaves(params))
    values = values | {"dtype": dtypes.most_common(1)[0][0]} | dict(fields or {})
    if canonical(chosen.read_back(values, chosen.heads[architecture], model.config)) != canonical(model.config):
        raise ConfigError(f"the fields {', '.join(fields or {})} change the model config. Leave them out.")
    tensors = saved_tensors(links, params)
    if quantization is not None:
        params, _ = quantize(params, bits=quantization[0], group_size=quantization[1])
        tensors = arrays_by_name(jax.tree.map(np.asarray, params)).items()
    config = values if quantization is None else values | quantization_fields(*quantization)
    write_weights(directory, config, tensors, max_shard_bytes=max_shard_bytes)
    if tokenizer is not None:
        tokenizer.save(directory)
    write_integrity(directory, make_example(model, params, values["dtype"]))
    return directory


def _check_params(model: nn.Module, params: PyTree) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters by path; raise ConfigError if they don't fit the model or are not finite."""
    if has_encoded(params):
        raise ConfigError(
            "these parameters are quantized or have updates, which this format can't store. Save the original "
            "parameters, with quantization= to quantize them, or dequantize them: `convert`, or `LoadedModel.merged`."
        )
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
            f"these parameters contain NaN or infinity and could not be loaded again: {', '.join(broken[:10])}. Use an "
            f"earlier checkpoint."
        )
    return shapes
