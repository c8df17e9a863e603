"""What both sides compute: tiny models of every family, their numbers and their inputs, from names and sizes alone.

No file of weights is kept: the numbers of a tensor are drawn by its name, so that a golden file holds names, shapes and
results only.
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
"""tokens of padding in the second row"""

NULLABLE = {
    ("deepseek_v3", "q_lora_rank"),
    *(("gemma2", name) for name in ("attn_logit_softcapping", "final_logit_softcapping")),
    ("gemma2", "use_bidirectional_attention"),
    *(("gemma3_text", name) for name in ("attn_logit_softcapping", "final_logit_softcapping")),
    ("gpt2", "n_inner"),
    ("modernbert", "rope_scaling"),
    *(("patchtst", name) for name in ("pooling_type", "scaling")),
    *((family, "num_decoder_layers") for family in ("t5", "umt5")),
    *((family, "sliding_window") for family in ("mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe")),
    ("starcoder2", "sliding_window"),
    *((family, "forced_eos_token_id") for family in ("bart", "blenderbot", "marian")),
}
"""(family, field of config.json) for which null is a value in the reference, too"""


@dataclass(frozen=True)
class Case:
    """One tiny model: the reference's classes of model and config, and the fields of the config."""

    architecture: str
    config: str
    values: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    """arguments of the reference's model beside its config"""
    length: int = 11
    """tokens of a row"""
    left_padding: bool = True
    """whether rows padded on the left are compared, too (decoders)"""
    new_tokens: int = 50
    """how many are generated, by models that write"""
    golden: bool = True
    """whether a golden file keeps it for the default tests"""
    more: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """names and shapes of tensors in its file that a new model of the reference would tie to others"""


@dataclass(frozen=True)
class Family:
    """The cases of one family: they share the start of the reference's class names, and the sizes."""

    name: str
    """with what its classes begin, such as Llama"""
    sizes: dict[str, Any]
    """config fields of every case that does not change them"""
    config: str = ""
    """class of the config, where it is not `name` and Config"""

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
        """The model whose class name ends with `head`; config fields replace those of `sizes` or add to them."""
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
        """A decoder with its language-model head; takes what `case` takes."""
        return self.case("ForCausalLM", **changes)

    def masked_lm(self, **changes: Any) -> Case:
        """An encoder with its masked-language-model head; takes what `case` takes."""
        return self.case("ForMaskedLM", **changes)

    def classifier(self, *, num_labels: int = 3, **changes: Any) -> Case:
        """A classifier of texts; takes what `case` takes."""
        return self.case("ForSequenceClassification", num_labels=num_labels, **changes)

    def seq2seq(self, *, left_padding: bool = False, **changes: Any) -> Case:
        """An encoder and a decoder with a language-model head; takes what `case` takes."""
        return self.case("ForConditionalGeneration", left_padding=left_padding, **changes)


def families() -> list[str]:
    """Families with cases: one file each."""
    return sorted(module.name for module in pkgutil.iter_modules([str(HERE / "cases")]))


def cases(family: str) -> dict[str, Case]:
    """The tiny models of a family, by name."""
    return importlib.import_module(f"golden.cases.{family}").CASES


def all_cases() -> list[tuple[str, str]]:
    """(family, name) of every case."""
    return [(family, name) for family in families() for name in cases(family)]


def numbers(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 numbers of a tensor: of a size that keeps activations near 1, none of them at its initial value."""
    drawn = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) < 2:
        # Scales of norms around 1; biases, sinks and the like around 0.
        return np.asarray(
            drawn * 0.2 + (1.0 if name.endswith((".weight", ".gamma", ".running_var")) else 0.0), np.float32
        )
    return (drawn * 1.2 / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


def golden_file(family: str) -> Path:
    """Where results of a family are kept."""
    return HERE / f"{family}.json"


def golden(family: str) -> dict[str, Any]:
    """Results of a family, by name of the case."""
    return json.loads(golden_file(family).read_text())


def tokens(seed: int, vocab_size: int, *shape: int) -> np.ndarray:
    """Ids that are never one of the first four, which families keep for padding and the like."""
    return np.random.RandomState(seed).randint(4, vocab_size, shape).astype(np.int32)


def past_values(steps: int, channels: int) -> np.ndarray:
    """Two series (2, steps, channels), channels of unlike scales."""
    drawn = np.random.RandomState(5).standard_normal((2, steps, channels))
    return (drawn * (1 + np.arange(channels)) - 0.7).astype(np.float32)


def real_tokens(padding: str, rows: int, length: int) -> np.ndarray:
    """Which tokens are no padding, (rows, length) of 0 and 1: all ("none"), or but for PADDED of the second row."""
    real = np.ones((rows, length), np.int32)
    if padding == "right":
        real[1, -PADDED:] = 0
    if padding == "left":
        real[1, :PADDED] = 0
    return real
