# windve for a cluster without accelerators:  docker build -f k8s/images/cpu.Dockerfile -t windve:0.1.0-cpu .
# Written where no image could be built: the build is untested. Base tags are exact; to pin the bytes too, put the digest
# behind each (`docker buildx imagetools inspect IMAGE` prints it): FROM python:3.11.14-slim-bookworm@sha256:...
FROM python:3.11.14-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# The compiler builds the kernels in C at the installation; nothing is compiled at start, so the image itself has none.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev
RUN python -m venv /opt/windve
WORKDIR /src
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY serve_app serve_app
COPY deployments deployments
COPY calibration calibration
RUN /opt/windve/bin/pip install --extra-index-url https://download.pytorch.org/whl/cpu \
        -c constraints.txt '.[demo,calibration,generation,sentencepiece,traces]'
# -P: the installed package, not the source beside it. An image without the kernels would serve, only slower: refuse to build it.
RUN ln -s "$(/opt/windve/bin/python -Pc 'import deployments.serve_adapter as adapter; print(*adapter.__path__)')/haproxy.sh" /opt/windve/bin/windve-haproxy \
    && test -x /opt/windve/bin/windve-haproxy \
    && test "$(ls /opt/windve/lib/python3.11/site-packages/deployments/generation/kernels/*.so | wc -l)" = 5

FROM python:3.11.14-slim-bookworm
# KubeRay's probes run bash, wget and grep in the pod.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bash grep wget ca-certificates libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/windve /opt/windve
ENV PATH=/opt/windve/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
WORKDIR /tmp
