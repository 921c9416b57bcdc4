"""Counters in Prometheus' text format: requests, their latency, batches, images, and what the queue holds."""

import threading
from bisect import bisect_left
from collections.abc import Callable

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """What the server counts; every method may be called from any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.requests: dict[Labels, int] = {}
        self.latency: dict[Labels, Histogram] = {}
        self.batch_sizes = Histogram(SIZES)
        self.batch_seconds = Histogram(SECONDS)
        self.images = 0
        self.gauges: list[tuple[str, str, Callable[[], float]]] = []

    def gauge(self, name: str, about: str, read: Callable[[], float]) -> None:
        """A value that is read when somebody asks."""
        self.gauges.append((name, about, read))

    def answered(self, route: str, status: int, seconds: float) -> None:
        labels = (("route", route), ("status", str(status)))
        with self.lock:
            self.requests[labels] = self.requests.get(labels, 0) + 1
            self.latency.setdefault(labels[:1], Histogram(SECONDS)).add(seconds)

    def ran(self, size: int, seconds: float) -> None:
        with self.lock:
            self.images += size
            self.batch_sizes.add(size)
            self.batch_seconds.add(seconds)

    def text(self) -> str:
        with self.lock:
            lines = head("vitlab_requests_total", "counter", "Requests by route and status.")
            lines += [f"vitlab_requests_total{shown(labels)} {n}" for labels, n in sorted(self.requests.items())]
            lines += head("vitlab_request_seconds", "histogram", "From a request's headers to its answer.")
            for labels, histogram in sorted(self.latency.items()):
                lines += histogram.lines("vitlab_request_seconds", labels)
            lines += head("vitlab_batch_size", "histogram", "Images that the model answered at a time.")
            lines += self.batch_sizes.lines("vitlab_batch_size")
            lines += head("vitlab_batch_seconds", "histogram", "Time of the model for a batch.")
            lines += self.batch_seconds.lines("vitlab_batch_seconds")
            lines += head("vitlab_images_total", "counter", "Images that the model answered.")
            lines += [f"vitlab_images_total {self.images}"]
        for name, about, read in self.gauges:
            lines += [*head(name, "gauge", about), f"{name} {read():g}"]
        return "\n".join(lines) + "\n"


class Histogram:
    """Counts of values up to each bound, their number and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: Labels = ()) -> list[str]:
        lines, total = [], 0
        for bound, count in zip([*self.bounds, float("inf")], self.counts, strict=True):
            total += count
            le = "+Inf" if bound == float("inf") else f"{bound:g}"
            lines.append(f"{name}_bucket{shown((*labels, ('le', le)))} {total}")
        return [*lines, f"{name}_sum{shown(labels)} {self.sum:.6f}", f"{name}_count{shown(labels)} {total}"]


def head(name: str, kind: str, about: str) -> list[str]:
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]


def shown(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{escaped(value)}"' for key, value in labels) + "}"


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
