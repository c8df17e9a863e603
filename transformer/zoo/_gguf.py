"""GGUF files, the format of llama.cpp, presented as checkpoint directories of the families that they contain.

The metadata become the fields of config.json, and the tensors get the names, shapes and values of the Hugging Face
format, from which llama.cpp's conversion script made them. That script permutes the queries and keys of Llama, because
llama.cpp rotates neighboring dimensions, and adds 1 to the norms of Gemma; both is undone here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from transformer.config._checks import nearest
from transformer.zoo.families._llama import LLAMA3_SCALING
from transformer.zoo.weights._files import TensorInfo, WeightFiles, WeightsError
from transformer.zoo.weights._gguf import GGUFHeader, GGUFTensor, read_gguf

SUFFIX = ".gguf"

_PLAIN = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v")},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_FOUR_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE_FACTORS = "rope_freqs.weight"
"""Tensor with the divisor of each rotary frequency, the scaling of Llama 3.1."""

_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}
_OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
# Keys that `_head_dim`, `_scaling` and `_config` compare or read, and two without an effect.
_READ = {"attention.key_length", "attention.value_length", "rope.dimension_count", "vocab_size", "expert_count"}
_READ |= {f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "finetuned")}
_READ |= {"tensor_data_layout", "expert_used_count", "rope.scale_linear"}


@dataclass(frozen=True)
class Architecture:
    """How the GGUF files of one architecture differ from the Hugging Face format."""

    family: str
    permuted: bool = False
    """Whether queries and keys are permuted."""
    shifted: bool = False
    """Whether 1 is added to the scales of all norms."""
    layer: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors of a layer that differ from `_LAYER`."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Metadata keys -> fields of config.json, in addition to those of all architectures."""
    fixed: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda fields: {}
    """Fields that follow from the others."""


def _gemma2_scale(fields: Mapping[str, Any]) -> dict[str, Any]:
    # The file has no scale of the scores. As in llama.cpp: only the model with 46 layers (27B) does not use the head
    # size.
    whole = fields["hidden_size"] // fields["num_attention_heads"]
    return {"query_pre_attn_scalar": whole if fields["num_hidden_layers"] == 46 else fields["head_dim"]}


ARCHITECTURES = {
    "llama": Architecture("llama", permuted=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma": Architecture("gemma", shifted=True),
    "gemma2": Architecture(
        "gemma2",
        shifted=True,
        layer=_FOUR_NORMS,
        keys={
            "attention.sliding_window": "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        fixed=_gemma2_scale,
    ),
}
"""Supported architectures by their name in `general.architecture`."""


def is_gguf(source: str | os.PathLike) -> bool:
    """Return whether a path names a GGUF file."""
    return str(source).endswith(SUFFIX)


class GGUFFiles(WeightFiles):
    """A GGUF file, presented as a checkpoint directory with dequantized tensors.

    `ignored` lists unknown metadata keys that do not affect the computation. Raises FileNotFoundError, or WeightsError
    if the file is damaged or has parts that are not supported.
    """

    config_file: ClassVar[str] = "metadata"

    def __init__(self, file: str | os.PathLike, ignored: Sequence[str] = ()):
        self.directory = Path(file)
        if not self.directory.is_file():
            raise FileNotFoundError(f"no file {file}. Pass the path of a GGUF file, such as model-q4_k_m.gguf.")
        try:
            header = read_gguf(self.directory)
            self.metadata = header.metadata
            self._architecture = _architecture(header)
            self.config = _config(header, self._architecture, ignored)
            if (factors := header.tensors.get(_ROPE_FACTORS)) is not None:
                self.config |= self._llama3_scaling(factors)
        except ValueError as error:
            problem = str(error).rstrip(".")
            raise WeightsError(f"{self.directory} can't be read: {problem}. Download or convert it again.") from None
        named = _names(self._architecture)
        self._tensors = {named(name): tensor for name, tensor in header.tensors.items() if name != _ROPE_FACTORS}
        self.tensors = {
            name: TensorInfo(name, one.format.dtype, one.shape, self.directory, one.offset)
            for name, one in self._tensors.items()
        }

    def read(self, name: str) -> np.ndarray:
        """Read one tensor into a new array, dequantized to float32 if it is quantized."""
        array = self._array(self._tensors[self._info(name).name])
        if self._architecture.permuted and (heads := self._rotated_heads(name)):
            array = unpermuted(array, heads, name)
        if self._architecture.shifted and name.endswith("norm.weight"):
            array = array - np.asarray(1, array.dtype)
        return array

    def dtype_read(self, name: str) -> np.dtype:
        """Return the dtype of the array that `read` returns: float32 if the tensor is quantized."""
        form = self._tensors[self._info(name).name].format
        return form.dtype if form.dequantized is None else np.dtype(np.float32)

    def place(self, filename: str) -> None:
        """Return None: a GGUF file has no files next to it."""

    def json(self, filename: str, expected: type = dict) -> None:
        """Return None: a GGUF file has no files next to it."""

    def _array(self, tensor: GGUFTensor) -> np.ndarray:
        """Return the contents of a tensor as they are in the file, dequantized."""
        raw = np.empty(tensor.nbytes, np.uint8)
        with self.directory.open("rb") as stream:
            stream.seek(tensor.offset)
            got = stream.readinto(raw)
        if got != raw.nbytes:
            raise WeightsError(
                f"{self.directory}, tensor {tensor.name!r}: expected {raw.nbytes} bytes, got {got}: the file changed "
                f"while it was open. Download it again."
            )
        return tensor.format.decode(raw).reshape(tensor.shape)

    def _llama3_scaling(self, tensor: GGUFTensor) -> dict[str, Any]:
        """Return `rope_scaling` for the divisors of the frequencies; raise ValueError for other scalings."""
        size, base = self.config["head_dim"], self.config.get("rope_theta", 10_000.0)
        if tensor.shape != (size // 2,) or tensor.format.name != "F32" or self.config.get("rope_scaling"):
            raise ValueError(f"{_ROPE_FACTORS} must be a vector of {size // 2} F32 without another scaling")
        factors = self._array(tensor)
        # A file contains only the result of the scaling.
        turns = (
            LLAMA3_SCALING["original_max_position_embeddings"] * base ** (-np.arange(0, size, 2) / size) / (2 * np.pi)
        )
        low, high = LLAMA3_SCALING["low_freq_factor"], LLAMA3_SCALING["high_freq_factor"]
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        factor = float(factors.max(initial=1.0))
        if not np.allclose(factors, 1 / ((1 - keep) / factor + keep), rtol=1e-4):
            raise ValueError(f"{_ROPE_FACTORS} is not the scaling of Llama 3.1, the only supported one")
        fixed = {name: value for name, value in LLAMA3_SCALING.items() if name != "factor"}
        return {} if factor == 1.0 else {"rope_scaling": fixed | {"factor": factor}}

    def _rotated_heads(self, name: str) -> int | None:
        """Return the number of heads of a tensor whose rows are permuted; None for other tensors."""
        found = re.search(r"self_attn\.([qk])_proj\.", name)
        heads = self.config["num_attention_heads"]
        if found is None or found[1] == "q":
            return found and heads
        return self.config.get("num_key_value_heads", heads)


def unpermuted(array: np.ndarray, heads: int, name: str = "") -> np.ndarray:
    """Undo llama.cpp's permutation of the rows (N H, ...) of queries or keys.

    llama.cpp rotates dimensions 2 i and 2 i + 1 of a head together; the Hugging Face format i and i + H / 2.
    """
    if len(array) % (2 * heads):
        raise WeightsError(f"{name} has {len(array)} rows, which is not a multiple of twice its {heads} heads.")
    return array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _architecture(header: GGUFHeader) -> Architecture:
    name = header.metadata.get("general.architecture")
    if type(parts := header.metadata.get("split.count", 1)) is not int or parts > 1:
        raise ValueError(f"it is one of {parts!r:.40} parts: merge them with `llama-gguf-split --merge`")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        hint = nearest(name, ARCHITECTURES) if isinstance(name, str) else ""
        raise ValueError(
            f"its architecture is {name!r:.40}, which is not supported.{hint} Supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def _names(architecture: Architecture) -> Callable[[str], str]:
    """Return a function from names of tensors to those of the Hugging Face format; it keeps unknown names."""
    layer = _LAYER | dict(architecture.layer)

    def named(name: str) -> str:
        inside, _, last = name.rpartition(".")
        if inside in _PLAIN:
            return f"{_PLAIN[inside]}.{last}"
        found = re.fullmatch(r"blk\.(0|[1-9][0-9]{0,3})\.(\w+)", inside)
        if found is None or found[2] not in layer:
            return name
        return f"model.layers.{found[1]}.{layer[found[2]]}.{last}"

    return named


def _config(header: GGUFHeader, architecture: Architecture, ignored: Sequence[str]) -> dict[str, Any]:
    """Return the fields of config.json; raise ValueError for keys that are missing, unknown or contradict others."""
    prefix = f"{header.metadata['general.architecture']}."
    read = {key: value for key, value in header.metadata.items() if key.startswith(prefix) and key not in ignored}
    given = {key.removeprefix(prefix): _plain(value) for key, value in read.items()}
    _check_keys(given, architecture, prefix)
    embedding = header.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding is not None and embedding.shape else given.get("vocab_size")
    keys = _SIZES | _OPTIONAL | dict(architecture.keys)
    fields = {name: given[key] for key, name in keys.items() if key in given}
    fields |= {"model_type": architecture.family, "vocab_size": rows, "head_dim": _head_dim(given, prefix)}
    fields |= {"tie_word_embeddings": "output.weight" not in header.tensors}
    if architecture.permuted:  # biases of queries and keys are part of Llama's config, not of other families
        fields["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if (scaling := _scaling(given)) is not None:
        fields["rope_scaling"] = scaling
    for role, key in {"bos": "bos", "eos": "eos", "pad": "padding"}.items():
        if type(i := header.metadata.get(f"tokenizer.ggml.{key}_token_id")) is int:
            fields[f"{role}_token_id"] = i
    return fields | architecture.fixed(fields)


def _check_keys(given: Mapping[str, Any], architecture: Architecture, prefix: str) -> None:
    """Raise ValueError for metadata keys that are missing or unknown, and for values that are not supported."""
    if missing := [f"{prefix}{key}" for key in _SIZES if key not in given]:
        raise ValueError(f"its metadata have no {', '.join(missing)}")
    if unknown := sorted(given.keys() - {*_SIZES, *_OPTIONAL, *_READ, *architecture.keys}):
        raise ValueError(
            f"its metadata contain {', '.join(f'{prefix}{key}' for key in unknown[:10])}, which is not supported"
        )
    if several := sorted(key for key, value in given.items() if isinstance(value, np.ndarray | list)):
        raise ValueError(f"{prefix}{several[0]} must be one value: a value per layer is not supported")
    if experts := given.get("expert_count"):
        raise ValueError(f"it has {experts} experts ({prefix}expert_count), which are not supported in GGUF files")
    base = given.get("rope.freq_base", 1.0)
    if type(base) not in (int, float) or not 0 < base < 1e12:
        raise ValueError(f"{prefix}rope.freq_base must be a number above 0, got {base!r:.40}")


def _plain(value: Any) -> Any:
    """Return a float32 as the shortest decimal that denotes it: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _head_dim(given: Mapping[str, Any], prefix: str) -> int:
    """Return the size of a head; raise ValueError if values or rotations have another one, or a size is invalid."""
    for key in (*_SIZES, "attention.head_count_kv", "attention.key_length"):
        if key in given and (type(given[key]) is not int or given[key] < 1):
            raise ValueError(f"{prefix}{key} must be one integer above 0, got {given[key]!r:.40}")
    size = given.get("attention.key_length", given["embedding_length"] // given["attention.head_count"])
    for key in ("attention.value_length", "rope.dimension_count"):
        if type(value := given.get(key, size)) is not int or value != size:
            raise ValueError(f"{prefix}{key} is {value!r:.40}: only the size of a head, {size}, is supported")
    return size


def _scaling(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `rope_scaling` of config.json for the metadata."""
    factor = given.get("rope.scaling.factor", given.get("rope.scale_linear", 1.0))
    kind = given.get("rope.scaling.type", "linear")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        length = given.get("rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    raise ValueError(f"rope.scaling.type is {kind!r:.40}: expected none, linear or yarn")
