# syntax=docker/dockerfile:1
# distflow_jax with its command, for a CPU, NVIDIA GPUs or TPUs:
#
#   docker build --tag=distflow .
#   docker build --tag=distflow:gpu --build-arg=PLATFORM=gpu .
#   docker build --tag=distflow:tpu --build-arg=PLATFORM=tpu .
#   mkdir -p runs
#   docker run --rm --user="$(id -u):$(id -g)" --volume="$PWD/runs:/runs" \
#       distflow train --config=tiny --workdir=/runs/tiny
#
# Any user can run it: the home folder, with the cache of models, is everybody's to write to. Docker makes
# a folder that does not exist as root, hence the mkdir. Without --user it is user and group 1000.
# GPUs need the host's driver and --gpus=all: CUDA comes with jax. The process gets SIGTERM itself, so
# that a stopped container leaves a checkpoint.
# JetStream is for its protocol in `distflow serve`.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE CHANGELOG.md CITATION.cff ./
COPY configs configs
COPY distflow_jax distflow_jax
RUN pip wheel --no-cache-dir --no-deps --wheel-dir=/wheels .

FROM python:${PYTHON}-slim
# cpu, gpu or tpu
ARG PLATFORM=cpu
COPY --from=build /wheels /wheels
# pip takes a file with extras, and that file's version is the source's own
# hadolint ignore=DL3013
RUN set -eu; \
    case "${PLATFORM}" in \
        cpu) extra="" ;; \
        gpu|tpu) extra="[${PLATFORM}]" ;; \
        *) echo "PLATFORM must be cpu, gpu or tpu, got ${PLATFORM}" >&2; exit 1 ;; \
    esac; \
    wheel="$(ls /wheels/distflow_jax-*.whl)"; \
    pip install --no-cache-dir "${wheel}${extra}"; \
    pip install --no-cache-dir --no-deps google-jetstream==0.2.2; \
    rm -r /wheels; \
    useradd --uid=1000 --user-group --create-home distflow; \
    install --directory --owner=distflow --group=distflow --mode=1777 /runs; \
    chmod 1777 /home/distflow
ENV PYTHONUNBUFFERED=1 \
    HOME=/home/distflow \
    LOGNAME=distflow \
    DISTFLOW_CACHE=/home/distflow/.cache/distflow_jax
USER 1000:1000
WORKDIR /runs
ENTRYPOINT ["distflow"]
CMD ["--help"]
