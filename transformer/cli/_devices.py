"""`python -m transformer devices`: the accelerators of this machine, and the devices that JAX uses.

The Makefile runs this file by its path (`--present`) before anything is installed. Therefore the top of the file may
import only the standard library.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# The chips that JAX itself detects (jax/_src/hardware_utils.py). The vendor id alone is not enough: Google's network
# card has the same one.
GOOGLE_PCI_VENDOR = "0x1ae0"
TPU_PCI_DEVICES = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}
"""PCI device ids of TPUs"""
# Variables that Cloud TPU virtual machines, Colab and Kubernetes set on machines with a TPU.
TPU_VARIABLES = ("TPU_ACCELERATOR_TYPE", "TPU_NAME", "TPU_WORKER_ID", "COLAB_TPU_ADDR", "COLAB_TPU_1VM")


def accelerator_present(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> str:
    """Return the accelerator of this machine, whether or not JAX can use it: "tpu", "gpu" or "cpu" (none).

    Args:
        root: root of the file system to search.
        environment: environment variables. A GPU counts only if `nvidia-smi` lists it: without a driver it can't be
            used.
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
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], timeout=60, env=dict(environment), check=False, **streams)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU " in listing.stdout


def unused_warning(present: str, used: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a warning if an accelerator is present but JAX uses another device, otherwise None."""
    if present in ("cpu", used):
        return None
    if platforms := environment.get("JAX_PLATFORMS"):
        remedy = f"JAX_PLATFORMS={platforms} is set: unset it to use the {present.upper()}."
    else:
        remedy = (
            f"Run `make setup ACCELERATOR={present}` to install its packages. If they are installed, another process "
            "may be using it, or its driver may be too old."
        )
    return f"this machine has a {present.upper()}, but JAX uses the {used.upper()}. {remedy}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the devices that JAX uses; return 0, or 1 if JAX cannot start its backend."""
    about = "List the accelerators of this machine and the devices that JAX uses."
    parser = argparse.ArgumentParser(prog=_called(), description=about, exit_on_error=False)
    only = "print only the accelerator of the machine: tpu, gpu or cpu"
    parser.add_argument("--present", action="store_true", help=only)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    try:
        options, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}. --help describes each option.") from None
    if unknown:
        raise ValueError(f"devices has no argument {unknown[0]}. Its options are --present and --json.")
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
        found = {"present": present, "used": used, "kind": kind, "count": len(devices), "jax": jax.__version__}
        print(json.dumps(found))
    else:
        name = used if kind == used else f"{used} ({kind})"
        print(f"device: {len(devices)} x {name}, jax {jax.__version__}")
    if warning := unused_warning(present, used):
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def _called() -> str:
    """Return the command for --help. If the Makefile runs this file by its path, the package can't be imported."""
    if not __package__:
        return "devices.py"
    from transformer.config._invocation import program

    return program("devices")


if __name__ == "__main__":
    sys.exit(main())
