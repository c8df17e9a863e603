"""The shape of every array between the six words "Me gusta la pizza de Pepperoni" and their logits.

Usage: python -m examples.array_shapes

Six layers, d_model 512 and eight heads of size 64, as in the paper's base model (Vaswani et al. 2017, table 3). JAX
only traces the model with abstract shapes, so this needs no parameters and almost no time.
"""

import jax
import jax.numpy as jnp

from transformer import CausalLM, transformer_base
from transformer.viz.studies import Size, sizes, sizes_table

SENTENCE = "Me gusta la pizza de Pepperoni"


def main() -> list[Size]:
    words = SENTENCE.split()
    vocabulary = sorted(set(words))
    ids = [vocabulary.index(word) for word in words]
    print("words:  " + "  ".join(words))
    print("tokens: " + "  ".join(f"{number:{len(word)}}" for number, word in zip(ids, words, strict=True)) + "\n")
    model = CausalLM(transformer_base(vocab_size=len(vocabulary)))
    found = sizes(model, jax.ShapeDtypeStruct((1, len(ids)), jnp.int32))
    print(sizes_table(found))
    return found


if __name__ == "__main__":
    main()
