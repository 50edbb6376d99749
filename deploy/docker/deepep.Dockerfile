# SPDX-License-Identifier: Apache-2.0
# The image for expert-parallel jobs: NVSHMEM with IBGDA, DeepEP with its mapping of GPUs to NICs, nccl-tests, sshd,
# epkit.
#
#     docker build -f deploy/docker/deepep.Dockerfile --build-arg EPKIT=REGISTRY/epkit:0.1.0 -t nemo-deepep:25.11 .
#
# NVSHMEM and DeepEP are built by the steps of a recipe of 'epkit install', as on a node: their flags, versions and commits
# are in recipes/deepep.yaml alone. RECIPE and SET choose among them: deepep-v2 for DeepEP 2, and
#     --build-arg SET=nvshmem=v3.8.0-1,nvshmem_commit=...
#
# BASE may also be the image of the testbed with NeMo 25.04 and gIB 1.0.6:
#     us-central1-docker.pkg.dev/deeplearning-images/reproducibility/pytorch-gpu-nemo-nccl:nemo25.04-gib1.0.6-A4
# With RECIPE=deepep-v2 it has to bring PyTorch 2.10 and NCCL 2.30.4 or later, which nemo:25.11 does not.
#
# Not verified: this file has not been built on the NeMo bases, because we have no access to them. A wrong pin or a missing
# package ends the build at the step that checks it. The tests check the rules of this file, that each failing command ends
# its step, and that the steps of the recipe that an image needs run in a root of their own.
#
# The first command that fails ends the build. No layer contains a key: start.sh of the chart reads those of the
# deployment from a Secret.
ARG BASE=nvcr.io/nvidia/nemo:25.11
ARG EPKIT=epkit:0.1.0

FROM ${EPKIT} AS epkit

FROM ${BASE}
ARG RECIPE=gcp-b200-ubuntu2404
ARG SET=use_nvpeermem=0
# v2.17.5
ARG NCCL_TESTS_COMMIT=0bb567cc0218312bd1c6e5641f4ea68e7219e5bb
ARG SSH_PORT=222
ENV EPKIT_SSH_PORT=${SSH_PORT}
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

COPY --from=epkit /opt/epkit /opt/epkit
RUN ln -s /opt/epkit/bin/epkit /usr/local/bin/epkit \
    && epkit version
# One layer: what was fetched and built would stay in it.
RUN epkit install apply "${RECIPE}" --set "node=0,${SET}" --reboot never \
    && rm -rf "/var/lib/epkit/install/${RECIPE}/fetch" "/var/lib/epkit/install/${RECIPE}/apt"

RUN git init -q /third_party/nccl-tests \
    && git -C /third_party/nccl-tests fetch -q --depth 1 https://github.com/NVIDIA/nccl-tests.git "${NCCL_TESTS_COMMIT}" \
    && git -C /third_party/nccl-tests checkout -q FETCH_HEAD
RUN make -C /third_party/nccl-tests -j "$(nproc)" MPI=1 MPI_HOME=/usr/lib/x86_64-linux-gnu/openmpi

# Checks that no layer contains what it must not.
RUN found=$(find / -xdev \( -name 'ssh_host_*_key' -o -path '/root/.ssh/id_*' -o -path '/home/*/.ssh/id_*' \) -print) \
    && test -z "${found}"
EXPOSE ${SSH_PORT}
