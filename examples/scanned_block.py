"""A decoder block in your own nn.scan, with stacked parameters; compared with a loop over the layers.

Usage: python -m examples.scanned_block
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer import AttentionOptions, LayerInputs, Mask, NormOptions, PreNormBlock, TransformerConfig
from transformer.config import RotaryOptions


class Layer(nn.Module):
    """One step of the scan: carry -> (carry, output). Of the output of a block, only x is used here."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x, _):
        x = PreNormBlock(self.config, causal=True, name="block")(x, LayerInputs(mask=Mask.causal())).x
        return x, jnp.sqrt(jnp.square(x).mean())  # the scan stacks the root mean square of x


class Tower(nn.Module):
    """x (B, T, D) -> x, and its root mean square after each of `depth` layers. XLA compiles the layer once."""

    config: TransformerConfig
    depth: int

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.depth)
        return layers(self.config, name="layers")(x, None)


def main():
    attention, norm = AttentionOptions(num_kv_heads=2), NormOptions(kind="rms_norm")
    config = TransformerConfig(d_model=24, num_heads=4, attention=attention, norm=norm, position=RotaryOptions())
    tower = Tower(config, depth=5)
    x = jax.random.normal(jax.random.key(0), (2, 7, 24))
    params = jax.jit(tower.init)(jax.random.key(1), x)["params"]
    scanned, sizes = jax.jit(tower.apply)({"params": params}, x)
    print(f"stacked query kernels: {params['layers']['block']['self_attention']['query']['kernel'].shape}")
    print(f"root mean square of x after each layer: {sizes}")

    looped = x
    for i in range(tower.depth):
        slice_i = jax.tree.map(lambda p, i=i: p[i], params["layers"])
        looped, _ = Layer(config).apply({"params": slice_i}, looped, None)
    difference = jnp.abs(scanned - looped).max()
    print(f"scan and loop over the slices differ by {difference:.1e}")
    return {"difference": difference, "params": params, "sizes": sizes}


if __name__ == "__main__":
    main()
