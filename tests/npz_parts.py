"""Archives with arrays in NumPy's format, written member by member, so that they can be damaged."""

import io
import zipfile

import numpy as np


def archive(content, compression=zipfile.ZIP_STORED, name="a.npy"):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as file:
        file.writestr(name, content)
    return stream.getvalue()


def array_of(shape, data=b""):
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return stream.getvalue() + data
