"""Prometheus metrics: engine counters read at scrape time, so that they move while tokens stream, and histograms.

Names under `vllm:` are those that dashboards for vLLM read, with vLLM's meaning; `tfglm:` names are this project's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tfglm.engine.api import EnginePort, Finished, Snapshot
from tfglm.server.toolcalls import Result

disable_created_metrics()

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200)
GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 10)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
LABEL = "model_name"

Counted = Literal["disconnected", "queue_full", "unclosed_think"]


class ServerMetrics:
    """One registry of its own. Every method is called from the event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._model = ""
        self._first_token = self._histogram("vllm:time_to_first_token_seconds", "Submit to first token.", SECONDS)
        self._gap = self._histogram("vllm:inter_token_latency_seconds", "Time a token after the first.", GAP_SECONDS)
        self._latency = self._histogram("vllm:e2e_request_latency_seconds", "Submit to end of reply.", SECONDS)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Submit to start.", SECONDS)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "Start to first token.", SECONDS)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "First token to last.", SECONDS)
        self._prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._reply = self._histogram("vllm:request_generation_tokens", "Reply tokens of a request.", TOKENS)
        self._success = Counter(
            "vllm:request_success", "Finished requests.", [LABEL, "finished_reason"], registry=self.registry
        )
        self._calls = Counter(
            "tfglm:tool_call_parse", "Tool calls in replies.", [LABEL, "result"], registry=self.registry
        )
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens that were cached.")
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self._counts: dict[Counted, Counter] = {
            "disconnected": self._counter("tfglm:client_disconnections", "Clients that left before the end."),
            "queue_full": self._counter("tfglm:queue_rejected", "Requests refused because the queue was full."),
            "unclosed_think": self._counter("tfglm:unclosed_think", "Replies that ended inside a think block."),
        }

    def watch(self, model: str, engine: EnginePort, ranks: int = 1) -> None:
        """From now on the engine's own counters are part of the page. ranks: that the model is spread over."""
        self._model = _label(model)
        self.registry.register(_EngineCollector(self._model, engine, ranks))
        for counter in (*self._counts.values(), self._hits, self._queries):
            counter.labels(self._model)
        for result in get_args(Result):
            self._calls.labels(self._model, result)

    def page(self) -> bytes:
        return generate_latest(self.registry)

    def count(self, what: Counted) -> None:
        self._counts[what].labels(self._model).inc()

    def tool_calls(self, results: Iterable[Result]) -> None:
        for result in results:
            self._calls.labels(self._model, result).inc()

    def started(self, queue_seconds: float) -> None:
        self._queue.labels(self._model).observe(queue_seconds)

    def first_token(self, seconds: float) -> None:
        self._first_token.labels(self._model).observe(seconds)

    def tokens(self, count: int, seconds: float) -> None:
        """`count` tokens after the first became known `seconds` after those before them."""
        gap = self._gap.labels(self._model)
        for _ in range(count):
            gap.observe(seconds / count)

    def finished(self, end: Finished, seconds: float) -> None:
        usage = end.usage
        self._success.labels(self._model, end.reason).inc()
        self._latency.labels(self._model).observe(seconds)
        self._prefill.labels(self._model).observe(end.timings.prompt_ms / 1000)
        self._decode.labels(self._model).observe(end.timings.predicted_ms / 1000)
        self._prompt.labels(self._model).observe(usage.prompt_tokens)
        self._reply.labels(self._model).observe(usage.completion_tokens)
        self._hits.labels(self._model).inc(usage.cached_tokens)
        self._queries.labels(self._model).inc(usage.prompt_tokens)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, [LABEL], buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, [LABEL], registry=self.registry)


class _EngineCollector(Collector):
    """The engine's snapshot as metric families, taken at every scrape."""

    def __init__(self, model: str, engine: EnginePort, ranks: int) -> None:
        self._model, self._engine, self._ranks = model, engine, ranks

    def collect(self) -> Iterator[Metric]:
        now = self._engine.snapshot()
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens read.", now.prompt_tokens),
            ("vllm:generation_tokens", "Reply tokens made.", now.generation_tokens),
            ("vllm:num_preemptions", "Requests put back into the queue (never done).", 0),
            ("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", now.drafted_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", now.accepted_tokens),
            ("tfglm:rounds", "Forwards that made tokens of replies.", now.rounds),
        ):
            counter = CounterMetricFamily(name, text, labels=[LABEL])
            counter.add_metric([self._model], value)
            yield counter
        yield from self._drafts(now)
        used, total = now.kv_tokens_used, now.kv_tokens_total
        levels: tuple[tuple[str, str, float], ...] = (
            ("vllm:num_requests_running", "Requests being worked on.", now.running),
            ("vllm:num_requests_waiting", "Requests in the queue.", now.waiting),
            ("vllm:kv_cache_usage_perc", "Used part of the latent cache, 0 to 1.", used / total if total else 0.0),
            ("tfglm:kv_tokens_used", "Tokens in the latent cache.", used),
            ("tfglm:kept_tokens", "Tokens of prompt states that are kept for later requests.", now.kept_tokens),
            ("tfglm:kv_tokens_total", "Capacity of the latent cache in tokens.", total),
            ("tfglm:step_age_seconds", "Age of the step in progress.", now.step_age_s),
            ("tfglm:ranks", "Ranks that the model is spread over.", self._ranks),
            ("tfglm:ready", "1 when requests are taken.", float(now.state == "ready")),
        )
        for name, text, level in levels:
            gauge = GaugeMetricFamily(name, text, labels=[LABEL])
            gauge.add_metric([self._model], level)
            yield gauge
        rows = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Rows a forward, prompt chunks too.", labels=[LABEL]
        )
        # Dashboards read the sum alone; one bucket keeps the histogram well-formed.
        rows.add_metric([self._model], buckets=[("+Inf", now.rounds + now.chunks)], sum_value=now.iteration_tokens)
        yield rows
        sleep = GaugeMetricFamily("vllm:engine_sleep_state", "Always awake.", labels=[LABEL, "sleep_state"])
        sleep.add_metric([self._model, "awake"], 1)
        yield sleep

    def _drafts(self, now: Snapshot) -> Iterator[Metric]:
        """Drafts by who made them and where in the draft they stood, from 0."""
        labels = [LABEL, "source", "position"]
        drafted = CounterMetricFamily("tfglm:draft_tokens", "Drafted tokens that were verified.", labels=labels)
        accepted = CounterMetricFamily("tfglm:draft_tokens_accepted", "Those that were accepted.", labels=labels)
        by_position: dict[int, int] = {}
        for count in now.drafts:
            values = [self._model, count.source, str(count.slot)]
            drafted.add_metric(values, count.drafted)
            accepted.add_metric(values, count.accepted)
            by_position[count.slot or 0] = by_position.get(count.slot or 0, 0) + count.accepted
        yield drafted
        yield accepted
        positions = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by position in the draft.",
            labels=[LABEL, "position"],
        )
        for position, tokens in sorted(by_position.items()):
            positions.add_metric([self._model, str(position)], tokens)
        yield positions


def _label(text: str) -> str:
    """Dashboards find the end of the labels by the first brace."""
    return text.replace("{", "(").replace("}", ")").replace('"', "'")
