"""Heads that a target, a format to be written, or a destination has no place for."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints_convert import ConversionError
from checkpoints_convert.heads import convert_heads
from jaxspec.checkpoint import open_checkpoint, open_heads
from jaxspec.errors import UserError
from jaxspec.model.heads.config import EagleConfig, resolved_aux_layers
from tests.heads import makers
from tests.heads.conftest import same_bits, tree

SIZES, SQUARE = makers.SIZES, makers.SQUARE
EAGLE3 = EagleConfig("eagle3", 19, 19, 23, 6, 2, 4, 1e-5, 1e4, 211, 53, 17, fc_bias=False, own_embed=False)


def eagle3_source(folder, tensors=None, **changes):
    return makers.write(folder / "src", makers.eagle3_config(**changes), tensors or makers.eagle3())


def eagle1_source(folder, tensors=None, **changes):
    return makers.write(folder / "src", makers.eagle_config(SQUARE, **changes), tensors or makers.eagle1())


# --- the target


def test_heads_that_do_not_fit_the_target(refused, shared, tiny_models) -> None:
    """All at once, each with both values."""
    target = tiny_models("tiny-draft")
    width = f"--target {target}: hidden size: the head was made for 64, the target has 32"
    for name in ("medusa", "eagle1"):
        assert refused(shared / "fixtures" / name, target=target) == [width]
    lines = refused(shared / "fixtures/eagle3", target=target)
    assert lines[0] == width
    assert "of a target with 2 layers the rule 2, n/2, n-3 gives 2, 1, -1" in lines[1]
    assert len(lines) == 2


def test_layers_that_a_target_has_not(refused, shared, tiny_models, heads_folders) -> None:
    """Fault I18: on a shallow target the rule 2, n/2, n-3 names fewer than three layers."""
    shallow = tiny_models("tiny-llama3")
    assert refused(shared / "fixtures/eagle3", target=shallow) == [
        f"--target {shallow}: layer ids: the head names none, and of a target with 4 layers the rule 2, n/2, n-3 "
        "gives 2, 2, 1: expected 3 distinct ones in 0..3"
    ]
    # Once bound to a target of 8 layers it names them.
    assert refused(heads_folders("eagle3"), target=shallow) == [
        f"--target {shallow}: layer ids: the head sees layers [2, 4, 5], the target has 0..3"
    ]


@pytest.mark.parametrize(
    ("num_layers", "expected"), [(8, (2, 4, 5)), (7, (2, 3, 4)), (32, (2, 16, 29)), (3, (0, 1, 2)), (80, (2, 40, 77))]
)
def test_the_authors_rule(num_layers, expected) -> None:
    assert resolved_aux_layers(EAGLE3, num_layers) == expected


@pytest.mark.parametrize("num_layers", [1, 2, 4, 5, 6])
def test_targets_too_shallow_for_the_authors_rule(num_layers) -> None:
    """Fault I18."""
    with pytest.raises(UserError, match=f"of a target with {num_layers} layers the rule"):
        resolved_aux_layers(EAGLE3, num_layers)


def test_vocabulary_and_width_of_a_target(refused, tmp_path, tiny_models) -> None:
    target = tiny_models("tiny-llama3-8l")
    assert refused(eagle3_source(tmp_path), target=target) == [
        f"--target {target}: hidden size: the head was made for 19, the target has 64",
        f"--target {target}: vocabulary: the head was made for 53 ids, the target has 512",
    ]


def test_the_tokenizer_that_heads_were_recorded_with(refused, shared, tmp_path, tiny_models, heads_folders) -> None:
    """Fault D21: shapes fit, the words do not. The target's fingerprint goes into the heads' manifest."""
    target = tiny_models("tiny-llama3")
    fingerprint = open_checkpoint(target).manifest.tokenizer_fingerprint
    heads = open_heads(heads_folders("medusa"))
    assert fingerprint is not None
    assert heads.manifest.tokenizer_fingerprint == fingerprint
    assert heads.tokenizer_dir is None
    other = tmp_path / "other"
    _with_fingerprint(target, other, "0" * 64)
    (line,) = refused(heads_folders("medusa"), target=other)
    assert line == (
        f"--target {other}: tokenizer: the heads were recorded with fingerprint {fingerprint}, "
        f"the target has {'0' * 64}"
    )
    # Foreign files record nothing: without a target there is no fingerprint, and none to compare with later.
    result = convert_heads(shared / "fixtures/medusa", tmp_path / "unbound")
    assert result.fingerprint is None
    assert open_heads(tmp_path / "unbound").manifest.tokenizer_fingerprint is None
    bound = convert_heads(tmp_path / "unbound", tmp_path / "bound", target=other)
    assert bound.fingerprint == "0" * 64
    assert same_bits(tree(tmp_path / "bound"), tree(heads_folders("medusa")))
    # Bound once, they stay bound where no target is given.
    assert convert_heads(tmp_path / "bound", tmp_path / "again").fingerprint == "0" * 64


def _with_fingerprint(target, copy, fingerprint) -> None:
    """The same checkpoint with another fingerprint in its manifest; only config and manifest are read here."""
    shutil.copytree(target, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["tokenizer_fingerprint"] = fingerprint
    (copy / "manifest.json").write_text(json.dumps(manifest))


# --- what other formats cannot say


def test_what_the_authors_loader_would_take_for_something_else(refused, tmp_path, tiny_models) -> None:
    tensors = makers.eagle3(layer="layers.0", embed=True)
    scaling = {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    }
    config = makers.speculators_config(layer_rope_scaling=scaling)
    convert_heads(makers.write(tmp_path / "src", config, tensors), tmp_path / "ours")
    assert refused(tmp_path / "ours", to="eagle3") == [
        "eagle3: the authors' heads have no rope scaling, these have llama3",
        "eagle3: the authors' heads norm after the residual, these have norm_before_residual",
    ]
    tensors = makers.eagle1(SIZES, layer="transformer", fc="fusion_fc", bias=False)
    config = makers.speculators_config(method="eagle")
    convert_heads(makers.write(tmp_path / "src", config, tensors), tmp_path / "ours", force=True)
    assert refused(tmp_path / "ours", to="eagle") == [
        "eagle: the authors' head_dim is hidden_size / num_attention_heads, these have 4 with 19 / 6"
    ]
    convert_heads(
        makers.write_medusa(tmp_path / "medusa", makers.medusa(heads=2, layers=2), medusa_num_layers=2), tmp_path / "m"
    )
    assert refused(tmp_path / "m", to="medusa") == [
        "medusa: head 0: its 2 blocks differ, the authors' loader shares one",
        "medusa: head 1: its 2 blocks differ, the authors' loader shares one",
    ]


def test_layers_that_the_authors_code_does_not_look_at(refused, shared, tmp_path, tiny_models) -> None:
    target = tiny_models("tiny-llama3-8l")
    source = tmp_path / "src"
    source.mkdir()
    config = json.loads((shared / "fixtures/eagle3/config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}))
    save_file(load_file(shared / "fixtures/eagle3/model.safetensors"), source / "model.safetensors")
    convert_heads(source, tmp_path / "ours", target=target)
    assert refused(tmp_path / "ours", to="eagle3", target=target) == [
        "eagle3: the authors' code looks at layers [2, 4, 5] of this target, these heads see [1, 4, 6]"
    ]
    convert_heads(tmp_path / "ours", tmp_path / "spec", to="speculators", target=target)
    said = json.loads((tmp_path / "spec" / "config.json").read_text())
    assert said["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]


# --- places


def test_what_is_no_heads_at_all(refused, shared, tmp_path, tiny_models) -> None:
    (line,) = refused(tmp_path / "nowhere")
    assert line.endswith("expected heads, found nothing")
    (line,) = refused(shared / "fixtures/tiny-llama3/hf")
    assert line == "model.safetensors: expected heads, found a whole model (convert it with to-orbax)"
    (line,) = refused(tiny_models("tiny-llama3"))
    assert "expected speculative heads, found a model" in line
    (tmp_path / "empty").mkdir()
    (line,) = refused(tmp_path / "empty")
    assert "found none of them" in line
    (tmp_path / "notes.txt").write_text("")
    (line,) = refused(tmp_path / "notes.txt")
    assert "expected heads: a folder, or a file" in line
    (line,) = refused(makers.write(tmp_path / "src", {}, {"a": np.zeros(3, np.float32)}))
    assert line.endswith("or speculators heads, found a")
    (line,) = refused(makers.write(tmp_path / "bare", None, makers.eagle3()))
    assert line.startswith("config.json: expected in ")
    (line,) = refused(shared / "fixtures/eagle3", target=tmp_path / "empty")
    assert "expected a converted checkpoint" in line
    with pytest.raises(UserError, match="to: expected orbax, medusa"):
        convert_heads(shared / "fixtures/eagle3", tmp_path / "out", to="gguf")


def test_destinations(shared, tmp_path, heads_folders) -> None:
    source = heads_folders("eagle3")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("only copy")
    for to in ("orbax", "eagle3", "speculators"):
        with pytest.raises(ConversionError, match="not replaced, even with --force"):
            convert_heads(source, precious, to=to, force=True)
        with pytest.raises(ConversionError, match="exists already; give --force"):
            convert_heads(source, precious, to=to)
        with pytest.raises(ConversionError, match="source and destination are the same"):
            convert_heads(source, source, to=to, force=True)
        for _ in range(2):
            convert_heads(source, tmp_path / to, to=to, force=True)
    assert (precious / "thesis.txt").read_text() == "only copy"
    # The model that the heads are for is never written over, force or not.
    with pytest.raises(ConversionError, match="expected a place apart from the target"):
        convert_heads(source, tmp_path / "orbax", target=tmp_path / "orbax", force=True)
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_leaves_nothing(heads_folders, tmp_path, monkeypatch) -> None:
    """The writer of foreign files fails midway: no folder, no hidden sibling."""

    def full(path, *arguments) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("checkpoints_convert.heads.write.write_safetensors", full)
    with pytest.raises(OSError, match="No space left"):
        convert_heads(heads_folders("eagle3"), tmp_path / "out", to="eagle3")
    assert list(tmp_path.iterdir()) == []
