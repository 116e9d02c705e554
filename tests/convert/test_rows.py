"""The order of query and key rows: hand-written small cases, and every ratio of heads to kv heads."""

import numpy as np
import pytest

from checkpoints_convert import convert
from checkpoints_convert.names import half_split_rows, interleaved_rows
from tests.convert import makers


def test_one_head_of_four_rows_by_hand() -> None:
    interleaved = np.array([[0, 1], [20, 21], [10, 11], [30, 31]])
    half_split = np.array([[0, 1], [10, 11], [20, 21], [30, 31]])
    assert half_split_rows(interleaved, heads=1).tolist() == half_split.tolist()
    assert interleaved_rows(half_split, heads=1).tolist() == interleaved.tolist()


def test_two_heads_of_six_rows_by_hand() -> None:
    half_split = np.array([0, 1, 2, 3, 4, 5, 60, 61, 62, 63, 64, 65])[:, None]
    interleaved = np.array([0, 3, 1, 4, 2, 5, 60, 63, 61, 64, 62, 65])[:, None]
    assert interleaved_rows(half_split, heads=2).tolist() == interleaved.tolist()
    assert half_split_rows(interleaved, heads=2).tolist() == half_split.tolist()


@pytest.mark.parametrize(("heads", "size", "width"), [(1, 2, 1), (3, 10, 7), (5, 14, 3), (4, 64, 11)])
def test_the_two_orders_undo_each_other(heads, size, width) -> None:
    """E05: on an index-valued matrix, both ways round."""
    index = np.arange(heads * size * width).reshape(heads * size, width)
    assert np.array_equal(half_split_rows(interleaved_rows(index, heads), heads), index)
    assert np.array_equal(interleaved_rows(half_split_rows(index, heads), heads), index)
    assert np.array_equal(interleaved_rows(index, heads), makers.interleave(index, heads))


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (8, 2), (8, 1), (32, 4), (12, 4), (9, 3)])
def test_gguf_rows_come_back_for_every_ratio_of_heads(heads, kv_heads, tmp_path, tree) -> None:
    """E02, E03: HF -> GGUF -> ours is HF -> ours, bit for bit, for heads/kv of 1, 2, 4, 8 and non-square ones."""
    sizes = makers.SIZES._replace(N=heads, K=kv_heads, L=1)
    weights = makers.hf_tensors(sizes)
    convert(makers.write_hf(tmp_path / "hf", makers.hf_config(sizes), weights), tmp_path / "from-hf")
    packed = makers.write_gguf(tmp_path / "model.gguf", makers.gguf_fields(sizes), makers.gguf_tensors(weights, sizes))
    convert(packed, tmp_path / "from-gguf")
    ours, theirs = tree(tmp_path / "from-hf"), tree(tmp_path / "from-gguf")
    assert list(ours) == list(theirs)
    for name, array in ours.items():
        assert array.tobytes() == theirs[name].tobytes(), name
