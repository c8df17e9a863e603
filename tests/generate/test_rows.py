"""The state of the slots of a server."""

import jax

from transformer import CausalLM, FeedForwardOptions, TransformerConfig
from transformer.generate._prompts import decoding_model
from transformer.generate._rows import blank_rows


def test_a_free_slot_requests_nothing():
    """What no row needs is not computed, so a slot that was never used must not need anything."""
    model = CausalLM(
        TransformerConfig(vocab_size=7, d_model=6, num_heads=3, num_layers=1, feed_forward=FeedForwardOptions(d_ff=5))
    )
    rows = jax.device_get(blank_rows(decoding_model(model), 3, 2, 16))
    assert not (rows.running | rows.sampling.top | rows.sampling.is_sorted | rows.proposes).any()
    assert rows.sampling.greedy.all()
    assert (rows.sampling.penalties.repetition == 1).all()
    assert (rows.ends == -1).all()
