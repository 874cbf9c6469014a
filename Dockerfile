# The server on the CPU. The image has not been built yet: tests/test_dockerfiles.py checks what needs no Docker.
#
#   docker build -t nanovllm .
#   docker run --rm -p 127.0.0.1:8000:8000 -v /path/to/model:/model:ro nanovllm --max-model-len 32768
#
# Options after the image's name are those of `nanovllm serve`. Name an --api-key before you publish the port to a network.

FROM python:3.11-slim-bookworm AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN NANOVLLM_CUDA=0 pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
# May contain pip options too, such as an index with torch's CPU build, which is a tenth of the size.
ARG TORCH=torch==2.13.0
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home nanovllm
RUN pip install --no-cache-dir $TORCH
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/nanovllm-*.whl)[server]"
USER nanovllm
EXPOSE 8000
HEALTHCHECK --start-period=5m CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["nanovllm", "serve", "--model", "/model", "--host", "0.0.0.0"]
