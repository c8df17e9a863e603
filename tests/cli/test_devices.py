"""Tests of accelerator detection, with simulated machines, and of the warning about an unused accelerator."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from transformer.__main__ import main as run_program
from transformer.cli import _devices as devices
from transformer.cli._devices import accelerator_present, unused_warning

SOURCE = Path(devices.__file__)


def machine(root: Path, *files: str) -> Path:
    """Create a file system with these empty files."""
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def pci(root: Path, vendor: str, device: str) -> Path:
    """Create the file system of a machine with one PCI device."""
    folder = root / "sys/bus/pci/devices/0000:00:05.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "device").write_text(f"{device}\n")
    return root


def test_a_machine_without_accelerators_reports_a_cpu(tmp_path):
    assert accelerator_present(tmp_path, {"PATH": ""}) == "cpu"


def test_device_files_of_a_tpu(tmp_path):
    assert accelerator_present(machine(tmp_path, "dev/accel0"), {"PATH": ""}) == "tpu"


def test_accelerators_of_other_vendors_are_not_reported_as_tpu(tmp_path):
    assert accelerator_present(machine(tmp_path, "dev/accel/accel0"), {"PATH": ""}) == "cpu"


def test_vfio_counts_as_tpu_only_with_tpu_environment_variables(tmp_path):
    machine(tmp_path, "dev/vfio/0", "dev/vfio/vfio")
    assert accelerator_present(tmp_path, {"PATH": ""}) == "cpu"
    assert accelerator_present(tmp_path, {"PATH": "", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}) == "tpu"


def test_finds_a_tpu_on_the_pci_bus(tmp_path):
    assert accelerator_present(pci(tmp_path, "0x1ae0", "0x0063"), {"PATH": ""}) == "tpu"


def test_a_google_network_card_is_not_a_tpu(tmp_path):
    assert accelerator_present(pci(tmp_path, "0x1ae0", "0x0042"), {"PATH": ""}) == "cpu"


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'", "gpu"),
        ("echo 'No devices were found'", "cpu"),
        ("echo 'NVIDIA-SMI has failed: GPU driver'; exit 9", "cpu"),
    ],
)
def test_a_gpu_counts_when_nvidia_smi_lists_it(tmp_path, script, found):
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    assert accelerator_present(tmp_path, {"PATH": str(program.parent)}) == found


def test_warns_about_an_unused_accelerator():
    assert unused_warning("cpu", "cpu", {}) is None
    assert unused_warning("gpu", "gpu", {}) is None
    message = unused_warning("gpu", "cpu", {})
    assert message.startswith("this machine has a GPU, but JAX uses the CPU. Run `make setup ACCELERATOR=gpu`")
    message = unused_warning("tpu", "cpu", {"JAX_PLATFORMS": "cpu"})
    assert message.endswith("JAX_PLATFORMS=cpu is set: unset it to use the TPU.")


def test_the_command_names_the_device(capsys, monkeypatch):
    monkeypatch.setattr(devices, "accelerator_present", lambda: "gpu")
    assert devices.main([]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("device: 8 x cpu, jax ")
    assert printed.err.startswith("warning: this machine has a GPU, but JAX uses the CPU")
    assert devices.main(["--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["present"], printed["used"], printed["count"]) == ("gpu", "cpu", 8)


def test_a_backend_that_fails_to_start_is_an_error(capsys, monkeypatch):
    def refuse():
        raise RuntimeError("the TPU is in use by another process")

    monkeypatch.setattr("jax.devices", refuse)
    assert devices.main([]) == 1
    assert re.fullmatch("error: .*: the TPU is in use by another process\n", capsys.readouterr().err)


def test_the_script_runs_by_path_without_installed_packages():
    """The Makefile runs it so: without site-packages, and without importing a neighboring file as a standard module."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(SOURCE), "--present"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() in ("cpu", "gpu", "tpu")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x"], "error: devices has no argument x. Its options are --present and --json.\n"),
        (["--present=x"], "error: argument --present: ignored explicit argument 'x'. --help describes each option.\n"),
    ],
)
def test_an_unknown_argument_is_a_one_line_error(words, message, capsys):
    assert run_program(["devices", *words]) == 2
    assert capsys.readouterr().err == message
