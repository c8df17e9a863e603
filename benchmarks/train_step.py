"""Time of our training step, compared with the same model in PyTorch (torch.compile) and in plain Flax.

Usage: python -m benchmarks.train_step [--works small large translator] [--peers torch flax] [--turns 6] [--times 5]
       python -m benchmarks.train_step --peers products update flat    time of separate parts of our step

Needs the parity environment (`make peers`), which contains PyTorch. Each side runs in a separate process, and the
processes take turns. Both are measured in the unchanged environment (`untouched`), and with allocator settings that
keep freed memory (`allocator`). Prints medians in milliseconds and the ratio of our tokens/s to the peer's. The last
line is a JSON object.

small and large are GPTs with (batch size, context, layers, heads, d_model) = (12, 64, 4, 4, 128) and (8, 256, 6, 6,
384) and a vocabulary of 65 characters. translator is the base model of Vaswani et al. 2017 with 16 pairs of 32 + 32
tokens and a vocabulary of 8,000. Three peers are not libraries but parts of our own step; their ratio is the fraction
of the step that they take. `products`: the matrix multiplications with weights, forward and backward, compiled by XLA.
`update`: the optimizer update for given gradients. `flat`: the same update with all parameters in one vector, so that
there is nothing left to fuse.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.side_by_side import ENVIRONMENTS, compare, last_line, serve, versions
from transformer.cli._allocator import keep_freed_memory
from transformer.config import EmbeddingOptions, LearnedOptions, SinusoidalOptions


@dataclass(frozen=True, kw_only=True)
class Work:
    """Sizes of a model and of its training batch."""

    batch: int
    length: int
    layers: int
    heads: int
    width: int
    hidden: int
    vocabulary: int
    encoder: bool = False

    @property
    def tokens(self) -> int:
        """Tokens per training step."""
        return self.batch * self.length * (2 if self.encoder else 1)

    @property
    def products(self) -> list[tuple[int, int, int]]:
        """(rows, inputs, outputs) of each matrix multiplication with weights in a forward pass."""
        rows = self.batch * self.length
        square = (rows, self.width, self.width)
        feed_forward = [(rows, self.width, self.hidden), (rows, self.hidden, self.width)]
        layer = [*[square] * 4, *feed_forward]
        layers = [*layer, *layer, *[square] * 4] if self.encoder else layer
        return [*layers * self.layers, (rows, self.width, self.vocabulary)]

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Return random arrays (B, T): source (only for encoder-decoders), tokens, targets."""
        random = np.random.default_rng(0)
        count = 3 if self.encoder else 2
        shape = (count, self.batch, self.length)
        return tuple(random.integers(3, self.vocabulary, shape, dtype=np.int32))


WORKS = {
    "small": Work(batch=12, length=64, layers=4, heads=4, width=128, hidden=512, vocabulary=65),
    "large": Work(batch=8, length=256, layers=6, heads=6, width=384, hidden=1536, vocabulary=65),
    "translator": Work(batch=16, length=32, layers=6, heads=8, width=512, hidden=2048, vocabulary=8_000, encoder=True),
}
BETAS = {False: (0.9, 0.99), True: (0.9, 0.98)}


def recipe_of(work: Work) -> Any:
    """Return the recipe of our side."""
    from transformer.config import Execution, FeedForwardOptions, NormOptions, ParameterOptions, TransformerConfig
    from transformer.data import NumberWords, TextFile
    from transformer.training import OptimizerConfig, Recipe, TrainingConfig

    sizes = {"vocab_size": work.vocabulary, "d_model": work.width, "num_layers": work.layers, "num_heads": work.heads}
    if work.encoder:
        model = TransformerConfig(
            feed_forward=FeedForwardOptions(d_ff=work.hidden),
            norm=NormOptions(position="post"),
            position=SinusoidalOptions(),
            dropout_rate=0.1,
            **sizes,
        )
    else:
        model = TransformerConfig(
            norm=NormOptions(kind="layer_norm_without_bias"),
            feed_forward=FeedForwardOptions(activation="gelu_erf"),
            position=LearnedOptions(max_length=work.length),
            parameters=ParameterOptions(use_bias=False, initializer_range=0.02),
            embedding=EmbeddingOptions(scale=False),
            **sizes,
        )
    return Recipe(
        name="benchmark",
        model=model,
        data=NumberWords(batch_size=work.batch)
        if work.encoder
        else TextFile(path="none", sequence_length=work.length, batch_size=work.batch),
        execution=Execution(scan=False),
        optimizer=OptimizerConfig(beta2=BETAS[work.encoder][1], weight_decay=0.1),
        training=TrainingConfig(label_smoothing=0.1 if work.encoder else 0.0),
    )


def ours(work: Work) -> Callable[[], Any]:
    """Return our side: the training step that `train.py` builds from a recipe."""
    import jax

    from transformer.training._state import make_state
    from transformer.training._step import make_train_step

    recipe = recipe_of(work)
    *source, tokens, targets = (jax.numpy.asarray(array) for array in work.arrays())
    batch = {"tokens": tokens, "targets": targets, "weights": np.ones(targets.shape, np.float32)}
    if work.encoder:
        batch |= {"source": source[0], "source_lengths": np.full(work.batch, work.length, np.int32)}
    batch = jax.tree.map(jax.numpy.asarray, batch)
    states = [jax.jit(lambda: make_state(recipe))()]
    compiled = jax.jit(make_train_step(recipe), donate_argnums=0)

    def step():
        states[0], metrics = compiled(states[0], batch)
        jax.block_until_ready((states[0], metrics))

    return step


def plain_flax(work: Work) -> Callable[[], Any]:
    """Return the training step of the same model with the layers of Flax."""
    import jax

    from benchmarks import flax_peers

    if work.encoder:
        model = flax_peers.Translator(work.vocabulary, work.width, work.heads, work.layers, work.hidden)
    else:
        model = flax_peers.GPT(work.vocabulary, work.length, work.layers, work.heads, work.width)
    step = flax_peers.training_step(model, work.arrays(), betas=BETAS[work.encoder])
    return lambda: jax.block_until_ready(step())


def pytorch(work: Work) -> Callable[[], Any]:
    """Return the training step of the same model in PyTorch."""
    from benchmarks import torch_peers

    if work.encoder:
        model = torch_peers.Translator(work.vocabulary, work.width, work.heads, work.layers, work.hidden, work.length)
    else:
        model = torch_peers.GPT(work.vocabulary, work.length, work.layers, work.heads, work.width)
    step = torch_peers.training_step(model, work.arrays(), betas=BETAS[work.encoder])
    return lambda: step().item()


def products(work: Work) -> Callable[[], Any]:
    """Return only the matrix multiplications with weights: forward, and the gradients of inputs and weights."""
    import jax

    draw = np.random.default_rng(0).standard_normal
    given = [
        tuple(jax.numpy.asarray(draw(shape, np.float32)) for shape in ((rows, ins), (ins, outs), (rows, outs)))
        for rows, ins, outs in work.products
    ]
    # For y = x W with gradient dy: x W (forward), dy W^T (gradient of x), x^T dy (gradient of W).
    compiled = jax.jit(lambda given: [(x @ kernel, slope @ kernel.T, x.T @ slope) for x, kernel, slope in given])
    return lambda: jax.block_until_ready(compiled(given))


def update(work: Work, flat: bool = False) -> Callable[[], Any]:
    """Return only the optimizer update for given gradients: clipping, Adam, weight decay, new parameters.

    With `flat`, all parameters are one vector.
    """
    import jax
    import optax

    from transformer.training._optimizers import make_optimizer
    from transformer.training._state import make_state

    recipe = recipe_of(work)
    params = jax.jit(lambda: make_state(recipe).params)()
    if flat:
        params = {"kernel": jax.flatten_util.ravel_pytree(params)[0]}
    optimizer = make_optimizer(recipe)
    gradients = jax.tree.map(lambda leaf: 1e-3 * leaf, params)
    states = [(params, jax.jit(optimizer.init)(params))]

    def change(state, gradients):
        changes, inner = optimizer.update(gradients, state[1], state[0])
        return optax.apply_updates(state[0], changes), inner

    compiled = jax.jit(change, donate_argnums=0)

    def step():
        states[0] = compiled(states[0], gradients)
        jax.block_until_ready(states[0])

    return step


SIDES = {
    "ours": ours,
    "torch": pytorch,
    "flax": plain_flax,
    "products": products,
    "update": update,
    "flat": functools.partial(update, flat=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--peers", nargs="+", choices=sorted({*SIDES} - {"ours"}), default=["torch", "flax"])
    parser.add_argument("--environments", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    parser.add_argument("--turns", type=int, default=6, help="turns of each side")
    parser.add_argument("--times", type=int, default=5, help="training steps per turn")
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "WORK"), help="internal: run one side as a worker")
    options = parser.parse_args()
    if options.worker:
        if options.worker[0] in ("ours", "update", "flat"):
            keep_freed_memory()  # the same allocator settings as train.py and python -m transformer
        side, work = options.worker
        serve(SIDES[side](WORKS[work]))
        return

    from benchmarks.machine import machine

    where = machine()
    print(
        f"{where}\n{'work':>12} {'peer':>6} {'setting':>10} {'ours ms':>9} {'peer ms':>9} {'tokens/s, ours / peer':>22}"
    )
    found = []
    module = "benchmarks.train_step"
    for name in options.works:
        for peer in options.peers:
            for environment in options.environments:
                one = compare(
                    name,
                    peer,
                    (module, "--worker", "ours", name),
                    (module, "--worker", peer, name),
                    environment=environment,
                    turns=options.turns,
                    times=options.times,
                )
                found.append(one)
                milliseconds = f"{1e3 * one.ours_seconds:9.1f} {1e3 * one.peer_seconds:9.1f}"
                print(f"{name:>12} {peer:>6} {environment:>10} {milliseconds} {one.ratio:22.2f}", flush=True)
    rates = [WORKS[found[0].work].tokens / seconds for seconds in (found[0].peer_seconds, found[0].ours_seconds)]
    print(
        last_line(
            f"training step, {found[0].work}",
            *rates,
            found[0].ratio,
            "tokens/s",
            where,
            all=[dataclasses.asdict(one) for one in found],
            versions=versions("jax", "flax", "torch"),
        )
    )


if __name__ == "__main__":
    main()
