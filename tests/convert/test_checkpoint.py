"""The checkpoint folder: opened only when its parts agree, restored straight into shardings, cast only on request."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding

from checkpoints_convert import convert
from jaxspec.checkpoint import open_checkpoint, restore_params
from jaxspec.checkpoint.manifest import group_and_leaf
from jaxspec.errors import UserError
from jaxspec.model.params import param_specs
from jaxspec.sharding import Sharding
from tests.convert import makers


@pytest.fixture
def folder(tiny_models, tmp_path):
    """A copy of a small checkpoint, to be spoilt."""
    shutil.copytree(tiny_models("tiny-llama3"), tmp_path / "copy")
    return tmp_path / "copy"


def edit(path, change) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def one_device(checkpoint) -> dict[str, SingleDeviceSharding]:
    return dict.fromkeys(checkpoint.manifest.tensors, SingleDeviceSharding(jax.devices()[0]))


def mesh_shardings(checkpoint) -> dict[str, NamedSharding]:
    sharding = Sharding(jax.make_mesh((1, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2))
    return {name: sharding.named(spec.axes, spec.shape) for name, spec in param_specs(checkpoint.config).items()}


@pytest.mark.parametrize("name", ["tiny-llama3", "tiny-llama3-bf16", "tiny-draft"])
def test_restoring_gives_the_stored_values_in_the_asked_shardings(name, tiny_models, tree) -> None:
    checkpoint = open_checkpoint(tiny_models(name))
    stored = tree(tiny_models(name))
    for shardings in (one_device(checkpoint), mesh_shardings(checkpoint)):
        params = restore_params(checkpoint, shardings, None)
        assert set(params) == set(stored)
        for leaf, array in params.items():
            assert array.sharding.is_equivalent_to(shardings[leaf], array.ndim), leaf
            assert np.asarray(array).tobytes() == stored[leaf].tobytes(), leaf
    split = params["layers.0.gate_up"]
    assert split.sharding.spec[0] == "model"
    assert {shard.data.shape[0] for shard in split.addressable_shards} == {split.shape[0] // 4}


def test_a_cast_happens_on_request_and_rounds_to_nearest_even(tiny_models, tree) -> None:
    checkpoint, stored = open_checkpoint(tiny_models("tiny-llama3")), tree(tiny_models("tiny-llama3"))
    for dtype in (jnp.bfloat16, jnp.float32):
        for shardings in (one_device(checkpoint), mesh_shardings(checkpoint)):
            for leaf, array in restore_params(checkpoint, shardings, dtype).items():
                assert array.dtype == dtype
                assert np.asarray(array).tobytes() == stored[leaf].astype(dtype).tobytes(), leaf


def test_bits_survive_restoring(tmp_path) -> None:
    """E18 on the way to the device: NaN payloads, infinities and -0."""
    patterns = np.array([0x7FC1, 0xFFC0, 0x7F80, 0xFF80, 0x8000, 0x0001], np.uint16)
    weights = makers.hf_tensors(dtype=ml_dtypes.bfloat16)
    weights["model.norm.weight"].view(np.uint16)[: len(patterns)] = patterns
    convert(makers.write_hf(tmp_path / "hf", makers.hf_config(), weights), tmp_path / "out")
    checkpoint = open_checkpoint(tmp_path / "out")
    restored = restore_params(checkpoint, one_device(checkpoint), None)["final_norm"]
    assert np.asarray(restored).view(np.uint16)[: len(patterns)].tolist() == patterns.tolist()


def test_data_of_another_dtype_than_the_manifest_s_is_an_error_that_names_the_leaf(folder, tiny_models) -> None:
    """E26: nothing is cast behind the user's back."""
    shutil.rmtree(folder / "params" / "layers.2")
    shutil.copytree(tiny_models("tiny-llama3-bf16") / "params" / "layers.2", folder / "params" / "layers.2")
    checkpoint = open_checkpoint(folder)
    for dtype in (None, jnp.float32):
        with pytest.raises(UserError, match=r"layers\.2\.qkv: the manifest says float32 \[4, 4, 8, 64\].* bfloat16"):
            restore_params(checkpoint, one_device(checkpoint), dtype)


def test_data_of_another_shape_is_an_error(folder, tiny_models) -> None:
    shutil.rmtree(folder / "params" / "layers.1")
    shutil.copytree(tiny_models("tiny-draft") / "params" / "layers.1", folder / "params" / "layers.1")
    checkpoint = open_checkpoint(folder)
    with pytest.raises(UserError, match=r"layers\.1\.down: the manifest says float32 \[64, 160\].*\[32, 96\]"):
        restore_params(checkpoint, one_device(checkpoint), None)


def _drop(path) -> None:
    path.unlink()


def _halve(path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("spoil", [_drop, _halve])
def test_missing_data_is_an_error_not_zeros(spoil, folder) -> None:
    """E15's kind: no weight is ever made up."""
    (piece,) = [path for path in (folder / "params" / "layers.3" / "down" / "c").rglob("*") if path.is_file()]
    spoil(piece)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(UserError, match=r"layers\.3\.down: expected 40960 bytes in params/layers\.3, found \d+"):
        restore_params(checkpoint, one_device(checkpoint), None)


def test_leaves_that_are_gone_are_all_named(folder) -> None:
    for leaf in ("down", "mlp_norm"):
        shutil.rmtree(folder / "params" / "layers.3" / leaf)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(UserError, match=r"layers\.3\.mlp_norm is missing from .*; layers\.3\.down is missing"):
        restore_params(checkpoint, one_device(checkpoint), None)


def test_what_orbax_cannot_read_is_told_in_one_line(folder) -> None:
    (folder / "params" / "layers.3" / "_METADATA").write_text("{")
    checkpoint = open_checkpoint(folder)
    with pytest.raises(UserError, match=r"layers\.3") as caught:
        restore_params(checkpoint, one_device(checkpoint), None)
    assert "\n" not in str(caught.value)


def test_shardings_must_name_exactly_the_parameters(tiny_models) -> None:
    checkpoint = open_checkpoint(tiny_models("tiny-draft"))
    shardings = one_device(checkpoint)
    shardings["lm_head"] = shardings.pop("embed")
    with pytest.raises(UserError, match=r"embed has no sharding; the checkpoint has no lm_head"):
        restore_params(checkpoint, shardings, None)


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        ("manifest.json", lambda data: data.update(format_version=1), "expected format version 2, got 1"),
        ("manifest.json", lambda data: data.update(color="red"), "unknown key 'color'"),
        ("manifest.json", lambda data: data.pop("family"), "missing key 'family'"),
        ("manifest.json", lambda data: data["tensors"].pop("layers.1.o"), "the manifest lacks layers.1.o"),
        ("manifest.json", lambda data: data["tensors"]["embed"].update(shape=[512, 63]), r"\[512, 64\].*\[512, 63\]"),
        ("manifest.json", lambda data: data["tensors"]["embed"].update(dtype="int7"), "expected dtype float32"),
        ("manifest.json", lambda data: data["tensors"]["embed"].update(crc=1), "tensors.embed: unknown key 'crc'"),
        ("manifest.json", lambda data: data.update(tensors=[]), "tensors: expected a JSON object"),
        ("config.json", lambda data: data.update(num_layers=5), "the manifest lacks layers.4.qkv"),
        ("config.json", lambda data: data.update(num_layers=3), "layers.3.qkv, which the model has not"),
        ("config.json", lambda data: data.update(tie_word_embeddings=True), "lm_head, which the model has not"),
        ("config.json", lambda data: data.pop("rope_theta"), "missing key 'rope_theta'"),
        ("config.json", lambda data: data.update(sliding_window=4), "unknown key 'sliding_window'"),
    ],
)
def test_parts_that_do_not_agree_are_named(file, change, named, folder) -> None:
    edit(folder / file, change)
    with pytest.raises(UserError, match=named):
        open_checkpoint(folder)


def test_all_missing_groups_are_listed(folder) -> None:
    for group in ("layers.0", "embed"):
        shutil.rmtree(folder / "params" / group)
    with pytest.raises(UserError, match=r"params/embed is missing; params/layers\.0 is missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "found no manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json: expected JSON"),
        (lambda folder: (folder / "config.json").unlink(), "expected a file config.json, found none"),
        (lambda folder: shutil.rmtree(folder / "tokenizer"), "tokenizer/tokenizer.json is missing"),
        (shutil.rmtree, "found nothing"),
    ],
)
def test_what_is_not_a_whole_checkpoint_does_not_open(spoil, named, folder) -> None:
    spoil(folder)
    with pytest.raises(UserError, match=named):
        open_checkpoint(folder)


def test_a_source_folder_is_not_a_checkpoint(shared) -> None:
    with pytest.raises(UserError, match="make one with jaxspec-convert"):
        open_checkpoint(shared / "fixtures" / "tiny-llama3" / "hf")


def test_groups_by_name() -> None:
    assert group_and_leaf("layers.11.gate_up") == ("layers.11", "gate_up")
    assert group_and_leaf("layers.11.gate_up_scale") == ("layers.11", "gate_up_scale")
    assert group_and_leaf("lm_head") == (*group_and_leaf("lm_head_scale")[:1], "lm_head")
