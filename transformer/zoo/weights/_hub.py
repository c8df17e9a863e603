"""Downloads of checkpoints from the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from transformer.config._checks import nearest
from transformer.config._local_paths import local_path
from transformer.zoo.weights._files import INDEX_FILE, WEIGHTS_FILE, WeightsError
from transformer.zoo.weights._flax_files import FLAX_FILE

# "gpt2" or "org/name", as the hub allows them. An existing local path that looks like an id is used as a path.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_-])?"
REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})?")
# Only files that are opened: no pickles, and no copies of the weights in subfolders.
_PATTERNS = ["*.json", "*.jinja", "model.safetensors", "model-*.safetensors"]


def fetch(name_or_path: str | os.PathLike, revision: str | None = None, known: Collection[str] = ()) -> Path:
    """Return the directory of a checkpoint, and download it from the hub if necessary.

    Only JSON files, safetensors files (without any: flax_model.msgpack) and chat templates are downloaded, into the
    shared cache of huggingface_hub. Cached files need no network.

    Args:
        name_or_path: an existing directory, or an id on the hub ("gpt2", "org/name").
        revision: branch, tag or commit on the hub. Only a commit is immutable.
        known: names that the caller accepts, of which an error suggests the nearest.

    Raises:
        FileNotFoundError: the argument looks like a path, but there is no such directory.
        WeightsError: no network, unknown name or revision, no permission, no safetensors, or huggingface_hub is not
            installed.
    """
    path = local_path(name_or_path, "the model").expanduser()
    if path.is_dir():
        if revision is not None:
            raise WeightsError(f"{path} is a directory, which has no revision {revision!r}. Omit the revision.")
        return path
    name = os.fspath(name_or_path)
    if path.exists():
        raise WeightsError(f"{name} is a file: expected a directory. Pass the directory that contains it.")
    if not REPOSITORY.fullmatch(name) or "--" in name or ".." in name:
        raise FileNotFoundError(
            f"no directory {name}, and it is not a valid id on the Hugging Face hub, such as gpt2 or org/name. "
            f"Check the path.{nearest(name, known)}"
        )
    directory = _download(name, revision, nearest(name, known), _PATTERNS)
    if not any((directory / file).exists() for file in (WEIGHTS_FILE, INDEX_FILE)):
        # Only now, because most models have safetensors, too.
        directory = _download(name, revision, nearest(name, known), [*_PATTERNS, FLAX_FILE])
    if not any((directory / file).exists() for file in (WEIGHTS_FILE, INDEX_FILE, FLAX_FILE)):
        raise WeightsError(
            f"{name} has no {WEIGHTS_FILE} on the hub: its weights are in an unsupported format, such as a "
            f"pickle, which can execute code. If you trust it, convert it with transformers: "
            f'AutoModel.from_pretrained("{name}").save_pretrained("out", safe_serialization=True), and pass "out".'
        )
    return directory


def _download(name: str, revision: str | None, suggestion: str, patterns: list[str]) -> Path:
    alternative = (
        f"run `hf download {name} --local-dir {name.replace('/', '-')}` on a machine with a network and pass that"
    )
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise WeightsError(
            f"no directory {name}, and a download from the hub needs the package huggingface_hub. Install it: "
            "pip install huggingface_hub. Or pass a directory."
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
    except errors.GatedRepoError:
        raise WeightsError(
            f"{name} is gated on the hub. Accept its terms at https://huggingface.co/{name} and log in: hf auth login."
        ) from None
    except errors.RevisionNotFoundError:
        raise WeightsError(f"{name} has no revision {revision!r} on the hub. Pass a branch, tag or commit.") from None
    except errors.RepositoryNotFoundError:
        raise WeightsError(
            f"no directory {name}, and the hub has no public model of this name.{suggestion} Check the name. For a "
            "private model, log in: hf auth login."
        ) from None
    except errors.LocalEntryNotFoundError:
        raise WeightsError(
            f"no directory {name}, the hub can't be reached, and the model is not fully downloaded to the cache of the "
            f"hub.{suggestion} Connect to the network, or {alternative} directory."
        ) from None
    except Exception as error:  # proxy, disk and server errors, which the library does not wrap
        reason = " ".join(str(error).split()) or "no reason given"
        raise WeightsError(
            f"{name} could not be downloaded from the hub: {type(error).__name__}, {reason:.300}. Try again, or "
            f"{alternative} directory."
        ) from error
