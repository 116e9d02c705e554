"""Generates the gRPC code from the .proto file, beside it (``make proto``).

The include root is the repository: protoc turns the path of a file into Python imports, and below ``serve/protos`` it
would write ``from jaxspec.v1 import ..``, which is another package here.
"""

import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = "serve/protos/jaxspec/v1/inference.proto"


def generate(out: Path) -> list[Path]:
    """Writes the three generated files below ``out``, at their repository paths. RuntimeError if protoc fails."""
    arguments = ["protoc", f"-I{ROOT}", f"-I{files('grpc_tools') / '_proto'}"]
    arguments += [f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    status = protoc.main([*arguments, PROTO])
    if status:
        raise RuntimeError(f"protoc: expected status 0 for {PROTO}, got {status}")
    stem = (out / PROTO).with_suffix("")
    return [stem.with_name(stem.name + suffix) for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")]


if __name__ == "__main__":
    for path in generate(ROOT):
        sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")
