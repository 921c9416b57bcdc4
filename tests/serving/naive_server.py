"""What batching is compared with: the same model and HTTP, one forward pass a request. `naive_server.py RUN`."""

import io
import sys

import uvicorn
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from PIL import Image

from vitlab.prediction import Classifier
from vitlab.serving.server import listen, server_url


def create(classifier: Classifier) -> FastAPI:
    app = FastAPI()

    def answer(body: bytes) -> list[dict[str, object]]:
        pixels = classifier.pixels(Image.open(io.BytesIO(body)).convert("RGB"))
        probabilities, indices = classifier.probabilities(pixels[None])[0].topk(5)
        pairs = zip(probabilities.tolist(), indices.tolist(), strict=True)
        return [{"index": i, "name": classifier.labels[i], "probability": p} for p, i in pairs]

    @app.post("/v1/predict")
    async def predict(request: Request) -> Response:
        classes = await run_in_threadpool(answer, await request.body())
        return JSONResponse({"images": [{"name": "image", "classes": classes}]})

    return app


if __name__ == "__main__":
    sock = listen("127.0.0.1", 0)
    print("ready", server_url(sock), flush=True)
    config = uvicorn.Config(create(Classifier(sys.argv[1])), http="h11", loop="asyncio", log_level="critical")
    uvicorn.Server(config).run(sockets=[sock])
