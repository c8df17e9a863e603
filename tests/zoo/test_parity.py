"""Comparison of every family with the reference (transformers on PyTorch): tiny random models in float32."""

import jax.numpy as jnp
import numpy as np
import pytest
from golden import case as golden_case
from golden import ours

from transformer.config import EmbeddingOptions, RotaryOptions
from transformer.generate import Sampling, generate
from transformer.nn.models import CausalLM, DualEncoder, Seq2Seq, VisionLanguageModel
from transformer.zoo import load_pretrained, save_pretrained
from transformer.zoo._family import rename
from transformer.zoo.weights._conversion import parameter_shapes, saved_tensors

pytestmark = pytest.mark.parity

PADDINGS = ("none", "right", "left")


@pytest.fixture(scope="module")
def reference():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from golden import reference

    return reference


@pytest.fixture(
    scope="module", params=golden_case.all_cases(), ids=["-".join(both) for both in golden_case.all_cases()]
)
def pair(request, reference, tmp_path_factory):
    """(case, reference model, our model loaded from its files, directory)."""
    case = golden_case.cases(request.param[0])[request.param[1]]
    directory = tmp_path_factory.mktemp("theirs")
    theirs, _ = reference.fill(reference.build(case), case, directory)
    return case, theirs, load_pretrained(directory), directory


@pytest.mark.parametrize("padding", PADDINGS)
def test_values_equal_the_reference(pair, reference, padding):
    case, theirs, loaded, _ = pair
    if padding != "none" and theirs.main_input_name != "input_ids":
        pytest.skip("no tokens, no padding")
    if padding == "left" and not (case.left_padding and isinstance(loaded.model, CausalLM)):
        pytest.skip("padding on the left is for decoders")
    if padding == "right" and isinstance(loaded.model, DualEncoder) and not loaded.model.config.attention.causal:
        pytest.skip("trained on texts of full length, in which padding is not masked")
    scaling = loaded.model.config.rotary.scaling
    if padding != "none" and scaling is not None and scaling.kind == "dynamic":
        pytest.skip("the reference takes the length of the longest row for all rows")
    expected = reference.run(theirs, case, padding)
    if padding == "right" and case.architecture.endswith("SequenceClassification") and "hidden" in expected:
        del expected["hidden"]  # includes padding tokens of the reference
    got = ours.run(loaded.model, loaded.params, case, padding, loaded.fields.get("pad_token_id") or 0)
    ours.compare({name: got[name] for name in expected}, expected, padding, case)


def test_gradients_equal_the_reference(pair, reference):
    """Compare the gradient by every tensor, with a tolerance of 1e-4 of its largest entry."""
    case, theirs, loaded, _ = pair
    shapes = parameter_shapes(loaded.params)
    if ours.without_head(loaded.model):
        pytest.skip("no head, no logits")
    expected = reference.gradients(theirs, case)
    links = loaded.family.links(loaded.model, loaded.architecture, shapes)
    if loaded.family.heads[loaded.architecture].base:
        links = rename(links, loaded.family.without_prefix)
    got = {name: make() for name, make in saved_tensors(links, ours.gradients(loaded.model, loaded.params, case))}
    assert expected.keys() <= got.keys()
    # Without rotary positions, a bias of keys does not change attention: its true gradient is 0, up to rounding.
    rounding = 1e-6 * max(np.abs(expected[name]).max() for name in expected)
    for name in expected:
        largest = np.abs(expected[name]).max()
        np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=1e-4 * largest + rounding, err_msg=name)


def test_the_reference_computes_the_same_from_saved_files(pair, reference, tmp_path):
    case, theirs, loaded, _ = pair
    free = {
        name: loaded.fields[name]
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "mask_type", "num_forecast_mask_patches")
        if name in loaded.fields
    }
    save_pretrained(loaded.model, loaded.params, tmp_path / "ours", family=loaded.family.name, fields=free)
    again = reference.reload(type(theirs), case, tmp_path / "ours")
    for name, expected in reference.run(theirs, case, "none").items():
        np.testing.assert_array_equal(reference.run(again, case, "none")[name], expected)


def test_clip_pools_the_same_position_without_a_mask(pair):
    """Of texts that the reference pads with their end token, or with another one."""
    import torch

    _, theirs, loaded, _ = pair
    if theirs.config.model_type != "clip":
        pytest.skip("another way of pooling")
    end = loaded.model.config.vocab_size - 1
    ids = np.random.RandomState(0).randint(1, end, (3, 9)).astype(np.int32)
    ids[0, 8], ids[1, 4:], ids[2, 2] = end, end, end
    expected = theirs.get_text_features(input_ids=torch.tensor(ids, dtype=torch.long))
    expected = getattr(expected, "pooler_output", expected).detach().numpy()
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    got = loaded.model.apply({"params": loaded.params}, jnp.asarray(ids), method="embed_texts")
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_greedy_generation_equals_the_reference(pair, reference):
    case, theirs, loaded, _ = pair
    if not isinstance(loaded.model, CausalLM | Seq2Seq) or not theirs.can_generate():
        pytest.skip("writes nothing")
    rows = np.asarray(ours.inputs_of(loaded.model, case, "none")[0][0]).tolist()
    given = {"prompts": rows}
    if isinstance(loaded.model, Seq2Seq):
        given = {"sources": rows, "bos_id": theirs.config.decoder_start_token_id}
    if isinstance(loaded.model, VisionLanguageModel):
        given["images"] = [images[: 2 - row] for row, images in enumerate(ours.images_of(loaded.model))]
    got = generate(
        loaded.model, loaded.params, **given, max_new_tokens=case.new_tokens, sampling=Sampling(temperature=0.0)
    )
    assert got == reference.generated(theirs, case)


def test_a_trained_model_opens_in_transformers(reference, tmp_path):
    """A converted workdir gives the same logits and the same token ids of a text."""
    import torch
    import transformers

    from transformer.config import Execution, FeedForwardOptions, TransformerConfig
    from transformer.data import TextFile
    from transformer.inference import export, open_model
    from transformer.nn._sharding import ParallelConfig
    from transformer.training import EvaluationConfig, LoggingConfig, Recipe, TrainingConfig
    from transformer.training._loop import train

    (tmp_path / "text.txt").write_text("ROMEO: But soft, what light through yonder window breaks?\n" * 30)
    recipe = Recipe(
        name="text",
        model=TransformerConfig(
            d_model=12,
            num_heads=3,
            num_layers=2,
            feed_forward=FeedForwardOptions(d_ff=17),
            position=RotaryOptions(),
            embedding=EmbeddingOptions(tie=False),
        ),
        data=TextFile(path=str(tmp_path / "text.txt"), sequence_length=16, batch_size=4, eval_batch_size=4),
        execution=Execution(scan=False),
        parallel=ParallelConfig(devices=1),
        training=TrainingConfig(steps=3),
        evaluation=EvaluationConfig(every=None, samples=0, batches=1),
        logging=LoggingConfig(tensorboard=False, progress="none"),
    )
    train(recipe, tmp_path / "run")
    opened = open_model(tmp_path / "run")
    assert opened.model.config.embedding.scale  # no such family scales embeddings, so the table holds the scale
    assert export(opened, tmp_path / "out").name == "gpt_neox"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "what light"
    ids = opened.tokenizer.encode(text)
    assert tokenizer(text, add_special_tokens=False).input_ids == ids
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits.numpy()
    got = opened.model.apply({"params": opened.params}, jnp.asarray([ids]))
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert tokenizer.decode(ids) == text
