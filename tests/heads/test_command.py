"""``jaxspec-convert heads``: what it prints, what it refuses, and its exit status."""

import subprocess
import sys

import pytest

from checkpoints_convert.cli import main
from jaxspec.checkpoint import open_heads
from tests.heads import makers


def run(capsys, *arguments) -> tuple[int, list[str], list[str]]:
    status = main(["heads", *map(str, arguments)])
    printed = capsys.readouterr()
    return status, printed.out.splitlines(), printed.err.splitlines()


def test_heads_with_their_target(shared, tmp_path, tiny_models, capsys) -> None:
    source, target = shared / "fixtures/eagle3", tiny_models("tiny-llama3-8l")
    status, out, err = run(capsys, source, tmp_path / "out", "--target", target, "--method", "eagle3")
    assert status == 0
    (line,) = out
    assert line == f"{tmp_path}/out: eagle3 heads as orbax, 71,936 parameters, from eagle3"
    assert [stage.split(":")[0] for stage in err] == ["converting heads", "hashing the rest", "syncing to disk"]
    assert open_heads(tmp_path / "out").config.aux_layers == (2, 4, 5)
    status, out, err = run(capsys, tmp_path / "out", tmp_path / "spec", "--to", "speculators", "--base", "org/model")
    assert status == 0
    assert out == [f"{tmp_path}/spec: eagle3 heads as speculators, 71,936 parameters, from jaxspec"]
    assert '"name_or_path": "org/model"' in (tmp_path / "spec" / "config.json").read_text()


def test_notes_follow_the_result(tmp_path, capsys) -> None:
    status, out, _ = run(capsys, makers.write_medusa(tmp_path / "src"), tmp_path / "out", "--dtype", "bfloat16")
    assert status == 0
    assert out[1:] == [
        f"{tmp_path}/out: config.json says 2 heads, medusa_lm_head.safetensors has 3: the file is right",
        f"{tmp_path}/out: bound to no tokenizer: give --target to check that the heads fit and to record it",
    ]
    assert open_heads(tmp_path / "out").manifest.dtype == "bfloat16"


def test_every_finding_is_a_line_and_the_status_is_2(shared, tmp_path, tiny_models, capsys) -> None:
    target = tiny_models("tiny-draft")
    (tmp_path / "out").mkdir()
    arguments = (shared / "fixtures/eagle3", tmp_path / "out", "--target", target)
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, [])
    assert len(err) == 3
    assert err[0] == f"error: {tmp_path}/out: exists already; give --force to replace it"
    assert all(line.startswith("error: ") for line in err)
    status, _, err = run(capsys, shared / "fixtures/eagle1", tmp_path / "out", "--method", "eagle3", "--force")
    assert status == 2
    assert len(err) == 1
    assert "expected EAGLE-3 weights (--method eagle3), found EAGLE-1 (method eagle" in err[0]
    assert list((tmp_path / "out").iterdir()) == []


def test_the_command_as_a_process(tmp_path) -> None:
    source = makers.write(tmp_path / "src", makers.eagle3_config(), makers.eagle3())
    command = [sys.executable, "-W", "error", "-m", "checkpoints_convert", "heads"]
    done = subprocess.run([*command, source, tmp_path / "out"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    again = subprocess.run([*command, source, tmp_path / "out"], capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert again.stderr == f"error: {tmp_path}/out: exists already; give --force to replace it\n"
    for check in ("inspect", "verify"):
        done = subprocess.run([*command[:-1], check, tmp_path / "out"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert (
        "target_ids"
        in subprocess.run(
            [*command[:-1], "inspect", tmp_path / "out"], capture_output=True, text=True, check=True
        ).stdout
    )


@pytest.mark.parametrize("name", ["medusa", "eagle1", "eagle3"])
def test_heads_are_inspected_and_verified_against_their_source(name, shared, tmp_path, capsys) -> None:
    source = shared / "fixtures" / name
    assert main(["heads", str(source), str(tmp_path / "out")]) == 0
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "total float32" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "out"), "--against", str(source)]) == 0
    assert "worst difference from the source: 0 in" in capsys.readouterr().out
    other = shared / "fixtures" / ("eagle1" if name == "eagle3" else "eagle3")
    assert main(["verify", str(tmp_path / "out"), "--against", str(other)]) == 2
    assert "method is" in capsys.readouterr().err
