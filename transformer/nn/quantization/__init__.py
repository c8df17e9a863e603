"""Kernels in fewer bits or with a trained update, and the products of activations with them and with plain arrays."""

from transformer.nn.quantization._int8 import quantize

__all__ = ["quantize"]
