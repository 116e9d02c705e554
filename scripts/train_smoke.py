"""``make train-smoke``: the target answers a few prompts, every kind of head learns from them for a few steps, and is
served.

Nothing is learnt in so few steps; what is shown is that the way from a checkpoint to served heads is whole.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Final

from jaxspec import Completion, Engine, Prompt, SamplingParams, SpeculationConfig
from train_heads.cli import main as train
from train_heads.config import KINDS

ROOT: Final = Path(__file__).resolve().parent.parent
PROMPTS: Final = (
    "Why is the sea salty?",
    "Write a line about winter.",
    "What is 12 times 12?",
    "Name three rivers.",
    "How do I boil an egg?",
    "Say hello in French.",
)
SMALL: Final = ("--steps", "3", "--warmup", "1", "--row", "128", "--rows", "2", "--held-out", "0.3", "--serve", "1")


def step(words: str, arguments: list[str]) -> None:
    """One command of jaxspec-train. SystemExit when it fails."""
    print(f"$ jaxspec-train {' '.join(arguments)}", flush=True)
    if train(arguments):
        raise SystemExit(f"{words} failed")


def serve(target: Path, kind: str, heads: Path) -> Completion:
    """A greedy answer with these heads."""
    method = "draft_model" if kind == "draft" else kind
    speculation = SpeculationConfig(method=method, model=str(heads), num_speculative_tokens=4)
    with Engine.load(target, speculation=speculation, mesh="1", max_slots=1, max_len=128) as engine:
        prompt = Prompt(chat=(("user", PROMPTS[0]),))
        return Completion.of(engine.generate(prompt, SamplingParams(max_tokens=16, temperature=0.0)))


def main() -> int:
    """Exit status 0 when every kind was trained and says what the others say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=ROOT / "models" / "smollm2-135m")
    target = parser.parse_args().target
    texts = set()
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        prompts, answers = home / "prompts.jsonl", home / "answers.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
        common = ["--target", str(target), "--mesh", "1"]
        files = ["--data", str(prompts), "--out", str(answers)]
        step("generate-data", ["generate-data", *common, *files, "--max-tokens", "48", "--max-len", "128"])
        for kind in KINDS:
            out = home / kind
            files = ["--data", str(answers), "--out", str(out), "--draft-vocab-size", "4096"]
            step(kind, [kind, *common, *files, *SMALL])
            done = serve(target, kind, out / "heads")
            texts.add(done.text)
            drafts = done.summary.speculation
            print(f"{kind}: {done.text!r}, {drafts.num_accepted_draft_tokens} of {drafts.num_draft_tokens} accepted\n")
    if len(texts) != 1:
        print(f"expected one text whatever drafts, got {texts}")
        return 1
    print("train-smoke: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
