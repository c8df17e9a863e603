"""Parameters for tests from NumPy's generator, which compiles no program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def random_params(module: Any, *inputs: Any, seed: int = 0, **options: Any) -> Any:
    """Return the variables that `module.init` returns for these inputs, with random values from NumPy.

    Norms and biases differ from the 1 and 0 of `init`, so that each of them affects the outputs.

    Args:
        module: A Linen module.
        inputs: The arguments of `module.init` after the random key. They are only traced.
        seed: Another seed gives other values.
        options: The keyword arguments of `module.init`.
    """
    shapes = jax.eval_shape(lambda *inputs: module.init(jax.random.key(0), *inputs, **options), *inputs)
    return random_values(shapes, seed)


def random_values(shapes: Any, seed: int = 0) -> Any:
    """Return a tree of random arrays with the shapes and dtypes of the leaves of `shapes`.

    Kernels have a standard deviation of 1 / sqrt(fan in), scales of norms a mean of 1, and variances are positive.
    """
    random = np.random.default_rng(seed)

    def make(path: Any, leaf: Any) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jax.device_put(np.zeros(leaf.shape, leaf.dtype))
        numbers = random.normal(size=leaf.shape)
        match next((str(entry.key) for entry in reversed(path) if hasattr(entry, "key")), ""):
            case "variance" | "var":
                numbers = np.exp(numbers / 4)
            case "scale":
                numbers = 1 + numbers / 4
            case _ if len(leaf.shape) > 1:
                numbers = numbers / np.sqrt(leaf.shape[-2])
            case _:
                numbers = numbers / 4
        return jax.device_put(numbers.astype(leaf.dtype))  # jnp.asarray compiles a program for each shape

    return jax.tree_util.tree_map_with_path(make, shapes)
