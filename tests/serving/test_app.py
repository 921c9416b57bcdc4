"""The API as a client sees it: right answers, errors in one format, and clients that cannot harm each other."""

import asyncio
import base64
import io
import re
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from servers import NAMES, encoded, photo, save
from starlette.testclient import TestClient

import vitlab
from vitlab.analysis.class_map import class_map
from vitlab.data.transforms import eval_image
from vitlab.errors import UserError
from vitlab.models.config import ResNetConfig
from vitlab.prediction import Classifier
from vitlab.serving.app import create_app
from vitlab.serving.limits import Limits
from vitlab.serving.service import Service, ServiceSettings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("runs") / "small")


@contextmanager
def client(run: Path, **settings: Any) -> Iterator[tuple[TestClient, Service]]:
    """A server in this process; one process decodes, as each costs a quarter of a second."""
    service = Service(Classifier(run, "cpu"), ServiceSettings(name="small", **({"processes": 1} | settings)))
    with TestClient(create_app(service)) as http:
        yield http, service


@pytest.fixture(scope="module")
def http(run: Path) -> Iterator[TestClient]:
    with client(run, processes=None) as (http, _):
        yield http


def expected(run: Path, image: Image.Image) -> np.ndarray:
    """Probabilities without any of the serving."""
    model = vitlab.load(run)
    with torch.no_grad():
        logits = model(eval_image(image, model.config.image_size, model.card.preprocess)[None])[0].double().numpy()
    shares = np.exp(logits - logits.max())
    return shares / shares.sum()


def form(*pictures: bytes) -> list[tuple[str, tuple[str, bytes]]]:
    return [("image", (f"{i}.png", data)) for i, data in enumerate(pictures)]


# ---- answers


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_answers_as_a_cpu_does_while_it_compiles_and_afterwards(run: Path) -> None:
    service = Service(Classifier(run, "cuda"), ServiceSettings(name="small", processes=1, max_batch=16))
    images = [photo(seed) for seed in range(12)]
    with TestClient(create_app(service)) as http:
        engine = service.classifier.engine
        for _ in range(2):
            found = http.post("/v1/predict?top_k=7", files=form(*map(encoded, images))).json()["images"]
            for one, image in zip(found, images, strict=True):
                truth = expected(run, image)
                assert all(abs(c["probability"] - truth[c["index"]]) < 0.05 for c in one["classes"])
            assert http.post("/v1/explain", files=form(encoded(images[0]))).status_code == 200
            if engine.warming is not None:
                engine.warming.join()
        assert sorted(engine.fast) == [1, 2, 4, 8, 16]
    assert engine.warming is None


def test_many_images_are_answered_in_their_order(http: TestClient, run: Path) -> None:
    images = [photo(seed) for seed in range(5)]
    answer = http.post("/v1/predict?top_k=7", files=form(*map(encoded, images)))
    assert answer.status_code == 200
    images_json = answer.json()["images"]
    assert [one["name"] for one in images_json] == [f"{i}.png" for i in range(5)]
    for one, image in zip(images_json, images, strict=True):
        truth = expected(run, image)
        assert [c["index"] for c in one["classes"]] == list(np.argsort(-truth, kind="stable"))
        assert [c["probability"] for c in one["classes"]] == pytest.approx(np.sort(truth)[::-1], abs=1e-5)
        assert [c["name"] for c in one["classes"]] == [NAMES[c["index"]] for c in one["classes"]]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "AVIF"])
def test_a_body_that_is_an_image(http: TestClient, run: Path, kind: str) -> None:
    data = encoded(photo(3), kind)
    answer = http.post("/v1/predict?top_k=1", content=data, headers={"Content-Type": f"image/{kind.lower()}"})
    assert answer.status_code == 200, answer.text
    truth = expected(run, Image.open(io.BytesIO(data)).convert("RGB"))
    (top,) = answer.json()["images"][0]["classes"]
    assert top["index"] == truth.argmax()
    assert top["probability"] == pytest.approx(truth.max(), abs=1e-5)


def test_other_formats_are_read_on_request(http: TestClient, run: Path) -> None:
    for kind in ("BMP", "TIFF", "PPM"):
        refused = http.post("/v1/predict", content=encoded(photo(3), kind), headers={"Content-Type": "image/x"})
        assert refused.status_code == 422
        assert "send JPEG, PNG, WEBP, GIF or AVIF" in refused.json()["error"]
    with client(run, limits=Limits(formats=("TIFF", "BMP"))) as (chosen, _):
        for kind, status in (("TIFF", 200), ("BMP", 200), ("PNG", 422)):
            answer = chosen.post("/v1/predict", content=encoded(photo(3), kind), headers={"Content-Type": "image/x"})
            assert answer.status_code == status, answer.text


def test_a_photo_on_its_side_is_turned(http: TestClient, run: Path) -> None:
    image = photo(4)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by a quarter to see it upright
    data = encoded(image.transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif)
    top = http.post("/v1/predict?top_k=1", files=form(data)).json()["images"][0]["classes"][0]
    assert top["probability"] == pytest.approx(expected(run, image).max(), abs=1e-5)


def test_explain_describes_the_picture_the_model_saw(http: TestClient, run: Path) -> None:
    image = photo(5)
    answered = http.post("/v1/explain?top_k=2", files=form(encoded(image))).json()
    assert answered["name"] == "0.png"
    assert answered["classes"][0]["probability"] == pytest.approx(expected(run, image).max(), abs=1e-5)
    seen = Image.open(io.BytesIO(base64.b64decode(answered["picture"])))
    truth = Classifier(run, "cpu").pixels(image).permute(1, 2, 0).numpy()
    assert (np.asarray(seen) == truth).all()
    maps = np.array(answered["attention"])
    assert maps.shape == (3, 3, 4, 4)
    assert maps.sum((2, 3)) == pytest.approx(np.ones((3, 3)), abs=1e-4)
    model = vitlab.load(run)
    rows = vitlab.attention(model, eval_image(image, (32, 32), model.card.preprocess)[None])
    first = rows[1][0, 2, 0, 1:].double().numpy()  # layer 2, head 3: the class token's row without itself
    assert maps[1, 2].ravel() == pytest.approx(first / first.sum(), abs=1e-5)
    assert np.array(answered["rollout"]).sum() == pytest.approx(1, abs=1e-4)
    for name, shape in {"tokens": (4, 4, 3), "positions": (4, 4, 3), "depths": (3, 4, 4, 3)}.items():
        colors = np.array(answered["steps"][name])
        assert colors.shape == shape
        assert (colors.min(), colors.max()) == (0, 255)


def test_any_class_has_its_map(http: TestClient, run: Path) -> None:
    image = photo(5)
    model = vitlab.load(run)
    seen = eval_image(image, (32, 32), model.card.preprocess)[None]
    best = int(expected(run, image).argmax())
    for label in range(len(NAMES)):
        answered = http.post(f"/v1/map?label={label}", files=form(encoded(image))).json()
        assert (answered["name"], answered["map"]["index"], answered["map"]["name"]) == ("0.png", label, NAMES[label])
        truth = class_map(model, seen, label)[0].double().numpy()
        assert np.array(answered["map"]["values"]) == pytest.approx(truth / max(truth.sum(), 1e-30), abs=1e-5)
        if label == best:
            assert http.post("/v1/explain", files=form(encoded(image))).json()["map"] == answered["map"]


def test_a_map_leaves_the_model_as_it_is(run: Path) -> None:
    """No gradients stay behind, and the next answer is the same."""
    with client(run) as (http, service):
        before = http.post("/v1/predict", files=form(PNG)).json()
        http.post("/v1/map?label=2", files=form(PNG))
        assert http.post("/v1/predict", files=form(PNG)).json() == before
        assert all(one.grad is None and not one.requires_grad for one in service.classifier.model.parameters())


@pytest.mark.parametrize(
    ("name", "settings", "maps"),
    [
        pytest.param("Ti/8", {"pool": "mean"}, (3, 3, 4, 4), marks=pytest.mark.slow),
        ("Ti/8", {"attention": "axial"}, (6, 3, 4, 4)),
        pytest.param("Ti/8", {"positions": "relative", "image_size": (32, 48)}, (3, 3, 4, 6), marks=pytest.mark.slow),
        ("R+Ti/16", {"image_size": 64}, (3, 3, 2, 2)),
    ],
)
def test_every_kind_of_model_is_explained(
    tmp_path: Path, name: str, settings: dict[str, Any], maps: tuple[int, ...]
) -> None:
    with client(save(tmp_path / "run", name, **settings)) as (http, _):
        answered = http.post("/v1/explain", files=form(encoded(photo()))).json()
        facts = http.get("/v1/model").json()
    assert np.array(answered["attention"]).shape == maps
    assert np.array(answered["map"]["values"]).shape == maps[2:]
    assert [facts["layers"], facts["heads"], *facts["grid"]] == list(maps)
    assert (answered["steps"]["positions"] is None) == (settings.get("positions") == "relative")


def test_a_resnet_has_classes_and_a_reason_for_no_more(tmp_path: Path) -> None:
    model = vitlab.build(ResNetConfig(image_size=(32, 32), stages=(1, 1), width=32, classes=len(NAMES)))
    vitlab.save(model, tmp_path / "run", labels=NAMES)
    with client(tmp_path / "run") as (http, _):
        answered = http.post("/v1/explain", files=form(encoded(photo()))).json()
        assert http.get("/v1/model").json()["kind"] == "resnet"
    assert len(answered["classes"]) == 5
    assert answered["attention"] is None
    assert answered["map"]["index"] == answered["classes"][0]["index"]
    assert "ResNet" in answered["reason"]


def test_a_large_picture_is_decoded_in_the_slow_pool(run: Path) -> None:
    image = photo(6, 300, 200)
    with client(run, limits=Limits(max_pixels=100_000)) as (http, _):
        answered = http.post("/v1/predict?top_k=1", files=form(encoded(image), encoded(photo(7)))).json()["images"]
    assert answered[0]["classes"][0]["probability"] == pytest.approx(expected(run, image).max(), abs=1e-5)
    assert answered[1]["classes"][0]["probability"] == pytest.approx(expected(run, photo(7)).max(), abs=1e-5)


def test_deep_greys_count_fourfold(run: Path) -> None:
    deep = Image.fromarray(np.full((100, 300), 40_000, np.uint16))
    with client(run, limits=Limits(max_pixels=100_000)) as (http, _):
        refused(http.post("/v1/predict", files=form(encoded(deep))), 413, "300 x 100 pixels that count fourfold")
        assert http.post("/v1/predict", files=form(encoded(deep.crop((0, 0, 200, 100))))).status_code == 200


def test_all_classes_by_name(http: TestClient) -> None:
    assert http.get("/v1/classes").json() == {"classes": NAMES}


# ---- errors, each a JSON object with a message


def refused(answer: Any, status: int, words: str) -> None:
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    assert words in answer.json()["error"]
    assert answer.headers["content-type"] == "application/json"


PNG = encoded(photo())


@pytest.mark.parametrize(
    ("files", "path", "status", "words"),
    [
        (form(PNG), "/v1/predict?top_k=0", 422, "top_k: input should be greater"),
        (form(PNG), "/v1/predict?top_k=many", 422, "top_k: input should be a valid integer"),
        (form(PNG, b"nonsense"), "/v1/predict", 422, "'1.png' is not an image in a supported format"),
        (form(PNG, b""), "/v1/predict", 422, "'1.png' is empty"),
        (form(PNG, PNG), "/v1/explain", 422, "this takes one image at a time, not 2"),
        (form(PNG, PNG), "/v1/map?label=0", 422, "this takes one image at a time, not 2"),
        (form(PNG), "/v1/map?label=7", 422, "label: input should be less than 7"),
        (form(PNG), "/v1/map?label=-1", 422, "label: input should be greater"),
        (form(PNG), "/v1/map", 422, "label: field required"),
        (form(b"nonsense"), "/v1/map?label=0", 422, "'0.png' is not an image"),
        (form(*[PNG] * 17), "/v1/predict", 413, "more than 16 parts"),
        ([("photo", ("a.png", PNG))], "/v1/predict", 422, "the form has a field 'photo'"),
    ],
)
def test_wrong_forms(http: TestClient, files: Any, path: str, status: int, words: str) -> None:
    refused(http.post(path, files=files), status, words)


@pytest.mark.parametrize(
    ("content", "kind", "status", "words"),
    [
        (PNG, "text/plain", 415, "Content-Type 'text/plain' holds no image"),
        (PNG, "", 415, "Content-Type 'none' holds no image"),
        (b"", "image/png", 422, "'image' is empty"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml", 422, "text such as SVG"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "image/heic", 422, "it is HEIC; send it as JPEG"),
        (PNG, "multipart/form-data", 422, "without a boundary"),
        (b"--x\r\n", "multipart/form-data; boundary=x", 422, "ends before its last boundary"),
        (b"--x--\r\n", "multipart/form-data; boundary=x", 422, "holds no image"),
        (b"hello", "multipart/form-data; boundary=x", 422, "the multipart body cannot be read"),
        (b"hello", "multipart/form-data; boundary=" + "x" * 999, 422, "the multipart body cannot be read"),
        (PNG[: len(PNG) // 2], "image/png", 422, "'image' is broken"),
    ],
)
def test_wrong_bodies(http: TestClient, content: bytes, kind: str, status: int, words: str) -> None:
    refused(http.post("/v1/predict", content=content, headers={"Content-Type": kind}), status, words)


def test_wrong_addresses(http: TestClient) -> None:
    refused(http.get("/v2"), 404, "there is nothing at /v2")
    refused(http.get("/page/../app.py"), 404, "there is nothing at")
    refused(http.get("/page/%2e%2e%2fapp.py"), 404, "there is nothing at")
    refused(http.get("/report"), 404, "there is nothing at /report")  # this run has none
    refused(http.post("/v1/corrections?label=0", files=form(PNG)), 404, "there is nothing at /v1/corrections")
    refused(http.get("/v1/predict"), 405, "GET is not allowed for /v1/predict")


def test_more_bytes_than_allowed(run: Path) -> None:
    with client(run, limits=Limits(max_bytes=2000)) as (http, service):
        refused(http.post("/v1/predict", files=form(bytes(3000))), 413, "larger than the 2 kB")
        headers = {"Content-Type": "image/png"}
        refused(http.post("/v1/predict", content=iter([bytes(900)] * 3), headers=headers), 413, "larger than the 2 kB")
        assert service.budget.used == 0


def test_more_bytes_than_all_uploads_together_may_hold(run: Path) -> None:
    with client(run) as (http, service):
        service.budget.acquire(service.budget.total - 10)
        answer = http.post("/v1/predict", files=form(PNG))
        refused(answer, 503, "too many uploads")
        assert answer.headers["retry-after"] == "1"
        service.budget.release(service.budget.total - 10)
        assert http.post("/v1/predict", files=form(PNG)).status_code == 200
        assert service.budget.used == 0


def test_a_request_can_never_be_larger_than_the_queue(run: Path) -> None:
    with pytest.raises(UserError, match="can never fit a queue of 4"):
        Service(Classifier(run, "cpu"), ServiceSettings(queue=4))


# ---- failures of the model


@contextmanager
def held(service: Service) -> Iterator[threading.Event]:
    """The model's thread, kept busy until the block ends."""
    entered, go = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        go.wait(60)

    busy = service.batcher.call(block)
    assert entered.wait(60)
    try:
        yield go
    finally:
        go.set()
        busy.result(60)


def test_a_full_queue_is_reported_and_recovers(run: Path) -> None:
    with client(run, queue=16) as (http, service):
        with held(service):
            most = service.batcher.reserve(15)
            refused(http.post("/v1/predict", files=form(PNG, PNG)), 503, "the queue is full")
            full = service.batcher.reserve(1)
            for path in ("/v1/explain", "/v1/map?label=0"):
                answer = http.post(path, files=form(PNG))
                refused(answer, 503, "the queue is full")
            assert answer.headers["retry-after"] == "1"
            with most, full:
                pass
        assert http.post("/v1/predict", files=form(PNG, PNG)).status_code == 200


def test_a_failing_model_fails_its_batch_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with client(run) as (http, service):
        with monkeypatch.context() as broken:
            broken.setattr(service.classifier, "to_scores", lambda *_: 1 / 0)
            refused(http.post("/v1/predict", files=form(PNG)), 500, "the model failed on this batch")
            refused(http.post("/v1/explain", files=form(PNG)), 500, "the model failed on this batch")
        assert http.post("/v1/predict", files=form(PNG)).status_code == 200
        assert sample(http, "vitlab_requests_total", route="/v1/predict", status="500") == 1


def test_a_client_that_disconnects_costs_no_computation(run: Path) -> None:
    """The app is called as a server calls it, by a client that leaves while its image waits."""
    with client(run) as (_, service):
        app = create_app(service)
        before = service.metrics.registry.get_sample_value("vitlab_images_total") or 0
        disconnected = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not receive.asked:  # type: ignore[attr-defined]
                receive.asked = True  # type: ignore[attr-defined]
                return {"type": "http.request", "body": PNG, "more_body": False}
            await disconnected.wait()
            return {"type": "http.disconnect"}

        receive.asked = False  # type: ignore[attr-defined]
        sent: list[MutableMapping[str, Any]] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/v1/predict", "raw_path": b"/v1/predict", "query_string": b"",
            "headers": [(b"content-type", b"image/png")], "http_version": "1.1", "scheme": "http", "root_path": "",
        }  # fmt: skip

        async def leave() -> None:
            task = asyncio.create_task(app(scope, receive, send))
            while not service.batcher.waiting:
                await asyncio.sleep(0.001)
            disconnected.set()
            await task

        with held(service):
            asyncio.run(leave())
            assert service.batcher.waiting[0].future.cancelled()
        service.batcher.submit(torch.zeros(3, 32, 32, dtype=torch.uint8)).result(60)
        assert service.metrics.registry.get_sample_value("vitlab_images_total") == before + 1  # not the abandoned one
        assert sent == []


# ---- the token, the metrics, the headers


def test_a_token_guards_the_api_and_not_the_page(run: Path) -> None:
    with client(run, token="open sesame") as (http, _):
        for path in ("/v1/predict", "/v1/explain", "/v1/map?label=0"):
            refused(http.post(path, files=form(PNG)), 401, "this server requires a token")
        for sent in ("", "Bearer", "Bearer open", "Bearer open sesame!", "Basic open sesame", "bearer \xff"):
            answer = http.get("/v1/model", headers={b"Authorization": sent.encode("latin-1")})
            refused(answer, 401, "Authorization: Bearer TOKEN")
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/metrics", "/v1/samples", "/v1/classes", "/report", "/nowhere", "/v1%2Fmodel", "//v1/model"):
            refused(http.get(path), 401, "token")
        assert [http.get(path).status_code for path in ("/", "/docs", "/page/app.js", "/openapi.json")] == [200] * 4
        assert http.get("/healthz").json() == {"status": "ok", "token": True}
        allowed = {"Authorization": "Bearer open sesame"}
        assert http.post("/v1/predict", files=form(PNG), headers=allowed).status_code == 200


def sample(http: TestClient, name: str, **labels: str) -> float | None:
    """The value of one sample of /metrics, or None."""
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for one in family.samples:
            if one.name == name and one.labels == labels:
                return one.value
    return None


def test_the_metrics(run: Path) -> None:
    with client(run) as (http, _):
        for _ in range(3):
            http.post("/v1/predict", files=form(PNG, PNG))
        http.post("/v1/predict", files=form(b"x"))
        http.get("/no%0Asuch%22place")
        answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(answer.text))
    assert {family.name: family.type for family in families} == {
        "vitlab_requests": "counter",
        "vitlab_request_seconds": "histogram",
        "vitlab_batch_size": "histogram",
        "vitlab_batch_seconds": "histogram",
        "vitlab_images": "counter",
        "vitlab_queue_length": "gauge",
        "vitlab_upload_bytes": "gauge",
    }
    samples: dict[tuple[Any, ...], float] = {
        (one.name, *sorted(one.labels.items())): one.value for family in families for one in family.samples
    }
    route = ("route", "/v1/predict")
    expected = {
        ("vitlab_requests_total", route, ("status", "200")): 3,
        ("vitlab_requests_total", route, ("status", "422")): 1,
        ("vitlab_requests_total", ("route", "other"), ("status", "404")): 1,
        ("vitlab_request_seconds_count", route): 4,
        ("vitlab_images_total",): 7,  # one of them to warm the model up
        ("vitlab_batch_size_bucket", ("le", "1.0")): 1,
        ("vitlab_batch_size_bucket", ("le", "2.0")): 4,
        ("vitlab_batch_size_sum",): 7,
        ("vitlab_queue_length",): 0,
        ("vitlab_upload_bytes",): 0,
    }
    assert {name: samples.get(name) for name in expected} == expected
    assert not [name for name, *_ in samples if name.endswith("_created")]


def test_a_stopping_server_answers_503(run: Path) -> None:
    with client(run) as (http, service):
        assert http.get("/healthz").status_code == 200
        service.draining = True
        assert http.get("/healthz").status_code == 503
        refused(http.post("/v1/predict", files=form(PNG)), 503, "the server is stopping")


@pytest.mark.parametrize(
    "path", ["/", "/docs", "/page/style.css", "/healthz", "/v1/model", "/nowhere", "/openapi.json"]
)
def test_headers_that_keep_browsers_safe(http: TestClient, path: str) -> None:
    headers = http.get(path).headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert http.head(path).status_code == http.get(path).status_code


PAGE = sorted((Path(vitlab.__file__).parent / "serving" / "page").iterdir())


@pytest.mark.parametrize("path", PAGE, ids=lambda path: path.name)
def test_the_page_loads_nothing_from_elsewhere_and_has_nothing_inline(http: TestClient, path: Path) -> None:
    answer = http.get(f"/page/{path.name}")
    assert answer.content == path.read_bytes()
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    assert answer.headers["content-type"].split(";")[0] == kinds[path.suffix]
    assert not re.search(r"(https?:)?//\w", answer.text.replace("http://www.w3.org/2000/svg", ""))
    if path.suffix == ".html":
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", answer.text)
