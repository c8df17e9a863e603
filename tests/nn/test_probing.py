"""Kernels that the installed compiler rejects: `auto` skips them with a warning; selecting one by name is an error."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from abstract_meshes import computing_on
from attention_specs import attention_spec
from jax.sharding import AxisType, Mesh

from transformer.config import ConfigError
from transformer.nn import _probing as probing
from transformer.nn import kernels
from transformer.nn._attention import dot_product_attention
from transformer.nn._masks import Mask
from transformer.nn._partitioning import platform
from transformer.nn.kernels import _cudnn as cudnn
from transformer.nn.kernels import _splash as splash
from transformer.nn.kernels import choose
from transformer.training.plan import parse_topology, topology_devices

pytestmark = pytest.mark.cpu_only("simulates other devices")

ERROR = "INTERNAL: Failed to deserialize the Mosaic module: Unsupported version: expected <= 7 but got 8"
PLATFORMS = {"tpu": ("splash", "TPU v5 lite", "blockwise"), "gpu": ("cudnn", "NVIDIA H100 80GB HBM3", "blockwise")}


def request(length=2048, dtype=jnp.bfloat16, **facts):
    return attention_spec(length, dtype=dtype, **facts)


@pytest.fixture
def rejected(monkeypatch):
    """Install a compiler that rejects every example; return the list of (example, dtype) pairs that it is asked for."""
    asked = []

    def reject(example, dtype, device):
        asked.append((example, dtype))
        raise RuntimeError(f"\n{ERROR}\nat location: loc(unknown)")

    class Device:  # hashed by identity, so that tests do not share cached results
        platform = None

    device = Device()

    def device_in_force():
        device.platform = platform()
        return device

    monkeypatch.setattr(probing, "_device", device_in_force)
    monkeypatch.setattr(probing, "_compile", reject)
    kernels._warn.cache_clear()
    return asked


@pytest.mark.parametrize("on", PLATFORMS)
def test_auto_warns_once_and_chooses_a_kernel_that_compiles(on, rejected):
    name, kind, other = PLATFORMS[on]
    with computing_on(on, kind), warnings.catch_warnings(record=True, action="always") as found:
        assert [choose("auto", request(length)) for length in (2048, 4096)] == [other, other]
    fused = [name, "flash"] if on == "gpu" else [name]
    for kernel, warning in zip(fused, found, strict=True):
        assert re.search(rf"the {kernel} attention kernel can't be compiled .*{ERROR}\)", str(warning.message))
        assert "A slower kernel is used instead." in str(warning.message)
    assert len(rejected) == len(fused)  # each is compiled once for two calls


def test_each_dtype_is_compiled_separately(rejected):
    dtypes = jnp.bfloat16, jnp.float32, jnp.bfloat16
    with computing_on("tpu", "TPU v5 lite"), pytest.warns(UserWarning, match="splash"):
        assert {choose("auto", request(dtype=dtype)) for dtype in dtypes} == {"blockwise"}
    assert [dtype for _, dtype in rejected] == ["bfloat16", "float32"]


@pytest.mark.parametrize("on", PLATFORMS)
def test_a_named_kernel_that_fails_is_an_error_with_alternatives(on, rejected):
    name, kind, _ = PLATFORMS[on]
    with computing_on(on, kind), pytest.raises(ConfigError, match=re.escape(ERROR)) as found:
        choose(name, request())
    message = str(found.value)
    assert message.startswith(f"the {name} attention kernel can't be compiled")
    others = "blockwise or flash" if on == "gpu" else "blockwise"
    assert message.endswith(f"Use reference or query_chunked or {others}, or auto.")
    if name == "splash":
        assert f"jax {jax.__version__}" in message
        assert re.search(r'run pip install "libtpu==[\d.*]+", which this JAX was released with, and restart', message)


def test_unsupported_features_are_errors_without_compiling(rejected):
    with computing_on("tpu", "TPU v5 lite"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose("auto", request(has_bias=True)) == "blockwise"
        assert choose("auto", request(64)) == "reference"
        with pytest.raises(ConfigError, match="splash attention kernel can't add a bias"):
            choose("splash", request(has_bias=True))
    assert rejected == []


def test_a_local_device_is_preferred_to_a_remote_mesh_device():
    mesh = Mesh(np.array(jax.devices()[2:4]), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert probing._device() is jax.local_devices()[0]


def test_without_a_device_no_kernel_is_rejected(monkeypatch):
    monkeypatch.setattr(probing, "_compile", lambda *_: pytest.fail("compiled for a device that does not exist"))
    with computing_on("tpu", "TPU that does not exist"):
        assert choose("auto", request()) == "splash"


@pytest.mark.parametrize("example", [splash._example, cudnn._example], ids=["splash", "cudnn"])
def test_probe_examples_compile_and_a_broken_kernel_fails(example, monkeypatch):
    """On CPU splash runs in interpret mode and cuDNN's call is computed by XLA: the same code up to the compiler."""
    monkeypatch.setattr(cudnn, "LIBRARY", "xla")
    module = splash if example is splash._example else cudnn
    assert probing.compiler_error(example, jnp.float32, "cpu") is None
    monkeypatch.setattr(module, "shard_map", lambda function, *_: lambda *arrays: object().nothing)
    renamed = functools.partial(example)  # a different cache key: the result for the example itself is cached
    assert "has no attribute 'nothing'" in probing.compiler_error(renamed, jnp.float32, "cpu")


def test_a_probe_ignores_the_trace_and_mesh_of_its_caller():
    seen = []

    def example(dtype):
        seen.append(jax.sharding.get_abstract_mesh().shape)
        return lambda x: x + 1, [jax.ShapeDtypeStruct((3,), dtype)]

    def traced(x):
        assert probing.compiler_error(example, x.dtype, "cpu") is None
        return dot_product_attention(x, x, x, mask=Mask.causal())[0]

    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        jax.jit(traced).lower(jnp.zeros((2, 4, 2, 3)))
    assert seen == [{"data": 1}]


def test_reports_installed_versions():
    assert probing.library_version("jax") == f"jax {jax.__version__}"
    assert probing.library_version("no-such-package") == "no-such-package"
    assert re.fullmatch(r"libtpu==\d[\d.*]+", probing.matching_libtpu())


@pytest.mark.usefixtures("tpu_compiler")
@pytest.mark.slow
class TestCompiler:
    """The real TPU compiler."""

    @pytest.mark.parametrize(
        ("topology", "dtype", "accepted"),
        [("v5e:2x2", jnp.bfloat16, True), ("v5e:2x2", jnp.float32, True), ("v3:2x2", jnp.bfloat16, False)],
        ids=["v5e-bfloat16", "v5e-float32", "v3-bfloat16"],
    )
    def test_a_probe_compiles_for_absent_devices(self, topology, dtype, accepted):
        """The kernel compiler supports no bfloat16 matrix multiplication on v3, so splash must not be chosen there."""
        devices = topology_devices(parse_topology(topology))
        answers = []

        def traced(x):
            answers.append(probing.compiler_error(splash._example, dtype, "tpu"))
            return x

        mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
        with jax.set_mesh(mesh):
            jax.eval_shape(traced, jax.ShapeDtypeStruct((3,), dtype))
        assert [answer is None for answer in answers] == [accepted], answers
