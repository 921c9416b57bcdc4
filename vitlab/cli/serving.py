"""A model behind a page."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from vitlab.cli.app import app, console
from vitlab.cli.models import number
from vitlab.errors import UserError
from vitlab.terminal import printable

if TYPE_CHECKING:
    from vitlab.serving.service import Settings


@app.command(
    epilog="Examples: [bold]vitlab serve runs/mine[/bold], then open http://127.0.0.1:8000; "
    "[bold]VITLAB_TOKEN=secret vitlab serve runs/mine --host 0.0.0.0 --port 80[/bold]; "
    "[bold]curl -F image=@cat.jpg localhost:8000/v1/predict[/bold]"
)
def serve(
    run: Annotated[str, typer.Argument(help="A run folder, a file of weights or a hub id.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one it has.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(envvar="VITLAB_TOKEN", help="Ask clients for this; set as a variable, other users do not see it."),
    ] = None,
    host_name: Annotated[
        list[str] | None,
        typer.Option(help="A name that clients use for this machine; repeatable.", show_default=False),
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="Images the model sees at a time; 64, on a CPU 16.", show_default=False)
    ] = None,
    max_wait_ms: Annotated[float, typer.Option(min=0, help="How long to wait for images that are on their way.")] = 5,
    queue: Annotated[int, typer.Option(min=1, help="Images that may wait; more are told to come back.")] = 256,
    max_bytes: Annotated[str, typer.Option(help="Largest request.")] = "20MB",
    max_pixels: Annotated[str, typer.Option(help="Largest picture.")] = "50M",
    max_images: Annotated[int, typer.Option(min=1, help="Images in a request.")] = 16,
    formats: Annotated[
        str, typer.Option(help="Kinds of pictures that are read; also bmp, tiff, jpeg2000, ppm and tga.")
    ] = "jpeg,png,webp,gif,avif",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a request to arrive.")] = 30,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that decode; as many as cores, up to 8.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
) -> None:
    """Put a model behind a page and an API: drop a picture, see its classes and where the model looks.

    The page is at /, the API at /v1/predict and /v1/explain, its description at /docs, counters at /metrics.
    SIGTERM and Ctrl-C finish what has begun and then stop.
    """
    from vitlab.serving import require_packages

    require_packages()
    from vitlab.serving.limits import Limits
    from vitlab.serving.service import Settings

    token = os.environ.get("VITLAB_TOKEN") if token is None else token  # typer takes an empty variable for none
    if token is not None and not token.strip():
        raise UserError("the token is empty; choose one, or leave out --token and unset VITLAB_TOKEN")
    limits = Limits(
        max_bytes=int(number(max_bytes.removesuffix("B"), "--max-bytes")),
        max_pixels=int(number(max_pixels, "--max-pixels")),
        max_images=max_images,
        formats=read_formats(formats),
        body_seconds=timeout,
        header_seconds=min(10.0, timeout),
        answer_seconds=min(5.0, timeout),
    )
    settings = Settings(
        name=Path(run).name or run,
        token=token,
        max_batch=max_batch,
        max_wait=max_wait_ms / 1000,
        queue=queue,
        processes=workers,
        limits=limits,
    )
    open_doors(run, device, host, port, settings, host_name or [])


def read_formats(text: str) -> tuple[str, ...]:
    """Pillow's names for a comma-separated list."""
    from vitlab.data.decoder import readers
    from vitlab.text import listed

    names = tuple(word.strip().upper() for word in text.split(","))
    for name in names:
        if name not in readers():
            raise UserError(f"--formats has '{name.lower()}'; there are {listed(r.lower() for r in readers())}")
    return names


def open_doors(run: str, device: str, host: str, port: int, settings: "Settings", names: list[str]) -> None:
    """Load the model, listen, and say so; returns when the server has been stopped."""
    from vitlab.predict import Classifier
    from vitlab.serving import server
    from vitlab.serving.app import create_app
    from vitlab.serving.hosts import Hosts
    from vitlab.serving.service import Service

    sock = server.listen(host, port)
    hosts = Hosts(sock.getsockname()[0], [host, *names])
    with console.status(f"loading {escape(printable(run))}"):
        service = Service(Classifier(run, device), settings)

    def started() -> None:
        where = f"{service.classifier.device}: {server.address(sock)}"
        console.print(f"{settings.name} on {where}")
        if settings.token is None and not is_loopback(sock.getsockname()[0]):
            console.print(
                "anyone who reaches this machine can use it; VITLAB_TOKEN=... asks for a token", style="yellow"
            )
        console.print("Ctrl-C stops it.", style="dim")

    def stopping() -> None:
        service.draining = True

    server.serve(create_app(service, hosts), sock, settings.limits, started, stopping)
    console.print("stopped", style="dim")


def is_loopback(host: str) -> bool:
    import ipaddress

    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
