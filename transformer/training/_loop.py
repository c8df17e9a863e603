"""The training loop around a pure, jitted step. Only the loop loads batches and writes files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import flax.linen as nn
import jax
from jaxtyping import PyTree

from transformer.config._local_paths import local_path
from transformer.data._config import shared_rows
from transformer.data._dataset import Batch, Dataset, padding
from transformer.data._pipeline import check_batch, check_local_paths
from transformer.nn.models._base import count_parameters
from transformer.training import _processes as processes
from transformer.training._batches import Rollouts, Supervision, make_source
from transformer.training._flops import Speed
from transformer.training._memory import EVALUATION, STEP, MemoryWatch, check_embedding, check_layers
from transformer.training._memory import check_memory as refuse_too_large
from transformer.training._parallel import Placement, place
from transformer.training._profile import Profiler, Window
from transformer.training._recipe import Recipe, build_model, to_json
from transformer.training._settings import schedule_warning
from transformer.training._signals import StopSignal
from transformer.training._start import Start
from transformer.training._state import TrainState, make_usable, merged_params, model_params, parameter_paths
from transformer.training._step import compiled_eval_step, make_train_step, why_not_finite
from transformer.training.metrics import _report as report
from transformer.training.metrics import _summary as summaries
from transformer.training.metrics._summary import Summary
from transformer.training.metrics._trackers import Trackers, check_installed
from transformer.training.metrics._writer import MetricsWriter, Progress
from transformer.training.tasks._base import Task
from transformer.training.tasks._evaluation import EvalStep, Evaluation
from transformer.training.tasks._rewards import RewardModel
from transformer.training.tasks._table import TASKS
from transformer.training.workdir._checkpoint import Checkpointer
from transformer.training.workdir._journal import Journal, TrainStats
from transformer.training.workdir._lock import NAME as LOCK
from transformer.training.workdir._lock import WorkdirLock
from transformer.training.workdir._provenance import how_to_extend
from transformer.training.workdir._restart import set_aside, writing_explained
from transformer.training.workdir._runs import begin, checkpoint_data, load_run, open_run, record_run, shared_facts

MANY_MICRO_BATCHES = 1024
"""number of micro-batches in a step from which a note announces long steps"""


def train(
    recipe: Recipe,
    workdir: str | os.PathLike,
    *,
    command: str = "",
    start: Start | None = None,
    teacher: Start | None = None,
    reward_model: RewardModel | None = None,
    profile: Window | None = None,
    take_over: bool = False,
    restart: bool = False,
    check_memory: bool = True,
    temporary: bool = False,
    allow_change: bool = False,
) -> Summary:
    """Train a recipe in a workdir to its last step or until a signal. An existing run is resumed, bit for bit.

    SIGTERM and Ctrl-C do not end the program: the run is saved, and this function returns. To end a script
    that would otherwise start its next run, call `exit_if_stopped()` of the result, or check its `stopped`.

    The workdir contains recipe.json, calls.jsonl, tokenizer/, checkpoints/, first_checkpoint.json, metrics.jsonl,
    tensorboard/, samples.txt, loss.png, summary.json and, with `profile`, profile/. All processes of one run
    (`parallel.coordinator`) make the same call, with one workdir that all can see.

    Args:
        recipe: what to train.
        workdir: directory of the run; created if it does not exist.
        command: the command that resumes this run; printed at the end.
        start: a model to initialize from (`transformer.inference.start_from` reads it); not needed again to resume.
        teacher: the model of `distill.teacher`, read in the same way; not needed again to resume.
        reward_model: the reward model of `grpo.reward_model`; `transformer.inference.reward_model` reads it.
        profile: the steps to trace.
        take_over: replace the lock of a process on another host (`WorkdirLock`).
        restart: start a new run; the files of an earlier run in the workdir are moved to its directory `previous`.
        check_memory: stop before any memory is taken if state, gradients and batch can't fit, as their shapes show.
        temporary: the caller removes the workdir after the run, so that the printed summary does not point into it.
        allow_change: resume although the learning rate, the batch size or other fields differ that keep the shapes of
            the parameters and the order of the data. The result then differs from that of an uninterrupted run.

    Returns:
        The outcome: the number of steps, measures, and whether a signal stopped the run.

    Raises:
        ValueError: the recipe or the data is invalid, or the workdir contains another run.
        WorkdirInUseError, CheckpointSaveError, OSError: the workdir is in use or not writable.
        NonFiniteError: loss, gradient or a parameter was not finite, with nan_policy "stop", or too often in a row.
        TrackerError: a tracker of `logging.writers` can't be started.
        LossSpikeError: a loss was far above the recent mean, with spike_policy "stop".
        ProcessesError: other processes of the run cannot be reached, or have ended.
        OutOfMemoryError: the run does not fit into device memory. The message has the required memory and remedies.
    """
    began, workdir = time.perf_counter(), local_path(workdir, "workdir")
    command = command or f"transformer.training.train(recipe, {str(workdir)!r})"
    check_local_paths(recipe.data)
    check_installed(recipe.logging.writers)
    with processes.together(recipe.parallel), contextlib.ExitStack() as resources:
        # Workdir: only the first process writes to it. A signal to any process stops all of them.
        lock = WorkdirLock(workdir, take_over)
        own_dir = resources.enter_context(_one_writer(workdir, lock))
        stopping = processes.SharedStop(resources.enter_context(StopSignal()))

        # Recipe, data, model, and the pure step on its devices
        recipe, dataset = _open_alike(recipe, workdir, start, restart, teacher, allow_change)
        model, steps = build_model(recipe), recipe.training.steps
        watch = resources.enter_context(MemoryWatch(recipe))
        placement = watch.placement = placed(recipe, dataset, check_memory)
        _print_lines(f"data: {dataset.describe()}", report.example_lines(dataset), placement.describe())
        source = make_source(recipe, dataset, model, placement, reward_model)

        # State: restored from the newest checkpoint, or new
        if restart and (previous := processes.first_decides(lambda: str(set_aside(workdir) or ""))):
            print(f"restart: the earlier run is now in {previous}")
        checkpoints = resources.enter_context(_checkpointer(recipe, workdir))
        batches = source.start()
        state, ledger = begin(recipe, dataset, workdir, checkpoints, batches, placement, start, teacher, allow_change)
        step, usable = int(state.step), make_usable(recipe)
        _record(recipe, dataset, own_dir, step)

        # Summary: a finished run prints it again and ends here
        shapes = jax.eval_shape(lambda one: merged_params(recipe, one.averaged, one.base), state)
        about = {"name": recipe.name, "workdir": str(workdir), "command": command, "task": recipe.task}
        summary = Summary(**about, temporary=temporary, steps=steps, parameters=count_parameters(shapes))
        print(_model_lines(recipe, model, summary.parameters, state))
        if finished := _finished_before(recipe, summary, step, ledger, stopping):
            return finished
        speed, where = Speed(recipe, shapes, placement), f"resuming from step {step}" if step else "a new run"
        print(f"{speed}\nworkdir: {workdir}, {where}, to step {steps}\n{_long_step_note(recipe)}", end="", flush=True)
        report.record_call(own_dir, step, command, report.device_line())

        # Metrics, progress bar and trace
        log, targets = recipe.logging, TASKS[recipe.task].targets
        writer = resources.enter_context(_metrics_writer(recipe, own_dir, step or None))
        progress = resources.enter_context(Progress(steps, start_step=step, mode=log.progress, targets=targets))
        profiler = Profiler(profile, workdir, step=step, first=processes.is_first(), say=progress.print)
        resources.enter_context(profiler)

        # Training, then the report
        state = placement.spread(state)  # reuse the name: another variable would keep a copy of the state alive
        training = _Training(
            recipe=recipe,
            dataset=dataset,
            model=model,
            placement=placement,
            usable=usable,
            batches=batches,
            source=source,
            ledger=ledger,
            journal=Journal(recipe, ledger, writer, progress, parameter_paths(state.params), speed=speed),
            state=state,
            step=step,
            checkpoints=checkpoints,
            writer=writer,
            progress=progress,
            profiler=profiler,
            watch=watch,
            stopping=stopping,
            lock=lock,
            own_dir=own_dir,
            began=began - ledger.seconds,
        )
        training.run()
        return training.finish(summary)


def placed(recipe: Recipe, dataset: Dataset, check: bool) -> Placement:
    """Place the training step on the devices; with `check`, refuse a run that can't fit into their memory."""
    check_layers(recipe)
    if check:
        check_embedding(recipe)
    placement = place(recipe, make_train_step)
    if check:
        refuse_too_large(recipe, dataset, placement)
    return placement


def _print_lines(*lines: str) -> None:
    print("\n".join(filter(None, lines)), flush=True)


def _checkpointer(recipe: Recipe, workdir: Path) -> Checkpointer:
    return Checkpointer(workdir, keep_last=recipe.checkpoint.keep_last, keep_best=recipe.checkpoint.keep_best)


def _metrics_writer(recipe: Recipe, own_dir: Path, restored_step: int | None) -> MetricsWriter:
    """Open the files of metrics and, in the first process, the run in the trackers."""
    trackers = Trackers(recipe, own_dir, restored_step) if processes.is_first() else None
    board = recipe.logging.tensorboard
    return MetricsWriter(own_dir, restored_step=restored_step, tensorboard=board, trackers=trackers)


def _record(recipe: Recipe, dataset: Dataset, own_dir: Path, step: int) -> None:
    """Write the files about the run before its training, and remove samples of later steps than `step`."""
    record_run(recipe, dataset, own_dir)
    report.save_example(own_dir, dataset)
    report.cut_samples(own_dir, step)


@contextlib.contextmanager
def _one_writer(workdir: Path, lock: WorkdirLock) -> Iterator[Path]:
    """Let only the first process, which holds the lock, write to the workdir. Yields the directory of this process.

    The others run the same program, but write to a temporary directory, and print nothing.
    """
    with contextlib.ExitStack() as resources:
        own_dir = workdir
        if processes.is_first():
            resources.enter_context(lock)
        else:
            own_dir = Path(resources.enter_context(tempfile.TemporaryDirectory()))
            silence = resources.enter_context(open(os.devnull, "w"))
            resources.enter_context(contextlib.redirect_stdout(silence))
        processes.check_shared(workdir / LOCK)
        resources.enter_context(writing_explained(workdir))
        yield own_dir


def _open_alike(
    recipe: Recipe, workdir: Path, start: Start | None, restart: bool, teacher: Start | None, allow_change: bool
) -> tuple[Recipe, Dataset]:
    """Open the recipe and its data (`open_run`). ConfigError if the processes of the run disagree on either."""
    _print_lines(report.device_line(), report.cache_line())
    processes.check_alike("settings", shared_facts(recipe))
    processes.check_alike("--restart", str(restart))
    processes.check_alike("models to start from", "" if start is None else start.fingerprint)
    processes.check_alike("teachers", "" if teacher is None else teacher.fingerprint)
    recipe, dataset = open_run(recipe, workdir, print, start, restart, teacher, allow_change)
    if (warning := schedule_warning(recipe.optimizer, recipe.training.steps)) and processes.is_first():
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    processes.check_alike("data", dataset.fingerprint)
    return recipe, dataset


def _model_lines(recipe: Recipe, model: nn.Module, parameters: int, state: TrainState) -> str:
    """Describe the model and its number of parameters; with LoRA, also the number of trained parameters."""
    vocabulary = f", vocabulary of {recipe.model.vocab_size}" if TASKS[recipe.task].tokens else ""
    line = f"model: {type(model).__name__}, {parameters:,} parameters{vocabulary}"
    if recipe.lora is None:
        return line
    return f"{line}\nLoRA with rank {recipe.lora.rank}: {count_parameters(state.params):,} trained parameters"


def _long_step_note(recipe: Recipe) -> str:
    """Return a line that announces long steps, before the first of which nothing would be printed; or ""."""
    count, (_, rows) = recipe.training.accumulation, shared_rows(recipe.data)
    if count < MANY_MICRO_BATCHES:
        return ""
    return (
        f"note: a step computes {count:,} micro-batches of {rows // count:,} rows (--training.accumulation), one after "
        f"another, and can take long; progress and Ctrl-C wait for its end\n"
    )


def _finished_before(
    recipe: Recipe, summary: Summary, step: int, ledger: TrainStats, stopping: processes.SharedStop
) -> Summary | None:
    """Print the summary of an already finished run again and return it; None if the run is not finished."""
    last = summaries.read_summary(summary.workdir) or summary
    if not processes.first_decides(lambda: step >= summary.steps and ledger.evaluated >= step and last.step == step):
        return None
    print(f"{summaries.render(last)}\n{summaries.render_finished(last, how_to_extend(summary.command, recipe))}")
    return dataclasses.replace(last, stop_code=stopping.exit_code)


@dataclasses.dataclass(kw_only=True)
class _Training:
    """A training run: its state, its data, and its output files."""

    recipe: Recipe
    dataset: Dataset
    model: nn.Module
    placement: Placement
    """runs the pure step on the devices"""
    usable: Callable[[TrainState], PyTree]
    """returns the parameters of a state that are evaluated"""
    batches: Iterator[Batch]
    source: Supervision | Rollouts
    """makes the batches of training from those of the data, `batches`"""
    ledger: TrainStats
    journal: Journal
    state: TrainState
    """state in the form that `placement.train_step` takes"""
    step: int
    """number of steps done"""
    checkpoints: Checkpointer
    writer: MetricsWriter
    progress: Progress
    profiler: Profiler
    watch: MemoryWatch
    stopping: processes.SharedStop
    lock: WorkdirLock
    own_dir: Path
    """directory for the files of this process: the workdir (first process) or a temporary directory (all others)"""
    began: float
    """`time.perf_counter()` at the start of the run, minus the time of earlier calls"""
    compiled: set[tuple] = dataclasses.field(default_factory=set)
    """shapes of batches for which the step is compiled"""
    evaluated: bool = False
    """whether this process has evaluated, so that later evaluations compile nothing"""

    @property
    def task(self) -> Task:
        """Task of the recipe."""
        return TASKS[self.recipe.task]

    def run(self) -> None:
        """Train to the last step or until a signal. Evaluate and save at the intervals of the recipe."""
        recipe, steps = self.recipe, self.recipe.training.steps
        while True:
            self.profiler.at(self.step, self.journal.pause)
            if self.source.unfinished(self.step):
                self.advance()
                continue
            stop = self.stopping.soon()
            to_evaluate = self.ledger.evaluated < self.step and _due(self.step, recipe.evaluation.every, steps)
            to_save = _due(self.step, recipe.checkpoint.every or recipe.evaluation.every, steps)
            if to_evaluate or to_save or stop:
                self.journal.pause()
            if to_evaluate and not stop:
                self.evaluate()
                stop = self.stopping()
                to_save |= self.checkpoints.newest_step == self.step  # resumed run: its checkpoint lacks the eval loss
            if self.step and (to_save or stop):
                self.save()
                stop = self.stopping()
            if self.step >= steps or stop:
                break
            self.advance()
        self.checkpoints.wait()

    def advance(self) -> None:
        """Train on the next batch. The metrics of a step are read only after the next step was dispatched."""
        recipe, asked = self.recipe, time.perf_counter()
        batch = self.source.batch(self.state, self.step, self.batches)
        check_batch(
            batch, recipe.model.vocab_size, recipe.model.embedding.source_vocab_size, recipe.model.output.num_classes
        )
        self.source.record(self.journal, time.perf_counter() - asked)
        with self._compilation_timed(batch):
            self.watch.batch = batch
            with self.profiler.step(self.step + 1):
                self.state, metrics = self.placement.train_step(self.state, batch, self.journal.skip_above())
        self.step += 1
        self.journal.add(self.step, metrics, padding(batch), batch, self._why_not_finite)

    def _why_not_finite(self, batch: Batch) -> str:
        """Return a sentence that names the non-finite parameter, or the row of the batch with non-finite logits."""
        state = self.placement.whole(self.state)
        return why_not_finite(self.recipe, self.model, model_params(self.recipe, state.params, state.base), batch)

    @contextlib.contextmanager
    def _compilation_timed(self, batch: Batch) -> Iterator[None]:
        """Report the compilation at the first step of each batch shape, and exclude its time from the speed."""
        shapes = tuple(array.shape for array in batch.values())
        if shapes in self.compiled:
            yield
            return
        self.journal.read()  # otherwise, the wait for the previous step would count as compilation
        again = " for another batch shape" if self.compiled else ""
        self.progress.print(f"compiling the training step{again} ...")
        before = time.perf_counter()
        yield
        seconds = time.perf_counter() - before
        self.progress.print(f"compiled in {seconds:.1f} s")
        self.compiled.add(shapes)
        self.journal.compiled(seconds)

    def evaluate(self) -> None:
        """Evaluate on held-out data and write samples. After a signal, nothing is recorded."""
        asked, step, self.watch.now = time.perf_counter(), self.step, EVALUATION
        params, reference = self._params()
        eval_step = functools.partial(self.placement.eval_step, reference=reference)
        result, text = self.task.evaluate(self._evaluation(params, eval_step, step))
        if result is not None and not self.stopping():  # otherwise the resumed run evaluates again
            self.ledger.record_evaluation(step, result, self.task.metric(result))
            self.writer.write(step, {f"eval/{name}": value for name, value in result.measures.items()})
            self.progress.print(f"step {step}: eval {result}")
            if text:
                report.append_samples(self.own_dir, step, text)
                self.progress.print(text)
        if not self.evaluated:
            self.progress.exclude(time.perf_counter() - asked)  # most of it is compilation
            self.evaluated = True
        self.watch.now = STEP

    def _evaluation(self, params: PyTree, eval_step: EvalStep, step: int) -> Evaluation:
        """Return the evaluation of these parameters; `step` is the seed of its samples, together with the run's."""
        recipe = self.recipe
        return Evaluation(
            model=self.model,
            params=params,
            dataset=self.dataset,
            options=recipe.evaluation,
            eval_step=eval_step,
            seed=(recipe.training.seed * 1_000_003 + step * 1_009) % 2**32,
            name=recipe.name,
            rewards=self.source.rewards,
            strict=recipe.training.nan_policy == "stop",
            should_stop=self.stopping,
        )

    def _params(self) -> tuple[PyTree, PyTree]:
        """Return the parameters to evaluate, and those of the reference model (None for a task without one)."""
        state = self.placement.whole(self.state)
        return self.usable(state), state.base if self.task.keeps_reference(self.recipe) else None

    def save(self) -> None:
        """Start to save a checkpoint, after all metrics up to its step are on disk."""
        self.lock.check()
        self.writer.flush()
        self.ledger.seconds = time.perf_counter() - self.began
        data = checkpoint_data(self.dataset, self.batches, self.ledger)
        metric = self.ledger.eval_metric if self.ledger.evaluated == self.step else None
        state = self.placement.whole(self.state)
        self.checkpoints.save(self.step, state, data=data, recipe=to_json(self.recipe), metric=metric)

    def finish(self, summary: Summary) -> Summary:
        """Evaluate the final model, plot the loss curve, and write and print the summary."""
        recipe, own_dir = self.recipe, self.own_dir
        self.watch.now = EVALUATION
        summary = self._measured(_with_totals(summary, self.step, self.ledger))
        self.writer.flush()
        if self.step >= min(recipe.logging.every, recipe.training.steps):
            from transformer.viz._curves import loss_curve  # imported late: matplotlib is slow to import

            unit = self.task.unit
            loss_curve(own_dir / "metrics.jsonl", own_dir / "loss.png", title=recipe.name, unit=unit)
        seconds = time.perf_counter() - self.began
        summary = dataclasses.replace(summary, stop_code=self.stopping.exit_code, seconds=seconds)
        self.progress.close()
        if summary.stop_code is None:
            summaries.save_summary(summary, own_dir)
            print(summaries.render(summary))
        else:
            print(summaries.render_stopped(summary))
        return dataclasses.replace(summary, stop_code=self.stopping.exit_code)  # a signal may have come meanwhile

    def _measured(self, summary: Summary) -> Summary:
        """Return the summary with measures and texts of the best saved model; unchanged after a signal."""
        if self.stopping():
            return summary
        recipe, shown, (params, reference) = self.recipe, self.step, self._params()
        if recipe.checkpoint.keep_best and summary.best_step not in (None, shown):
            best = load_run(summary.workdir)
            params, shown = best.params, best.step
        summary = dataclasses.replace(summary, shown_step=shown)
        run = self._evaluation(params, compiled_eval_step(recipe, reference), recipe.training.steps)
        if (results := self.task.report(run, self.own_dir)) is not None:
            summary = dataclasses.replace(summary, **vars(results))
        if summary.measures:
            self.writer.write(self.step, summary.measures)
        return summary


def _with_totals(summary: Summary, step: int, ledger: TrainStats) -> Summary:
    """Return the summary with the training statistics after `step` steps."""
    names = "tokens_per_s", "skipped", "spikes", "eval_loss", "eval_accuracy", "eval_mae", "best_loss", "best_step"
    return dataclasses.replace(summary, step=step, **{name: getattr(ledger, name) for name in names})


def _due(step: int, every: int | None, steps: int) -> bool:
    """Return whether an action that runs at every multiple of `every` and at the last step is due after this step."""
    return step > 0 and (step == steps or (every is not None and step % every == 0))
