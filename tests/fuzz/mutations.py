"""Which change a seed makes to which base. The same format and seed give the same mutant, on any machine."""

import json
import random
from collections.abc import Sequence
from typing import NamedTuple

from tests.fuzz.containers import mutate_gguf, mutate_safetensors
from tests.fuzz.jsons import mutate_json
from tests.fuzz.torch_files import mutate_ranks, mutate_torch
from tests.fuzz.trees import Rng, Special, Tree, mutate_bytes, mutate_files

INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".gguf", ".pth", ".pt", ".bin")
# Beside the source lies a folder of this name with copies of its files, and one absolute path leads there.
ELSEWHERE = "elsewhere"


class Mutant(NamedTuple):
    """A changed source. ``must_refuse``: no reader may accept it, whatever else it holds."""

    tree: Tree
    what: str
    must_refuse: bool


def mutant(bases: Sequence[Tree], format_name: str, seed: int) -> Mutant:
    """Mutant number ``seed``: one to three changes to one of the bases."""
    rng = random.Random(f"{format_name} {seed}")
    number = rng.randrange(len(bases))
    tree, said, must_refuse = dict(bases[number]), [f"base {number}"], False
    for _ in range(rng.choice([1, 1, 1, 1, 2, 3])):
        if not tree:
            break
        tree, what, refuse = _once(tree, rng)
        said.append(what)
        must_refuse = must_refuse or refuse
    # A later change may undo the first, or hit the file that held it.
    return Mutant(tree, "; ".join(said), must_refuse and len(said) == 2)


def _once(tree: Tree, rng: Rng) -> tuple[Tree, str, bool]:
    names = list(tree)
    chances = [
        4 if name.endswith(_WEIGHTS) else 2 if name in (INDEX, "config.json", "params.json") else 1 for name in tree
    ]
    name = rng.choices(names, chances)[0]
    content = tree[name]
    if isinstance(content, Special) or rng.random() < 0.12:
        return *mutate_files(tree, rng, name), False
    try:
        content, what, refuse = _content(name, content, rng)
    except RecursionError:  # an earlier change nests deeper than can be walked
        content, what, refuse = *mutate_bytes(content, rng, [(0, 100)]), False
    return tree | {name: content}, f"{name}: {what}", refuse


def _content(name: str, content: bytes, rng: Rng) -> tuple[bytes, str, bool]:
    """A change that knows what the file is."""
    refuse = False
    if name == INDEX and rng.random() < 0.6:
        content, what, refuse = _mutate_shard_names(content, rng)
    elif name.endswith(".json"):
        content, what = mutate_json(content, rng) if rng.random() < 0.8 else mutate_bytes(content, rng, [(0, 40)])
    elif name.endswith(".safetensors"):
        content, what = mutate_safetensors(content, rng)
    elif name.endswith(".gguf"):
        content, what = mutate_gguf(content, rng)
    elif name == "tokenizer.model":
        content, what = mutate_ranks(content, rng)
    elif name.endswith(_WEIGHTS):
        content, what, refuse = mutate_torch(content, rng)
    else:
        content, what = mutate_bytes(content, rng, [(0, len(content))])
    return content, what, refuse


def _mutate_shard_names(data: bytes, rng: Rng) -> tuple[bytes, str, bool]:
    """Names that leave the folder; the files they lead to are there and right, so that only the name is wrong."""
    try:
        index = json.loads(data)
        old = rng.choice(sorted(set(index["weight_map"].values())))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, IndexError):
        return *mutate_json(data, rng), False
    leaving = [
        f"../{ELSEWHERE}/{old}",
        f"./{old}",
        f"sub/../{old}",
        f"../src/{old}",
        f"/tmp/{old}",
        f"..\\{old}",
        f"{old}\0",
    ]
    others = [
        old.upper(),
        "",
        ".",
        "..",
        f"{old} ",
        f"{old}/",
        "x" * 300,
        "x" * 70_000,
        "config.json",
        INDEX,
        "a\nb",
        "\ud800",
    ]
    others += ["\udcff", "~", "$HOME", "*.safetensors", "file:///etc/passwd", "CON", "-rf", "\x1b[2J", "tokenizer.json"]
    refuse = rng.random() < 0.5
    new = rng.choice(leaving if refuse else others)
    every = rng.random() < 0.7
    names = [name for name, shard in index["weight_map"].items() if shard == old]
    for name in names if every else rng.sample(names, 1):
        index["weight_map"][name] = new
    return json.dumps(index).encode(), f"shard {old} named {new[:60]!r}", refuse
