"""Six words through a transformer: the size of every array between "Me gusta la pizza de Pepperoni" and the logits.

Usage: python -m examples.array_shapes

Six layers, d_model 512, eight heads of 64, as in the paper's base model (Vaswani et al. 2017, table 3). Nothing is
computed: the model is traced as shapes, so this takes no time and no weights.
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
