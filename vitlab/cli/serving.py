"""A model behind a page."""

import os
from typing import Annotated

import typer
from rich.markup import escape

from vitlab.cli.app import app, console
from vitlab.config import UserError


@app.command(
    epilog="Examples: [bold]vitlab serve runs/mine[/bold], then open http://127.0.0.1:8000; "
    "[bold]VITLAB_TOKEN=secret vitlab serve runs/mine --host 0.0.0.0 --port 80[/bold]; "
    "[bold]curl -F image=@cat.jpg localhost:8000/v1/predict[/bold]"
)
def serve(
    run: Annotated[str, typer.Argument(help="A run folder, a file of weights or a hub id.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is everyone's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(envvar="VITLAB_TOKEN", help="What clients must send; others can see it here, so rather use"),
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="Images the model sees at a time; 64, on a CPU 16.", show_default=False)
    ] = None,
    max_wait_ms: Annotated[float, typer.Option(min=0, help="Wait for images that are on their way.")] = 5,
    queue: Annotated[int, typer.Option(min=1, help="Images that may wait; more are told to come back.")] = 256,
    max_bytes: Annotated[str, typer.Option(help="Largest request.")] = "20MB",
    max_pixels: Annotated[str, typer.Option(help="Largest picture.")] = "50M",
    max_images: Annotated[int, typer.Option(min=1, help="Images in a request.")] = 16,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a request to arrive.")] = 30,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Threads that decode; as many as cores, up to 8.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
) -> None:
    """Put a model behind a page and an API: drop a picture, see its classes and where the model looks.

    The page is at /, the API at /v1/predict and /v1/explain, its description at /docs, counters at /metrics.
    SIGTERM and Ctrl-C finish what has begun and then stop.
    """
    from vitlab.cli.models import number
    from vitlab.serving.limits import Limits, needed

    needed()
    from vitlab.predict import Classifier
    from vitlab.serving.app import create_app
    from vitlab.serving.server import address, listen
    from vitlab.serving.server import serve as run_server
    from vitlab.serving.service import Service, Settings

    limits = Limits(
        int(number(max_bytes.removesuffix("B"), "--max-bytes")),
        int(number(max_pixels, "--max-pixels")),
        max_images,
        timeout,
        min(10.0, timeout),
    )
    if token is not None and not token.strip():
        raise UserError("the token is empty; leave it out, or choose one")
    sock = listen(host, port)
    with console.status(f"loading {escape(run)}"):
        classifier = Classifier(run, device)
    on_cpu = classifier.device.type == "cpu"
    settings = Settings(
        name=os.path.basename(run.rstrip("/")) or run,
        token=token,
        max_batch=max_batch or (16 if on_cpu else 64),
        max_wait=max_wait_ms / 1000,
        queue=queue,
        threads=workers or min(8, os.cpu_count() or 1),
        limits=limits,
    )
    service = Service(classifier, settings)
    console.print(f"[bold]{escape(settings.name)}[/] on {classifier.device}: {address(sock)}", highlight=False)
    if token is None and not is_loopback(sock.getsockname()[0]):
        console.print("anyone who reaches this machine can use it; set VITLAB_TOKEN to ask for a token", style="yellow")
    console.print("Ctrl-C stops it.", style="dim")

    def stopping() -> None:
        service.draining = True

    run_server(create_app(service), sock, limits, settings.drain, stopping)
    console.print("stopped", style="dim")


def is_loopback(host: str) -> bool:
    import ipaddress

    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
