"""FLOPs of a training step, counted from the model config and the shapes of a batch, and the speed in FLOP/s."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

import jax
from jaxtyping import PyTree

from transformer.config._model import TransformerConfig
from transformer.config._parts import LayerKind
from transformer.data.kinds import DataConfig
from transformer.nn._parameter_axes import axes_of
from transformer.training._chips import peak_flops
from transformer.training._parallel import Placement
from transformer.training._recipe import Recipe, build_teacher
from transformer.training._state import initial_params, parameter_paths
from transformer.training.tasks._base import Shapes
from transformer.training.tasks._table import TASKS


def batch_field(data: DataConfig) -> str:
    """Return the name of the data field that sets the batch size: "batch_size" or "batch_tokens"."""
    return "batch_size" if getattr(data, "batch_tokens", None) is None else "batch_tokens"


def batch_rows(data: DataConfig) -> int:
    """Return the number of rows of a training batch; with `batch_tokens`, of the batches with the longest sequences."""
    if batch_field(data) == "batch_size":
        return data.batch_size
    width = max(data.max_source_length, data.max_target_length)
    return data.batch_tokens // width // data.row_multiple * data.row_multiple  # rounded down to the multiple


def batch_shapes(recipe: Recipe) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of a training batch, for a recipe with known sequence lengths."""
    return TASKS[recipe.task].batch_shapes(recipe, batch_rows(recipe.data))


def sequences(recipe: Recipe, batch: Shapes) -> tuple[int, int]:
    """Return the number and the length of the sequences that the stack of layers reads.

    For pairs, these are the sequences of the decoder. An image is one sequence, a time series one sequence per channel.
    """
    return TASKS[recipe.task].sequences(recipe.model, batch)


def step_tokens(recipe: Recipe) -> int:
    """Return the number of tokens of a step: of sources, targets, captions, and patches of images and series."""
    shapes = batch_shapes(recipe)
    rows, length = sequences(recipe, shapes)
    return rows * length + (shapes["source"].size if "source" in shapes else rows * _image_positions(recipe.model))


def counted(recipe: Recipe) -> tuple[int, str]:
    """Return the number and name of the units in which throughput is reported: tokens per step, or else targets."""
    task = TASKS[recipe.task]
    return (step_tokens(recipe), "tokens") if task.tokens else (batch_shapes(recipe)["targets"].size, task.targets)


@dataclass(frozen=True)
class Flops:
    """FLOPs of a training step on all devices together, by operation."""

    matrices: int
    """matrix multiplications with parameters"""
    attention: int
    """attention scores and weighted sums of values"""

    @property
    def total(self) -> int:
        """Return the sum of both."""
        return self.matrices + self.attention


def step_flops(recipe: Recipe, batch: Shapes | None = None, params: PyTree = None) -> Flops:
    """Count the FLOPs of a training step (Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B).

    The forward pass takes 2 x parameters x tokens for each matrix (for MoE layers, only the selected experts count) and
    2 T S N (H + Hv) per row for each attention layer. The backward pass takes twice as much. Without an encoder and
    with H = Hv, the total is 6 x parameters + 12 x L x N x H x T per token.

    The full attention matrix is counted: causal masks, windows and packing are not subtracted, although a kernel may
    skip masked blocks. Padding tokens count, because they are computed. Recomputation (remat), norms, softmax and the
    optimizer do not count. With LoRA the matrices are frozen and have no gradient, so their backward pass takes as much
    as their forward pass; the products with the low-rank updates, a few percent of these, do not count.

    Args:
        recipe: recipe of the run.
        batch: arrays or shapes (B, ...) by name; by default, the largest batch of the recipe.
        params: tree of the model's parameters or of their shapes; computed from the recipe if omitted.
    """
    model, shapes = recipe.model, batch_shapes(recipe) if batch is None else batch
    rows, length = sequences(recipe, shapes)
    source = shapes["source"].shape[1] if "source" in shapes else 0
    image = _image_positions(model)
    matrices = matrix_flops(recipe, rows * length, rows * (source or image or length), params)

    def scores(queries, keys, model=model, kind=LayerKind()):
        # q k^T, (B, N, T, S), contracts over H: 2 T S N H FLOPs per row (one multiplication and one addition per term).
        # The weighted sum of the values, (B, T, N, Hv), contracts over S: 2 T S N Hv.
        value_dim = model.size_of_value if kind.head_dim is None else model.attention.value_dim or kind.head_dim
        return 2 * rows * queries * keys * model.num_heads * (model.head_dim_of(kind) + value_dim)

    def self_attentions(layers, length):
        # Other mixers of a layer (LayerKind without self-attention, or with linear attention) have no scores.
        kinds = (layer.kind for layer in model.layers(layers))
        kinds = (kind for kind in kinds if kind.self_attention and kind.gated_delta is None)
        return sum(scores(length, length, kind=kind) for kind in kinds)

    if source:
        attention = self_attentions(model.encoder_layers, source)
        attention += self_attentions(model.decoder_layers, length)
        attention += model.decoder_layers * scores(length, source)  # cross-attention: T queries, S keys
    else:
        attention = self_attentions(model.num_layers, length)
        if image:
            encoder = model.image_encoder
            attention += encoder.num_layers * scores(image, image, encoder)
    # Forward pass once, backward pass twice: y = x W needs dL/dx = dL/dy W^T and, if W is trained, dL/dW = x^T dL/dy.
    # A reference model has a forward pass too, and so has a teacher.
    reference = TASKS[recipe.task].keeps_reference(recipe)
    own = Flops(((3 if recipe.lora is None else 2) + reference) * matrices, (3 + reference) * attention)
    if recipe.distill is None:
        return own
    teacher = dataclasses.replace(recipe, model=build_teacher(recipe).config, distill=None, lora=None)
    theirs = step_flops(teacher, shapes)
    return Flops(own.matrices + theirs.matrices // 3, own.attention + theirs.attention // 3)


def _image_positions(model: TransformerConfig) -> int:
    """Return the length of the sequences of an encoder of images next to that of texts; 0 without one."""
    images = model.images or model.image_tokens
    return 0 if images is None else images.patches.positions


def matrix_flops(recipe: Recipe, tokens: int, source_tokens: int, params: PyTree = None) -> int:
    """Count the FLOPs of the matrix multiplications with parameters in a forward pass.

    `tokens` are those outside the encoder. `source_tokens` are read by the encoder and by the keys and values of
    cross-attention, or are the positions of images next to texts. `params` is a tree of arrays or shapes; None: the
    recipe's.
    """
    params = jax.eval_shape(lambda: initial_params(recipe)) if params is None else params
    total = 0
    for name, leaf in zip(parameter_paths(params), jax.tree.leaves(params), strict=True):
        axes = axes_of(name, leaf.ndim)
        # Parameters without input axes (biases, scales) are not matrices. Tables are looked up, not multiplied, except
        # the token embedding, which may be tied to the output head (`tokens_through` returns 0 if it is not).
        if axes is None or not axes.inputs or (axes.is_table and name != "embedding/embedding"):
            continue
        reads_source = name.startswith(("encoder/", "image/", "projector/")) or re.search(
            r"cross_attention/(key|value)/", name
        )
        size = leaf.size
        count = TASKS[recipe.task].tokens_through(recipe.model, name, source_tokens if reads_source else tokens)
        if "expert" in axes.names:
            model = recipe.model
            layers = (*model.layers(model.encoder_layers), *model.layers(model.decoder_layers))
            moe = next(layer.kind.moe for layer in layers if f"/{layer.path}/" in name)
            size = size * moe.top_k // moe.num_experts  # each token is processed by top_k of the experts
        total += 2 * size * count
    return total


class Speed:
    """Count the FLOPs of training steps, and compute FLOP/s and MFU.

    MFU = FLOPs of the model in a step / (seconds per step x peak FLOP/s of all devices), with the FLOPs of `step_flops`
    and the peak of `training.chips` (Chowdhery et al. 2022, arXiv 2204.02311, appendix B). Recomputation in the
    backward pass does not count as FLOPs of the model.
    """

    def __init__(self, recipe: Recipe, params: PyTree, placement: Placement):
        """Prepare the counter; `params` is the tree of the model's parameters, or of their shapes."""
        self._recipe, self._params, self._placement = recipe, params, placement
        self._counted: dict[tuple, int] = {}
        self._kind, self._devices = jax.devices()[0].device_kind, math.prod(placement.sizes.values())
        peak = peak_flops(self._kind)
        self._peak = None if peak is None else peak * self._devices

    def flops(self, batch: Shapes) -> int:
        """Return the FLOPs of a step of all processes, given the rows (B, ...) of this process."""
        shapes = tuple((name, batch[name].shape) for name in sorted(batch))
        if shapes not in self._counted:
            rows = len(batch["weights"])
            own = step_flops(self._recipe, batch, self._params).total
            # FLOPs are proportional to the number of rows: scale from this process's rows to the whole batch.
            self._counted[shapes] = own * self._placement.whole_rows(rows) // rows
        return self._counted[shapes]

    def measures(self, flops: int, seconds: float) -> dict[str, float]:
        """Return the metrics of steps with `flops` FLOPs in total that took `seconds`, for metrics.jsonl."""
        values = {"perf/flops_per_s": flops / seconds}
        return values if self._peak is None else values | {"perf/mfu": flops / seconds / self._peak}

    def __str__(self):
        """Return a line with the peak that MFU is relative to, or the reason why MFU is unavailable."""
        if self._peak is None:
            return f"MFU is unavailable: the peak of {self._kind} is unknown; logging FLOP/s only"
        each = "" if self._devices == 1 else f" x {self._devices} devices"
        peak = f"{self._peak / self._devices / 1e12:,.0f} TFLOP/s{each}"
        return f"MFU: FLOP/s of the model as a fraction of {peak}, the bfloat16 peak of {self._kind}"
