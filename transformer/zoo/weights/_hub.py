"""A checkpoint by its name on the Hugging Face hub, or by its directory."""

from __future__ import annotations

import os
import re
from pathlib import Path

from transformer.zoo.weights._files import INDEX_FILE, WEIGHTS_FILE, WeightsError

# "gpt2" or "org/name", as the hub allows them; a local path that looks like one and exists is taken as a path.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_-])?"
_HUB_ID = re.compile(rf"{_PART}(?:/{_PART})?")
# What is opened here and no more: neither pickles nor the copies of the weights that some have in folders.
_PATTERNS = ["*.json", "model.safetensors", "model-*.safetensors"]


def fetch(name_or_path: str | os.PathLike, revision: str | None = None) -> Path:
    """The directory of a checkpoint: an existing one as it is, else of the hub's `name` ("gpt2", "org/name").

    JSON and safetensors alone are fetched, into the cache that huggingface_hub keeps and shares with other programs.
    What is in the cache already needs no network.

    Args:
        revision: branch, tag or commit on the hub. Only a commit names the same weights forever.

    Raises:
        FileNotFoundError: it looks like a path, and there is no such directory.
        WeightsError: no network, no such name or revision, no permission, no safetensors, or no huggingface_hub.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if revision is not None:
            raise WeightsError(f"{path} is a directory, which has no revision {revision!r}. Leave the revision out.")
        return path
    name = os.fspath(name_or_path)
    if path.exists():
        raise WeightsError(f"{name} is a file: expected a directory. Name the one that it is in.")
    if not _HUB_ID.fullmatch(name) or "--" in name or ".." in name:
        raise FileNotFoundError(
            f"no directory {name}, and it can be no name on the Hugging Face hub, which are like gpt2 or org/name. "
            "Check the path."
        )
    directory = _fetched(name, revision)
    if not (directory / WEIGHTS_FILE).exists() and not (directory / INDEX_FILE).exists():
        raise WeightsError(
            f"{name} has no {WEIGHTS_FILE} on the hub: its weights are in a format that is not read here, such as a "
            f'pickle, which can run code. Where you trust it, convert it: AutoModel.from_pretrained("{name}")'
            '.save_pretrained("out", safe_serialization=True) with transformers, and give that directory.'
        )
    return directory


def _fetched(name: str, revision: str | None) -> Path:
    elsewhere = f"fetch it where there is one, hf download {name} --local-dir {name.replace('/', '-')}, and give that"
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise WeightsError(
            f"no directory {name}, and to fetch it from the hub needs the package huggingface_hub. Install it: "
            "pip install huggingface_hub. Or give a directory."
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=_PATTERNS))
    except errors.GatedRepoError as error:
        raise WeightsError(
            f"{name} is gated on the hub. Accept its terms at https://huggingface.co/{name} and log in: hf auth login."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise WeightsError(f"{name} has no revision {revision!r} on the hub. Name a branch, tag or commit.") from error
    except errors.RepositoryNotFoundError as error:
        raise WeightsError(
            f"no directory {name}, and no model of this name on the hub, or a private one. Check the name; for a "
            "private one, log in: hf auth login."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise WeightsError(
            f"no directory {name}, the hub can't be reached, and it is not whole in the hub's cache. Without a "
            f"network, {elsewhere} directory."
        ) from error
    except Exception as error:  # a broken proxy, a full disk, a server's fault: the library lets them through
        reason = " ".join(str(error).split()) or "no reason given"
        raise WeightsError(
            f"{name} could not be fetched from the hub: {type(error).__name__}, {reason:.300}. Try again, or "
            f"{elsewhere} directory."
        ) from error
