"""One file of weights: what is written, what the engine makes of it, and what is refused."""

import json

import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert.cli import main
from checkpoints_convert.heads.convert import convert_heads
from checkpoints_convert.pack import pack
from jaxspec.checkpoint import open_checkpoint, open_heads, read_group
from jaxspec.checkpoint.packed import WEIGHTS
from jaxspec.errors import UserError


@pytest.fixture
def draft(tiny_models):
    """A draft of the target's first two layers, with its two ends."""
    return tiny_models("tiny-llama3-8l")


def whole(folder):
    checkpoint = open_heads(folder) if "method" in json.loads((folder / "config.json").read_text()) else None
    checkpoint = checkpoint or open_checkpoint(folder, beside_target=True)
    return {name: array for group in checkpoint.groups() for name, array in read_group(checkpoint, group).items()}


def test_a_draft_beside_its_target(draft, tmp_path, capsys):
    """The ends are left out, the rest is there bit for bit, and it is no target."""
    dst = tmp_path / "packed"
    assert main(["pack", str(draft), str(dst), "--beside", str(draft)]) == 0
    assert "embed and lm_head of the target" in capsys.readouterr().out
    assert sorted(path.name for path in dst.iterdir()) == ["config.json", "manifest.json", WEIGHTS]
    before, after = whole(draft), whole(dst)
    assert set(before) - set(after) == {"embed", "lm_head"}
    for name, array in after.items():
        np.testing.assert_array_equal(array, before[name])
    with pytest.raises(UserError, match="a draft that takes embed, lm_head from its target: give it with --draft"):
        open_checkpoint(dst)
    assert main(["verify", str(dst)]) == 0
    assert main(["inspect", str(dst)]) == 0
    assert main(["to-hf", str(dst), str(tmp_path / "hf")]) == 2
    assert main(["pack", str(draft), str(dst)]) == 2
    assert main(["pack", str(draft), str(dst), "--dtype", "bfloat16", "--force"]) == 0
    assert whole(dst)["embed"].dtype == ml_dtypes.bfloat16
    # By itself it is a model, with its tokenizer.
    assert open_checkpoint(dst).manifest.tokenizer_size == open_checkpoint(draft).manifest.tokenizer_size
    assert (dst / "tokenizer").is_dir() == (draft / "tokenizer").is_dir()


def test_heads(shared, tmp_path):
    """Ids of a reduced vocabulary stay integers, a list of words goes along."""
    heads, dst = tmp_path / "heads", tmp_path / "packed"
    convert_heads(shared / "fixtures" / "eagle3", heads)
    (heads / "draft_vocab.json").write_text("[1, 2]\n")
    result = pack(heads, dst, dtype="bfloat16")
    assert result.dtype == "bfloat16"
    before, after = whole(heads), whole(dst)
    assert before.keys() == after.keys()
    for name, array in after.items():
        expected = before[name] if before[name].dtype == np.int32 else before[name].astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(array, expected)
    assert (dst / "draft_vocab.json").read_text() == "[1, 2]\n"


def test_what_is_refused(draft, tiny_models, shared, tmp_path):
    # One of another width, and one of the very same shapes with other weights.
    same_shape = tiny_models("tiny-llama3")
    assert open_checkpoint(same_shape).specs["embed"].shape == open_checkpoint(draft).specs["embed"].shape
    for other in (tiny_models("tiny-draft"), same_shape):
        with pytest.raises(UserError, match="expected a target with the draft's embeddings or LM head"):
            pack(other, tmp_path / "a", beside=draft)
    heads = tmp_path / "heads"
    convert_heads(shared / "fixtures" / "eagle3", heads)
    with pytest.raises(UserError, match="expected a draft model, got heads"):
        pack(heads, tmp_path / "b", beside=draft)
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("fault", ["flipped", "cut", "other tensors", "gone"])
def test_a_damaged_file_is_refused(draft, tmp_path, fault):
    """One line that names file and tensor; no weight of it is used."""
    dst = tmp_path / "packed"
    pack(draft, dst, beside=draft)
    path = dst / WEIGHTS
    stored = open_checkpoint(draft).manifest.dtype
    other = "float32" if stored == "bfloat16" else "bfloat16"
    raw = bytearray(path.read_bytes())
    if fault == "flipped":
        raw[-1] ^= 1
        path.write_bytes(raw)
        words = "its sha256 differs"
    elif fault == "cut":
        path.write_bytes(raw[:-4])
        words = "cannot be read"
    elif fault == "other tensors":
        pack(draft, tmp_path / "other", dtype=other, beside=draft)
        path.write_bytes((tmp_path / "other" / WEIGHTS).read_bytes())
        words = f"the manifest says {stored} .* the file holds {other}"
    else:
        path.unlink()
        words = r"params/.* is missing"
    with pytest.raises(UserError, match=words) as error:
        whole(dst)
    assert str(dst) in str(error.value)
    assert "\n" not in str(error.value)
