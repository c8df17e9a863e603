"""Contrastive losses equal those of transformers for the same logits, and so do their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.training.tasks._losses import matched_by_sigmoid, matched_by_softmax

pytestmark = pytest.mark.parity

TEXT = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 3, "vocab_size": 29}
IMAGE = {**{name: size for name, size in TEXT.items() if name != "vocab_size"}, "image_size": 14, "patch_size": 7}


def reference(family):
    """Return logits (7, 7), the loss of transformers for them, and its gradient in the logits."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 28, "pad_token_id": 1}
    text = TEXT | {"max_position_embeddings": 11} | ends
    if family == "clip":
        config = transformers.CLIPConfig(text_config=text, vision_config=IMAGE, projection_dim=10)
        model = transformers.CLIPModel(config)
    else:
        config = transformers.SiglipConfig(text_config=text | {"projection_size": 12}, vision_config=IMAGE)
        model = transformers.SiglipModel(config)
        torch.nn.init.constant_(model.logit_scale, 1.3)
        torch.nn.init.constant_(model.logit_bias, -0.7)
    tokens = torch.randint(2, 28, (7, 11))
    tokens[:, -1] = 28
    outputs = model(input_ids=tokens, pixel_values=torch.randn(7, 3, 14, 14), return_loss=True)
    outputs.logits_per_image.retain_grad()
    outputs.logits_per_text.retain_grad()
    outputs.loss.backward()
    gradient = sum(
        part for part in (outputs.logits_per_image.grad, _transposed(outputs.logits_per_text.grad)) if part is not None
    )
    return (array.detach().numpy() for array in (outputs.logits_per_image, outputs.loss, gradient))


def _transposed(gradient):
    return None if gradient is None else gradient.T


@pytest.mark.parametrize(("family", "loss"), [("clip", matched_by_softmax), ("siglip", matched_by_sigmoid)])
def test_the_loss_of_a_batch_equals_transformers(family, loss):
    logits, expected, gradient = reference(family)

    def mean(logits):
        total, weight = loss(logits, jnp.ones(7))
        return total / weight

    found, ours = jax.value_and_grad(mean)(jnp.asarray(logits))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(ours, gradient, atol=1e-6)
    assert np.abs(gradient).max() > 1e-3
