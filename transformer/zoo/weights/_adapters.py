"""LoRA adapters in the format of the PEFT library: adapter_config.json and adapter_model.safetensors.

PEFT stores, for a torch module with the matrix (out, in), `lora_A` (r, in), `lora_B` (out, r) and, with DoRA,
`lora_magnitude_vector` (out). The rules that map the matrix to kernels map its rows to their outputs here. If a torch
module fuses several kernels, such as queries, keys and values, their updates are stacked: `lora_A` has the rows of all
of them, and `lora_B` is zero where an output does not use a row.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import flax.traverse_util
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from transformer.config._checks import ConfigError, shortened
from transformer.config._local_paths import local_path
from transformer.nn._parameter_axes import axes_of
from transformer.nn.quantization._adapted import Adapted, dense, output_norms
from transformer.zoo.weights._files import AdapterFiles, WeightsError, first_non_finite, write_weights
from transformer.zoo.weights._rules import Fused, FusedByHead, Link, Relation, Reshaped, Shape, Target

PREFIX = "base_model.model."
"""prefix that PEFT puts before the name of a module"""

_UNSUPPORTED = (
    *("lora_bias", "use_qalora", "use_bdlora", "target_parameters", "trainable_token_indices", "layer_replication"),
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "velora_config", "monteclora_config"),
)
"""fields of adapter_config.json that change the function of an adapter; PEFT's defaults for them are empty"""

_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
"""values of init_lora_weights that leave the weights of the base model unchanged. Others (pissa, olora, corda, loftq,
lora_ga) subtract the initial update from them, so that the stored update belongs to weights that no file contains."""

_PATTERN = r"(.*\.)?({})$"
"""how a key of rank_pattern and alpha_pattern matches the name of a module, as in PEFT"""
_MERGE = "Merge the adapter with PEFT (merge_and_unload), and load the merged weights."
_SHOWN = 10
"""maximum number of problems that a message lists"""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Low-rank updates of a model's kernels, and parameters that replace those of the model."""

    updates: Mapping[str, Mapping[str, Any]]
    """path of a linear layer -> `a` (..., I, r), `b` (..., r, O) and, with DoRA, `magnitude` (..., O)"""
    rank: int
    """r"""
    alpha: float
    """the updates are multiplied by alpha / r, with `rslora` by alpha / sqrt(r)"""
    rslora: bool = False
    new: Mapping[str, Any] = field(default_factory=dict)
    """path -> parameter that replaces that of the model"""

    @property
    def scale(self) -> float:
        """Factor of the updates."""
        return _scale(self.alpha, self.rank, self.rslora)

    def applied_to(self, params: PyTree) -> PyTree:
        """Return a model's parameters with these updates; the kernels of the model are shared, not copied."""
        flat = flax.traverse_util.flatten_dict(params, sep="/") | dict(self.new)
        for path, update in self.updates.items():
            parts = {name: jnp.asarray(array) for name, array in update.items()}
            kernel = flat[f"{path}/kernel"]
            flat[f"{path}/kernel"] = Adapted(kernel, parts["a"], parts["b"], parts.get("magnitude"), self.scale)
        return flax.traverse_util.unflatten_dict(flat, sep="/")


def _scale(alpha: float, rank: int, rslora: bool) -> float:
    return alpha / (math.sqrt(rank) if rslora else rank)


@dataclass(frozen=True)
class _Module:
    """A torch module with a matrix, and the kernels that the matrix contains."""

    name: str
    link: Link
    inputs: int
    """size of the input"""
    outputs: tuple[Shape, ...]
    """output axes of each kernel"""
    rows: Relation
    """relation between the matrix (out, r) and kernels (r, *out)"""
    transposed: bool
    """whether torch stores the matrix as (in, out)"""

    @property
    def sizes(self) -> list[int]:
        """Number of outputs of each kernel."""
        return [math.prod(shape) for shape in self.outputs]

    def split(self, matrix: np.ndarray) -> list[np.ndarray]:
        """Split a matrix (out, r) into one (r, O) per kernel."""
        rank = matrix.shape[1]
        parts = self.rows.load([matrix], [(rank, *shape) for shape in self.outputs])
        return [part.reshape(rank, -1) for part in parts]

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Join one (r, O) per kernel to a matrix (out, r), the inverse of `split`."""
        kernels = [part.reshape(-1, *shape) for part, shape in zip(parts, self.outputs, strict=True)]
        return np.ascontiguousarray(self.rows.save(kernels)[0])


def _modules(links: Sequence[Link], shapes: Mapping[str, Shape]) -> Iterator[_Module]:
    """Yield the torch modules whose matrix is made of kernels of linear layers, one tensor and one layer each."""
    for one in links:
        kernels = one.shapes(shapes)
        found = [axes_of(target.path, len(shapes[target.path])) for target in one.targets]
        if len(one.tensors) != 1 or not one.tensors[0].endswith(".weight"):
            continue
        if any(axes is None or axes.role != "hidden" or not axes.inputs for axes in found):
            continue
        rows, each = _rows(one.relation), one.relation
        each = each.each if isinstance(each, Fused | FusedByHead) else each
        if rows is None or any("expert" in axes.names for axes in found):
            continue  # the transformers library has no module for each expert
        inputs = len(found[0].inputs)
        yield _Module(
            one.tensors[0].removesuffix(".weight"),
            one,
            math.prod(kernels[0][:inputs]),
            tuple(kernel[inputs:] for kernel in kernels),
            rows,
            isinstance(each, Reshaped) and not each.transposed,
        )


def _rows(relation: Relation) -> Relation | None:
    """Return the relation between a matrix (out, r) and kernels (r, *out), given that for matrices of weights."""
    if isinstance(relation, Reshaped) and relation.inputs:
        return Reshaped(1, transposed=True)
    if isinstance(relation, Fused | FusedByHead):
        each = _rows(relation.each)
        return None if each is None else Fused(0, each) if isinstance(relation, Fused) else FusedByHead(each)
    return None


def _layer(target: Target) -> str:
    return target.path.removesuffix("/kernel")


def write_adapter(
    directory: str | os.PathLike,
    adapter: Adapter,
    links: Sequence[Link],
    params: PyTree,
    *,
    base: str | None = None,
    task: str | None = None,
    copies: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write an adapter for a model in the format of PEFT.

    Of the parameters, only shapes are read, and with DoRA those kernels that a torch module fuses with updated ones.
    `base` is the name or directory of the model that the adapter is for, and `task` PEFT's task type, such as
    "CAUSAL_LM". `copies` are tensors of other torch modules with the same values -> the tensor of `links`: PEFT trains
    and loads each module on its own, so that an adapter needs all of them. ConfigError names layers whose updates
    PEFT's format can't express; WeightsError if the directory is not empty.
    """
    directory = local_path(directory, "directory")
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    shapes = {path: tuple(leaf.shape) for path, leaf in flat.items()}
    tensors, modules, ranks = _low_rank_tensors(adapter, _modules(links, shapes), flat)
    written = {_layer(target) for module in modules for target in module.link.targets}
    if missing := sorted(set(adapter.updates) - written):
        raise ConfigError(
            f"PEFT's format has no place for the updates of {shortened(missing, _SHOWN)}: the transformers library has "
            f"no linear module there (it stores the experts of a layer as one parameter). Export merged weights "
            f"instead."
        )
    whole, saved = _whole_tensors(adapter.new, links, shapes, copies)
    scales = {name: math.sqrt(rank) if adapter.rslora else rank for name, rank in ranks.items()}
    config = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "rank_pattern": ranks,
        "alpha_pattern": {name: adapter.scale * scale for name, scale in scales.items()},
        "target_modules": [module.name for module in modules],
        "use_rslora": adapter.rslora,
        "use_dora": any("magnitude" in update for update in adapter.updates.values()),
        "fan_in_fan_out": any(module.transposed for module in modules),
        "modules_to_save": saved or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    write_weights(directory, config, tensors | whole, max_shard_bytes=2**62, kind=AdapterFiles)


def _low_rank_tensors(adapter: Adapter, modules: Iterable[Any], flat: Mapping[str, Any]) -> tuple[dict, list, dict]:
    """Return the tensors of all updated modules, these modules, and the ranks that differ from the adapter's."""
    tensors, updated, ranks = {}, [], {}
    for module in modules:
        parts = [_part(adapter, target) for target in module.link.targets]
        if all(part is None for part in parts):
            continue
        a, b = _stacked(module, parts)
        tensors[f"{PREFIX}{module.name}.lora_A.weight"] = a
        tensors[f"{PREFIX}{module.name}.lora_B.weight"] = b
        if any(part is not None and "magnitude" in part for part in parts):
            tensors[f"{PREFIX}{module.name}.lora_magnitude_vector"] = _magnitudes(module, parts, flat)
        updated.append(module)
        if len(a) != adapter.rank:
            ranks[module.name] = len(a)
    return tensors, updated, ranks


def _part(adapter: Adapter, target: Target) -> dict[str, np.ndarray] | None:
    """Return the arrays of the update of one kernel of one layer, or None if it has none."""
    update = adapter.updates.get(_layer(target))
    return None if update is None else {name: np.asarray(array)[target.index] for name, array in update.items()}


def _stacked(module: _Module, parts: Sequence[Mapping[str, np.ndarray] | None]) -> tuple[np.ndarray, np.ndarray]:
    """Return lora_A (R, in) and lora_B (out, R), where R is the sum of the ranks of all updates of a module."""
    total = sum(part["a"].shape[1] for part in parts if part is not None)
    rows, columns, start = [], [], 0
    for part, size in zip(parts, module.sizes, strict=True):
        b = np.zeros((total, size), np.float32)
        if part is not None:
            rows.append(part["a"].T)
            rank = part["a"].shape[1]
            b[start : start + rank] = part["b"]
            start += rank
        columns.append(b)
    return np.concatenate(rows).astype(np.float32), module.joined(columns)


def _magnitudes(module: _Module, parts: Sequence[Any], flat: Mapping[str, Any]) -> np.ndarray:
    """Return DoRA's magnitude of a module, (out,); that of a kernel without an update is the norm of its weights."""
    found = []
    for part, target, size in zip(parts, module.link.targets, module.sizes, strict=True):
        if part is None:
            kernel = dense(flat[target.path], jnp.float32)[target.index]
            given = output_norms(kernel, (module.inputs, size))
        else:
            given = part["magnitude"]
        found.append(np.asarray(given, np.float32)[None])
    return module.joined(found)[:, 0]


def _whole_tensors(
    new: Mapping[str, Any], links: Sequence[Link], shapes: Mapping[str, Shape], copies: Mapping[str, str]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the tensors of parameters that were trained whole, with their copies, and the names of their modules."""
    tensors, written = {}, set()
    for one in links:
        if any(target.path in new for target in one.targets):
            if any(target.path not in new for target in one.targets):
                raise ConfigError(
                    f"PEFT's format can't express {', '.join(one.tensors)}, of which only a part was trained. Export "
                    f"merged weights instead."
                )
            arrays = one.relation.save([np.asarray(new[target.path])[target.index] for target in one.targets])
            named = zip(one.tensors, arrays, strict=True)
            tensors |= {PREFIX + name: np.ascontiguousarray(array) for name, array in named}
            written |= {target.path for target in one.targets}
    if missing := sorted(set(new) - written):
        raise ConfigError(f"the family has no tensors for {shortened(missing, _SHOWN)}. Export merged weights instead.")
    tensors |= {PREFIX + copy: tensors[PREFIX + name] for copy, name in copies.items() if PREFIX + name in tensors}
    return tensors, sorted({name.removeprefix(PREFIX).rpartition(".")[0] for name in tensors})


def read_adapter(
    directory: str | os.PathLike,
    links: Sequence[Link],
    params: PyTree,
    *,
    prefix: str = "",
    title: str = "the model",
    copies: Mapping[str, str] = MappingProxyType({}),
) -> Adapter:
    """Read an adapter that PEFT or `write_adapter` wrote, for a model with these links and parameters.

    Files may omit `prefix` in names of tensors; `title` names the model in messages; `copies` as in `write_adapter`.
    Raises FileNotFoundError, WeightsError for damaged files or options that are not supported, or ConfigError for an
    adapter for another model, with the modules and their sizes.
    """
    files = AdapterFiles(directory)
    _check_config(files)
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    shapes = {path: tuple(leaf.shape) for path, leaf in flat.items()}
    grouped, whole = _grouped(files)
    modules = {module.name: module for module in _modules(links, shapes)}
    modules |= {name.removeprefix(prefix): module for name, module in modules.items()}
    problems, updates = [], {}
    for name, arrays in grouped.items():
        if name not in modules:
            problems.append(f"{name}: {title} has no such linear layer")
        elif fault := _misfit(name, arrays, modules[name], files.config):
            problems.append(fault)
        else:
            alpha = _pattern(files.config, "alpha_pattern", name, files.config["lora_alpha"])
            scale = _scale(alpha, len(arrays["a"]), bool(files.config.get("use_rslora")))
            _collect(updates, modules[name], arrays, scale)
    apart = _trained_apart(whole, copies, prefix)
    new, faults = _replaced(whole, links, shapes, prefix)
    if problems := problems + apart + faults:
        more = f"\n- and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        listed = "".join(f"\n- {problem}" for problem in problems[:_SHOWN])
        raise ConfigError(
            f"the adapter {directory} does not fit {title}:{listed}{more}\nUse the model that the adapter was trained "
            f"for ({files.config.get('base_model_name_or_path') or 'adapter_config.json does not name it'})."
        )
    return _joined(updates, new, flat, files.config)


def _joined(
    updates: Mapping[str, Any], new: Mapping[str, Any], flat: Mapping[str, Any], config: Mapping[str, Any]
) -> Adapter:
    """Return an adapter of the updates that `_collect` collected."""
    rank, alpha, rslora = config["r"], config["lora_alpha"], bool(config.get("use_rslora"))
    read = [update for layers in updates.values() for update in layers.values()]
    if any(update["scale"] != _scale(alpha, rank, rslora) for update in read):
        # Some modules have their own factor. An adapter has one for all, so the factors are multiplied into b.
        for update in read:
            update["b"] = update["b"] * update["scale"]
        alpha, rslora = rank, False
    found = {path: _over_layers(layers, flat[f"{path}/kernel"]) for path, layers in updates.items()}
    return Adapter(updates=found, new=new, rank=rank, alpha=alpha, rslora=rslora)


def _check_config(files: AdapterFiles) -> None:
    config, where = files.config, f"{files.directory}/{files.config_file}"
    if config.get("peft_type") != "LORA":
        raise WeightsError(f"peft_type in {where} must be 'LORA', got {config.get('peft_type')!r:.40}. {_MERGE}")
    for name, least in (("r", 1), ("lora_alpha", 0)):
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 2**31:
            raise WeightsError(
                f"{name} in {where} must be a number of at least {least}, got {value!r:.40}. Correct it."
            )
    if type(config["r"]) is not int:
        raise WeightsError(f"r in {where} must be an integer, got {config['r']!r:.40}. Correct it.")
    for name in ("rank_pattern", "alpha_pattern"):
        _check_patterns(config.get(name) or {}, f"{name} in {where}")
    given = [name for name in _UNSUPPORTED if config.get(name)]
    if given or config.get("bias", "none") != "none":
        raise WeightsError(f"{where} sets {', '.join(given) or 'bias'}, which is not supported. {_MERGE}")
    if (start := config.get("init_lora_weights")) not in _STARTS:
        raise WeightsError(
            f"init_lora_weights in {where} is {start!r:.40}: the update belongs to changed weights of the base model, "
            f"which the adapter does not contain; expected one of {', '.join(map(repr, _STARTS[1:]))}. Save the "
            f"adapter with PEFT's path_initial_model_for_weight_conversion, or merge it (merge_and_unload) and load "
            f"the merged weights."
        )


def _check_patterns(patterns: object, title: str) -> None:
    """Raise WeightsError unless `rank_pattern` or `alpha_pattern` maps valid patterns to numbers."""
    numbers = patterns.values() if isinstance(patterns, dict) else [None]
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
        raise WeightsError(f"{title} must map patterns to numbers, got {patterns!r:.80}. Correct it.")
    for key in patterns:
        try:
            re.compile(_PATTERN.format(key))
        except (re.error, OverflowError, RecursionError):
            raise WeightsError(f"{title} has the key {key!r:.80}: not a valid pattern. Correct it.") from None


def _grouped(files: AdapterFiles) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Read the tensors: module -> `a`, `b`, `magnitude` as PEFT stores them, and name -> tensor of whole parameters."""
    grouped: dict[str, dict[str, np.ndarray]] = {}
    whole = {}
    kinds = {"lora_A.weight": "a", "lora_B.weight": "b", "lora_magnitude_vector": "magnitude"}
    kinds |= {"lora_magnitude_vector.weight": "magnitude"}  # as older versions of PEFT name it
    for name in files.tensors:
        array = files.read(name)
        if first_non_finite(array) is not None:
            raise WeightsError(f"{files.directory}: tensor {name} has values that are not finite. Train it again.")
        short = name.removeprefix(PREFIX)
        kind = next((kind for kind in kinds if short.endswith(f".{kind}")), None)
        if kind is None:
            whole[short] = array
        else:
            module = short.removesuffix(f".{kind}")
            grouped.setdefault(module, {})[kinds[kind]] = np.asarray(array, np.float32)
    return grouped, whole


def _misfit(name: str, arrays: Mapping[str, np.ndarray], module: _Module, config: Mapping[str, Any]) -> str | None:
    """Return what does not fit in the tensors of a module, or None."""
    if not {"a", "b"} <= set(arrays):
        return f"{name}: lora_A and lora_B must both exist, got only {', '.join(sorted(arrays))}"
    if bool(config.get("use_dora")) != ("magnitude" in arrays):
        return f"{name}: use_dora is {bool(config.get('use_dora'))}, but the tensors say the opposite"
    rank, outputs = _pattern(config, "rank_pattern", name, config["r"]), sum(module.sizes)
    expected = {
        "a": ("lora_A", (rank, module.inputs)),
        "b": ("lora_B", (outputs, rank)),
        "magnitude": ("lora_magnitude_vector", (outputs,)),
    }
    wrong = [
        f"{tensor} {shape}, got {arrays[part].shape}"
        for part, (tensor, shape) in expected.items()
        if part in arrays and arrays[part].shape != shape
    ]
    return f"{name}: expected {'; '.join(wrong)}" if wrong else None


def _pattern(config: Mapping[str, Any], field: str, name: str, default: float) -> float:
    """Return the value of a module in rank_pattern or alpha_pattern, whose keys match the end of its name."""
    patterns = (config.get(field) or {}).items()
    return next((value for key, value in patterns if re.match(_PATTERN.format(key), name)), default)


def _collect(updates: dict[str, Any], module: _Module, arrays: Mapping[str, np.ndarray], scale: float) -> None:
    """Add the update of a module to those of its kernels: path -> index of the layer -> arrays."""
    magnitude = arrays.get("magnitude")
    magnitudes = [None] * len(module.sizes) if magnitude is None else module.split(magnitude[:, None])
    for target, b, m in zip(module.link.targets, module.split(arrays["b"]), magnitudes, strict=True):
        update = {"a": arrays["a"].T, "b": b, "scale": scale} | ({} if m is None else {"magnitude": m[0]})
        updates.setdefault(_layer(target), {})[target.index] = update


def _over_layers(layers: Mapping[tuple[int, ...], Any], kernel: PyTree) -> dict[str, np.ndarray]:
    """Stack the updates of all layers that share a kernel; missing updates, and the rest of lower ranks, are zeros."""
    first = next(iter(layers.values()))
    lead = kernel.shape[: len(next(iter(layers)))]
    rank = max(update["a"].shape[1] for update in layers.values())
    inputs, outputs = first["a"].shape[0], first["b"].shape[1]
    a = np.zeros((*lead, inputs, rank), np.float32)
    b = np.zeros((*lead, rank, outputs), np.float32)
    for index, update in layers.items():
        own = update["a"].shape[1]
        a[(*index, slice(None), slice(None, own))] = update["a"]
        b[(*index, slice(None, own))] = update["b"]
    arrays = {"a": a, "b": b}
    if "magnitude" in first:
        arrays["magnitude"] = np.array(output_norms(kernel, (*lead, inputs, outputs)))
        for index, update in layers.items():
            arrays["magnitude"][index] = update["magnitude"]
    return arrays


def _trained_apart(whole: dict[str, np.ndarray], copies: Mapping[str, str], prefix: str) -> list[str]:
    """Remove the copies of tensors from `whole`; return one line for each copy that does not equal its tensor.

    The model has one parameter for both, for example for the embeddings and the output. PEFT trains the modules in
    modules_to_save on their own, so that they can differ, and a module that is not saved has the base model's values.
    """
    problems = []
    for copy, name in copies.items():
        found = [next((n for n in (one, one.removeprefix(prefix)) if n in whole), None) for one in (copy, name)]
        if found == [None, None]:
            continue
        arrays = [None if one is None else whole[one] for one in found]
        if None in found:
            missing = copy if found[0] is None else name
            problems.append(
                f"{found[0] or found[1]}: trained without {missing}, although the model has one parameter for both"
            )
        elif not np.array_equal(*arrays):
            problems.append(f"{found[0]}: trained apart from {found[1]}, although the model has one parameter for both")
        if found[0] is not None:
            del whole[found[0]]
    return problems


def _replaced(
    whole: Mapping[str, np.ndarray], links: Sequence[Link], shapes: Mapping[str, Shape], prefix: str
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the parameters that tensors of whole modules replace, and the tensors that do not fit."""
    new, problems, left = {}, [], dict(whole)
    for one in links:
        names = [next((n for n in (name, name.removeprefix(prefix)) if n in whole), None) for name in one.tensors]
        if all(name is None for name in names):
            continue
        wanted = one.relation.tensor_shapes(one.shapes(shapes))
        got = [() if name is None else whole[name].shape for name in names]
        if got != wanted:
            problems.append(f"{', '.join(one.tensors)}: expected {wanted}, got {got}")
        elif any(target.index for target in one.targets):
            problems.append(f"{', '.join(one.tensors)}: one layer of a parameter that several layers share")
        else:
            arrays = one.relation.load([np.asarray(whole[name], np.float32) for name in names], one.shapes(shapes))
            new |= {target.path: array for target, array in zip(one.targets, arrays, strict=True)}
        for name in names:
            left.pop(name, None)
    return new, problems + [f"{name}: neither an update nor a parameter of the model" for name in left]
