"""A model zoo of transformers in JAX and Flax: pure functions for the numerics, small modules that own the
parameters.
"""

from transformer.config import ConfigError, Execution, LayerKind, RotaryScaling, TransformerConfig

__version__ = "0.1.0"

__all__ = ["ConfigError", "Execution", "LayerKind", "RotaryScaling", "TransformerConfig"]
