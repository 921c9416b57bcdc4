"""The server conforms to its OpenAPI description, whatever schemathesis sends; nothing is answered with 5xx."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Err, Ok
from schemathesis.generation import GenerationMode
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from servers import encoded, photo, save

from vitlab.prediction import Classifier
from vitlab.serving.app import create_app
from vitlab.serving.service import Service, ServiceSettings

EXAMPLES = 60  # of each route
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]
PICTURES = [encoded(photo(seed), kind) for seed, kind in enumerate(["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A picture of which a piece is missing or replaced."""
    data = draw(st.sampled_from(PICTURES))
    start = draw(st.integers(0, len(data)))
    return data[:start] + draw(st.binary(max_size=20)) + data[start + draw(st.integers(0, 40)) :]


BODIES = st.one_of(st.sampled_from(PICTURES), damaged(), st.binary(max_size=300))
schemathesis.openapi.media_type("image/*", BODIES)
schemathesis.openapi.format("binary", BODIES)
ROUTES = [
    ("/v1/predict", "POST"),
    ("/v1/explain", "POST"),
    ("/v1/map", "POST"),
    ("/v1/corrections", "POST"),
    ("/v1/model", "GET"),
    ("/v1/classes", "GET"),
    ("/v1/samples", "GET"),
    ("/healthz", "GET"),
    ("/metrics", "GET"),
]


class Lasting(Service):
    """Each call of schemathesis starts and ends the app; the model is kept."""

    async def warm_up(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BaseSchema]:
    folder = tmp_path_factory.mktemp("schema")
    run = save(folder / "small")
    service = Lasting(Classifier(run, "cpu"), ServiceSettings(corrections=folder / "corrections"))
    yield schemathesis.openapi.from_asgi("/openapi.json", create_app(service))
    Service.close(service)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "verb"), ROUTES)
@pytest.mark.parametrize("mode", GenerationMode)
def test_the_api_conforms(api: BaseSchema, path: str, verb: str, mode: GenerationMode) -> None:
    answered: set[int] = set()

    @given(case=api[path][verb].as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def ask(case: schemathesis.Case[Any]) -> None:
        answer = case.call()
        answered.add(answer.status_code)
        case.validate_response(answer, checks=CHECKS)

    try:
        ask()
    except Unsatisfiable:
        assert (verb, mode) == ("GET", GenerationMode.NEGATIVE)  # there is nothing to get wrong
        return
    assert not [status for status in answered if status >= 500]
    if verb == "POST":
        assert (200 in answered) or mode == GenerationMode.NEGATIVE
        assert 422 in answered


def test_all_routes_are_described(api: BaseSchema) -> None:
    operations = list(api.get_all_operations())
    assert not [operation for operation in operations if isinstance(operation, Err)]
    valid = [operation.ok() for operation in operations if isinstance(operation, Ok)]
    found = {(operation.path, operation.method.upper()) for operation in valid}
    assert found == set(ROUTES)
