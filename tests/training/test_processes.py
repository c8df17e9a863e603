"""Multi-process training: the same losses, one writer, and no process hangs when another one is lost."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from training_recipes import change, tiny_recipe, xla_flags

from transformer.config import ConfigError
from transformer.data import TextFile
from transformer.nn._sharding import ParallelConfig
from transformer.training import _processes as processes
from transformer.training._loop import train
from transformer.training._parallel import PmapPlacement
from transformer.training._signals import StopSignal
from transformer.training.metrics._writer import read_metrics
from transformer.training.workdir._checkpoint import load_params
from transformer.training.workdir._runs import shared_facts

pytestmark = pytest.mark.cpu_only("starts processes that compute on the CPU")

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
import dataclasses
import pathlib
from training_recipes import change, text_recipe
from transformer.nn._sharding import ParallelConfig

def get_config():
    sizes = {{"model": {{"d_model": 16, "num_heads": 2}}, "data": {{"batch_size": 8}}}}
    files = {{"logging": {{"every": 1}}, "checkpoint": {{"every": 2, "keep_last": 100_000}}}}
    recipe = change(text_recipe(pathlib.Path({folder!r})), **sizes, **files)
    return dataclasses.replace(recipe, parallel=ParallelConfig())
"""
MESH = ("--parallel.fsdp", "4", "--parallel.data", "2")


class Group:
    """Processes of one run, each with some of the devices; their output goes to files."""

    def __init__(self, folder, workdir, *flags, devices=(4, 4), patience=60, steps=12, slurm=False, last=()):
        (folder / "recipe.py").write_text(RECIPE.format(folder=str(folder)))
        port = free_port(range(61440, 65536) if slurm else None)
        self.members, self.outputs = [], [folder / f"{workdir.name}-{index}.txt" for index in range(len(devices))]
        for index, count in enumerate(devices):
            command = [sys.executable, str(ROOT / "train.py"), str(folder / "recipe.py"), "--workdir", str(workdir)]
            command += ["--training.steps", str(steps), *flags, *(last if index else ())]
            if len(devices) > 1 and not slurm:
                command += ["--parallel.coordinator", f"localhost:{port}", "--parallel.process-id", str(index)]
                command += ["--parallel.num-processes", str(len(devices)), "--parallel.patience", str(patience)]
            environment = os.environ | {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": xla_flags(count),
                "PYTHONPATH": str(ROOT / "tests"),
                "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
            if slurm:  # the variables that srun sets for each task; JAX derives the port from the job ID
                said = {"JOB_ID": port - 61440, "STEP_NODELIST": "localhost", "NTASKS": len(devices)}
                said |= {"PROCID": index, "LOCALID": index}
                environment |= {f"SLURM_{name}": str(value) for name, value in said.items()}
            with open(self.outputs[index], "w") as output:
                self.members.append(
                    subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=folder)
                )

    def wait(self, seconds=600):
        """Return the exit codes and outputs of all processes."""
        try:
            codes = [member.wait(seconds) for member in self.members]
            time.sleep(0.5)  # output after the end of a process
            return codes, self.told()
        finally:
            self.kill()

    def told(self):
        return [output.read_text() for output in self.outputs]

    def kill(self):
        for member in self.members:
            with contextlib.suppress(OSError):
                member.kill()

    def wait_until(self, condition, seconds=600):
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or any(member.poll() is not None for member in self.members):
                self.kill()
                raise AssertionError(self.told())
            time.sleep(0.02)


def free_port(wanted=None):
    for port in wanted or [0]:
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return free.getsockname()[1]
    raise AssertionError(f"no free port in {wanted}")


def losses(workdir):
    return [line["train/loss"] for line in read_metrics(workdir / "metrics.jsonl") if "train/loss" in line]


@pytest.fixture(scope="module")
def alone(folder):
    """The same run in this process alone, with all eight devices."""
    namespace = {}
    exec(RECIPE.format(folder=str(folder)), namespace)
    recipe = change(namespace["get_config"](), parallel={"fsdp": 4, "data": 2}, training={"steps": 12})
    assert train(recipe, folder / "alone").finished
    return folder / "alone"


@pytest.fixture(scope="module")
def together(folder):
    """The run in two processes with four devices each, never interrupted."""
    codes, told = Group(folder, folder / "together", *MESH).wait()
    assert codes == [0, 0], told
    return folder / "together", told


@pytest.mark.slow
def test_two_processes_train_as_one(alone, together):
    workdir, told = together
    np.testing.assert_allclose(losses(workdir), losses(alone), rtol=1e-5)
    assert len(losses(workdir)) == 12
    assert sorted(path.name for path in workdir.iterdir()) == sorted(path.name for path in alone.iterdir())
    assert "8 x cpu, 2 processes" in told[0]
    assert "step 12" in told[0]
    assert "step" not in told[1], "the second process is silent"
    assert (workdir / "samples.txt").read_text() == (alone / "samples.txt").read_text()


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_is_read_by_one(folder, alone, together):
    """A run starts with two processes, is resumed by one, and then by two again."""
    workdir = folder / "elastic"
    for steps, devices in ((4, (4, 4)), (8, (2,)), (12, (2, 2))):
        flags = () if sum(devices) < 8 else MESH
        codes, told = Group(folder, workdir, *flags, devices=devices, steps=steps).wait()
        assert set(codes) == {0}, told
    assert "resuming from step 8, to step 12" in told[0]
    np.testing.assert_allclose(losses(workdir), losses(alone), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_all_processes_end_when_one_is_killed_and_resume(folder, together, victim):
    workdir = folder / f"killed-{victim}"
    group = Group(folder, workdir, *MESH, "--training.steps", "100000")
    group.wait_until(lambda: (workdir / "checkpoints" / "4").exists())
    group.members[victim].kill()
    codes, told = group.wait()
    assert codes[1 - victim] not in (0, None)
    assert f"process {1 - victim} of 2" in told[1 - victim]
    assert "Restart all processes with the same command" in told[1 - victim]
    assert "Traceback" not in told[1 - victim]
    # Go back to a checkpoint that both runs had: from there on, the results must be bit-identical
    for path in (workdir / "checkpoints").iterdir():
        if path.name != "4":
            path.rename(workdir / path.name)
    codes, told = Group(folder, workdir, *MESH).wait()
    assert codes == [0, 0], told
    assert "resuming from step 4, to step 12" in told[0]
    jax.tree.map(
        np.testing.assert_array_equal,
        load_params(workdir, names="params")[0],
        load_params(together[0], names="params")[0],
    )
    assert losses(workdir) == losses(together[0])


@pytest.mark.slow
def test_slurm_is_found_without_a_flag(folder, alone):
    codes, told = Group(folder, folder / "slurm", *MESH, slurm=True).wait()
    assert codes == [0, 0], told
    assert "8 x cpu, 2 processes" in told[0]
    np.testing.assert_allclose(losses(folder / "slurm"), losses(alone), rtol=1e-5)


@pytest.mark.slow
def test_processes_with_different_settings_do_not_start(folder):
    codes, told = Group(folder, folder / "other", last=("--training.seed", "1")).wait()
    assert codes[0] != 0
    assert codes[1] == 2
    assert "process 1 of 2 and process 0 have different settings. Start all processes with the same command" in told[1]


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all(folder):
    workdir = folder / "signal"
    group = Group(folder, workdir, *MESH, "--training.steps", "100000")
    group.wait_until(lambda: (workdir / "checkpoints" / "2").exists())
    group.members[1].send_signal(signal.SIGTERM)
    codes, told = group.wait()
    assert codes == [143, 143], told
    newest = max(int(path.name) for path in (workdir / "checkpoints").iterdir())
    assert f"stopped at step {newest}" in told[0]


@pytest.mark.slow
def test_reports_processes_that_do_not_connect(folder):
    """The processes wait for each other for a limited time, and each one prints what to do."""
    group = Group(folder, folder / "second", patience=3)
    group.members[0].kill()
    codes, told = group.wait()
    assert codes[1] == 1
    assert "error: the coordinator at localhost:" in told[1]
    assert " does not answer (" in told[1]
    assert "waited 3 s, --parallel.patience). Start process 0" in told[1]
    group = Group(folder, folder / "third", patience=3)
    group.members[1].kill()
    codes, told = group.wait()
    assert codes[0] != 0
    assert "did not all connect within 3 s (--parallel.patience). Start each process" in told[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"coordinator": "localhost"}, r"coordinator.*got 'localhost'"),
        ({"coordinator": "a:99999"}, r"coordinator must be host:port"),
        ({"coordinator": "a:1"}, r"parallel.num_processes.*parallel.process_id"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, r"0.*num_processes.*1.*got 2.*2"),
        ({"num_processes": 2, "process_id": 0}, r"parallel.coordinator.*: --parallel.coordinator 10\.0"),
        ({"coordinator": "a:b:1", "num_processes": 2, "process_id": 0}, r"coordinator must be host:port"),
        ({"patience": 0}, r"patience.*1.*1,000,000.*got 0"),
    ],
)
def test_rejects_invalid_process_settings(fields, message):
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**fields)


@pytest.mark.parametrize(
    ("said", "lost"),
    [
        ("FAILED_PRECONDITION: Gloo all-reduce failed:\n[pair.cc:547] Connection closed by peer", True),
        ("INTERNAL: the program has failed\n[external/gloo/gloo/transport/tcp/pair.cc:547] closed", True),
        ("UNAVAILABLE: failed to connect to all addresses", True),
        ("INVALID_ARGUMENT: shapes differ", False),
    ],
)
@pytest.mark.parametrize("ending", [False, True])
def test_a_lost_process_is_reported(said, lost, ending, monkeypatch):
    """During training, and at the end, while a process waits for the others."""

    def fail():
        raise jax.errors.JaxRuntimeError(said)

    def work():
        with processes.together(ParallelConfig()):
            fail()

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax.distributed, "shutdown", fail)
    first = said.splitlines()[0]
    wanted = rf"process 0 of 2 lost the connection .*{first}\). Restart all processes" if lost else first
    with pytest.raises(processes.ProcessesError if lost else jax.errors.JaxRuntimeError, match=wanted):
        (processes.part if ending else work)()


def test_detects_the_launcher_of_the_process():
    slurm = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2"}
    assert processes.launcher(slurm) == "Slurm"
    assert processes.launcher({"OMPI_COMM_WORLD_SIZE": "4"}) == "Open MPI"
    assert processes.launcher({"TPU_WORKER_HOSTNAMES": "a,b"}) == "a TPU slice"
    shell = slurm | {"SLURM_STEP_NUM_TASKS": "1"}  # a shell inside an allocation of two tasks
    for alone in ({}, slurm | {"SLURM_NTASKS": "1"}, shell, {"SLURM_NTASKS": "2"}, {"TPU_WORKER_HOSTNAMES": "a"}):
        assert processes.launcher(alone) is None


def test_missing_connection_settings_are_named(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(processes.ProcessesError, match=r"MPI 5.*--parallel.coor"):
        processes.join(ParallelConfig())
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE")

    def refuse(**kwargs):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    with pytest.raises(
        processes.ProcessesError, match=r"not connect to .* this cluster: .* defined\. Pass to each process"
    ):
        processes.join(ParallelConfig(coordinator="auto"))
    here = ParallelConfig(coordinator="localhost:1", num_processes=2, process_id=0)
    with pytest.raises(processes.ProcessesError, match="port is in use"):
        processes.join(here)


def test_a_single_process_does_not_wait(monkeypatch):
    monkeypatch.setattr(processes, "launcher", lambda: None)
    processes.join(ParallelConfig())
    processes.barrier("nothing")
    processes.part()
    assert not jax.distributed.is_initialized()
    assert processes.is_first()
    assert processes.first_decides(lambda: [1]) == [1]
    stop = StopSignal()
    shared = processes.SharedStop(stop)
    assert (shared(), shared.soon(), shared.exit_code) == (False, False, None)
    stop.requested, stop.signum = True, signal.SIGTERM
    assert (shared(), shared.soon(), shared.exit_code) == (True, True, 143)


def test_processes_may_differ_in_index_and_data_path():
    def facts(path="a.txt", process_id=0, **training):
        recipe = tiny_recipe(**training)
        parallel = ParallelConfig(coordinator="a:1", num_processes=2, process_id=process_id)
        return shared_facts(dataclasses.replace(recipe, data=TextFile(path=path), parallel=parallel))

    assert facts("b.txt", 1) == facts()
    assert facts(seed=1) != facts()


def test_reports_processes_that_read_different_data(monkeypatch):
    processes.check_alike("data", "a")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "first_decides", lambda function: "a")
    processes.check_alike("data", "a")
    with pytest.raises(ConfigError, match=r"process 0 of 2 and process 0 have different data\. Start all"):
        processes.check_alike("data", "b")


def test_reports_a_disk_that_is_not_shared(tmp_path):
    processes.check_shared(tmp_path)
    with pytest.raises(ConfigError, match=r"\S+nowhere.*--workdir"):
        processes.check_shared(tmp_path / "nowhere")


def test_rejects_pmap_with_several_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"2.*--parallel.kind"):
        PmapPlacement(tiny_recipe())
