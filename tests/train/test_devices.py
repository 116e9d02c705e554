"""One device, four devices, four processes: the same losses and the same parameters, to rounding."""

import socket

import numpy as np
import pytest

from jaxspec.checkpoint import open_any, restore_params
from jaxspec.sharding import make_sharding
from tests.train.runs import KINDS, config, finish, flags, losses, start
from train_heads.job import make_job
from train_heads.loop import Run, run
from train_heads.progress import Progress

STEPS = ("--steps", "3", "--serve", "0", "--evaluate-every", "3")


def values(out, kind="train"):
    return [loss for _, loss, _ in losses(out, kind)]


def weights(folder):
    checkpoint = open_any(folder)
    one = make_sharding("1")
    layout = dict.fromkeys(checkpoint.specs, one.replicated)
    return {name: np.asarray(value) for name, value in restore_params(checkpoint, layout, None).items()}


@pytest.fixture(scope="module")
def alone(target_dir, data, tmp_path_factory):
    """``alone(kind)``: the run on one device."""
    home = tmp_path_factory.mktemp("alone")

    def ran(kind):
        out = home / kind
        if not out.exists():
            run(config(*flags(kind, target_dir, data, out, *STEPS)), Progress())
        return out

    return ran


@pytest.mark.parametrize("kind", KINDS)
def test_four_devices_train_as_one(kind, alone, target_dir, data, tmp_path):
    """I11, I16, I17: rows of very different lengths over two data shards, parameters over two model shards."""
    out = tmp_path / "run"
    run(config(*flags(kind, target_dir, data, out, *STEPS, "--mesh", "data=2,model=2")), Progress())
    np.testing.assert_allclose(values(out), values(alone(kind)), rtol=2e-5)
    np.testing.assert_allclose(values(out, "held_out"), values(alone(kind), "held_out"), rtol=2e-5)
    expected = weights(alone(kind) / "heads")
    for name, value in weights(out / "heads").items():
        # Adam's first steps are signs of gradients: one near zero may go either way, by a step's length.
        assert np.mean(np.abs(value - expected[name]) > 1e-4) < 0.01, name


def test_replicas_stay_one(target_dir, data, tmp_path):
    """I16: after steps on other rows per device, every device holds the same parameters, to the last bit."""
    arguments = flags("medusa", target_dir, data, tmp_path / "run", *STEPS, "--mesh", "data=4,model=1")
    made = Run(make_job(config(*arguments)), tmp_path / "run", Progress())
    try:
        for _ in range(2):
            batch = made.batches[made.step]
            made.state, _ = made._take(made.state, made.fixed, made.job.target, *made.given(batch))
            made.step += 1
        for value in made.state.trained.values():
            shards = [np.asarray(shard.data) for shard in value.addressable_shards]
            assert len(shards) == 4
            for shard in shards[1:]:
                np.testing.assert_array_equal(shard, shards[0])
    finally:
        made.close()


def test_four_processes_train_as_one(alone, target_dir, data, tmp_path):
    """Through ``jax.distributed``, one device each; the first process alone writes logs and heads."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = tmp_path / "run"
    arguments = flags("medusa", target_dir, data, out, *STEPS, "--mesh", "data=4,model=1")
    several = ("--coordinator", f"127.0.0.1:{port}", "--num-processes", "4")
    processes = [start([*arguments, *several, "--process-id", str(index)], devices=1) for index in range(4)]
    for process in processes:
        finish(process)
    np.testing.assert_allclose(values(out), values(alone("medusa")), rtol=2e-5)
    assert (
        open_any(out / "heads").manifest.parameter_count == open_any(alone("medusa") / "heads").manifest.parameter_count
    )
