"""Sixty-four clients at once against the real server: no errors, bounded latency, no slower than without batching.

By itself, `python tests/serving/test_crowd.py [SECONDS]` runs it for a minute and prints what it measured.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # to run this file by itself
from servers import Running, encoded, photo, save, server
from timing import measure_until

from vitlab.prediction import Classifier

CLIENTS = 64
SECONDS = 12.0  # of load on each server, in turns
TURNS = 3
MODEL = {"depth": 12, "width": 192, "mlp": 768, "heads": 3, "image_size": 128}  # Ti/16 on small pictures
NAIVE = (sys.executable, str(Path(__file__).with_name("naive_server.py")))


@dataclass
class Load:
    """What the clients saw."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    def percentile(self, share: float) -> float:
        return sorted(self.latencies)[min(len(self.latencies) - 1, int(share * len(self.latencies)))]


async def client(port: int, picture: bytes, end: float, load: Load) -> None:
    """One connection, one request after another; it writes HTTP itself, which costs least."""
    head = "POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\n"
    question = f"{head}Content-Length: {len(picture)}\r\n\r\n".encode() + picture
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < end:
        start = time.perf_counter()
        writer.write(question)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        if not answer.startswith(b"HTTP/1.1 200"):
            load.errors.append(body.decode())
        load.latencies.append(time.perf_counter() - start)
    writer.close()


async def press(port: int, seconds: float, load: Load) -> None:
    pictures = [encoded(photo(seed, 160, 120), "JPEG") for seed in range(CLIENTS)]
    start = time.perf_counter()
    results = await asyncio.gather(
        *(client(port, picture, start + seconds, load) for picture in pictures), return_exceptions=True
    )
    load.errors += [repr(result) for result in results if result is not None]
    load.seconds += time.perf_counter() - start


def full_batch(run: Path) -> float:
    """Seconds of the model alone for 64 pictures."""
    classifier = Classifier(run)
    pixels = torch.stack([classifier.pixels(photo(seed)) for seed in range(CLIENTS)])
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        classifier.probabilities(pixels)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def measure(run: Path, seconds: float) -> tuple[Load, Load, float]:
    """Ours, the naive one, and a full batch; turns follow each other, so that a busy machine is busy for both."""
    ours, naive, batches = Load(), Load(), [full_batch(run)]
    with server(run) as one, server(run, str(run), command=NAIVE) as other:
        warm_up(one, other)
        for _ in range(TURNS):
            asyncio.run(press(one.port, seconds / TURNS, ours))
            asyncio.run(press(other.port, seconds / TURNS, naive))
            batches.append(full_batch(run))
    return ours, naive, statistics.median(batches)


def warm_up(*servers: Running) -> None:
    for one in servers:
        asyncio.run(press(one.port, 0.5, Load()))


def report(ours: Load, naive: Load, batch: float) -> str:
    lines = [f"a full batch of {CLIENTS}: {batch * 1000:.0f} ms"]
    for name, load in (("batching", ours), ("one by one", naive)):
        middle, late = load.percentile(0.5) * 1000, load.percentile(0.99) * 1000
        lines.append(
            f"{name}: {load.rate:.0f} requests/s, median {middle:.0f} ms, p99 {late:.0f} ms, {len(load.errors)} errors"
        )
    lines.append(
        f"p99 is {ours.percentile(0.99) / batch:.2f} full batches; throughput {ours.rate / naive.rate:.2f} times"
    )
    return "\n".join(lines)


@pytest.mark.slow
def test_sixty_four_clients(tmp_path: Path) -> None:
    run = save(tmp_path / "ti", "Ti/16", **MODEL)

    def attempt() -> tuple[Load, Load, float]:
        ours, naive, batch = measure(run, SECONDS)
        assert ours.errors == []
        assert len(ours.latencies) > 2 * CLIENTS
        return ours, naive, batch

    def is_met(measured: tuple[Load, Load, float]) -> bool:
        ours, naive, batch = measured
        return ours.percentile(0.99) <= 3 * batch and ours.rate >= 0.9 * naive.rate

    print(report(*measure_until(is_met, attempt, lambda measured: report(*measured))))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as spare:
        small = save(Path(spare) / "ti", "Ti/16", **MODEL)
        print(report(*measure(small, float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)))
