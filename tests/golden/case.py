"""Test cases for comparisons with the reference: tiny models of every family, their weights and their inputs.

No weights are stored: the values of a tensor are random numbers seeded by its name. A golden file therefore contains
only names, shapes and results.
"""

import importlib
import json
import pkgutil
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
PADDED = 3
"""Number of padding tokens in the second row."""

NULLABLE = {
    ("deepseek_v3", "q_lora_rank"),
    *(("gemma2", name) for name in ("attn_logit_softcapping", "final_logit_softcapping")),
    *((family, "use_bidirectional_attention") for family in ("gemma", "gemma2")),
    *(("gemma4_text", name) for name in ("use_bidirectional_attention", "final_logit_softcapping")),
    *(("gemma3_text", name) for name in ("attn_logit_softcapping", "final_logit_softcapping")),
    ("gpt2", "n_inner"),
    ("modernbert", "rope_scaling"),
    *((family, "adapter_attn_dim") for family in ("hubert", "wav2vec2")),
    *(("patchtst", name) for name in ("pooling_type", "scaling")),
    *((family, "num_decoder_layers") for family in ("t5", "umt5")),
    *((family, "sliding_window") for family in ("mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe")),
    *((family, "sliding_window") for family in ("smollm3", "starcoder2")),
    *(("smollm3", name) for name in ("no_rope_layers", "layer_types")),
    *((family, "forced_eos_token_id") for family in ("bart", "blenderbot", "marian")),
}
"""Pairs (family, field of config.json) for which the reference accepts null."""


@dataclass(frozen=True)
class Case:
    """One tiny model: the model and config classes of the reference, and the fields of the config."""

    architecture: str
    config: str
    values: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    """Additional arguments of the reference model."""
    length: int = 11
    """Number of tokens per row."""
    left_padding: bool = True
    """Whether rows with left padding are compared, too (decoders)."""
    new_tokens: int = 50
    """Number of generated tokens, for generative models."""
    golden: bool = True
    """Whether a golden file stores the results for the default tests."""
    more: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Names and shapes of additional tensors in the file that the reference would tie to others in a new model."""


@dataclass(frozen=True)
class Family:
    """Builder for the cases of one family, which share a class name prefix and sizes."""

    name: str
    """Prefix of the class names, such as Llama."""
    sizes: dict[str, Any]
    """Default config fields of the cases."""
    config: str = ""
    """Class of the config, if it is not `name` + "Config"."""

    def case(
        self,
        head: str,
        *,
        golden: bool = True,
        left_padding: bool = True,
        options: dict[str, Any] | None = None,
        more: dict[str, tuple[int, ...]] | None = None,
        **fields: Any,
    ) -> Case:
        """Return the case for the class `name` + `head`; `fields` override or extend `sizes`."""
        return Case(
            self.name + head,
            self.config or f"{self.name}Config",
            self.sizes | fields,
            options=options or {},
            left_padding=left_padding,
            golden=golden,
            more=more or {},
        )

    def causal_lm(self, **changes: Any) -> Case:
        """Return a decoder with a language-model head (arguments as `case`)."""
        return self.case("ForCausalLM", **changes)

    def masked_lm(self, **changes: Any) -> Case:
        """Return an encoder with a masked-language-model head (arguments as `case`)."""
        return self.case("ForMaskedLM", **changes)

    def classifier(self, *, num_labels: int = 3, **changes: Any) -> Case:
        """Return a text classifier (arguments as `case`)."""
        return self.case("ForSequenceClassification", num_labels=num_labels, **changes)

    def seq2seq(self, *, left_padding: bool = False, **changes: Any) -> Case:
        """Return an encoder-decoder with a language-model head (arguments as `case`)."""
        return self.case("ForConditionalGeneration", left_padding=left_padding, **changes)


def families() -> list[str]:
    """Return the names of all families with cases (one file each)."""
    return sorted(module.name for module in pkgutil.iter_modules([str(HERE / "cases")]))


def cases(family: str) -> dict[str, Case]:
    """Return the cases of a family by name."""
    return importlib.import_module(f"golden.cases.{family}").CASES


def all_cases() -> list[tuple[str, str]]:
    """Return (family, name) of every case."""
    return [(family, name) for family in families() for name in cases(family)]


def numbers(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return random float32 values for a tensor, seeded by its name.

    The scale keeps activations near 1, and no parameter has its usual initial value, so that every parameter matters.
    """
    drawn = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) < 2:
        # Scales of norms around 1; biases, sinks and the like around 0.
        return np.asarray(
            drawn * 0.2 + (1.0 if name.endswith((".weight", ".gamma", ".running_var", ".layer_scalar")) else 0.0),
            np.float32,
        )
    return (drawn * 1.2 / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


def golden_file(family: str) -> Path:
    """Return the path of the golden file of a family."""
    return HERE / f"{family}.json"


def golden(family: str) -> dict[str, Any]:
    """Return the golden results of a family by case name."""
    return json.loads(golden_file(family).read_text())


def tokens(seed: int, vocab_size: int, *shape: int) -> np.ndarray:
    """Return random token ids other than the first four, which many families use as special tokens."""
    return np.random.RandomState(seed).randint(4, vocab_size, shape).astype(np.int32)


def texts(length: int, vocab_size: int, padding: str) -> tuple[np.ndarray, np.ndarray]:
    """Return two texts (2, length) that end in the end token, the largest id, and which of their tokens are real."""
    real = real_tokens(padding, 2, length)
    ids = tokens(1, vocab_size - 1, 2, length) * real
    ids[np.arange(2), real.sum(1) - 1] = vocab_size - 1
    return ids, real


MARKER = 3
"""Token of images in the cases of vision-language models; `tokens` never draws it."""
SUFFIX = 3
"""Number of last tokens that are not part of the prefix, for models that read prompts in both directions."""


def with_images(ids: np.ndarray, count: int) -> np.ndarray:
    """Return tokens (2, length) with `count` tokens for two images in the first row and for one in the second."""
    ids = ids.copy()
    ids[0, 1 : 1 + count] = ids[0, 2 + count : 2 + 2 * count] = ids[1, PADDED + 1 : PADDED + 1 + count] = MARKER
    return ids


IMAGE_GRIDS = ((2, 2), (1, 4), (4, 1))
"""Rows and columns of tokens of the images of models that read images of any size; all have 4 tokens."""


def dynamic_images(side: int, channels: int) -> list[np.ndarray]:
    """Return three images (height, width, channels), whose tokens are squares of `side` pixels."""
    random = np.random.RandomState(5)
    return [
        random.standard_normal((side * rows, side * columns, channels)).astype(np.float32)
        for rows, columns in IMAGE_GRIDS
    ]


def past_values(steps: int, channels: int) -> np.ndarray:
    """Return two time series (2, steps, channels) whose channels have different scales."""
    drawn = np.random.RandomState(5).standard_normal((2, steps, channels))
    return (drawn * (1 + np.arange(channels)) - 0.7).astype(np.float32)


SAMPLES = 101
"""Number of samples of a recording."""


def recordings() -> np.ndarray:
    """Return two recordings (2, SAMPLES)."""
    return np.random.RandomState(5).standard_normal((2, SAMPLES)).astype(np.float32)


def real_tokens(padding: str, rows: int, length: int) -> np.ndarray:
    """Return a padding mask (rows, length) with 1 for real tokens; the second row has PADDED tokens of padding."""
    real = np.ones((rows, length), np.int32)
    if padding == "right":
        real[1, -PADDED:] = 0
    if padding == "left":
        real[1, :PADDED] = 0
    return real


GRIDS = ((1, 5), (3, 2))
"""Rows and columns of patches of two images for models that read any number of them.

None has several rows of one column: PyTorch 2.13 then gives all rows the position of the first, without interpolation.
"""


def image_patches(width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the patches (2, 7, width) of two images with `GRIDS`, padded, and which of them are real."""
    values = np.random.RandomState(5).standard_normal((2, 7, width)).astype(np.float32)
    real = np.arange(7) < np.prod(GRIDS, 1)[:, None]
    return values * real[..., None], real.astype(np.int32)
