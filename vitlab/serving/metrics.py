"""Prometheus metrics: requests, their latency, batches, images, and what the queue and the uploads hold."""

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

disable_created_metrics()  # type: ignore[no-untyped-call]  # or each counter had one more series


class Metrics:
    """The metrics of one service, in a registry of its own; every method may be called from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, histogram = partial(Counter, registry=self.registry), partial(Histogram, registry=self.registry)
        self.requests = counter("vitlab_requests", "Requests by route and status.", ["route", "status"])
        self.request_seconds = histogram(
            "vitlab_request_seconds", "Time from a request's headers to its answer.", ["route"], buckets=SECONDS
        )
        self.batch_size = histogram("vitlab_batch_size", "Images in a batch.", buckets=SIZES)
        self.batch_seconds = histogram("vitlab_batch_seconds", "Time of the model for a batch.", buckets=SECONDS)
        self.images = counter("vitlab_images", "Images that the model classified.")

    def add_gauge(self, name: str, about: str, read: Callable[[], float]) -> None:
        """Add a value that is read at every scrape."""
        Gauge(name, about, registry=self.registry).set_function(read)

    def count_request(self, route: str, status: int, seconds: float) -> None:
        self.requests.labels(route, str(status)).inc()
        self.request_seconds.labels(route).observe(seconds)

    def count_batch(self, size: int, seconds: float) -> None:
        self.images.inc(size)
        self.batch_size.observe(size)
        self.batch_seconds.observe(seconds)

    def text(self) -> str:
        """All metrics in the text format, version 0.0.4."""
        return generate_latest(self.registry).decode()
