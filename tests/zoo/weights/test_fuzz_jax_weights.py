"""Fuzz tests of flax_model.msgpack and of .npz files: they are read, or rejected with WeightsError."""

import struct
import zipfile

import flax.serialization
import numpy as np
from fuzz_parts import BYTE_EDITS, Fuzz, damaged, fuzz
from hypothesis import strategies as st
from npz_parts import archive, array_of

from transformer.zoo.weights._files import WeightsError
from transformer.zoo.weights._flax_files import FLAX_FILE, FlaxFiles
from transformer.zoo.weights._npz import NpzFile

__all__ = ["fuzz"]  # a fixture

TREE = {"a": {"kernel": np.ones((2, 3), np.float32), "bias": np.ones(3, np.float16)}, "b": {"scale": np.ones(())}}
GOOD = flax.serialization.to_bytes(TREE)
PIECES = st.sampled_from([b"\x81\xa1a", b"\xc7\x0a\x01", b"\x93\x91", b"\xdf" + struct.pack(">I", 2**31), b"\xc0"])
FILES = st.one_of(
    st.builds(damaged, st.just(GOOD), BYTE_EDITS),
    st.builds(lambda parts: b"".join(parts), st.lists(PIECES | st.binary(max_size=4), max_size=9)),
)


def test_fuzzed_flax_files(fuzz: Fuzz):
    def put(folder, content):
        (folder / "config.json").write_text("{}")
        (folder / FLAX_FILE).write_bytes(content)

    def read(folder, content):
        files = FlaxFiles(folder)
        for name, info in files.tensors.items():
            assert files.read(name).shape == info.shape

    fuzz("flax_model.msgpack", 5000, FILES, read, put=put, refusals=(WeightsError,))


ARCHIVES = st.builds(
    damaged,
    st.sampled_from([archive(array_of((3,), bytes(12))), archive(array_of((0, 2)), zipfile.ZIP_DEFLATED)]),
    BYTE_EDITS,
)


def test_fuzzed_npz_files(fuzz: Fuzz):
    def read(folder, content):
        file = NpzFile(folder / "a.npz")
        for name, info in file.tensors.items():
            assert file.read(name).shape == info.shape

    put = lambda folder, content: (folder / "a.npz").write_bytes(content)  # noqa: E731
    fuzz("npz of big_vision", 2000, ARCHIVES, read, put=put, refusals=(WeightsError,))
