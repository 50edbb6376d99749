# SPDX-License-Identifier: Apache-2.0
# The small image: the command epkit, and kubectl for the agent of deploy/daemonset. Built from the root of the tree:
#
#     docker build -f deploy/docker/epkit.Dockerfile -t epkit:0.1.0 .
ARG BASE=ubuntu:24.04
# A program that the agent runs with rights in the cluster: by its digest, which a tag can not replace.
ARG KUBECTL=registry.k8s.io/kubectl:v1.34.1@sha256:59bafa07ff3a6d4b417e7633ddb9d79a9606ca98bf64bac080b3e65748669250

FROM ${KUBECTL} AS kubectl

FROM ${BASE} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /src
COPY . .
# The command as a relocatable tree: third-party libraries are linked in.
RUN scripts/packages.sh build dist
RUN scripts/dist.sh --to /opt/epkit
RUN /opt/epkit/bin/epkit version

FROM ${BASE}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# nsenter and openssh: for the node's namespaces, and for epkit launch.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates openssh-client openssh-server util-linux \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*_key*
COPY --from=kubectl /bin/kubectl /usr/local/bin/kubectl
COPY --from=build /opt/epkit /opt/epkit
RUN ln -s /opt/epkit/bin/epkit /usr/local/bin/epkit \
    && epkit version
ENTRYPOINT ["epkit"]
CMD ["help"]
