"""int8 storage: the right integers, the errors that were made, and the same weights wherever they are read."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert import convert
from checkpoints_convert.cli import main
from jaxspec.checkpoint import open_checkpoint, read_group, read_stored, restore_params
from jaxspec.checkpoint.int8 import dequantize, quantize
from jaxspec.model.params import param_specs
from jaxspec.sharding import make_sharding
from tests.convert import makers


@pytest.fixture
def source(tmp_path):
    return makers.write_hf(tmp_path / "hf", makers.hf_config(), makers.hf_tensors())


def test_each_output_channel_has_its_own_scale() -> None:
    weight = np.array([[1.27, -0.635, 0.005], [0.0, 0.0, 0.0], [-254.0, 1.0, 127.0]], np.float32)
    values, scale, worst, relative = quantize(weight, 1)
    # 0.635 / 0.01 and 1 / 2 lie half way: to the even neighbour, whichever side float32 puts the first on.
    assert values[0, 0] == 127
    assert abs(int(values[0, 1])) in (63, 64)
    assert values[1].tolist() == [0, 0, 0]
    assert values[2].tolist() == [-127, 0, 64]
    assert scale == pytest.approx([0.01, 0.0, 2.0])
    assert worst == 1.0
    errors = np.abs(dequantize(values, scale) - weight)
    assert worst == errors.max()
    assert relative == pytest.approx(np.sqrt((errors**2).sum() / (weight**2).sum()))


def test_channels_are_what_leads_the_in_axes() -> None:
    weight = np.random.default_rng(5).standard_normal((7, 3, 2, 5), np.float32)
    assert quantize(weight, 1).scale.shape == (7, 3, 2)
    values, scale, worst, _ = quantize(weight, 3)
    assert scale.shape == (7,)
    assert scale == pytest.approx(np.abs(weight).max(axis=(1, 2, 3)) / 127)
    assert np.abs(dequantize(values, scale) - weight).max() == worst
    assert worst <= scale.max() / 2 * (1 + 1e-6)


def test_large_matrices_are_quantised_in_parts_that_agree_with_the_whole() -> None:
    weight = np.random.default_rng(5).standard_normal((4099, 1031), np.float32)  # 16.9 MB: two parts
    values, scale, worst, relative = quantize(weight, 1)
    assert scale.tobytes() == (np.abs(weight).max(axis=1) / np.float32(127)).tobytes()
    assert np.abs(dequantize(values, scale) - weight).max() == worst
    assert 0.005 < relative < 0.02


def test_every_matrix_is_int8_and_every_vector_is_kept(source, tmp_path) -> None:
    manifest = convert(source, tmp_path / "out", quantize="int8").manifest
    for name, spec in param_specs(open_checkpoint(tmp_path / "out").config).items():
        assert manifest.tensors[name].dtype == ("int8" if spec.n_in else "float32"), name
        assert (f"{name}_scale" in manifest.tensors) == bool(spec.n_in)
        assert (name in manifest.quantization_errors) == bool(spec.n_in)
    assert manifest.dtype == "mixed"


def test_what_is_stored_is_the_source_s_own_values_rounded(source, tmp_path) -> None:
    convert(source, tmp_path / "plain")
    convert(source, tmp_path / "out", quantize="int8", dtype="bfloat16")
    plain, packed = open_checkpoint(tmp_path / "plain"), open_checkpoint(tmp_path / "out")
    for group in plain.groups():
        kept, stored, read = read_group(plain, group), read_stored(packed, group), read_group(packed, group)
        assert list(kept) == list(read)
        for name, array in kept.items():
            spec = packed.specs[name]
            if not spec.n_in:
                assert stored[name].dtype == jnp.bfloat16  # --dtype is for what is not quantised
                continue
            values, scale, worst, relative = quantize(array, spec.n_in)
            assert stored[name].tobytes() == values.tobytes(), name
            assert stored[f"{name}_scale"].tobytes() == scale.tobytes(), name
            assert read[name].tobytes() == dequantize(values, scale).tobytes(), name
            error = packed.manifest.quantization_errors[name]
            assert (error.max_abs, error.relative_rms) == (worst, relative)
            assert 0 < error.relative_rms < 0.01


@pytest.mark.parametrize("mesh", ["1", "4", "data=2,model=2"])
def test_restoring_multiplies_out_in_every_sharding(mesh, shared, tmp_path) -> None:
    convert(shared / "fixtures" / "tiny-llama3" / "hf", tmp_path / "out", quantize="int8")
    checkpoint, sharding = open_checkpoint(tmp_path / "out"), make_sharding(mesh)
    shardings = {name: sharding.named(spec.axes, spec.shape) for name, spec in checkpoint.specs.items()}
    expected = {name: array for group in checkpoint.groups() for name, array in read_group(checkpoint, group).items()}
    for dtype in (None, jnp.float32, jnp.bfloat16):
        restored = restore_params(checkpoint, shardings, dtype)
        assert set(restored) == set(expected)
        for name, array in restored.items():
            assert array.dtype == (dtype or jnp.float32)
            assert array.sharding.is_equivalent_to(shardings[name], array.ndim), name
            assert np.asarray(array).tobytes() == expected[name].astype(array.dtype).tobytes(), name


def test_inspect_names_bytes_errors_and_the_worst(source, tmp_path, capsys) -> None:
    weights = makers.hf_tensors()
    weights["model.layers.1.mlp.down_proj.weight"][:, 5] *= 300  # outliers: everything beside them rounds to nothing
    convert(makers.write_hf(source, makers.hf_config(), weights), tmp_path / "out", quantize="int8")
    assert main(["inspect", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    manifest = open_checkpoint(tmp_path / "out").manifest
    for name, error in manifest.quantization_errors.items():
        (line,) = [line for line in out.splitlines() if line.split()[1:3] == [name, "int8"]]
        assert f"{error.max_abs:.3g}" in line
        assert f"{error.relative_rms:.2%}" in line
        assert f"{manifest.tensors[name].nbytes:,}" in line
    assert "worst of int8: layers.1.down " in out
    sizes = [record.nbytes for record in manifest.tensors.values() if record.dtype == "int8"]
    assert f"total int8      {len(sizes)} tensors, {sum(sizes):,} values, {sum(sizes):,} bytes" in out


def test_verify_compares_int8_with_its_source(source, tmp_path, capsys) -> None:
    convert(source, tmp_path / "out", quantize="int8")
    assert main(["verify", str(tmp_path / "out"), "--against", str(source)]) == 0
    out = capsys.readouterr().out
    worst = max(error.max_abs for error in open_checkpoint(tmp_path / "out").manifest.quantization_errors.values())
    assert f"worst difference from the source: {worst:.3g} in " in out
    weights = makers.hf_tensors()
    weights["lm_head.weight"][3] *= 1.5
    makers.write_hf(source, makers.hf_config(), weights)
    assert main(["verify", str(tmp_path / "out"), "--against", str(source)]) == 2
    assert "lm_head: differs from the source in 1 of" in capsys.readouterr().err  # a scale alone


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_have_no_int8_are_refused_by_name(value, source, refused) -> None:
    weights = makers.hf_tensors()
    weights["model.layers.2.self_attn.v_proj.weight"][1, 1] = value
    makers.write_hf(source, makers.hf_config(), weights)
    assert refused(source, "--quantize", "int8") == [
        "layers.2.qkv: cannot be stored as int8: expected finite values, found NaN or infinity"
    ]


def test_a_scale_that_is_missing_is_told(source, tmp_path) -> None:
    convert(source, tmp_path / "out", quantize="int8")
    path = tmp_path / "out" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["tensors"]["layers.0.o_scale"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"the manifest lacks layers\.0\.o_scale"):
        open_checkpoint(tmp_path / "out")


def test_dequantising_on_the_device_is_the_same_product() -> None:
    values = np.random.default_rng(7).integers(-127, 128, (11, 3, 13), np.int8)
    scale = np.random.default_rng(8).random((11, 3), np.float32)
    on_device = dequantize(jnp.asarray(values), jnp.asarray(scale))
    assert isinstance(on_device, jax.Array)
    assert np.asarray(on_device).tobytes() == dequantize(values, scale).tobytes()
