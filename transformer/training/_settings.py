"""Config groups of a recipe for training: optimizer, training, evaluation, checkpoint, logging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from transformer.config._checks import ConfigError, check_choice, check_choices, check_range, check_whole, named

OptimizerName = Literal["adamw", "adafactor", "lion", "muon", "schedule_free_adamw", "sophia"]
ScheduleName = Literal["cosine", "rsqrt", "noam", "constant", "wsd"]
NanPolicy = Literal["stop", "skip"]
SpikePolicy = Literal["log", "skip", "stop"]
GradientDType = Literal["float32", "bfloat16"]
WriterName = Literal["wandb", "mlflow", "trackio"]
ProgressMode = Literal["auto", "bar", "lines", "none"]


def _check_share(config: object, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            raise ConfigError(f"{named(config, field)} must be a number from 0 to 1, got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule.

    Raises:
        ConfigError: an unknown name, a number out of range, or a schedule that needs a warm-up but has none.
    """

    section: ClassVar[str] = "optimizer"
    name: OptimizerName = "adamw"
    """optimizer:
    adamw;
    adafactor: AdamW's second moment as row and column means, no first moment (least memory);
    lion: the sign of a momentum (learning rate about 1/3 to 1/10 of AdamW's);
    muon: orthogonalized momentum for the weight matrices of the layers, AdamW for all other parameters;
    schedule_free_adamw: averaged parameters instead of a decay of the learning rate (needs schedule constant);
    sophia: momentum divided by an estimate of the Hessian's diagonal"""
    learning_rate: float = 1e-3
    """peak learning rate, reached at the end of the warm-up;
    noam: factor of the paper's rate, whose peak is (d_model * warmup_steps)^-0.5"""
    schedule: ScheduleName = "cosine"
    """learning-rate schedule after the warm-up:
    cosine: cosine decay to final_fraction;
    rsqrt: 1/sqrt(step);
    noam: rsqrt with the peak of "Attention Is All You Need";
    constant;
    wsd (warm-up, stable, decay): constant, then linear decay to final_fraction"""
    warmup_steps: int = 100
    """number of warm-up steps, during which the learning rate rises linearly from 0"""
    decay_steps: int | None = None
    """step at which the decay of cosine and wsd ends; None: training.steps"""
    final_fraction: float = 0.1
    """final learning rate of cosine and wsd, as a fraction of learning_rate"""
    decay_fraction: float = 0.2
    """wsd: length of the decay, as a fraction of the steps up to its end (at most the steps after the warm-up);
    0: drop to the final rate in the last step"""
    beta1: float = 0.9
    """AdamW: decay rate of the moving average of gradients (first moment)"""
    beta2: float = 0.99
    """AdamW: decay rate of the moving average of squared gradients (second moment)"""
    epsilon: float = 1e-8
    """added to the denominator of the update, for numerical stability"""
    momentum: float = 0.95
    """Muon: decay rate of the momentum"""
    weight_decay: float = 0.01
    """decoupled weight decay (multiplied by the learning rate);
    not applied to norms, biases, other vectors, position tables and the updates of LoRA"""
    decay_embeddings: bool = False
    """apply weight decay to token embeddings too"""
    clip_norm: float | None = 1.0
    """largest global norm of the gradient; larger gradients are scaled down to it; None: no clipping"""

    def __post_init__(self):
        check_choices(self, name=OptimizerName, schedule=ScheduleName)
        check_range(self, 0, float("inf"), "learning_rate", "weight_decay", "epsilon")
        check_range(self, 0, 1, "beta1", "beta2", "momentum")
        _check_share(self, "final_fraction", "decay_fraction")
        check_whole(self, "warmup_steps", least=0)
        check_whole(self, "decay_steps")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(
                f"optimizer.clip_norm must be above 0, got {self.clip_norm!r}. Use None to turn clipping off."
            )
        if self.name == "schedule_free_adamw" and (self.schedule != "constant" or not self.beta1):
            raise ConfigError(
                f"optimizer.name schedule_free_adamw needs schedule='constant' and a beta1 above 0, because an average "
                f"with the weight beta1 replaces the decay; got schedule={self.schedule!r}, beta1={self.beta1}. Pass "
                f"--optimizer.schedule constant."
            )
        if self.schedule in ("rsqrt", "noam") and self.warmup_steps < 1:
            raise ConfigError(f"optimizer.warmup_steps must be at least 1 with schedule={self.schedule!r}, got 0.")


def schedule_warning(config: OptimizerConfig, steps: int) -> str | None:
    """Return a warning about a learning-rate schedule that does not suit a run of `steps` steps, or None.

    Not an error: a short run may be the first part of a longer one, whose warm-up must not change on resume.
    """
    warmup, decay = config.warmup_steps, config.decay_steps
    if warmup > steps:
        return (
            f"the learning rate never reaches its peak: the warm-up has {warmup} steps (--optimizer.warmup-steps), the "
            f"run {steps} (--training.steps). Shorten the warm-up, or train longer."
        )
    if config.schedule in ("cosine", "wsd") and decay is not None and decay <= warmup:
        return (
            f"the learning rate drops to its final value directly after the warm-up: the decay ends at step {decay} "
            f"(--optimizer.decay-steps), the warm-up at step {warmup} (--optimizer.warmup-steps). Raise "
            f"--optimizer.decay-steps, or remove it."
        )
    return None


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Number of steps, seed, loss and safeguards of training."""

    section: ClassVar[str] = "training"
    steps: int = 1000
    """total number of optimizer updates; raise it to continue a finished run"""
    seed: int = 0
    """random seed of initialization, dropout and data order"""
    accumulation: int = 1
    """gradient accumulation: number of micro-batches per update, computed one after another to save memory;
    must divide data.batch_size"""
    label_smoothing: float = 0.0
    """label smoothing: probability mass spread over the vocabulary (training loss only)"""
    z_loss: float = 0.0
    """weight of the z-loss, the squared log-sum-exp of the logits, which keeps logits small (training loss only)"""
    loss_tokens: int | None = None
    """number of tokens per device whose logits are in memory at the same time;
    None: chosen automatically; 0: all tokens"""
    embedding_gradient_dtype: GradientDType = "float32"
    """data type in which the gradients of the token embedding and of the output head are summed over devices;
    bfloat16: half the bytes between devices, with a relative rounding error of up to 0.4 % per addition"""
    ema_decay: float | None = None
    """decay rate of an exponential moving average of the parameters, which evaluation and the trained model use;
    None: no moving average"""
    nan_policy: NanPolicy = "stop"
    """if the loss, a gradient or a parameter is not finite: stop with an error, or skip the update and count it"""
    spike_policy: SpikePolicy = "log"
    """on a loss spike: log and count it; skip: also skip the update; stop: stop with an error"""
    spike_deviations: float = 10.0
    """a loss is a spike if it is more than this many standard deviations above the mean of about 50 recent losses"""

    def __post_init__(self):
        check_choices(self, nan_policy=NanPolicy, spike_policy=SpikePolicy, embedding_gradient_dtype=GradientDType)
        check_whole(self, "steps", "accumulation")
        check_whole(self, "seed", "loss_tokens", least=0)
        check_range(self, 0, 1, "label_smoothing", "ema_decay")
        check_range(self, 0, float("inf"), "z_loss")
        check_range(self, 1, float("inf"), "spike_deviations")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation on held-out data and samples, during and after training."""

    section: ClassVar[str] = "evaluation"
    every: int | None = 200
    """steps between evaluations; None: evaluate only at the end"""
    batches: int | None = None
    """number of held-out batches per evaluation; None: all"""
    samples: int = 3
    """number of texts to generate at each evaluation"""
    sample_tokens: int = 200
    """length of a generated text in tokens (language models only; a translation stops at its end token)"""
    temperature: float = 0.8
    """sampling temperature of generated texts (language models only; translations are greedy); 0 is greedy"""
    exact_match_examples: int = 1000
    """number of held-out pairs to translate and score after training;
    number words are scored by exact match, other pairs by BLEU and chrF; 0 disables it"""
    translations: int = 10
    """number of these translations to show in the summary"""
    beam_size: int = 1
    """beam size of the translations after training; 1 is greedy decoding"""
    beam_alpha: float = 0.6
    """length penalty of beam search: scores are divided by ((5 + length) / 6)^beam_alpha;
    larger values favor longer targets"""

    def __post_init__(self):
        check_whole(self, "every", "batches", "sample_tokens", "beam_size")
        check_whole(self, "samples", "exact_match_examples", "translations", least=0)
        check_range(self, 0, float("inf"), "temperature", "beam_alpha")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often to save checkpoints, and which of them to keep."""

    section: ClassVar[str] = "checkpoint"
    every: int | None = None
    """steps between checkpoints; None: one at each evaluation;
    a checkpoint is also saved at the end and on a stop signal"""
    keep_last: int = 2
    """number of newest checkpoints to keep"""
    keep_best: int = 1
    """number of best checkpoints to keep, those with the lowest eval/loss (classifiers: highest eval/accuracy)"""

    def __post_init__(self):
        check_whole(self, "every", "keep_last")
        check_whole(self, "keep_best", least=0)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Metrics, TensorBoard events, experiment trackers and the progress display.

    Raises:
        ConfigError: an unknown or repeated tracker, a number out of range, or an empty project.
    """

    section: ClassVar[str] = "logging"
    every: int = 10
    """steps between lines in metrics.jsonl; each line has the means over these steps"""
    tensorboard: bool = True
    """also write TensorBoard event files"""
    writers: tuple[WriterName, ...] = ()
    """experiment trackers that also get the metrics; each needs the extra of its name: pip install
    'transformer-zoo[wandb]'"""
    project: str = "transformer-zoo"
    """name of the project (MLflow: experiment) in these trackers"""
    progress: ProgressMode = "auto"
    """progress display: auto (a bar on a terminal, plain lines otherwise), bar, lines, or none"""

    def __post_init__(self):
        check_choices(self, progress=ProgressMode)
        for name in self.writers:
            check_choice("logging.writers", name, WriterName.__args__)
        if len(set(self.writers)) != len(self.writers):
            raise ConfigError(f"logging.writers must name each tracker once, got {' '.join(self.writers)}.")
        if not self.project.strip():
            raise ConfigError("logging.project must not be empty: it names the project in the trackers.")
        check_whole(self, "every")
