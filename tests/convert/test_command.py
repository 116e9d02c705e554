"""The command line: what it prints, what it refuses, and its exit status."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from checkpoints_convert import ConversionError, convert
from checkpoints_convert.cli import main
from jaxspec.checkpoint import open_checkpoint
from tests.convert import makers


@pytest.fixture
def source(tmp_path):
    return makers.write_hf(tmp_path / "hf", makers.hf_config(), makers.hf_tensors())


def with_tokenizer(folder, shared):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(shared / "fixtures" / "tiny-llama3" / "hf" / name, folder / name)
    return folder


def run(capsys, *arguments) -> tuple[int, str, list[str]]:
    status = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err.splitlines()


def test_converting_says_what_was_written_and_one_line_per_stage(source, tmp_path, capsys) -> None:
    status, out, err = run(capsys, "to-orbax", source, tmp_path / "out")
    assert status == 0
    assert re.search(r"out: [\d,]+ parameters, 21 tensors, float32, llama unknown", out)
    assert "takes and gives token ids only" in out
    assert [line.split(":")[0] for line in err] == ["converting", "hashing the rest", "syncing to disk"]


def test_the_module_runs_as_a_command(source, tmp_path) -> None:
    command = [sys.executable, "-W", "error", "-m", "checkpoints_convert"]
    done = subprocess.run([*command, "to-orbax", source, tmp_path / "out"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == [
        "converting",
        "hashing the rest",
        "syncing to disk",
    ]
    refused = subprocess.run([*command, "to-orbax", source], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "DST" in refused.stderr


def test_inspect_prints_config_manifest_and_totals(source, tmp_path, capsys) -> None:
    assert main(["to-orbax", str(source), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    capsys.readouterr()
    status, out, err = run(capsys, "inspect", tmp_path / "out")
    assert (status, err) == (0, [])
    checkpoint = open_checkpoint(tmp_path / "out")
    assert json.dumps(checkpoint.config.to_json()) in out
    assert checkpoint.manifest.sources["model.safetensors"] in out
    for name, record in checkpoint.manifest.tensors.items():
        shape = "x".join(map(str, record.shape))
        assert re.search(rf"{re.escape(name)} +bfloat16 +{shape} +{record.nbytes:,}\n", out), name
    count = checkpoint.manifest.parameter_count
    assert f"total bfloat16  21 tensors, {count:,} values, {2 * count:,} bytes" in out


def test_inspect_and_verify_refuse_what_is_no_checkpoint(source, capsys) -> None:
    for command in ("inspect", "verify"):
        status, out, err = run(capsys, command, source)
        assert (status, out) == (2, "")
        assert len(err) == 1
        assert "manifest.json" in err[0]


def test_verify_finds_every_changed_tensor(source, tmp_path, capsys) -> None:
    convert(source, tmp_path / "out")
    assert run(capsys, "verify", tmp_path / "out")[0] == 0
    for leaf in ("layers.0/qkv", "layers.2/down"):
        pieces = [path for path in (tmp_path / "out" / "params" / leaf).rglob("*") if path.is_file()]
        (piece,) = [path for path in pieces if path.name != "zarr.json"]
        raw = bytearray(piece.read_bytes())
        raw[40] ^= 1
        piece.write_bytes(raw)
    status, out, err = run(capsys, "verify", tmp_path / "out")
    assert (status, out) == (2, "")
    errors = [line for line in err if line.startswith("error: ")]
    assert errors == [
        "error: layers.0.qkv: its sha256 is not the manifest's",
        "error: layers.2.down: its sha256 is not the manifest's",
    ]


def test_verify_against_the_source_prints_the_worst_difference(source, tmp_path, capsys) -> None:
    weights = makers.hf_tensors()
    packed = makers.write_gguf(tmp_path / "model.gguf", makers.gguf_fields(), makers.gguf_tensors(weights))
    convert(source, tmp_path / "kept")
    convert(source, tmp_path / "rounded", dtype="bfloat16")
    status, out, _ = run(capsys, "verify", tmp_path / "kept", "--against", source)
    assert status == 0
    assert "worst difference from the source: 0 in" in out
    status, out, _ = run(capsys, "verify", tmp_path / "rounded", "--against", packed)
    assert status == 2, "another format may have other end tokens"
    status, out, _ = run(capsys, "verify", tmp_path / "rounded", "--against", source)
    assert status == 0
    found = re.search(r"worst difference from the source: (\S+) in (\S+)", out)
    assert found is not None
    worst = max(
        float(np.abs(array - array.astype(makers.ml_dtypes.bfloat16).astype(np.float32)).max())
        for array in weights.values()
    )
    assert float(found[1]) == pytest.approx(worst, rel=1e-2)
    assert worst > 0


def test_verify_against_another_model_names_what_differs(source, tmp_path, capsys) -> None:
    convert(source, tmp_path / "out")
    weights = makers.hf_tensors()
    weights["model.layers.1.self_attn.v_proj.weight"][2, 3] += 0.5
    weights["model.norm.weight"][4] = np.nan
    other = makers.write_hf(tmp_path / "other", makers.hf_config(rope_theta=10000.0), weights)
    status, out, err = run(capsys, "verify", tmp_path / "out", "--against", other)
    assert status == 2
    assert "worst difference from the source: inf in final_norm" in out
    errors = [line for line in err if line.startswith("error: ")]
    assert len(errors) == 3
    assert "rope_theta is 500000.0, the source says 10000.0" in errors[0]
    assert any("layers.1.qkv: differs from the source in 1 of" in line for line in errors)
    assert any("final_norm: differs from the source in 1 of" in line for line in errors)


def test_a_destination_that_exists_needs_force(source, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    convert(source, out)
    before = (out / "manifest.json").read_bytes()
    status, _, err = run(capsys, "to-orbax", source, out, "--dtype", "bfloat16")
    assert status == 2
    assert err == [f"error: {out}: exists already; give --force to replace it"]
    assert (out / "manifest.json").read_bytes() == before
    assert main(["to-orbax", str(source), str(out), "--dtype", "bfloat16", "--force"]) == 0
    assert open_checkpoint(out).manifest.dtype == "bfloat16"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def test_force_replaces_checkpoints_and_empty_folders_alone(source, tmp_path, capsys) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("only copy")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(precious)
    for taken in (precious, tmp_path / "file", tmp_path / "link"):
        status, _, err = run(capsys, "to-orbax", source, taken, "--force")
        assert status == 2
        assert "not replaced, even with --force" in err[0]
    assert (precious / "thesis.txt").read_text() == "only copy"
    (tmp_path / "empty").mkdir()
    assert main(["to-orbax", str(source), str(tmp_path / "empty"), "--force"]) == 0


def test_source_and_destination_must_lie_apart(source, tmp_path, capsys) -> None:
    (tmp_path / "link").symlink_to(source)
    for src, dst in (
        (source, source),
        (source, tmp_path / "link"),
        (source, source / "inside" / "out"),
        (source, tmp_path),
        (source, tmp_path / "hf" / ".." / "hf"),
    ):
        status, _, err = run(capsys, "to-orbax", src, dst, "--force")
        assert status == 2, (src, dst)
        assert any("the same" in line or "one lies inside the other" in line for line in err), err
    assert not (source / "inside").exists()
    assert (source / "model.safetensors").is_file()


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(source, shared, refused) -> None:
    (line,) = refused(with_tokenizer(source, shared))
    assert line == "tokenizer: expected at most 53 tokens (vocab_size), got 512"


def test_a_broken_tokenizer_is_refused(source, shared, refused) -> None:
    with_tokenizer(source, shared)
    (source / "tokenizer.json").write_text('{"version": "1.0"')
    (line,) = refused(source)
    assert "tokenizer" in line


def test_a_tokenizer_given_apart_stands_in_for_the_source_s(shared, tmp_path, refused) -> None:
    sizes = makers.SIZES._replace(V=521)
    weights = makers.hf_tensors(sizes)
    source = with_tokenizer(makers.write_hf(tmp_path / "hf", makers.hf_config(sizes), weights), shared)
    (source / "tokenizer.json").write_text("{}")
    apart = with_tokenizer(tmp_path, shared)
    result = convert(source, tmp_path / "out", tokenizer=apart)
    assert result.manifest.tokenizer_size == 512  # fewer tokens than embeddings: padding, as many models have
    assert result.manifest.model_version == "3"
    carried = open_checkpoint(tmp_path / "out").tokenizer_dir
    assert (carried / "tokenizer.json").read_bytes() == (apart / "tokenizer.json").read_bytes()
    digest = result.manifest.sources["tokenizer.json"]
    assert digest == makers.sha256(apart / "tokenizer.json")
    (line,) = refused(source, "--tokenizer", str(tmp_path / "nowhere"))
    assert "expected a folder with tokenizer.json" in line


def test_everything_wrong_is_told_at_once(source, shared, tmp_path, capsys) -> None:
    """Destination, weights and tokenizer in one go."""
    weights = makers.hf_tensors()
    del weights["model.norm.weight"]
    makers.write_hf(source, makers.hf_config(), weights)
    with_tokenizer(source, shared)
    (tmp_path / "out").mkdir()
    with pytest.raises(ConversionError) as caught:
        convert(source, tmp_path / "out")
    assert len(caught.value.findings) == 3
    status, _, err = run(capsys, "to-orbax", source, tmp_path / "out")
    assert status == 2
    assert len(err) == 3
