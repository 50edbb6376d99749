# SPDX-License-Identifier: Apache-2.0
# The image for expert-parallel jobs: NVSHMEM with IBGDA, DeepEP with its mapping of GPUs to NICs, nccl-tests, sshd,
# epkit.
#
#     docker build -f deploy/docker/deepep.Dockerfile --build-arg EPKIT=REGISTRY/epkit:0.1.0 -t nemo-deepep:25.11 .
#
# BASE may also be the image of the testbed with NeMo 25.04 and gIB 1.0.6:
#     us-central1-docker.pkg.dev/deeplearning-images/reproducibility/pytorch-gpu-nemo-nccl:nemo25.04-gib1.0.6-A4
#
# Not verified: this file has not been built on the NeMo bases, because we have no access to them. The commits of
# NVSHMEM (919760f) and of DeepEP (8a07e7e), the tag of nccl-tests and the package names on those bases are taken from
# notes and release pages; a wrong pin ends the build at the step that checks it. The tests check the rules of this
# file, and that each failing command ends its step.
#
# The first command that fails ends the build. No layer contains a key: start.sh of the chart reads those of the
# deployment from a Secret.
ARG BASE=nvcr.io/nvidia/nemo:25.11
ARG EPKIT=epkit:0.1.0

FROM ${EPKIT} AS epkit

FROM ${BASE}
ARG CUDA_ARCH=100
ARG TORCH_CUDA_ARCH=10.0
ARG NVSHMEM_TAG=v3.5.19-1
ARG NVSHMEM_COMMIT=919760f
ARG DEEPEP_COMMIT=8a07e7e
ARG NCCL_TESTS_TAG=v2.17.2
ARG SSH_PORT=222
ENV NVSHMEM_HOME=/opt/deepep/nvshmem EPKIT_SSH_PORT=${SSH_PORT}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# Packages create host keys when they are installed, which all users of the image would share. They are removed in the
# same step, since a later step would leave them in the layer of this one.
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssh-server openssh-client openmpi-bin libopenmpi-dev \
        git cmake ninja-build libibverbs-dev librdmacm-dev rdma-core ibverbs-utils perftest numactl \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*_key*
# Also those of the base image; its layers still contain them.
RUN rm -f /etc/ssh/ssh_host_*_key* /root/.ssh/id_* /root/.ssh/authorized_keys \
    && mkdir -p /run/sshd \
    && printf 'Port %s\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n' "${SSH_PORT}" \
        >/etc/ssh/sshd_config.d/epkit.conf

# NVSHMEM with IBGDA, without gdrcopy, which the NIC handler "gpu" does not need.
RUN git clone --branch "${NVSHMEM_TAG}" https://github.com/NVIDIA/nvshmem.git /opt/deepep/src/nvshmem \
    && git -C /opt/deepep/src/nvshmem rev-parse HEAD | grep "^${NVSHMEM_COMMIT}"
RUN cmake -S /opt/deepep/src/nvshmem -B /opt/deepep/build/nvshmem -G Ninja \
        -DCMAKE_INSTALL_PREFIX="${NVSHMEM_HOME}" -DCMAKE_CUDA_ARCHITECTURES="${CUDA_ARCH}" \
        -DNVSHMEM_IBGDA_SUPPORT=ON -DNVSHMEM_USE_GDRCOPY=OFF -DNVSHMEM_MPI_SUPPORT=OFF -DNVSHMEM_SHMEM_SUPPORT=OFF \
        -DNVSHMEM_UCX_SUPPORT=OFF -DNVSHMEM_USE_NCCL=OFF -DNVSHMEM_PMIX_SUPPORT=OFF -DNVSHMEM_BUILD_TESTS=OFF \
        -DNVSHMEM_BUILD_EXAMPLES=OFF -DNVSHMEM_BUILD_PACKAGES=OFF
RUN cmake --build /opt/deepep/build/nvshmem
RUN cmake --install /opt/deepep/build/nvshmem
RUN find /opt/deepep/build/nvshmem -name nvshmem-info -type f -perm -u+x -exec install -D -t "${NVSHMEM_HOME}/bin" {} + \
    && test -x "${NVSHMEM_HOME}/bin/nvshmem-info"
RUN LD_LIBRARY_PATH="${NVSHMEM_HOME}/lib" "${NVSHMEM_HOME}/bin/nvshmem-info" -a | grep 'NVSHMEM_IBGDA_SUPPORT=ON'

# DeepEP, the commit of pull request 466, whose mapping is both defined and called.
RUN git clone https://github.com/deepseek-ai/DeepEP.git /opt/deepep/DeepEP
RUN git -C /opt/deepep/DeepEP fetch origin pull/466/head \
    && git -C /opt/deepep/DeepEP checkout --detach "${DEEPEP_COMMIT}"
RUN cd /opt/deepep/DeepEP \
    && TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH}" NVSHMEM_DIR="${NVSHMEM_HOME}" \
        pip install --no-build-isolation --no-deps --target /opt/deepep/python .
# Checks the installed copy: without the call all GPUs use one NIC.
RUN grep 'def _setup_device_hca_mapping' /opt/deepep/python/deep_ep/buffer.py
RUN grep 'self\._setup_device_hca_mapping()' /opt/deepep/python/deep_ep/buffer.py

RUN git clone --depth 1 --branch "${NCCL_TESTS_TAG}" https://github.com/NVIDIA/nccl-tests.git /third_party/nccl-tests
RUN make -C /third_party/nccl-tests -j "$(nproc)" MPI=1 MPI_HOME=/usr/lib/x86_64-linux-gnu/openmpi

COPY --from=epkit /opt/epkit /opt/epkit
COPY deploy/docker/unified-env.sh /opt/deepep/unified-env.sh
RUN ln -s /opt/epkit/bin/epkit /usr/local/bin/epkit \
    && epkit version
RUN rm -rf /opt/deepep/build /opt/deepep/src
# Checks that no layer contains what it must not.
RUN found=$(find / -xdev \( -name 'ssh_host_*_key' -o -path '/root/.ssh/id_*' -o -path '/home/*/.ssh/id_*' \) -print) \
    && test -z "${found}"
EXPOSE ${SSH_PORT}
