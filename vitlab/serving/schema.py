"""The requests and responses of the API, for its OpenAPI description."""

from typing import Any

from pydantic import BaseModel, Field


class Error(BaseModel):
    error: str = Field(description="What is wrong and how to fix it.")


class ClassProbability(BaseModel):
    index: int
    name: str
    probability: float
    threshold: float | None = Field(None, description="Of a multi-label model: from where the class counts as found.")


class Prediction(BaseModel):
    name: str = Field(description="The file's name, as it was sent.")
    classes: list[ClassProbability] = Field(description="The most probable classes, the first one first.")
    refused: bool | None = Field(
        None,
        description="Whether the image is none of the classes, which are then those it resembles most. "
        "Only of a model that can refuse.",
    )
    distance: float | None = Field(
        None, description="How far the image is from those of the classes; above 1 it is refused."
    )


class Predictions(BaseModel):
    images: list[Prediction] = Field(description="In the order they were sent.")


class ClassMap(BaseModel):
    index: int
    name: str
    values: list[list[float]] = Field(description="(h, w), sums to 1: what in the image speaks for the class.")


class Map(BaseModel):
    name: str = Field(description="The file's name, as it was sent.")
    map: ClassMap


class Steps(BaseModel):
    tokens: list[list[list[int]]] = Field(description="(h, w, 3): patch tokens as colors, 0 to 255.")
    positions: list[list[list[int]]] | None = Field(description="(h, w, 3): position embeddings as colors.")
    depths: list[list[list[list[int]]]] = Field(description="(blocks, h, w, 3): tokens after each block as colors.")
    prefix: list[list[list[int]]] = Field(description="(blocks, P, 3): class token and registers after each block.")
    prefix_attention: list[list[float]] = Field(description="(L, P): share of the attention that goes to each of them.")


class Explanation(Prediction):
    picture: str = Field(description="What the model saw: a PNG in base64. All maps cover the same area.")
    map: ClassMap = Field(description="Of the most probable class; /v1/map has those of others.")
    rollout: list[list[float]] | None = Field(description="(h, w), sums to 1: attention through all layers.")
    attention: list[list[list[list[float]]]] | None = Field(description="(L, H, h, w), each map sums to 1.")
    steps: Steps | None
    reason: str | None = Field(description="Why there is no attention, where there is none.")


class ModelInfo(BaseModel):
    """The model and its sizes; those of patches and heads are null for a ResNet."""

    name: str
    kind: str
    classes: int
    multi_label: bool = Field(description="Whether an image may have any number of classes.")
    refuse: float | None = Field(description="The share of known images that may be refused; null: none is.")
    image_size: list[int]
    parameters: int
    layers: int
    heads: int
    width: int | None = None
    grid: list[int] | None = None
    patch: int | None = None
    stem: bool | None = None
    pool: str | None = None
    features: int | None = None
    positions: str | None = None
    rotary: bool | None = None
    class_token: bool | None = None
    registers: int | None = None
    axial: bool | None = None
    max_bytes: int
    max_images: int
    samples: int = Field(description="How many images to try /v1/samples has.")
    corrections: bool = Field(description="Whether /v1/corrections takes photos.")
    report: str | None = Field(description="The path of the run's report.")


class Classes(BaseModel):
    classes: list[str] = Field(description="All class names; a class's index is its place here.")


class Sample(BaseModel):
    label: str = Field(description="Its class.")
    kind: str = Field(description="jpeg or png.")
    data: str = Field(description="The image in base64.")


class Samples(BaseModel):
    samples: list[Sample]


class Correction(BaseModel):
    stored: str = Field(description="The photo's path in the corrections folder.")


class Health(BaseModel):
    status: str
    token: bool = Field(description="Whether this server requires a token.")


ERRORS = {
    400: "The request is not HTTP, or comes in too many tiny pieces.",
    401: "The token is missing or wrong.",
    403: "The header 'X-Requested-With: vitlab' is missing.",
    408: "The body did not arrive in time.",
    413: "Too many bytes, images or pixels.",
    415: "The Content-Type is neither a form nor an image.",
    421: "The Host header names another server.",
    422: "A broken picture, or a parameter out of range.",
    429: "Too many large or unusual pictures at once; try again after Retry-After seconds.",
    500: "The model failed on this batch.",
    503: "The queue is full, or the server is stopping; try again after Retry-After seconds.",
    507: "The corrections folder or its disk is full.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Error, "description": ERRORS[status]} for status in statuses}


def body(most: int) -> dict[str, Any]:
    """The OpenAPI of an upload; the routes read the body themselves, as it arrives."""
    binary = {"type": "string", "format": "binary"}
    images = {"type": "array", "items": binary, "minItems": 1, "maxItems": most}
    form = {"type": "object", "properties": {"image": images}, "required": ["image"], "additionalProperties": False}
    content = {"multipart/form-data": {"schema": form}, "image/*": {"schema": binary}}
    return {"requestBody": {"required": True, "content": content}}
