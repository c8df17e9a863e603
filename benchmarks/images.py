"""Images: preprocessing and batch embedding, compared with transformers on PIL, NumPy and PyTorch.

Usage: python -m benchmarks.images [--images 48] [--batch 4] [--turns 3] [--threads 1] [--layers 12]

Needs the parity environment (`make peers`). Preprocessing reads JPEG files of 640 x 480 pixels and gives those of
ViT-B/16 (224 x 224, normalized); the peer is the ViTImageProcessor of transformers that uses PIL and NumPy. Embedding
runs a model of the size of ViT-B/16 with random weights, written by transformers, in float32; the peer is its ViTModel
on PyTorch with scaled_dot_product_attention. Both sides run in one process on the same `--threads` cores, in turns.

A ratio is the time of the peer divided by ours, so above 1 ours is faster. The table shows the ratio of the medians,
and that of the fastest times, which other programs on the machine disturb least. The last line is a JSON object.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def write_photos(folder: Path, count: int) -> list[str]:
    """Write smooth random JPEG images of 640 x 480 pixels, and return their paths."""
    from PIL import Image

    paths = []
    for seed in range(count):
        small = np.random.default_rng(seed).integers(0, 256, (24, 32, 3)).astype(np.uint8)
        paths.append(str(folder / f"{seed}.jpg"))
        Image.fromarray(small).resize((640, 480), Image.Resampling.BICUBIC).save(paths[-1], quality=90)
    return paths


def timed(sides: dict[str, Callable[[], Any]], turns: int) -> dict[str, list[float]]:
    """Return the seconds of each side in each turn; the sides alternate, and a first turn is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns + 1):
        for name, call in sides.items():
            began = time.perf_counter()
            call()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def row(name: str, seconds: dict[str, list[float]], images: int) -> dict[str, Any]:
    """Return the figures of one comparison, in milliseconds per image."""
    ours, peer = seconds["ours"], seconds["peer"]
    each = {side: 1000 * statistics.median(values) / images for side, values in seconds.items()}
    found = {"work": name, "ours_ms": each["ours"], "peer_ms": each["peer"]}
    found |= {"ratio": statistics.median(peer) / statistics.median(ours), "ratio_of_fastest": min(peer) / min(ours)}
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}


def preprocessing(folder: Path, images: int, turns: int) -> dict[str, Any]:
    """Compare the preprocessing of JPEG files; raise AssertionError if the pixels differ."""
    from PIL import Image
    from transformers import ViTImageProcessorPil

    from transformer.media import ImageProcessor

    paths = write_photos(folder, images)
    ours, peer = ImageProcessor(height=224, width=224), ViTImageProcessorPil()

    def theirs() -> np.ndarray:
        pictures = [Image.open(path).convert("RGB") for path in paths]
        return peer(pictures, return_tensors="np")["pixel_values"]

    np.testing.assert_allclose(ours(paths), theirs().transpose(0, 2, 3, 1), atol=1e-5)
    return row("preprocessing", timed({"ours": lambda: ours(paths), "peer": theirs}, turns), images)


def embedding(folder: Path, batch: int, layers: int, turns: int) -> dict[str, Any]:
    """Compare the embedding of a batch of pixels; raise AssertionError if the vectors differ."""
    import torch
    from transformers import ViTConfig, ViTModel

    from transformer.inference import open_model
    from transformer.inference._embed import _image_vectors

    torch.manual_seed(0)
    ViTModel(ViTConfig(num_hidden_layers=layers)).save_pretrained(folder / "vit")
    peer, opened = ViTModel.from_pretrained(folder / "vit").eval(), open_model(folder / "vit")
    pixels = np.random.default_rng(0).standard_normal((batch, 224, 224, 3)).astype(np.float32)
    given = torch.tensor(pixels).permute(0, 3, 1, 2)

    def ours() -> np.ndarray:
        return np.asarray(_image_vectors(opened.model, opened.params, pixels))

    def theirs() -> np.ndarray:
        with torch.no_grad():
            return peer(given).pooler_output.numpy()

    np.testing.assert_allclose(ours(), theirs(), atol=1e-3)
    return row(f"embedding, batch of {batch}", timed({"ours": ours, "peer": theirs}, turns), batch)


def main() -> None:
    """Print the table of both comparisons, and the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"images": 48, "batch": 4, "turns": 3, "threads": 1, "layers": 12}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    # Before JAX and PyTorch start their threads: both use the cores that the process may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])

    import torch

    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        rows = [
            preprocessing(Path(name), options.images, options.turns),
            embedding(Path(name), options.batch, options.layers, options.turns),
        ]
    print("| work | ours, ms per image | peer, ms per image | ratio | ratio of the fastest |\n| --- |" + 4 * " ---: |")
    for one in rows:
        print(f"| {one['work']} | {one['ours_ms']} | {one['peer_ms']} | {one['ratio']} | {one['ratio_of_fastest']} |")
    print(json.dumps({"threads": options.threads, "turns": options.turns, "rows": rows}))


if __name__ == "__main__":
    main()
