"""``jaxspec-serve``: loads a model and serves it over gRPC."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxspec import options
from serve import log
from serve.server import ServerOptions, run

if TYPE_CHECKING:
    from jaxspec import Engine

PROG = "jaxspec-serve"


def parser() -> argparse.ArgumentParser:
    """All flags of ``jaxspec-serve``."""
    default = ServerOptions()
    parser = options.Parser(prog=PROG, description="Serves a model over gRPC (docs/protocol.md). Logs are JSON lines.")
    options.add_model_flags(parser)
    options.add_speculation_flags(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default=default.host, help="address to listen on; 0.0.0.0 for all")
    group.add_argument("--port", type=int, default=default.port, help="0 picks a free one (see the ready line)")
    group.add_argument("--metrics-port", type=int, help="Prometheus metrics over HTTP; 0 picks a free port")
    group.add_argument("--max-slots", type=int, default=4, metavar="N", help="requests that run at once")
    group.add_argument("--max-queue", type=int, default=64, metavar="N", help="requests that may wait")
    group.add_argument("--drain-s", type=float, default=default.drain_s, metavar="S", help="to finish after SIGTERM")
    group.add_argument(
        "--max-stream-s", type=float, default=default.max_stream_s, metavar="S", help="longest stream; 0: no limit"
    )
    group.add_argument(
        "--max-request-bytes", type=int, default=default.max_request_bytes, metavar="N", help="of one request message"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 after a signal and a drain, 2 for a user's mistake, 1 for a fault."""
    args = parser().parse_args(argv)
    return options.exit_status(PROG, lambda: serve(args))


def serve(args: argparse.Namespace) -> None:
    """Serves as the parsed flags say, until a signal."""
    speculation = options.speculation_from(args)
    server_options = ServerOptions(
        host=args.host,
        port=args.port,
        metrics_port=args.metrics_port,
        drain_s=args.drain_s,
        max_stream_s=args.max_stream_s or None,
        max_request_bytes=args.max_request_bytes,
    )
    log.set_up()

    def load() -> "Engine":
        # It imports jax; until then the port answers health.
        return options.load_engine(
            args, speculation, max_slots=args.max_slots, max_queue=args.max_queue, max_len=args.max_len
        )

    asyncio.run(run(server_options, load))


if __name__ == "__main__":
    sys.exit(main())
