"""`python -m transformer devices`: the accelerators of this machine, and what JAX computes on.

The Makefile runs this file by path before anything is installed (`--present`), so only the standard library may be
imported at its top.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# The chips known to JAX's own detection (jax/_src/hardware_utils.py). Google's network card has the same vendor.
GOOGLE_PCI_VENDOR = "0x1ae0"
TPU_PCI_DEVICES = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}
"""PCI device ids of TPUs"""
# What Cloud TPU virtual machines, Colab and Kubernetes set where there is a TPU.
TPU_VARIABLES = ("TPU_ACCELERATOR_TYPE", "TPU_NAME", "TPU_WORKER_ID", "COLAB_TPU_ADDR", "COLAB_TPU_1VM")


def accelerator_present(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> str:
    """Returns "tpu", "gpu" or "cpu": what this machine has, whether or not JAX can use it.

    `root` is the file system to look at. An NVIDIA card counts when `nvidia-smi` can list it: a card without a driver
    is of no use.
    """
    if _tpu_present(root, environment):
        return "tpu"
    return "gpu" if _gpu_present(environment) else "cpu"


def _tpu_present(root: Path, environment: Mapping[str, str]) -> bool:
    # /dev/accel0 is a TPU; the directory /dev/accel/ belongs to other makers' chips.
    if any(root.glob("dev/accel[0-9]*")):
        return True
    for vendor in root.glob("sys/bus/pci/devices/*/vendor"):
        if vendor.read_text().strip() == GOOGLE_PCI_VENDOR:
            device = vendor.with_name("device")
            if device.exists() and device.read_text().strip() in TPU_PCI_DEVICES:
                return True
    return any(root.glob("dev/vfio/[0-9]*")) and any(environment.get(name) for name in TPU_VARIABLES)


def _gpu_present(environment: Mapping[str, str]) -> bool:
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"],
            capture_output=True,
            text=True,
            timeout=60,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU " in listing.stdout


def unused_warning(present: str, used: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns the sentence to say when an accelerator is present but JAX computes elsewhere, else None."""
    if present in ("cpu", used):
        return None
    if platforms := environment.get("JAX_PLATFORMS"):
        remedy = f"JAX_PLATFORMS={platforms} is set: unset it to use the {present.upper()}."
    else:
        remedy = (
            f"`make setup ACCELERATOR={present}` installs what it needs; if that is done, another process may hold it, "
            "or its driver may be too old."
        )
    return f"this machine has a {present.upper()}, which is not used: JAX computes on {used.upper()}. {remedy}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what JAX computes on; returns 0, or 1 when JAX cannot start its backend."""
    parser = argparse.ArgumentParser(
        prog=_called(), description="Which accelerators this machine has, and which JAX uses."
    )
    parser.add_argument("--present", action="store_true", help="print only tpu, gpu or cpu: what the machine has")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    present = accelerator_present()
    if options.present:
        print(json.dumps({"present": present}) if options.json else present)
        return 0

    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:
        print(f"error: JAX found no usable device: {error}", file=sys.stderr)
        return 1
    used, kind = devices[0].platform, devices[0].device_kind
    if options.json:
        print(
            json.dumps({"present": present, "used": used, "kind": kind, "count": len(devices), "jax": jax.__version__})
        )
    else:
        name = used if kind == used else f"{used} ({kind})"
        print(f"device: {len(devices)} x {name}, jax {jax.__version__}")
    if warning := unused_warning(present, used):
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def _called() -> str:
    """The command, for --help. There is no package to import from when the Makefile runs this file by its path."""
    if not __package__:
        return "devices.py"
    from transformer.config._invocation import program

    return program("devices")


if __name__ == "__main__":
    sys.exit(main())
