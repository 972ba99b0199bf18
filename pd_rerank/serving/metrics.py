"""What a server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """Counters of one application, in a registry of their own. Names end in their unit."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter("pd_rerank_requests", "Requests answered, by status.", ["status"], registry=registry)
        self.disconnected = Counter(
            "pd_rerank_disconnected", "Requests whose client went away before its answer.", registry=registry
        )
        self.documents = Counter("pd_rerank_documents", "Documents scored.", registry=registry)
        self.windows = Counter("pd_rerank_windows", "Windows scored.", registry=registry)
        self.tokens = Counter("pd_rerank_prompt_tokens", "Tokens of the windows scored.", registry=registry)
        self.cut = Counter("pd_rerank_documents_cut", "Documents shortened to fit a prompt.", registry=registry)
        self.missing = Counter("pd_rerank_grades_missing", "Grades the model did not give.", registry=registry)
        self.failures = Counter("pd_rerank_engine_failures", "Engine calls that failed.", registry=registry)
        self.seconds = Histogram(
            "pd_rerank_request_seconds", "From a request's arrival to its answer.", buckets=_SECONDS, registry=registry
        )
        self.waited = Histogram(
            "pd_rerank_queue_seconds", "From the queue's start to its end.", buckets=_SECONDS, registry=registry
        )
        self.computed = Histogram(
            "pd_rerank_engine_seconds", "Of one engine call.", buckets=_SECONDS, registry=registry
        )
        self.together = Histogram(
            "pd_rerank_batch_requests", "Requests scored in one engine call.", buckets=_COUNTS, registry=registry
        )
        self._info = Info("pd_rerank_model", "The served models.", ["name"], registry=registry)

    def watch(self, *, under_way: Callable[[], float], queued: Callable[[], float]) -> None:
        """Read two numbers whenever metrics are asked for: requests under way, and windows waiting."""
        for name, text, read in (
            ("pd_rerank_requests_under_way", "Requests read, waiting or scored now.", under_way),
            ("pd_rerank_queue_windows", "Windows waiting now.", queued),
        ):
            Gauge(name, text, registry=self.registry).set_function(read)

    def describe(self, name: str, **facts: str) -> None:
        """Name a served model and what it is."""
        self._info.labels(name=name).info(facts)

    def page(self) -> bytes:
        """All of it in Prometheus' text form."""
        return generate_latest(self.registry)
