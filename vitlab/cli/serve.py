"""`vitlab serve`: a model behind a web page and an HTTP API."""

import ipaddress
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.markup import escape
from typer import Argument, Option

from vitlab.cli.app import console, verb
from vitlab.cli.options import RUN, Calibrate, Device, Precision, Refuse, parse_size, pick_scales
from vitlab.errors import UserError
from vitlab.terminal import printable
from vitlab.text import listed

if TYPE_CHECKING:
    from vitlab.inference.int8 import EightBits
    from vitlab.serving.service import ServiceSettings


@verb(
    "vitlab serve",
    "vitlab serve runs/mine",
    "VITLAB_TOKEN=secret vitlab serve runs/mine --host 0.0.0.0 --port 80",
    "curl -F image=@cat.jpg localhost:8000/v1/predict",
)
def serve(
    run: Annotated[
        str | None, Argument(metavar="RUN", help=f"{RUN} If left out, box, the small model of the package.")
    ] = None,
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 is every address.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 is any free one.")] = 8000,
    token: Annotated[
        str | None,
        Option(
            envvar="VITLAB_TOKEN", help="Require this token from clients; other users cannot see it in the variable."
        ),
    ] = None,
    host_name: Annotated[list[str] | None, Option(help="A name that clients use for this machine; repeatable.")] = None,
    max_batch: Annotated[int | None, Option(min=1, help="Images per batch; 256, on a CPU 16.")] = None,
    max_wait_ms: Annotated[float, Option(min=0, help="How long a batch waits for more images.")] = 5,
    queue: Annotated[
        int | None, Option(min=1, help="Images that may wait; more get 503 and Retry-After. 1024, on a CPU 256.")
    ] = None,
    max_bytes: Annotated[str, Option(help="Largest request.")] = "20MB",
    max_pixels: Annotated[str, Option(help="Largest image.")] = "50M",
    max_images: Annotated[int, Option(min=1, help="Images per request.")] = 16,
    formats: Annotated[
        str, Option(help="Image formats to accept; also bmp, tiff, jpeg2000, ppm and tga.")
    ] = "jpeg,png,webp,gif,avif",
    timeout: Annotated[float, Option(min=0.1, help="Seconds for a request to arrive.")] = 30,
    workers: Annotated[int | None, Option(min=1, help="Processes that decode; one per core, up to 8.")] = None,
    corrections: Annotated[
        Path | None, Option(help="Let users correct answers: photos go into class folders here, for vitlab finetune.")
    ] = None,
    samples: Annotated[bool, Option("--samples/--no-samples", help="Offer the run's held-out photos to try.")] = True,
    refuse: Refuse = None,
    device: Device = "auto",
    precision: Precision = "auto",
    calibrate: Calibrate = None,
) -> None:
    """Serve a model as a web page and an API: drop an image, see its classes and where the model looks.

    The page is at http://127.0.0.1:8000/, the API at /v1/predict and /v1/explain, its description at /docs, metrics at
    /metrics. SIGTERM and Ctrl-C finish requests that have begun and then stop.
    """
    from vitlab.serving import require_packages

    require_packages()
    from vitlab.data.samples import read_samples
    from vitlab.serving.limits import Limits
    from vitlab.serving.report import read_report
    from vitlab.serving.service import ServiceSettings
    from vitlab.weights import box

    if run is None:
        console.remark("note", box.describe())
    run = box.NAME if run is None else run
    folder = box.find_folder() if run == box.NAME else Path(run).expanduser()
    token = os.environ.get("VITLAB_TOKEN") if token is None else token  # typer ignores an empty variable
    if token is not None and not token.strip():
        raise UserError("the token is empty; choose one, or leave out --token and unset VITLAB_TOKEN")
    limits = Limits(
        max_bytes=int(parse_size(max_bytes.removesuffix("B"), "--max-bytes")),
        max_pixels=int(parse_size(max_pixels, "--max-pixels")),
        max_images=max_images,
        formats=parse_formats(formats),
        body_seconds=timeout,
        header_seconds=min(10.0, timeout),
        answer_seconds=min(5.0, timeout),
    )
    name, wait = Path(run).name or run, max_wait_ms / 1000
    settings = ServiceSettings(
        name=name,
        token=token,
        max_batch=max_batch,
        max_wait=wait,
        queue=queue,
        processes=workers,
        limits=limits,
        samples=read_samples(folder) if samples else (),
        report=read_report(folder, has_token=token is not None),
        corrections=corrections and corrections.expanduser(),
    )
    scales = pick_scales(precision, calibrate, run, device)
    run_server(run, device, host, port, settings, host_name or [], refuse, scales)


def parse_formats(text: str) -> tuple[str, ...]:
    """Pillow's names for a comma-separated list."""
    from vitlab.data.decoder import readers

    names = tuple(word.strip().upper() for word in text.split(","))
    for name in names:
        if name not in readers():
            raise UserError(f"--formats has '{name.lower()}'; there are {listed(r.lower() for r in readers())}")
    return names


def run_server(
    run: str,
    device: str,
    host: str,
    port: int,
    settings: "ServiceSettings",
    names: list[str],
    refuse: float | None = None,
    scales: "EightBits | None" = None,
) -> None:
    """Load the model, listen, and print the address; returns when the server has been stopped."""
    from vitlab.prediction import Classifier
    from vitlab.serving import server
    from vitlab.serving.app import create_app
    from vitlab.serving.hosts import AllowedHosts
    from vitlab.serving.service import Service

    sock = server.listen(host, port)
    address = sock.getsockname()[0]
    hosts = AllowedHosts(address, [host, *names])
    with console.status(f"loading {escape(printable(run))}"):
        service = Service(Classifier(run, device, refuse=refuse, scales=scales), settings)

    def started() -> None:
        console.print(f"{settings.name} on {service.classifier.device}: {server.server_url(sock)}")
        if settings.token is None and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            warning = "anyone who reaches this machine can use it; VITLAB_TOKEN=... requires a token"
            console.print(warning, style="yellow")
        console.print("Ctrl-C stops it.", style="dim")

    def stopping() -> None:
        service.draining = True

    server.serve(create_app(service, hosts), sock, settings.limits, started, stopping)
    console.print("stopped", style="dim")
