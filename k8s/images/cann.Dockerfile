# windve for Ascend NPUs:  docker build -f k8s/images/cann.Dockerfile -t windve:0.1.0-cann .
# Written where no image could be built and no NPU was at hand: untested. Take the base's tag for your chip (910b, 310p,
# ...) and the CANN that torch-npu's release notes name for the version in constraints.txt; to pin the bytes too, put the
# digest behind it (`docker buildx imagetools inspect IMAGE` prints it).
FROM ascendai/cann:8.5.0-910b-ubuntu22.04-py3.11 AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/windve
WORKDIR /src
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY serve_app serve_app
COPY deployments deployments
COPY calibration calibration
# CANN's compiler wants the last three. The base has gcc, which builds
# the kernels in C. The index keeps CUDA's packages out on x86.
RUN /opt/windve/bin/pip install --extra-index-url https://download.pytorch.org/whl/cpu \
        -c constraints.txt '.[demo,npu,calibration,generation,sentencepiece,traces]' decorator attrs scipy
# -P: the installed package, not the source beside it. An image without the kernels would serve, only slower: refuse to build it.
RUN ln -s "$(/opt/windve/bin/python -Pc 'import deployments.serve_adapter as adapter; print(*adapter.__path__)')/haproxy.sh" /opt/windve/bin/windve-haproxy \
    && test -x /opt/windve/bin/windve-haproxy \
    && test "$(ls /opt/windve/lib/python3.11/site-packages/deployments/generation/kernels/*.so | wc -l)" = 5

FROM ascendai/cann:8.5.0-910b-ubuntu22.04-py3.11
# KubeRay's probes run bash, wget and grep in the pod.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bash grep wget ca-certificates libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/windve /opt/windve
# BASH_ENV: KubeRay starts Ray by a bash that reads no profile, and CANN must be found there.
ENV PATH=/opt/windve/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    BASH_ENV=/usr/local/Ascend/ascend-toolkit/set_env.sh
USER 1000:1000
WORKDIR /tmp
