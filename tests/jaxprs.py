"""A function of JAX at the place where each supported release has it."""

try:
    from jax.extend.core import jaxprs_in_params
except ImportError:  # before JAX 0.8
    from jax.core import jaxprs_in_params

__all__ = ["jaxprs_in_params"]
