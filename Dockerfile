# `vitlab serve` on a CPU; docs/serving.md has the commands.
FROM python:3.12-slim AS build
WORKDIR /src
# the address of PyTorch's wheels without CUDA, which is most of torch's size; without it, torch as pip finds it
ARG TORCH_INDEX=""
COPY constraints.txt ./
RUN python -m venv /venv \
    && /venv/bin/pip install --no-cache-dir --no-deps --constraint constraints.txt \
        ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch torchvision
COPY pyproject.toml README.md LICENSE ./
COPY vitlab ./vitlab
RUN /venv/bin/pip install --no-cache-dir --constraint constraints.txt ".[serve,heic]"

FROM python:3.12-slim
COPY --from=build /venv /venv
RUN useradd --uid 10001 --create-home vitlab
# a number, so that Kubernetes can check that it is not root
USER 10001
ENV PATH=/venv/bin:$PATH \
    PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
ENTRYPOINT ["vitlab", "serve"]
CMD ["/model", "--host", "0.0.0.0"]
