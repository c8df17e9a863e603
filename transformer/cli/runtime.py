"""Checks of a notebook's runtime: versions, accelerator, storage. Each problem is reported in one line with its remedy.

The notebooks call these functions before JAX is imported and before all requirements are installed. Therefore the top
of this file imports only the standard library and modules that import nothing else.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from transformer.cli._devices import TPU_VARIABLES, accelerator_present
from transformer.cli._errors import describe, one_line
from transformer.config._local_paths import local_path

__all__ = ["RuntimeProblem", "check_devices", "check_versions", "missing", "one_line_errors", "storage"]

_PROJECT = "transformer-zoo"
_SOURCE = Path(__file__).resolve().parents[2]
"""root of the checkout, unless the package is installed"""

_MACHINE = ("jax", "jaxlib", "numpy")
"""packages that the machine provides in versions for its accelerator; only the user may replace them"""

_LOADED = (*_MACHINE, "flax", "ml_dtypes", "optax")
"""packages that cannot be replaced after their import"""

_ROOM = 2**28
"""free bytes that a small run needs, for checkpoints of a few million parameters"""

_RESTART = "restart the session (Runtime > Restart session), then Run all"
_NEW_MACHINE = "Runtime > Disconnect and delete runtime, then Run all"


class RuntimeProblem(RuntimeError):
    """The runtime cannot run the notebook. A notebook shows the message without a traceback."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints instead of a traceback."""
        return [str(self)]


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_versions(
    modules: Mapping[str, ModuleType] = sys.modules,
    installed: Callable[[str], str | None] = _installed,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Check the packages that the machine provides.

    Raises:
        RuntimeProblem: a package was replaced after its import, which requires a restart; JAX or NumPy is too old; or
            jaxlib or NumPy is incompatible with JAX.
    """
    for name in _LOADED:
        loaded, found = getattr(modules.get(name), "__version__", None), installed(name)
        if None not in (loaded, found) and loaded != found:
            raise RuntimeProblem(
                f"{name} {loaded} is loaded, but {found} is installed and takes effect only after a restart: "
                f"{_RESTART}."
            )
    owners = [(_PROJECT, requirement) for requirement in _requirements()]
    owners += [(f"jax {installed('jax')}", requirement) for requirement in _required_by_jax()]
    for owner, requirement in owners:
        name, found = requirement.name, installed(requirement.name)
        if name in _MACHINE and found is not None and not requirement.specifier.contains(found, prereleases=True):
            extra = {"tpu": "jax[tpu]", "gpu": "jax[cuda12]"}.get(accelerator_present(environment=environment), "jax")
            raise RuntimeProblem(
                f"{name} {found} is incompatible with {owner}, which needs {requirement}. Choose the latest runtime "
                f"version "
                f'(Runtime > Change runtime type), or run %pip install -U "{extra}" and {_RESTART}.'
            )


def _required_by_jax() -> list[Any]:
    """Return the requirements of the installed JAX, without extras."""
    from packaging.requirements import Requirement

    found = [Requirement(line) for line in metadata.requires("jax") or ()] if _installed("jax") else []
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]


def _requirements(*extras: str) -> list[Any]:
    """Return the requirements of this project with extras ("train", "zoo"), as `packaging.requirements.Requirement`."""
    from packaging.requirements import Requirement  # ipykernel depends on it: every notebook has it

    found, groups = [], _groups()
    for line in groups[""] + [line for extra in extras for line in groups[extra]]:
        requirement = Requirement(line)
        if requirement.name == _PROJECT:
            found += [inner for extra in sorted(requirement.extras) for inner in map(Requirement, groups[extra])]
        elif requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.append(requirement)
    return found


def missing(*extras: str, installed: Callable[[str], str | None] = _installed) -> list[str]:
    """Return the requirements of these extras that no installed package satisfies, for pip."""
    needed = {}
    for requirement in _requirements(*extras):
        found = installed(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            needed[str(requirement)] = None
    return list(needed)


def _groups() -> dict[str, list[str]]:
    """Return the requirements by extra ("" is the base), from the checkout's pyproject.toml or installed package."""
    file = _SOURCE / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        if project["name"] == _PROJECT:
            return {"": project["dependencies"], **project["optional-dependencies"]}
    groups: dict[str, list[str]] = {"": []}
    for name in metadata.metadata(_PROJECT).get_all("Provides-Extra") or ():
        groups[name] = []
    for line in metadata.requires(_PROJECT) or ():
        needed, _, marker = line.partition(";")
        extra = re.search(r"""extra == ["']([\w-]+)["']""", marker)
        groups["" if extra is None else extra[1]].append(needed.strip())
    return groups


def check_devices(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> None:
    """Print the devices that JAX uses, with their memory.

    Raises:
        RuntimeProblem: the machine has a TPU or a GPU, or its runtime is for TPUs, but JAX does not use it. This is not
            an error if `JAX_PLATFORMS` excludes the platform.
    """
    expected = accelerator_present(root, environment)
    if expected == "cpu" and any(environment.get(name) for name in TPU_VARIABLES):
        expected = "tpu"

    import jax

    platforms = environment.get("JAX_PLATFORMS", "")
    intended = platforms and expected.replace("gpu", "cuda") not in platforms.replace("gpu", "cuda").split(",")
    try:
        devices = jax.devices()
    except RuntimeError as error:
        first = one_line(str(error).strip().partition("\n")[0])[:300].rstrip(".")
        raise RuntimeProblem(f"JAX cannot start: {first}. {_remedy(expected)}") from error
    used = devices[0].platform
    if expected not in ("cpu", used) and not intended:
        name = expected.upper()
        raise RuntimeProblem(f"This is a {name} runtime, but JAX uses the {used.upper()}. {_remedy(expected)}")
    for device in devices:
        memory = (device.memory_stats() or {}).get("bytes_limit")
        print(f"{device.id}: {device.device_kind}{f', {memory / 2**30:.1f} GiB' if memory else ''}")
    if used == "tpu" and (difference := _libtpu_difference()):
        print(f"note: {difference}. If JAX or a kernel fails to compile, {_matching_libtpu()}.")


def _libtpu_difference(installed: Callable[[str], str | None] = _installed) -> str | None:
    """Describe how the installed libtpu differs from the version that this JAX was released with, or return None."""
    from packaging.specifiers import SpecifierSet

    found, jax = installed("libtpu"), metadata.version("jax")
    wanted = _libtpu_of_jax()
    if found is None:
        return f"libtpu is not installed; jax {jax} was released with libtpu{wanted}"
    if SpecifierSet(wanted).contains(found, prereleases=True):
        return None
    return f"libtpu {found} is not the version that jax {jax} was released with (libtpu{wanted})"


def _libtpu_of_jax() -> str:
    """Return the version of libtpu that the installed JAX requires ("==0.0.23"), or "" if it requires none."""
    found = (re.match(r"libtpu\s*([^;\s]*)", line) for line in metadata.requires("jax") or ())
    return next((match[1] for match in found if match), "")


def _matching_libtpu() -> str:
    return f'run %pip install "libtpu{_libtpu_of_jax()}" and {_RESTART}'


def _remedy(accelerator: str, installed: Callable[[str], str | None] = _installed) -> str:
    """Return what to do if JAX does not use the machine's "tpu" or "gpu"."""
    if accelerator == "tpu" and (difference := _libtpu_difference(installed)):
        return f"The reason may be that {difference}: {_matching_libtpu()}."
    if accelerator == "gpu":
        plugins = {name: installed(name) for name in ("jax-cuda12-plugin", "jax-cuda13-plugin")}
        if installed("jaxlib") not in plugins.values():
            got = ", ".join(f"{name} {version}" for name, version in plugins.items() if version) or "no CUDA plugin"
            version = metadata.version("jax")
            return f'JAX {version} has {got}: run %pip install "jax[cuda12]=={version}" and {_RESTART}.'
    return f"Another process may use it: {_RESTART}. If that does not help: {_NEW_MACHINE}."


def storage(drive: str, local: str | os.PathLike = "runs", room: int = _ROOM) -> Path:
    """Return the folder for runs: in Colab a folder on Google Drive, otherwise `local`.

    Args:
        drive: mount point of Google Drive; "" uses `local` in Colab, too.
        local: a folder on this machine.
        room: number of bytes that must be free.

    Raises:
        RuntimeProblem: Google Drive could not be mounted, or the folder is full or not writable.
    """
    try:
        from google.colab import drive as colab
    except ImportError:
        colab = None
    if colab is None or not drive or "KAGGLE_KERNEL_RUN_TYPE" in os.environ:  # Kaggle's image descends from Colab's
        folder = local_path(local, "local").resolve()
    else:
        otherwise = 'Run all again and allow the access, or set DRIVE = "" to keep the run on this machine.'
        try:
            colab.mount(drive)
        except Exception as error:  # colab raises ValueError, MessageError and others
            raise RuntimeProblem(f"Google Drive is not mounted ({one_line(str(error))}). {otherwise}") from error
        if not (local_path(drive, "drive") / "MyDrive").is_dir():
            raise RuntimeProblem(f"Google Drive is not mounted: {drive} has no folder MyDrive. {otherwise}")
        folder = Path(drive) / "MyDrive" / _PROJECT
    _check_room(folder, room)
    return folder


def _check_room(folder: Path, room: int) -> None:
    probe = folder / ".probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < room:
            raise OSError(errno.ENOSPC, f"{free / 2**20:.0f} MiB are free, but a run needs {room / 2**20:.0f} MiB")
        probe.write_bytes(b"0" * 2**16)
        probe.unlink()
    except OSError as error:
        full = "Free some space (on Google Drive: empty the trash, too)"
        do = full if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Check its permissions"
        reason = error.strerror or str(error)
        raise RuntimeProblem(
            f'{folder} cannot be used: {reason}. {do}, or set DRIVE = "" to keep the run on this machine; then Run all.'
        ) from error


def one_line_errors(shell: Any = None) -> None:
    """Show errors of this package as one line in the notebook; `%tb` shows the traceback of the last one.

    Args:
        shell: the IPython shell; None: the running shell. Outside IPython, the function does nothing.
    """
    if shell is None:
        from IPython import get_ipython

        shell = get_ipython()
    if shell is not None:
        shell.set_custom_exc((Exception,), _show)


def _show(shell: Any, kind: type, error: Exception, trace: TracebackType, tb_offset: int | None = None) -> None:
    if _is_explained(error, trace):
        sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace  # for %tb
        shell._showtraceback(kind, error, [f"{describe(error)}  (%tb shows the traceback)"])
    else:
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)


def _is_explained(error: BaseException, trace: TracebackType | None) -> bool:
    """Return whether the message of an error is sufficient without a traceback.

    This is the case for an error class of this package, and for a ValueError or OSError raised in this package.
    """
    if type(error).__module__.partition(".")[0] == "transformer" and not isinstance(error, RuntimeProblem):
        return True
    files: Iterable[str] = ()
    while trace is not None:
        files, trace = (*files, trace.tb_frame.f_code.co_filename), trace.tb_next
    inside = [Path(file).is_relative_to(Path(__file__).parents[1]) for file in files]
    return any(inside) if isinstance(error, OSError) else bool(inside) and inside[-1] and isinstance(error, ValueError)
