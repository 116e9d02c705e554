"""jaxspec-serve as a child process: started, watched through its log of JSON lines, stopped by SIGTERM."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SILENCE_S = 180.0  # without a word from a server that is not ready yet
STOP_S = 60.0


class ServerFailed(Exception):
    """The server did not become ready or did not stop cleanly. One line, with where its log is."""


class Server:
    """A running jaxspec-serve on a port of its own choice; leaving the ``with`` block drains and stops it.

    ``mesh`` is "auto" for the devices that are there, or a number of virtual CPU devices. ``flags``: what else
    jaxspec-serve is told.
    """

    def __init__(self, model: Path, mesh: str, cache: Path, flags: Sequence[str] = ()) -> None:
        cache.mkdir(exist_ok=True)
        self.log_path = cache / "demo-server.log"
        self.command = [sys.executable, "-m", "serve", "--target", str(model), "--port", "0", "--mesh", mesh]
        self.command += ["--compilation-cache", str(cache / "xla"), *flags]
        self.environment = dict(os.environ)
        if mesh != "auto":
            flag = f"--xla_force_host_platform_device_count={mesh}"
            self.environment |= {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"{self.environment.get('XLA_FLAGS', '')} {flag}".strip(),
            }
        self.events: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def __enter__(self) -> "Server":
        self.process = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True, env=self.environment)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        return self

    def _read(self) -> None:
        """Keeps the log and passes its events on; None marks its end."""
        assert self.process.stderr is not None
        with self.log_path.open("w") as log:
            for line in self.process.stderr:
                log.write(line)
                log.flush()
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # written by a library past the logger, at a crash for example
                if isinstance(event, dict):
                    self.events.put(event)
        self.events.put(None)

    def wait_until_ready(self, on_progress: Callable[[int, int], None]) -> int:
        """The port, once the server is warm. ServerFailed when it ends or says nothing for SILENCE_S seconds."""
        while True:
            try:
                event = self.events.get(timeout=SILENCE_S)
            except queue.Empty:
                raise ServerFailed(f"server: no word for {SILENCE_S:.0f} s, see {self.log_path}") from None
            if event is None:
                raise ServerFailed(
                    f"server ended with status {self.process.wait()} before it was ready: see {self.log_path}"
                )
            if event.get("event") == "warmup":
                on_progress(event["done"], event["total"])
            if event.get("event") == "ready":
                return event["port"]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            status = None
        self.reader.join(STOP_S)
        if kind is None and status != 0:
            reason = f"ended with status {status}" if status is not None else f"was still there {STOP_S:.0f} s after"
            raise ServerFailed(f"server {reason} SIGTERM: see {self.log_path}")
