"""Read, change and run notebooks in a kernel of this Python, for several test files."""

import json
import os
import pathlib
import re
import sys
import uuid

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell

ROOT = pathlib.Path(__file__).parent.parent
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TRAINING = ROOT / "notebooks" / "colab_tpu.ipynb"
PRETRAINED = ROOT / "notebooks" / "pretrained_tpu.ipynb"
FINETUNE = ROOT / "notebooks" / "finetune_colab.ipynb"
SHARDING = ROOT / "notebooks" / "sharding.ipynb"
INSTALL = ("setup", "install", "versions")
"""cells that are the same in every notebook"""

LAUNCH = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]


def read(path):
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def code_of(notebook, name):
    """Return the code of the cell with this id."""
    (cell,) = [cell for cell in notebook.cells if cell.id == name]
    assert cell.cell_type == "code"
    return cell.source


def with_parameters(notebook, **values):
    """Return the notebook with new values in its parameters cell, which must set each name exactly once."""
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    for name, value in values.items():
        cell.source, times = re.subn(
            rf"^{name} = .*$", lambda _, n=name, v=value: f"{n} = {v!r}", cell.source, flags=re.M
        )
        assert times == 1, f"the cell of parameters sets {name} {times} times"
    return notebook


def until(notebook, name):
    """Return the notebook up to this cell, inclusive."""
    names = [cell.id for cell in notebook.cells]
    notebook.cells = notebook.cells[: names.index(name) + 1]
    return notebook


def execute(notebook, tmp_path, folder, **environment):
    """Run a notebook in `folder`, and return the outputs of each cell. Modules in tmp_path/modules take precedence.

    The kernel is this Python with this checkout, independently of the kernels installed on the machine.
    """
    spec = tmp_path / "kernels" / "here" / "kernel.json"
    spec.parent.mkdir(parents=True, exist_ok=True)
    settings = {
        "XLA_FLAGS": re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"]).strip(),
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "modules"), str(ROOT)]),
        "TFDS_DATA_DIR": str(tmp_path / "tfds"),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),  # otherwise each call of `train` compiles again
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "TMPDIR": str(tmp_path),
        **environment,
    }
    spec.write_text(json.dumps({"argv": LAUNCH, "display_name": "here", "language": "python", "env": settings}))
    specs = KernelSpecManager(kernel_dirs=[str(spec.parent.parent)], ensure_native_kernel=False)
    kernel = AsyncKernelManager(kernel_name="here", kernel_spec_manager=specs)
    kernel.connection_file = str(tmp_path / f"kernel-{uuid.uuid4()}.json")
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, km=kernel, kernel_name="here", timeout=600, resources=resources)
    client.execute(cleanup_kc=True)
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def check(notebook, lines=""):
    """Return the notebook with a final cell that runs `lines` and checks that TensorFlow is not imported."""
    notebook.cells.append(new_code_cell(f"import sys\nassert 'tensorflow' not in sys.modules\n{lines}", id="check"))
    return notebook


def stopped(notebook, *arguments, **environment):
    """Return the id of the cell at which a notebook stops, and the displayed lines of its error."""
    try:
        execute(notebook, *arguments, **environment)
    except CellExecutionError:
        failed = [
            (cell.id, output) for cell in notebook.cells for output in cell.get("outputs", ()) if "ename" in output
        ]
        ((name, output),) = failed
        return name, output["traceback"]
    raise AssertionError("the notebook ran to its end")


def printed(outputs):
    return "".join(output.get("text", "") for output in outputs)


def pictures(outputs):
    return sum("image/png" in output.get("data", {}) for output in outputs)
