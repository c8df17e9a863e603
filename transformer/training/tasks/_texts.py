"""Tasks of models that read tokens, and whose targets are tokens or classes; the texts that language models sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from transformer.config._model import TransformerConfig
from transformer.data._dataset import DataKind
from transformer.generate._generation import generate
from transformer.generate._sampling import Sampling
from transformer.nn._masks import Mask
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._encoders import Classifier, MaskedLM
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.training.tasks._base import (
    LabelTask,
    Options,
    Sums,
    Task,
    TokenTask,
    first_words,
    has_router,
    row_lengths,
    target_shapes,
)
from transformer.training.tasks._evaluation import Evaluation
from transformer.training.tasks._log_probabilities import answer_sums
from transformer.training.tasks._losses import Batch
from transformer.training.tasks._results import Results
from transformer.training.tasks._translation import corpus_score, corrected, make_beam, scores, selection, translations


def continuations(run: Evaluation, prompts: Sequence[str]) -> list[str]:
    """Generate a continuation of each prompt by sampling; return it together with its prompt.

    A model that was trained on windows of some length has not learned later positions. So the text is generated in
    pieces of half a window, each with the preceding half window as its prompt.
    """
    half = max(run.dataset.config.sequence_length // 2, 1)
    tokenizer, new_tokens = run.dataset.tokenizer, run.options.sample_tokens
    texts = [tokenizer.encode_source(prompt) for prompt in prompts]
    lengths = [len(text) + new_tokens for text in texts]
    for piece in range(-(-new_tokens // half)):  # ceil(new_tokens / half)
        generated = generate(
            run.model,
            run.params,
            [text[-half:] for text in texts],
            max_new_tokens=half,
            sampling=Sampling(temperature=run.options.temperature),
            seed=(run.seed + piece) % 2**32,  # another seed for each piece; seeds are 32-bit
        )
        texts = [text + new for text, new in zip(texts, generated, strict=True)]
    return [tokenizer.decode(text[:length]) for text, length in zip(texts, lengths, strict=True)]


def answers(run: Evaluation, wanted: int) -> list[tuple[str, str]]:
    """Return (last message, answer of the model) of held-out conversations."""
    found = run.dataset.openings(wanted)
    if not found:
        return []
    limit = run.dataset.config.sequence_length - max(len(ids) for _, ids in found)
    generated = generate(
        run.model,
        run.params,
        [ids for _, ids in found],
        max_new_tokens=min(run.options.sample_tokens, limit),
        sampling=Sampling(temperature=run.options.temperature),
        eos_id=run.dataset.end_ids,
        seed=run.seed,
    )
    return [(asked, run.dataset.tokenizer.decode(ids)) for (asked, _), ids in zip(found, generated, strict=True)]


class LanguageModeling(TokenTask):
    """Predict the next token of running text."""

    name = "causal_lm"
    model = CausalLM
    lengths = "data.sequence_length"
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

    def samples(self, run: Evaluation) -> str:
        return "\n---\n".join(continuations(run, run.dataset.prompts()[: run.options.samples]))

    def report(self, run: Evaluation, folder: Path) -> Results | None:
        prompt = run.dataset.prompts()[0]
        return Results(text=continuations(run, [prompt])[0], prompt=first_words(prompt))


class SupervisedFineTuning(LanguageModeling):
    """Write the messages of the assistant in conversations."""

    name = "sft"
    targets = "trained tokens"
    try_it = ("answer", "--prompt")

    def sums(self, model: nn.Module, params: PyTree, batch: Batch, reference: PyTree, options: Options) -> Sums:
        return answer_sums(model, params, self.inputs(model.config, batch), batch)

    def samples(self, run: Evaluation) -> str:
        return "\n---\n".join(f"{asked}\n-> {text}" for asked, text in answers(run, run.options.samples))

    def report(self, run: Evaluation, folder: Path) -> Results | None:
        asked, text = next(iter(answers(run, 1)), ("", ""))
        found = Results(text=text, prompt=first_words(asked))
        if "test" not in run.dataset.splits:
            return found
        result = run.mean_loss("test")
        return None if result is None else dataclasses.replace(found, split="test", held_out=result)


class Translation(TokenTask):
    """Generate the target of a source."""

    name = "seq2seq"
    model = Seq2Seq
    source = True
    lengths = "data.max_source_length and data.max_target_length"
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

    def shapes(self, config: TransformerConfig, data: DataKind, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        source = {
            "source": jax.ShapeDtypeStruct((rows, data.max_source_length), jnp.int32),
            "source_lengths": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }
        return target_shapes((rows, data.max_target_length)) | source

    def layers(self, config: TransformerConfig) -> int:
        return config.encoder_layers + config.decoder_layers

    def samples(self, run: Evaluation) -> str:
        found = translations(run, "validation", run.options.samples) or []
        return "\n".join(f"{item.example.source} -> {corrected(item)}" for item in found)

    def report(self, run: Evaluation, folder: Path) -> Results | None:
        options, data = run.options, run.dataset.config
        if not options.exact_match_examples:
            return Results(prompt=run.dataset.prompts()[0])
        beam = make_beam(options.beam_size, options.beam_alpha)
        done, basics = translations(run, run.unseen, options.exact_match_examples, beam), None
        if done is not None and "basics" in run.dataset.splits:
            basics = translations(run, "basics", None, beam)
            done = None if basics is None else done
        if done is None:
            return None
        by_words, shown = data.bleu_tokenization is None, selection(done, options.translations)
        return Results(
            exact_match=scores(done) if by_words else {},
            group_name=data.group_name,
            basics=None if basics is None else scores(basics)[""],
            corpus=None if by_words else corpus_score(done, data.bleu_tokenization),
            split=run.unseen,
            translations=tuple((item.example.source, item.example.target, item.output) for item in shown),
            prompt=done[len(done) // 2].example.source,
        )


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


class MaskedLanguageModeling(TokenTask, EncoderTask):
    """Predict the masked tokens of a text from the others."""

    name = "masked_lm"
    model = MaskedLM
    targets = "masked tokens"


class Classification(LabelTask, EncoderTask):
    """Predict the class of a text."""

    name = "classifier"
    model = Classifier
    targets = "texts"
    unit = "nats per text"
    try_it = ("classify text", "--text")
