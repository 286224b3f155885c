# speedrun in a container: two targets in one file.
#
#   docker build --target cpu --tag speedrun:cpu .
#   docker build --target gpu --tag speedrun:gpu .     with --build-arg CUDA=13 for drivers from 580 on
#
# Run it with scripts/docker_run.sh, which passes the digest of the image for the record.
# The base has no CUDA: the locked wheels bring CUDA, cuDNN and NCCL, and the driver is the host's.

FROM python:3.12-slim-bookworm@sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254 AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
LABEL org.opencontainers.image.title="speedrun" \
    org.opencontainers.image.description="A speedrun harness for language models in JAX" \
    org.opencontainers.image.licenses="MIT"
# git only names the commit of the code, so its version is not pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/* \
    && git config --system --add safe.directory /opt/speedrun
# docker_run.sh runs the image as the calling user, so these folders are open to everybody.
RUN useradd --uid 1000 --no-create-home racer \
    && install -d -m 1777 /cache /workspace /workspace/data /workspace/records /workspace/runs
ENV HOME=/cache JAX_COMPILATION_CACHE_DIR=/cache/jax \
    PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
COPY requirements /opt/speedrun/requirements
VOLUME ["/workspace/data", "/workspace/records", "/workspace/runs", "/cache"]
WORKDIR /workspace
HEALTHCHECK --interval=30m --timeout=5m --start-period=1m CMD ["speedrun", "doctor"]
ENTRYPOINT ["speedrun"]
CMD ["doctor"]

FROM base AS gpu
ARG CUDA=12
RUN python -m pip install --require-hashes --requirement /opt/speedrun/requirements/run.lock \
    --requirement "/opt/speedrun/requirements/cuda$CUDA.lock"
# The parts of the driver that the NVIDIA runtime mounts.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY . /opt/speedrun
RUN python -m pip install --no-deps --no-build-isolation --editable /opt/speedrun \
    && python -m pip check && python -m compileall -q /opt/speedrun/speedrun && chmod -R a+rX /opt/speedrun
USER 1000:1000

FROM base AS cpu
RUN python -m pip install --require-hashes --requirement /opt/speedrun/requirements/run.lock
COPY . /opt/speedrun
RUN python -m pip install --no-deps --no-build-isolation --editable /opt/speedrun \
    && python -m pip check && python -m compileall -q /opt/speedrun/speedrun && chmod -R a+rX /opt/speedrun
USER 1000:1000
