"""Tasks of models that read tokens, and whose targets are tokens or classes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from transformer.config._model import TransformerConfig
from transformer.data._config import DataKind
from transformer.nn._masks import Mask
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._encoders import Classifier, MaskedLM
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.training.tasks._base import Task, before_the_head, has_router, row_lengths, target_shapes
from transformer.training.tasks._losses import Batch


class LanguageModeling(Task):
    """Predict the next token of running text."""

    name = "causal_lm"
    model = CausalLM
    context_axis = True
    lengths = "data.sequence_length"
    each_token = True
    writes = True
    try_it = ("generate", "--prompt")

    def inputs(self, config: TransformerConfig, batch: Batch) -> dict[str, Any]:
        mask = Mask.segments(batch["segment_ids"]) if "segment_ids" in batch else None
        return {"tokens": batch["tokens"], "positions": batch.get("positions"), "mask": mask}

    def shapes(self, config: TransformerConfig, data: DataKind, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        shapes = target_shapes((rows, data.sequence_length))
        return shapes | dict.fromkeys(("segment_ids", "positions") if data.segments else (), shapes["tokens"])

    def context(self, config: TransformerConfig, data: DataKind) -> int | None:
        return data.sequence_length  # the model is not trained on later positions


class SupervisedFineTuning(LanguageModeling):
    """Write the messages of the assistant in conversations."""

    name = "sft"
    answers = True
    exact_answers = True
    targets = "trained tokens"
    try_it = ("generate", "--chat --prompt")


class Translation(Task):
    """Generate the target of a source."""

    name = "seq2seq"
    model = Seq2Seq
    source = True
    lengths = "data.max_source_length and data.max_target_length"
    each_token = True
    writes = True
    try_it = ("generate", "--prompt")

    def inputs(self, config: TransformerConfig, batch: Batch) -> dict[str, Any]:
        texts = {"source": batch["source"], "target": batch["tokens"]}
        if "segment_ids" not in batch:
            masks = {"source_mask": Mask.lengths(batch["source_lengths"])}
            if has_router(config):
                masks["mask"] = Mask.lengths(row_lengths(batch["weights"]))
            return texts | masks
        source, target = batch["source_segment_ids"], batch["segment_ids"]
        return texts | {
            "source_positions": batch["source_positions"],
            "positions": batch["positions"],
            "source_mask": Mask.segments(source),
            "mask": Mask.segments(target),
            "context_mask": Mask.segments(target, source),
        }

    def example(self, config: TransformerConfig) -> tuple[jax.Array, ...]:
        return super().example(config) * 2

    def shapes(self, config: TransformerConfig, data: DataKind, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        source = {
            "source": jax.ShapeDtypeStruct((rows, data.max_source_length), jnp.int32),
            "source_lengths": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }
        return target_shapes((rows, data.max_target_length)) | source

    def layers(self, config: TransformerConfig) -> int:
        return config.encoder_layers + config.decoder_layers


class EncoderTask(Task):
    """Base class of tasks in which an encoder reads texts with padding."""

    lengths = "data.max_length"

    def inputs(self, config: TransformerConfig, batch: Batch) -> dict[str, Any]:
        types = None if config.embedding.token_types is None else batch.get("token_types")
        return {"tokens": batch["tokens"], "mask": Mask.lengths(batch["lengths"]), "token_types": types}

    def shapes(self, config: TransformerConfig, data: DataKind, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        shapes = {
            "tokens": jax.ShapeDtypeStruct((rows, data.max_length), jnp.int32),
            "lengths": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }
        targets = target_shapes((rows, data.max_length) if self.each_token else (rows,))
        return shapes | {name: targets[name] for name in ("targets", "weights")}


class MaskedLanguageModeling(EncoderTask):
    """Predict the masked tokens of a text from the others."""

    name = "masked_lm"
    model = MaskedLM
    each_token = True
    targets = "masked tokens"


class Classification(EncoderTask):
    """Predict the class of a text."""

    name = "classifier"
    model = Classifier
    labels = True
    targets = "texts"
    unit = "nats per text"
    try_it = ("classify", "--text")

    def tokens_through(self, config: TransformerConfig, path: str, tokens: int) -> int:
        return before_the_head(path, tokens)
