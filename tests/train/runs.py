"""How the tests of training start runs, and what they read of them afterwards."""

import os
import re
import subprocess
import sys

from jaxspec.checkpoint import open_any
from train_heads import logs
from train_heads.cli import config_from, parser

KINDS = {
    "medusa": ["--heads", "3", "--draft-vocab-size", "128"],
    "eagle": [],
    "eagle3": ["--unroll", "3", "--draft-vocab-size", "128"],
    "draft": ["--layers", "2"],
}


# What a failed test leaves running is ended after it, see the fixture in conftest.py.
STARTED: list[subprocess.Popen[str]] = []


def flags(kind, target_dir, data, out, *more):
    small = ["--row", "64", "--rows", "4", "--held-out", "0.2", "--warmup", "1", "--mesh", "1"]
    files = ["--target", str(target_dir), "--data", str(data), "--out", str(out)]
    return [kind, *files, *small, *KINDS[kind], *more]


def config(*arguments):
    return config_from(parser().parse_args(arguments))


def losses(out, kind="train"):
    return [
        (line["step"], line["loss"], line.get("rate")) for line in logs.read(out / logs.LOG) if line["kind"] == kind
    ]


def start(arguments, devices=4):
    xla = re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"])
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "XLA_FLAGS": xla}
    command = [sys.executable, "-m", "train_heads", *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    STARTED.append(process)
    return process


def finish(process):
    output = process.communicate(timeout=500)[0]
    assert process.returncode == 0, output
    return output


def parameters(folder):
    checkpoint = open_any(folder)
    return {name: record.sha256 for name, record in checkpoint.manifest.tensors.items()}
