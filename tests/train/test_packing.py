"""Packed rows: every document once, alone in what it sees, and a loss where serving would draft."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.model.cache import empty_cache
from tests.train.conftest import LENGTHS, ROW
from train_heads.objective import look
from train_heads.packing import Document, pack, plan, served, stack


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200))
def test_every_document_has_one_place_and_no_row_overflows(lengths):
    rows = plan(lengths, 50)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= 50 for row in rows)


def test_a_document_that_is_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="document 1: expected 1 to 8 tokens, got 9"):
        plan([8, 9], 8)


def test_a_packed_document_is_seen_as_if_it_were_alone(target, documents, rows):
    """Nothing attends across documents and positions begin anew: what is seen is what serving's own cache gives."""
    model, params = target
    packed = [np.asarray(array) for array in jax.jit(lambda rows: tuple(look(model, params, rows, (2, 4))))(rows)]

    @jax.jit
    def serve(tokens_BT, positions_BT):
        cache = empty_cache(model.config, model.sharding, len(tokens_BT), ROW, model.dtype)
        output = model.merge(params)(tokens_BT, positions_BT, cache, None, (2, 4))
        return output.hidden_BTD, output.taps_BTX

    alone = serve(*stack([pack([document], ROW) for document in documents])[:2])
    for row, part in enumerate(plan(LENGTHS, ROW)):
        start = 0
        for index in part:
            end = start + LENGTHS[index]
            for together, single in zip(packed, alone, strict=True):
                np.testing.assert_allclose(together[row, start:end], single[index, : LENGTHS[index]], atol=2e-5)
            start = end
        assert np.isfinite(packed[0][row]).all(), "padding must not poison a gradient"


def test_losses_lie_where_serving_drafts():
    """I05: (position, label, counted) of three prompt and three answer tokens, and of a second document behind them."""
    first = Document(np.array([10, 11, 12, 20, 21, 22], np.int32), np.arange(6) >= 3)
    second = Document(np.array([30, 31, 40, 41], np.int32), np.arange(4) >= 2)
    rows = pack([first, second], 12)
    # Head 0 at the last prompt token drafts what follows the first answer token.
    assert np.flatnonzero(served(rows, 2)[0]).tolist() == [2, 3, 7]
    assert np.flatnonzero(served(rows, 3)[0]).tolist() == [2]
    assert not np.asarray(served(rows, 4)).any()
