"""Upload of an exported model to the Hugging Face hub, with a model card."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer.config._untrusted import read_json_object, regular_file
from transformer.zoo.weights._files import WeightFiles, WeightsError
from transformer.zoo.weights._hub import REPOSITORY

CARD = "README.md"
ADAPTER = "adapter_config.json"
UPLOADED = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.txt", "LICENSE*", CARD)
"""files of a directory that are uploaded; others, such as pickles and checkpoints, are not"""

PIPELINES = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForConditionalGeneration": "text2text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForImageClassification": "image-classification",
    "ForCTC": "automatic-speech-recognition",
}
"""tasks of the hub, by the end of the architecture's name in config.json"""


@dataclass(frozen=True)
class Upload:
    """What `push` uploaded."""

    address: str
    """address of the commit"""
    files: tuple[str, ...]
    bytes: int


def push(
    directory: Path,
    repository: str,
    *,
    private: bool = False,
    license_id: str | None = None,
    message: str | None = None,
) -> Upload:
    """Upload an exported model to the hub in one commit; the repository is created if it does not exist.

    A directory without README.md gets a model card, unless the repository has one already.

    Args:
        directory: directory with config.json (or adapter_config.json) and safetensors.
        repository: "user/name" on the hub.
        private: whether a new repository is private.
        license_id: license of a new model card, such as "apache-2.0".
        message: message of the commit.

    Raises:
        WeightsError: the directory has no exported model, the name is invalid, there is no token, or the hub refuses.
    """
    if "/" not in repository or not REPOSITORY.fullmatch(repository) or "--" in repository or ".." in repository:
        raise WeightsError(f"--repo must be USER/NAME on the hub, such as me/my-model, got {repository!r}.")
    files = _files(directory)
    try:
        import huggingface_hub
        from huggingface_hub import CommitOperationAdd, HfApi
    except ImportError:
        raise WeightsError(
            "an upload needs the package huggingface_hub. Install it: pip install 'transformer-zoo[zoo]'."
        ) from None
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise WeightsError("HF_HUB_OFFLINE is set, so that nothing can be uploaded. Unset it to upload.")
    if not huggingface_hub.get_token():
        raise WeightsError("no token for the hub was found. Log in with `hf auth login`, or set HF_TOKEN.")
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        operations = [CommitOperationAdd(name, str(directory / name)) for name in files]
        if CARD not in files and not api.file_exists(repository, CARD):
            card = model_card(directory, repository, license_id).encode()
            operations.append(CommitOperationAdd(CARD, card))
        commit = api.create_commit(repository, operations, commit_message=message or "Upload model")
    except Exception as error:  # errors of the library, of its HTTP client, and of the disk
        raise WeightsError(_refused(repository, error)) from error
    names = tuple(operation.path_in_repo for operation in operations)
    return Upload(str(commit.commit_url), names, sum(operation.upload_info.size for operation in operations))


def _files(directory: Path) -> list[str]:
    """Return the names of the files to upload; raise WeightsError without an exported model."""
    if not directory.is_dir():
        raise WeightsError(f"directory {directory} not found. Pass a directory that `convert` wrote.")
    names = sorted({path.name for pattern in UPLOADED for path in directory.glob(pattern) if path.is_file()})
    described = any((directory / name).is_file() for name in ("config.json", ADAPTER))
    if not described or not any(name.endswith(".safetensors") for name in names):
        run = (directory / "recipe.json").is_file()
        what = "is the workdir of a run" if run else "has no config.json with safetensors"
        raise WeightsError(f"{directory} {what}. Export the model with `convert {directory} OUT`, and push OUT.")
    for name in names:
        try:
            regular_file(directory, name)
        except ValueError as error:
            raise WeightsError(f"{directory} can't be uploaded: {error}.") from error
    return names


def _refused(repository: str, error: Exception) -> str:
    """Describe why the hub took no upload."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
    if status == 401:
        return f"the hub does not accept the token. Log in again with `hf auth login`, or set HF_TOKEN ({reason})."
    if status == 403:
        return f"the token may not write to {repository}. Use a token with write access to it ({reason})."
    return f"{repository} could not be uploaded: {type(error).__name__}, {reason}. Try again; finished files are kept."


def model_card(directory: Path, repository: str, license_id: str | None = None) -> str:
    """Return a model card: metadata for the hub, the size of the model, and how to load it."""
    adapter = (directory / ADAPTER).is_file()
    config = read_json_object(directory, ADAPTER if adapter else "config.json", "Export the model again.", WeightsError)
    architecture = str((config.get("architectures") or [""])[0])
    pipeline = next((task for end, task in PIPELINES.items() if architecture.endswith(end)), None)
    base = config.get("base_model_name_or_path") if adapter else None
    metadata = {
        "library_name": "peft" if adapter else "transformers",
        "license": license_id,
        "pipeline_tag": pipeline,
        "base_model": base if isinstance(base, str) and REPOSITORY.fullmatch(base) else None,
        "tags": ["jax", "flax", "transformer-zoo"],
    }
    # JSON values are valid YAML.
    lines = [f"{name}: {json.dumps(value)}" for name, value in metadata.items() if value is not None]
    use = ["import transformer", "", f'model = transformer.open("{repository}")']
    if adapter:
        use = ["from peft import PeftModel", "", f'model = PeftModel.from_pretrained(base, "{repository}")']
    text = [
        *("---", *lines, "---", "", f"# {repository.rpartition('/')[2]}", ""),
        f"{_kind(directory, config, architecture, adapter)} Written by transformer-zoo, in JAX and Flax.",
        *("", "```python", *use, "```", ""),
    ]
    return "\n".join(text)


def _kind(directory: Path, config: dict[str, Any], architecture: str, adapter: bool) -> str:
    """Return a sentence about the model: its architecture and its number of parameters."""
    if adapter:
        return f"A LoRA adapter of rank {config.get('r')} in the format of PEFT."
    count = sum(math.prod(info.shape) for info in WeightFiles(directory).tensors.values())
    return f"{architecture or config.get('model_type', 'A model')} with {count:,} parameters."
