"""Prometheus metrics, with the names that other servers have, read from the engine when they are scraped."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from jaxspec.engine.records import Loads, Summary

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """What is observed per request; totals and levels come from ``loads`` at each scrape (None: no model yet)."""

    def __init__(self, loads: Callable[[], Loads | None]) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "jaxspec_requests", "Generate calls that ended, by gRPC status", ["status"], registry=self.registry
        )
        self._first_token = Histogram(
            "jaxspec_time_to_first_token_seconds",
            "From arrival at the engine to the first token",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._per_token = Histogram(
            "jaxspec_time_per_output_token_seconds",
            "Decoding time per token after the first, one observation per request",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.registry.register(_EngineLoads(loads))

    def request_ended(self, status: str) -> None:
        """Counts one Generate call that ended with a gRPC status."""
        self._requests.labels(status).inc()

    def completed(self, summary: Summary) -> None:
        """Records the latencies of a request that reached its last chunk."""
        if summary.timing.ttft_ms is not None:
            self._first_token.observe(summary.timing.ttft_ms / 1000)
        if summary.timing.tpot_ms is not None:
            self._per_token.observe(summary.timing.tpot_ms / 1000)

    def listen(self, host: str, port: int) -> tuple[int, Callable[[], None]]:
        """Serves the metrics over HTTP. Returns the port (the chosen one for port 0) and a function that stops it."""
        server, thread = start_http_server(port, addr=host, registry=self.registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return server.server_port, stop


class _EngineLoads(Collector):
    def __init__(self, loads: Callable[[], Loads | None]) -> None:
        self._loads = loads

    def collect(self) -> Iterable["Metric"]:
        loads = self._loads()
        if loads is None:
            return
        usage = loads.cache_tokens_used / loads.cache_tokens_total if loads.cache_tokens_total else 0.0
        yield GaugeMetricFamily("jaxspec_num_requests_running", "Requests that hold a slot", loads.running)
        yield GaugeMetricFamily("jaxspec_num_requests_waiting", "Requests in the queue", loads.waiting)
        yield GaugeMetricFamily("jaxspec_kv_cache_usage_perc", "Used share of the target's cache, 1 = all", usage)
        counters = loads.counters
        for name, text, value in (
            ("spec_decode_num_drafts", "Speculative steps, counted per request", counters.num_drafts),
            ("spec_decode_num_draft_tokens", "Drafted tokens", counters.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Accepted drafted tokens", counters.num_accepted_tokens),
            ("generation_tokens", "Committed tokens", counters.num_committed_tokens),
            ("target_passes", "Passes of the target model over decoding rows", counters.num_target_passes),
        ):
            yield CounterMetricFamily(f"jaxspec_{name}", text, value)
        per_position = CounterMetricFamily(
            "jaxspec_spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by draft position", labels=["position"]
        )
        for position, count in enumerate(counters.num_accepted_tokens_per_pos):
            per_position.add_metric([str(position)], count)
        yield per_position
        finished = CounterMetricFamily("jaxspec_requests_finished", "Finished requests by reason", labels=["reason"])
        for reason, count in sorted(counters.num_requests_finished.items()):
            finished.add_metric([reason], count)
        yield finished
