"""The execution options of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformer.config._checks import ConfigError, check_choices

Remat = Literal["none", "full", "dots", "names", "offload"]
Experts = Literal["auto", "blockwise", "ragged", "megablox"]
QuantizedProducts = Literal["none", "int8", "int8_full", "fp8", "fp8_full"]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Execution options of a model: they change speed and memory, and the result only by rounding errors.

    Raises:
        ConfigError: an unknown name, or `quantization_paths` that are a string or without `quantization`.
    """

    attention: str = "auto"
    """attention kernel; auto: select one by platform, sequence length and the features that the model needs"""
    experts: Experts = "auto"
    """matrix multiplications of the experts of MoE layers:
    blockwise: a loop over blocks of tokens, on any device;
    ragged: jax.lax.ragged_dot, a kernel of the TPU compiler (elsewhere it computes all experts for all tokens);
    megablox: a Pallas kernel for TPUs;
    auto: ragged on TPU, otherwise blockwise"""
    scan: bool = True
    """compile one layer and loop over it (jax.lax.scan);
    false: unroll the loop, with the same parameters (faster on CPU, slower to compile)"""
    remat: Remat = "none"
    """rematerialization, what the backward pass recomputes to save memory:
    none: nothing;
    full: everything;
    dots: everything but the results of matrix multiplications, of splash attention and of ring attention;
    names: everything but the attention outputs and the hidden layers of the feed-forward layers;
    offload: as names, but these and the inputs of the layers are stored in host memory"""
    sow_weights: bool = False
    """sow attention weights into the collection "intermediates" if a call makes it mutable, to inspect them"""
    quantization: QuantizedProducts = "none"
    """8-bit matrix multiplications in attention projections, feed-forward layers and experts (needs qwix):
    none: in the model's dtype;
    int8: integers, gradients in the model's dtype;
    int8_full: integers, gradients too;
    fp8: float8_e4m3fn, gradients in the model's dtype;
    fp8_full: float8_e4m3fn, gradients in float8_e5m2;
    the results change by the rounding to 8 bits, about 1 % of a product"""
    quantization_paths: tuple[str, ...] = ()
    """quantize only the multiplications by kernels whose path contains one of these parts, such as feed_forward or
    self_attention/out;
    empty: by all kernels of the layers"""

    def __post_init__(self):
        check_choices(self, experts=Experts, remat=Remat, quantization=QuantizedProducts)
        if isinstance(self.quantization_paths, str):  # each of its letters would be a path that selects nothing
            raise ConfigError(
                f"quantization_paths must be a tuple of strings, got the string {self.quantization_paths!r}. Pass "
                f"({self.quantization_paths!r},)."
            )
        if self.quantization_paths and self.quantization == "none":
            raise ConfigError(
                f"quantization_paths selects the matrix multiplications that are quantized, got "
                f"{', '.join(self.quantization_paths)}, but quantization is 'none'. Set quantization, or remove it."
            )
