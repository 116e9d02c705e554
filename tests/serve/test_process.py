"""jaxspec-serve as a process: health from the first moment on, logs as JSON lines, SIGTERM, exit status."""

import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from jaxspec.engine.params import SamplingParams, SpeculationParams
from jaxspec.engine.records import Completion
from serve import cli
from serve.client import CallFailed, Client

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class ServerProcess:
    """The process, and its log as events."""

    process: subprocess.Popen[str]
    events: "queue.Queue[dict[str, Any] | None]"
    seen: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def wait_for(self, name: str) -> dict[str, Any]:
        while True:
            event = self.events.get(timeout=240)
            if event is None:
                pytest.fail(f"the log ended before {name!r}: {self.seen}")
            self.seen.append(event)
            if event["event"] == name:
                return event


@contextmanager
def serving(*flags: str) -> Iterator[ServerProcess]:
    command = [sys.executable, "-m", "serve", "--port", "0", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    events: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            events.put(json.loads(line))  # every line is an event
        events.put(None)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield ServerProcess(process, events)
    finally:
        process.kill()
        process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


def takes_nothing_new(client: Client) -> bool:
    """Health and a new request say so, or the port is closed already."""
    try:
        if client.serving():
            return False
        next(client.generate([7]))
    except CallFailed as failed:
        return failed.code is grpc.StatusCode.UNAVAILABLE
    return False


def test_a_whole_life(tiny_models: Callable[[str], Path], goldens):
    golden = goldens["p33"]
    flags = ("--target", str(tiny_models("tiny-llama3")), "--mesh", "data=1,model=4")
    flags += ("--method", "none", "--max-slots", "3", "--max-len", "251")
    with serving(*flags) as server:
        port = server.wait_for("listening")["port"]
        with Client(f"127.0.0.1:{port}") as client:
            assert not client.serving(), "health answers while the model is loaded"
            for call in (client.model_info, lambda: next(client.generate([7]))):
                with pytest.raises(CallFailed) as failed:
                    call()
                assert failed.value.code is grpc.StatusCode.UNAVAILABLE
            assert server.wait_for("ready")["port"] == port
            client.wait_until_serving(timeout_s=60)
            assert client.server_info().mesh == {"data": 1, "model": 4}
            done = Completion.of(client.generate(golden.ids, golden.sampling(), request_id="of-the-log"))
            assert done.token_ids == golden.greedy
            logged = server.wait_for("request")
            assert (logged["request_id"], logged["status"]) == ("of-the-log", "OK")
            assert logged["usage"]["completion_tokens"] == 64

            whole = SamplingParams(temperature=0.0, ignore_eos=True)
            streams = [client.generate(golden.ids, whole, SpeculationParams(0)) for _ in range(3)]
            chunks = [next(stream) for stream in streams]
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("draining")
            assert takes_nothing_new(client)
            for chunk, stream in zip(chunks, streams, strict=True):
                done = Completion.of([chunk, *stream])
                assert done.finish_reason == "length", "what runs is finished"
                assert len(done.token_ids) == 251 - len(golden.ids)
                assert done.token_ids[:64] == golden.greedy
        server.wait_for("stopped")
        assert server.process.wait(timeout=60) == 0


def test_sigterm_while_loading_ends_it_cleanly(tiny_models: Callable[[str], Path]):
    with serving("--target", str(tiny_models("tiny-llama3")), "--max-len", "251") as server:
        server.wait_for("listening")
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("stopped")
        assert server.process.wait(timeout=120) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--speculative-config", '{"foo": 1}'], "unknown key 'foo'"),
        (["--speculative-config", '{"num_beams": 2}'], "beam search"),
        (["--method", "draft_model"], "--draft"),
        (["--drain-s", "-1"], "drain-s"),
        (["--port", "70000"], "port"),
        (["--max-request-bytes", "1"], "max-request-bytes"),
        (["--max-stream-s", "nan"], "max-stream-s"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--target", "nowhere", *flags]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert words in told


def test_a_port_in_use_is_a_users_mistake(server, tmp_path: Path):
    command = [sys.executable, "-m", "serve", "--target", str(tmp_path), "--port", str(server.server.port)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"got {server.server.port}" in done.stderr


def test_a_target_that_is_no_checkpoint_is_a_users_mistake(tmp_path: Path):
    command = [sys.executable, "-m", "serve", "--target", str(tmp_path), "--port", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr


def test_the_client_starts_without_jax():
    code = "import sys, serve.client_cli; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
