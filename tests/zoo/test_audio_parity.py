"""wav2vec 2.0 and HuBERT with padding, and in files of older releases, compared with the reference."""

import jax.numpy as jnp
import numpy as np
import pytest
from golden.case import SAMPLES, cases, recordings

from transformer.zoo import load_pretrained
from transformer.zoo.weights._files import WeightFiles, write_weights

pytestmark = pytest.mark.parity

LENGTH = 67


@pytest.fixture(scope="module")
def reference():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from golden import reference

    return reference


@pytest.mark.parametrize(("family", "name"), [("wav2vec2", "stable"), ("hubert", "ctc"), ("wav2vec2", "mixed")])
def test_padding_is_masked(reference, tmp_path, family, name):
    import torch

    case = cases(family)[name]
    theirs, _ = reference.fill(reference.build(case), case, tmp_path)
    loaded = load_pretrained(tmp_path)
    samples, lengths = recordings(), np.array([SAMPLES, LENGTH])
    real = np.arange(SAMPLES) < lengths[:, None]
    samples = np.where(real, samples, 0).astype(np.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor(samples), attention_mask=torch.tensor(real).long())[0].numpy()
    got = np.asarray(loaded.model.apply({"params": loaded.params}, jnp.asarray(samples), jnp.asarray(lengths)))
    for row, length in enumerate(lengths):
        count = loaded.model.config.audio.frames(int(length))
        np.testing.assert_allclose(got[row, :count], expected[row, :count], atol=1e-4)


@pytest.mark.parametrize("family", ["wav2vec2", "hubert"])
def test_padding_with_group_norm_equals_the_reference_on_single_rows(reference, tmp_path, family):
    """The reference normalizes over padding, so that a row depends on the longest row of its batch."""
    import torch

    case = cases(family)["base" if family == "hubert" else "ctc"]
    theirs, _ = reference.fill(reference.build(case), case, tmp_path)
    loaded = load_pretrained(tmp_path)
    samples = recordings()
    with torch.no_grad():
        expected = theirs(torch.tensor(samples[1:, :LENGTH]))[0].numpy()[0]
    lengths = jnp.asarray([SAMPLES, LENGTH])
    got = np.asarray(loaded.model.apply({"params": loaded.params}, jnp.asarray(samples), lengths))
    np.testing.assert_allclose(got[1, : len(expected)], expected, atol=1e-4)


def test_reads_weight_normalization_names_before_torch_2(reference, tmp_path):
    case = cases("wav2vec2")["ctc"]
    reference.fill(reference.build(case), case, tmp_path / "new")
    expected = load_pretrained(tmp_path / "new")
    files = WeightFiles(tmp_path / "new")
    new, old = "conv.parametrizations.weight.original", "conv.weight_"
    tensors = {
        name.replace(f"{new}0", f"{old}g").replace(f"{new}1", f"{old}v"): files.read(name) for name in files.tensors
    }
    write_weights(tmp_path / "old", files.config, tensors)
    assert f"wav2vec2.encoder.pos_conv_embed.{old}v" in tensors
    found = load_pretrained(tmp_path / "old")
    np.testing.assert_array_equal(
        found.params["position_convolution"]["kernel"], expected.params["position_convolution"]["kernel"]
    )
