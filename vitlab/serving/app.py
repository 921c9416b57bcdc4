"""The routes: predict, explain, maps, corrections, the model, health, metrics, and the pages."""

import asyncio
import contextlib
import json
import mimetypes
from collections.abc import AsyncIterator
from functools import partial
from importlib import resources
from typing import Annotated, Any

from fastapi import FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from vitlab import __version__
from vitlab.serving import schema
from vitlab.serving.explain import model_info
from vitlab.serving.hosts import AllowedHosts
from vitlab.serving.limits import RequestError
from vitlab.serving.middleware import PUBLIC, SecurityMiddleware
from vitlab.serving.report import Report, ReportResponse
from vitlab.serving.service import Service

TopK = Annotated[
    int | None,
    Query(ge=1, le=1000, description="How many classes to return: 5, or those a multi-label model finds."),
]
# A page of another site can send a form here from the browser of anyone who visits it, but no header of this name:
# for that the browser asks this server first, and it does not agree.
CALLER = "vitlab"
RequestedWith = Annotated[
    str | None, Header(description="Other sites cannot send it.", json_schema_extra={"enum": [CALLER]})
]
ABOUT = "Image classification and attention maps of one Vision Transformer."


def create_app(service: Service, hosts: AllowedHosts | None = None) -> FastAPI:
    """The application; without `hosts` any Host header is accepted, and the program that embeds it has to check it."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.warm_up()
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="vitlab", version=__version__, description=ABOUT, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    settings = service.settings
    public = PUBLIC if settings.report is None else (*PUBLIC, settings.report.path)
    app.add_middleware(SecurityMiddleware, metrics=service.metrics, token=settings.token, hosts=hosts, public=public)
    app.add_exception_handler(HTTPException, http_error_response)
    app.add_exception_handler(RequestValidationError, validation_error_response)
    add_model_routes(app, service)
    add_server_routes(app, service)
    add_pages(app)
    if settings.report is not None:
        add_report(app, settings.report)
    return app


def add_model_routes(app: FastAPI, service: Service) -> None:
    failures = schema.errors(400, 401, 408, 413, 415, 421, 422, 429, 500, 503)
    index = Query(ge=0, lt=len(service.classifier.labels), description="The index of the class.")

    @app.post(
        "/v1/predict",
        summary="Classes of one or many images",
        response_description="For each image its name and its most probable classes.",
        responses={200: {"model": schema.Predictions}, **failures},
        openapi_extra=schema.body(service.limits.max_images),
    )
    async def predict(request: Request, top_k: TopK = None) -> Response:
        rows = await service.predict(request)
        return fast_json({"images": [service.answer(name, scores, top_k) for name, scores in rows]})

    @app.post(
        "/v1/explain",
        summary="Classes of one image, where the model looks, and the five steps",
        response_description="Classes, the picture as the model saw it, and maps of the same area.",
        responses={200: {"model": schema.Explanation}, **failures},
        openapi_extra=schema.body(1),
    )
    async def explain(request: Request, top_k: TopK = None) -> Response:
        name, scores, fields = await service.explain(request)
        return await asyncio.to_thread(fast_json, service.answer(name, scores, top_k) | fields)

    @app.post(
        "/v1/map",
        summary="What in an image speaks for a class",
        response_description="The map of one class.",
        responses={200: {"model": schema.Map}, **failures},
        openapi_extra=schema.body(1),
    )
    async def class_map(request: Request, label: Annotated[int, index]) -> Response:
        return fast_json(await service.map(request, label))

    if service.corrections is not None:

        @app.post(
            "/v1/corrections",
            summary="Store a photo under its right class",
            response_description="Where it is stored.",
            responses={200: {"model": schema.Correction}, **failures, **schema.errors(403, 507)},
            openapi_extra=schema.body(1),
        )
        async def correct(
            request: Request, label: Annotated[int, index], x_requested_with: RequestedWith = None
        ) -> Response:
            if x_requested_with != CALLER:
                raise RequestError(403, f"corrections need the header 'X-Requested-With: {CALLER}'")
            return fast_json({"stored": await service.correct(request, label)})

    @app.get(
        "/v1/model",
        summary="The model and its sizes",
        response_description="Its kind and sizes, and the server's limits.",
        responses=schema.errors(401, 421),
    )
    async def model() -> schema.ModelInfo:
        settings, limits = service.settings, service.limits
        return schema.ModelInfo(
            **model_info(service.classifier, settings.name),
            max_bytes=limits.max_bytes,
            max_images=limits.max_images,
            samples=len(settings.samples),
            corrections=service.corrections is not None,
            report=None if settings.report is None else settings.report.path,
        )

    @app.get(
        "/v1/classes",
        summary="The names of all classes",
        response_description="In the order of their indices.",
        responses={200: {"model": schema.Classes}, **schema.errors(401, 421)},
    )
    async def classes() -> Response:
        return fast_json({"classes": service.classifier.labels})

    @app.get(
        "/v1/samples",
        summary="Images to try",
        response_description="Held-out images of the run, as thumbnails.",
        responses={200: {"model": schema.Samples}, **schema.errors(401, 421)},
    )
    async def samples() -> Response:
        return fast_json({"samples": [vars(sample) for sample in service.settings.samples]})


def add_server_routes(app: FastAPI, service: Service) -> None:
    @app.get(
        "/healthz",
        summary="Whether the server is ready",
        response_description="It is.",
        response_model=schema.Health,
        responses={503: {"model": schema.Health, "description": "The server is stopping."}},
    )
    async def healthz() -> Response:
        is_ready = service.batcher.is_open and not service.draining
        status, code = ("ok", 200) if is_ready else ("stopping", 503)
        return JSONResponse({"status": status, "token": service.settings.token is not None}, code)

    @app.get(
        "/metrics",
        summary="Metrics for Prometheus",
        response_description="Requests, latencies, batches, images and the queue, as text.",
        response_class=PlainTextResponse,
        responses=schema.errors(401, 421),
    )
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")


def add_pages(app: FastAPI) -> None:
    """Serve the files of the page, read once; there is no path to any other file."""
    files = {file.name: file.read_bytes() for file in resources.files("vitlab.serving").joinpath("page").iterdir()}

    async def page(name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response(files[name], media_type=kind, headers={"Cache-Control": "no-cache"})

    app.get("/page/{name}", include_in_schema=False)(page)
    app.get("/", include_in_schema=False)(partial(page, "index.html"))
    app.get("/docs", include_in_schema=False)(partial(page, "docs.html"))


def add_report(app: FastAPI, report: Report) -> None:
    async def page() -> Response:
        return ReportResponse(report)

    app.get(report.path, include_in_schema=False, name="report")(page)


def fast_json(value: Any) -> Response:
    """JSON without a pydantic model in between, which would validate every number."""
    return Response(json.dumps(value, separators=(",", ":"), allow_nan=False), media_type="application/json")


# ---- errors in one format


async def http_error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = f"{request.url.path[:200]}; /docs lists the routes"
    messages = {404: f"there is nothing at {path}", 405: f"{request.method} is not allowed for {path}"}
    return JSONResponse({"error": messages.get(error.status_code, error.detail)}, error.status_code, error.headers)


async def validation_error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return JSONResponse({"error": f"{first['loc'][-1]}: {first['msg'][0].lower()}{first['msg'][1:]}"}, 422)
