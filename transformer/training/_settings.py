"""The groups of a recipe that say how to train: optimizer, training, evaluation, checkpoint, logging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformer.config._checks import ConfigError, check_choice

OptimizerName = Literal["adamw", "muon"]
ScheduleName = Literal["cosine", "rsqrt", "noam", "constant", "wsd"]
NanPolicy = Literal["stop", "skip"]
SpikePolicy = Literal["log", "skip", "stop"]
ProgressMode = Literal["auto", "bar", "lines", "none"]


def _check_whole(group: str, config: object, least: int, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        if value is None and type(config).__dataclass_fields__[field].type.endswith("None"):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{group}.{field} must be a whole number of at least {least}, got {value!r}.")


def _check_share(group: str, config: object, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            raise ConfigError(f"{group}.{field} must be a number from 0 to 1, got {value!r}.")


def _check_number(group: str, config: object, low: float, high: float, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        if value is None and type(config).__dataclass_fields__[field].type.endswith("None"):
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value < high:
            limits = f"at least {low:g}" + ("" if high == float("inf") else f" and below {high:g}")
            raise ConfigError(f"{group}.{field} must be a number of {limits}, got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How parameters follow their gradients.

    Raises:
        ConfigError: an unknown name, a number out of range, or a schedule that needs a warm-up without one.
    """

    name: OptimizerName = "adamw"
    """adamw, or muon (orthogonalized momentum) for the matrices of the layers and Nesterov's adamw for the rest"""
    learning_rate: float = 1e-3
    """highest rate, reached at the end of the warm-up; noam: the factor before d_model^-0.5 (the paper has 1)"""
    schedule: ScheduleName = "cosine"
    """after the warm-up: cosine (down to final_fraction), rsqrt (1/sqrt(step)), noam (the paper's), constant, wsd
    (constant, then linearly down to final_fraction)"""
    warmup_steps: int = 100
    """steps over which the rate rises linearly from 0"""
    decay_steps: int | None = None
    """step at which cosine and wsd reach their end; None: training.steps"""
    final_fraction: float = 0.1
    """cosine and wsd end at this share of learning_rate"""
    decay_fraction: float = 0.2
    """wsd: share of the steps up to its end in which the rate falls, at most those after the warm-up; 0: it falls at
    once, at the end"""
    beta1: float = 0.9
    """adam: decay of the mean of gradients"""
    beta2: float = 0.99
    """adam: decay of the mean of their squares"""
    epsilon: float = 1e-8
    """adam: added to the root of the mean square"""
    momentum: float = 0.95
    """muon: decay of the momentum"""
    weight_decay: float = 0.01
    """decoupled, times the rate; never on norms, biases, position tables and sinks"""
    decay_embeddings: bool = False
    """weight decay on token embeddings, too"""
    clip_norm: float | None = 1.0
    """gradients longer than this (over all parameters) are scaled down to it; None: never"""

    def __post_init__(self):
        check_choice("optimizer.name", self.name, OptimizerName.__args__)
        check_choice("optimizer.schedule", self.schedule, ScheduleName.__args__)
        _check_number("optimizer", self, 0.0, float("inf"), "learning_rate", "weight_decay", "epsilon")
        _check_number("optimizer", self, 0.0, 1.0, "beta1", "beta2", "momentum")
        _check_share("optimizer", self, "final_fraction", "decay_fraction")
        _check_whole("optimizer", self, 0, "warmup_steps")
        _check_whole("optimizer", self, 1, "decay_steps")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(
                f"optimizer.clip_norm must be above 0, got {self.clip_norm!r}. None leaves gradients as they are."
            )
        if self.schedule in ("rsqrt", "noam") and self.warmup_steps < 1:
            raise ConfigError(f"optimizer.warmup_steps must be at least 1 with schedule={self.schedule!r}, got 0.")


def schedule_warning(config: OptimizerConfig, steps: int) -> str | None:
    """What is wrong with the learning-rate schedule of a run of `steps` steps; None if nothing is.

    It is no error: a short run may be the first part of a longer one, since `training.steps` may be raised and
    `optimizer.warmup_steps` may not be changed.
    """
    warmup, decay = config.warmup_steps, config.decay_steps
    if warmup > steps:
        return (
            f"the learning rate never reaches its peak: warm-up of {warmup} steps (--optimizer.warmup-steps), run of "
            f"{steps} (--training.steps). Shorten the warm-up, or train longer."
        )
    if config.schedule in ("cosine", "wsd") and decay is not None and decay <= warmup:
        return (
            f"the learning rate drops to its final value right after the warm-up: decay ends at step {decay} "
            f"(--optimizer.decay-steps), warm-up at step {warmup} (--optimizer.warmup-steps). Raise "
            f"--optimizer.decay-steps, or leave it out."
        )
    return None


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long and on what terms."""

    steps: int = 1000
    """updates in all; a finished run goes on when this is raised"""
    seed: int = 0
    """of initialization, dropout and the order of the data"""
    accumulation: int = 1
    """micro-batches that one update is computed in, one after the other, to save memory; must divide data.batch_size"""
    label_smoothing: float = 0.0
    """share of the target's probability that is spread over the vocabulary (training loss only)"""
    z_loss: float = 0.0
    """nats added for each square of ln(sum of exp(logits)), which keeps logits small (training loss only)"""
    loss_tokens: int | None = None
    """tokens of a device whose logits are there at once; None: all, or where they are many as many as pays; 0: all"""
    ema_decay: float | None = None
    """keep an exponential average of the parameters, used in evaluation and after training; None: don't"""
    nan_policy: NanPolicy = "stop"
    """at a loss, gradient or parameter that is not finite: stop with an error, or skip that update and count it"""
    spike_policy: SpikePolicy = "log"
    """at a loss far above what was usual: say so and count it, skip that update, too, or stop with an error"""
    spike_deviations: float = 10.0
    """standard deviations above the mean of recent losses (about 50 steps) from which a loss is such a spike"""

    def __post_init__(self):
        check_choice("training.nan_policy", self.nan_policy, NanPolicy.__args__)
        check_choice("training.spike_policy", self.spike_policy, SpikePolicy.__args__)
        _check_whole("training", self, 1, "steps", "accumulation")
        _check_whole("training", self, 0, "seed", "loss_tokens")
        _check_number("training", self, 0.0, 1.0, "label_smoothing", "ema_decay")
        _check_number("training", self, 0.0, float("inf"), "z_loss")
        _check_number("training", self, 1.0, float("inf"), "spike_deviations")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What is measured and shown while training, and at the end."""

    every: int | None = 200
    """steps between evaluations; None: only at the end"""
    batches: int | None = None
    """batches of held-out data in an evaluation; None: all"""
    samples: int = 3
    """texts written by the model at each evaluation"""
    sample_tokens: int = 200
    """length of such a text in tokens (running text; a translation ends by itself)"""
    temperature: float = 0.8
    """of sampling such a text (running text; translations are greedy); 0: always the likeliest token"""
    exact_match_examples: int = 1000
    """pairs never trained on that are translated at the end, and compared: number words word for word, others by BLEU
    and chrF"""
    translations: int = 10
    """of these, how many the summary shows"""
    beam_size: int = 1
    """hypotheses that are followed at once when these are translated; 1: always the likeliest token"""
    beam_alpha: float = 0.6
    """length penalty of a beam: a log-probability is divided by ((5 + length) / 6)^beam_alpha; more: longer targets"""

    def __post_init__(self):
        _check_whole("evaluation", self, 1, "every", "batches", "sample_tokens", "beam_size")
        _check_whole("evaluation", self, 0, "samples", "exact_match_examples", "translations")
        _check_number("evaluation", self, 0.0, float("inf"), "temperature", "beam_alpha")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept to go on from."""

    every: int | None = None
    """steps between checkpoints; None: at each evaluation (and always at the end, and when stopped)"""
    keep_last: int = 2
    """newest checkpoints that stay"""
    keep_best: int = 1
    """best checkpoints that stay: of lowest eval/loss, of a classifier of highest eval/accuracy"""

    def __post_init__(self):
        _check_whole("checkpoint", self, 1, "every", "keep_last")
        _check_whole("checkpoint", self, 0, "keep_best")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is written down."""

    every: int = 10
    """steps between lines of metrics; each gives means over these steps"""
    tensorboard: bool = True
    """write event files for TensorBoard, too"""
    progress: ProgressMode = "auto"
    """a bar on a terminal and plain lines elsewhere (auto), or one of them always, or nothing"""

    def __post_init__(self):
        check_choice("logging.progress", self.progress, ProgressMode.__args__)
        _check_whole("logging", self, 1, "every")
