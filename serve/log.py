"""Structured logs: one JSON object per line on standard error, whatever library wrote the record."""

import json
import logging
import sys
import time
from typing import Any

LOGGER = logging.getLogger("jaxspec.serve")


class JsonLines(logging.Formatter):
    """``{"time": .., "level": .., "event": .., fields..}``; foreign records have event "log" and a logger."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
        }
        fields = getattr(record, "fields", None)
        if fields is not None:
            line |= {"event": record.msg, **fields}
        else:
            line |= {"event": "log", "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up() -> None:
    """Sends every log record and every warning of this process through :class:`JsonLines`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("jaxspec").setLevel(logging.INFO)  # the engine's notes, and ours
    logging.captureWarnings(True)


def event(name: str, *, level: int = logging.INFO, exc_info: bool = False, **fields: object) -> None:
    """Logs one event; fields must be JSON types (others are shown as text)."""
    LOGGER.log(level, name, extra={"fields": fields}, exc_info=exc_info)
