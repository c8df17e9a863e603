"""Directories with quantized weights: packed in the file and in memory, complete, and checked like any other."""

import json

import jax
import numpy as np
import pytest
from golden import case as golden_case
from golden import ours

from transformer import load
from transformer.__main__ import main
from transformer.config import ConfigError
from transformer.inference._export import export
from transformer.inference._opened_model import open_model
from transformer.nn import quantize
from transformer.nn._sharding import make_mesh
from transformer.nn.quantization._adapted import has_encoded
from transformer.zoo import verify
from transformer.zoo._quantized_models import arrays_by_name
from transformer.zoo.weights._files import WeightFiles, WeightsError, write_weights


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return ours.write(tmp_path_factory.mktemp("original") / "llama", golden_case.golden("llama")["lm"])


@pytest.fixture(scope="module")
def small(original, tmp_path_factory):
    """The directory that `convert --quantize int4` writes."""
    out = tmp_path_factory.mktemp("small") / "out"
    assert main(["convert", str(original), str(out), "--quantize", "int4", "--group-size", "64"]) == 0
    return out


@pytest.mark.programs(170, reason="`quantize` reports the errors of each parameter, so it can't run in jax.jit")
def test_a_saved_quantized_model_equals_quantization_on_load(original, small):
    model, params = load(original)
    expected, _ = quantize(params, bits=4, group_size=64)
    loaded, found = load(small)
    assert loaded.config == model.config
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert arrays_by_name(found).keys() == WeightFiles(small).tensors.keys()
    assert verify(small) == pytest.approx(0, abs=1e-4)
    assert load(small, dtype="bfloat16")[0].config.parameters.dtype == "bfloat16"


@pytest.mark.programs(164, reason="`export` quantizes each parameter outside of jax.jit")
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_weights_are_packed_in_the_file(original, tmp_path, bits):
    """A kernel of the layers takes 4 or 8 bits a weight, and its scales."""
    export(open_model(original), tmp_path / "out", quantization=(bits, 32))
    tensors = WeightFiles(tmp_path / "out").tensors
    name = "decoder/layers/slot_0/feed_forward/up/kernel/" + ("codes" if bits == 4 else "values")
    assert tensors[name].nbytes == 2 * 12 * 19 * bits // 8
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings == {"quant_method": "transformer_zoo", "bits": bits} | ({"group_size": 32} if bits == 4 else {})


@pytest.mark.programs(70, reason="`export` and `merged` dequantize each parameter outside of jax.jit")
def test_an_export_is_dequantized_for_other_programs(small, tmp_path):
    opened = open_model(small)
    export(opened, tmp_path / "plain")
    plain = load(tmp_path / "plain")[1]
    assert not has_encoded(plain)
    jax.tree.map(np.testing.assert_array_equal, plain, opened.merged().params)
    with pytest.raises(ConfigError, match=r"these parameters are quantized or have updates"):
        export(opened, tmp_path / "again", quantization=(8, 32))


def test_a_quantized_model_cannot_be_sharded(small):
    with pytest.raises(ConfigError, match=r"are quantized, and quantized weights are not sharded"):
        load(small, mesh=make_mesh({"data": 1}, jax.devices()[:1]))


def changed(small, to, change):
    files = WeightFiles(small)
    tensors = {name: files.read(name) for name in files.tensors}
    write_weights(to, files.config, change(tensors) or tensors)
    return to


CODES = "decoder/layers/slot_0/feed_forward/up/kernel/codes"
NORM = "decoder/final_norm/scale"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: {k: v for k, v in tensors.items() if k != CODES}, rf"1 missing: {CODES}"),
        (lambda tensors: tensors.update(other=np.ones(2, np.float32)), r"1 unexpected: other"),
        (
            lambda tensors: tensors.update({CODES: tensors[CODES][:1]}),
            rf"{CODES}: expected uint8 \(2, 6, 19\), got uint8",
        ),
        (lambda tensors: tensors.update({CODES: tensors[CODES].view(np.int8)}), r"uint8.*got int8"),
        (lambda tensors: tensors.update({NORM: np.full(12, np.nan, np.float32)}), rf"{NORM}\[0\] is not finite"),
        (
            lambda tensors: tensors.update({NORM: np.ones(12, np.int32)}),
            rf"{NORM}: expected float32 \(12,\), got int32",
        ),
    ],
)
def test_every_tensor_is_counted(small, tmp_path, change, message):
    with pytest.raises(WeightsError, match=message):
        load(changed(small, tmp_path / "changed", change))


@pytest.mark.parametrize("settings", [{"bits": 5}, {"bits": 4, "group_size": 7}, {"bits": "4"}, {}])
def test_unknown_settings_are_refused(small, tmp_path, settings):
    files = WeightFiles(small)
    config = files.config | {"quantization_config": {"quant_method": "transformer_zoo"} | settings}
    write_weights(tmp_path / "a", config, {name: files.read(name) for name in files.tensors})
    with pytest.raises(ConfigError, match=r"bits 4 or 8.*group_size.*32, 64, 128"):
        load(tmp_path / "a")


def test_generate_supports_4_bits(small, original, capsys):
    """Both ways: when the model is loaded, and in the file."""
    model, params = load(small)
    ids = np.arange(6)[None]
    whole, whole_params = load(original)
    found, expected = (
        np.asarray(jax.jit(m.apply)({"params": p}, ids)) for m, p in ((model, params), (whole, whole_params))
    )
    assert 0 < np.abs(found - expected).max() < np.abs(expected).max()
    assert main(["generate", str(original), "--prompt", "x", "--quantize", "int2"]) == 2
    message = capsys.readouterr().err
    assert "invalid choice 'int2' for argument '--quantize'" in message
    assert "None" not in message
