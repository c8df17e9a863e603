"""The training loop: named sections around the pure step. Only here are batches fed, metrics read and files written."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path

import jax

from transformer.data import check_batch, padding
from transformer.models import count_parameters
from transformer.training import processes
from transformer.training.calls import record_call
from transformer.training.checkpoint import Checkpointer
from transformer.training.evaluation import evaluate_loss
from transformer.training.finite import why_not_finite
from transformer.training.journal import Journal
from transformer.training.lock import NAME as LOCK
from transformer.training.lock import WorkdirLock
from transformer.training.memory import EVALUATION, STEP, MemoryWatch
from transformer.training.metrics import MetricsWriter, Progress
from transformer.training.numbers import draw_forecasts
from transformer.training.parallel import place
from transformer.training.profiling import Profiler, Window
from transformer.training.recipe import Recipe, build_model, to_json
from transformer.training.report import append_samples, cache_line, cut_samples, device_line, report, samples
from transformer.training.restart import set_aside, writing_explained
from transformer.training.runs import begin, checkpoint_data, load_run, open_run, record_run, shared_facts
from transformer.training.settings import schedule_warning
from transformer.training.signals import StopSignal
from transformer.training.speed import Speed
from transformer.training.start import Start
from transformer.training.state import make_usable, model_params, parameter_paths
from transformer.training.summary import (
    Summary,
    read_summary,
    render,
    render_finished,
    render_stopped,
    save_summary,
)
from transformer.training.tasks import TASKS


def train(
    recipe: Recipe,
    workdir: str | os.PathLike,
    *,
    command: str = "",
    start: Start | None = None,
    profile: Window | None = None,
    take_over: bool = False,
    restart: bool = False,
) -> Summary:
    """Train a recipe in a workdir to its last step or until a signal. An existing run is resumed, bit for bit.

    The workdir contains recipe.json, calls.jsonl, tokenizer/, checkpoints/, first_checkpoint.json, metrics.jsonl,
    tensorboard/, samples.txt, loss.png, summary.json and, with `profile`, profile/. All processes of one run
    (`parallel.coordinator`) make the same call, with one workdir that all can see.

    Args:
        recipe: what to train.
        workdir: directory of the run; created if it does not exist.
        command: the command that resumes this run, to be printed.
        start: a model to initialize from (`transformer.inference.start_from` reads it); not needed again to resume.
        profile: the steps to trace.
        take_over: replace the lock of a process on another host (`WorkdirLock`).
        restart: begin anew; the files of an earlier run in the workdir move to its directory `previous`.

    Raises:
        ValueError: a recipe or data that can't be, or a workdir of another run.
        WorkdirInUseError, CheckpointSaveError, OSError: the workdir can't be used or written.
        NonFiniteError: loss, gradient or parameter was not finite, with nan_policy "stop", or always again.
        LossSpikeError: a loss far above the usual, with spike_policy "stop".
        ProcessesError: other processes of the run can't be reached, or are gone.
        OutOfMemoryError: a device has no room for it; says how much it takes, and what helps.
    """
    started, workdir = time.perf_counter(), Path(workdir)
    command = command or f"transformer.training.loop.train(recipe, {str(workdir)!r})"
    with processes.together(recipe.parallel), contextlib.ExitStack() as resources:
        # Who writes: the first process; the others do the same, but nobody reads what they say
        own, lock = workdir, WorkdirLock(workdir, take_over)
        if processes.is_first():
            resources.enter_context(lock)
        else:
            own = Path(resources.enter_context(tempfile.TemporaryDirectory()))
            silence = resources.enter_context(open(os.devnull, "w"))
            resources.enter_context(contextlib.redirect_stdout(silence))
        processes.check_shared(workdir / LOCK)
        resources.enter_context(writing_explained(workdir))
        stop = resources.enter_context(StopSignal())
        stopping = processes.SharedStop(stop)

        # What to train: recipe, data, model
        print(device_line(), flush=True)
        if kept := cache_line():
            print(kept)
        processes.check_alike("settings", shared_facts(recipe))
        processes.check_alike("--restart", str(restart))
        processes.check_alike("models to start from", "" if start is None else start.fingerprint)
        recipe, dataset = open_run(recipe, workdir, say=print, start=start, restart=restart)
        if (warning := schedule_warning(recipe.optimizer, recipe.training.steps)) and processes.is_first():
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        processes.check_alike("data", dataset.fingerprint)
        model, steps = build_model(recipe), recipe.training.steps
        watch = resources.enter_context(MemoryWatch(recipe))
        placement = watch.placement = place(recipe)
        print(f"data: {dataset.describe()}")
        if spread := placement.describe():
            print(spread)

        # Where to begin: the newest checkpoint, or a new state
        if restart and (previous := processes.first_decides(lambda: str(set_aside(workdir) or ""))):
            print(f"restart: the earlier run is now in {previous}")
        keep = {"keep_last": recipe.checkpoint.keep_last, "keep_best": recipe.checkpoint.keep_best}
        checkpoints = resources.enter_context(Checkpointer(workdir, **keep))
        batches = dataset.train_batches(recipe.training.seed, placement.rows)
        state, ledger = begin(recipe, dataset, workdir, checkpoints, batches, placement, start)
        step, seconds_before = int(state.step), ledger.seconds
        record_run(recipe, dataset, own)
        cut_samples(own, step)
        usable = make_usable(recipe)
        shapes = jax.eval_shape(usable, state)
        parameters = count_parameters(shapes)
        about = {"name": recipe.name, "workdir": str(workdir), "command": command, "task": recipe.task}
        summary = Summary(**about, steps=steps, parameters=parameters)
        vocabulary = f", vocabulary of {recipe.model.vocab_size}" if TASKS[recipe.task].tokens else ""
        print(f"model: {type(model).__name__}, {parameters:,} parameters{vocabulary}")
        if recipe.lora is not None:
            print(f"LoRA of rank {recipe.lora.rank}: {count_parameters(state.params):,} parameters are trained")
        last = read_summary(workdir) or summary
        if processes.first_decides(lambda: step >= steps and ledger.evaluated >= step and last.step == step):
            print(f"{render(last)}\n{render_finished(dataclasses.replace(last, command=command))}")
            return last
        where = f"going on from step {step}" if step else "a new run"
        speed = Speed(recipe, shapes, placement)
        print(f"{speed}\nworkdir: {workdir}, {where}, to step {steps}", flush=True)
        record_call(own, step, command, device_line())

        # What the loop is made of
        writer = MetricsWriter(own, restored_step=step or None, tensorboard=recipe.logging.tensorboard)
        resources.callback(writer.close)
        counted = TASKS[recipe.task].targets
        progress = Progress(steps, start_step=step, mode=recipe.logging.progress, targets=counted)
        resources.callback(progress.close)
        profiler = Profiler(profile, workdir, step=step, first=processes.is_first(), say=progress.print)
        resources.enter_context(profiler)

        def why(batch) -> str:
            now = placement.whole(state)
            return why_not_finite(recipe, model, model_params(recipe, now.params, now.base), batch)

        journal = Journal(recipe, ledger, writer, progress, parameter_paths(state.params), why, speed)
        state = placement.spread(state)

        def evaluate() -> None:
            held_out = dataset.eval_batches(limit=recipe.evaluation.batches)
            params = usable(placement.whole(state))
            strict = recipe.training.nan_policy == "stop"
            result = evaluate_loss(placement.eval_step, params, held_out, stopping, strict)
            text = "" if stopping() else samples(recipe, model, params, dataset, step)
            if result is None or stopping():
                return  # it is done again when the run goes on
            ledger.record_evaluation(step, result.loss, result.accuracy, result.mae, TASKS[recipe.task].labels)
            writer.write(step, {f"eval/{name}": value for name, value in result.measures.items()})
            progress.print(f"step {step}: eval {result}")
            if text:
                append_samples(own, step, text)
                progress.print(text)

        def save() -> None:
            lock.check()
            writer.flush()
            ledger.seconds = seconds_before + time.perf_counter() - started
            data = checkpoint_data(dataset, batches, ledger)
            metric = ledger.eval_metric if ledger.evaluated == step else None
            checkpoints.save(step, placement.whole(state), data=data, recipe=to_json(recipe), metric=metric)

        # Training
        compiled = set()
        while True:
            profiler.at(step, journal.pause)
            stop_now = stopping.soon()
            to_evaluate = ledger.evaluated < step and _due(step, recipe.evaluation.every, steps)
            to_save = _due(step, recipe.checkpoint.every or recipe.evaluation.every, steps)
            if to_evaluate or to_save or stop_now:
                journal.pause()
            if to_evaluate and not stop_now:
                watch.now = EVALUATION
                evaluate()
                watch.now = STEP
                stop_now = stopping()
                to_save = to_save or checkpoints.newest_step == step  # gone on with: its checkpoint lacks the loss
            if step and (to_save or stop_now):
                save()
                stop_now = stopping()
            if step >= steps or stop_now:
                break
            asked = time.perf_counter()
            batch = next(batches)
            check_batch(batch, recipe.model.vocab_size, recipe.model.source_vocab_size, recipe.model.num_classes)
            journal.fed(time.perf_counter() - asked)
            sizes = tuple(array.shape for array in batch.values())
            if sizes not in compiled:
                journal.read()  # else its wait would count as compilation
                progress.print(f"compiling the training step{' for a batch of other sizes' * bool(compiled)} ...")
            watch.batch, before = batch, time.perf_counter()
            with profiler.step(step + 1):
                state, metrics = placement.train_step(state, batch, journal.skip_above())
            if sizes not in compiled:
                seconds = time.perf_counter() - before
                progress.print(f"compiled in {seconds:.1f} s")
                compiled.add(sizes)
                journal.compiled(seconds)
            step += 1
            journal.add(step, metrics, padding(batch), batch)
        checkpoints.wait()

        # What came of it
        watch.now = EVALUATION
        summary = dataclasses.replace(
            summary,
            step=step,
            tokens_per_s=ledger.tokens_per_s,
            skipped=ledger.skipped,
            spikes=ledger.spikes,
            eval_loss=ledger.eval_loss,
            eval_accuracy=ledger.eval_accuracy,
            eval_mae=ledger.eval_mae,
            best_loss=ledger.best_loss,
            best_step=ledger.best_step,
        )
        if not stopping():
            params, shown = usable(placement.whole(state)), step
            if recipe.checkpoint.keep_best and ledger.best_step not in (None, step):
                best = load_run(workdir)
                params, shown = best.params, best.step
            summary = dataclasses.replace(summary, shown_step=shown)
            summary = report(recipe, model, params, dataset, summary, stopping)
            if summary.measures:
                writer.write(step, summary.measures)
            if (picture := TASKS[recipe.task].picture) and not stopping():
                draw_forecasts(recipe, model, params, dataset, own / picture)
        writer.flush()
        if step >= min(recipe.logging.every, steps):
            from transformer.viz.curves import loss_curve  # matplotlib takes a while: not before the first step

            unit = TASKS[recipe.task].unit
            loss_curve(own / "metrics.jsonl", own / "loss.png", title=recipe.name, unit=unit)
        seconds = seconds_before + time.perf_counter() - started
        summary = dataclasses.replace(summary, stop_code=stopping.exit_code, seconds=seconds)
        progress.close()
        if summary.stop_code is None:
            save_summary(summary, own)
            print(render(summary))
        else:
            print(render_stopped(summary))
        return summary


def _due(step: int, every: int | None, steps: int) -> bool:
    return step > 0 and (step == steps or (every is not None and step % every == 0))
