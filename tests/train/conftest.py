"""A tiny target and packed rows of it."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert.convert import convert
from jaxspec.checkpoint import open_checkpoint, restore_params
from jaxspec.model.llama import define
from jaxspec.sharding import make_sharding
from tests.train.runs import STARTED
from train_heads.packing import Document, pack, plan, stack

ROW = 64
LENGTHS = (41, 9, 17, 30, 22, 60, 5, 33)


@pytest.fixture(autouse=True)
def _no_process_stays():
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture(scope="session")
def target(shared, tmp_path_factory):
    """(definition, parameters) of the 8-layer fixture, float32, one device."""
    source = shared / "fixtures" / "tiny-llama3-8l" / "hf"
    checkpoint = open_checkpoint(convert(source, tmp_path_factory.mktemp("target") / "target").path)
    sharding = make_sharding("1")
    model = define(checkpoint.config, sharding, jnp.dtype("float32"))
    return model, restore_params(checkpoint, model.shardings(), model.dtype)


@pytest.fixture(scope="session")
def documents():
    rng = np.random.default_rng(3)
    found = []
    for length in LENGTHS:
        answer_T = np.arange(length) >= length // 3
        found.append(Document(rng.integers(0, 500, length).astype(np.int32), answer_T))
    return found


@pytest.fixture(scope="session")
def rows(documents):
    """[4, ROW]"""
    parts = plan(LENGTHS, ROW)
    return stack([pack([documents[i] for i in part], ROW) for part in parts])


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Documents of very different lengths, with regular tokens that a head can learn a little of."""
    rng = np.random.default_rng(5)
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    with path.open("w") as file:
        for _ in range(40):
            start, length = rng.integers(0, 400), rng.integers(12, 60)
            ids = ((start + 3 * np.arange(length)) % 500).tolist()
            file.write(json.dumps({"prompt_ids": ids[: length // 3], "answer_ids": ids[length // 3 :]}) + "\n")
    return path


@pytest.fixture(scope="session")
def target_dir(tiny_models):
    return tiny_models("tiny-llama3-8l")
