#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Dockerfiles and Cloud Build, without building: rules, failures that must not be hidden, and what fits together. And that
# the rules notice what they are for.
#
# shellcheck disable=SC2154,SC2016,SC2030,SC2031 # set by run; texts of Dockerfiles

load common

images() {
    python3 "$EPKIT_SOURCE/tests/deploy/images.py" "$@"
}

@test "the Dockerfiles keep the rules" {
    images lint "$EPKIT_SOURCE"/deploy/docker/*.Dockerfile
}

@test "each command of each build step, made to fail, fails its step" {
    images failures "$EPKIT_SOURCE"/deploy/docker/*.Dockerfile
}

@test "Cloud Build: substitutions, arguments and images fit together; two hours, e2-highcpu-32" {
    images cloudbuild "$EPKIT_SOURCE/deploy/cloudbuild.yaml"
}

# stand_in FOLDER: a repository of what is there; its commit
stand_in() {
    git -C "$1" init -q
    git -C "$1" add .
    git -C "$1" -c user.name=t -c user.email=t@example.org commit -qm first
    git -C "$1" rev-parse HEAD
}

@test "an image gets NVSHMEM and DeepEP by the steps of a recipe, and has no version or flag of its own" {
    local docker=$EPKIT_SOURCE/deploy/docker/deepep.Dockerfile work=$BATS_TEST_TMPDIR nvshmem deepep recipe
    run ! grep -nE '^[^#]*(-DNVSHMEM|NVSHMEM_(TAG|COMMIT)|DEEPEP_COMMIT|DeepEP[.]git|nvshmem[.]git)' "$docker"
    grep -q 'epkit install apply "${RECIPE}" --set "node=0' "$docker"
    [ "$(id -u)" -eq 0 ] || skip "applying a recipe needs root"
    command -v ninja >/dev/null || skip "ninja is not installed"
    mkdir -p "$work/nvshmem" "$work/DeepEP/deep_ep" "$work/DeepEP/tests" "$work/cuda"
    # Stand-ins that show what they are built with.
    cat >"$work/nvshmem/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.20)
project(nvshmem NONE)
file(WRITE ${CMAKE_BINARY_DIR}/nvshmem-info "#!/bin/sh\necho NVSHMEM_IBGDA_SUPPORT=ON NVSHMEM_USE_GDRCOPY=OFF\n")
file(WRITE ${CMAKE_BINARY_DIR}/built "${CMAKE_CUDA_ARCHITECTURES} ${NVSHMEM_IBGDA_SUPPORT} ${NVSHMEM_USE_GDRCOPY} ${NVSHMEM_BUILD_PYTHON_LIB} $ENV{CPLUS_INCLUDE_PATH} $ENV{CMAKE_LIBRARY_PATH}\n")
install(PROGRAMS ${CMAKE_BINARY_DIR}/nvshmem-info DESTINATION bin)
install(FILES ${CMAKE_BINARY_DIR}/built DESTINATION .)
install(FILES ${CMAKE_BINARY_DIR}/built DESTINATION lib RENAME libnvshmem_host.so.3)
install(FILES ${CMAKE_BINARY_DIR}/built DESTINATION lib RENAME nvshmem_transport_ibgda.so.3)
END
    cat >"$work/DeepEP/setup.py" <<'END'
import os, shutil, sys
out = sys.argv[sys.argv.index("--build-lib") + 1]
shutil.copytree("deep_ep", out + "/deep_ep")
with open(out + "/deep_ep/built", "w") as built:
    print(os.environ["TORCH_CUDA_ARCH_LIST"], os.environ.get("NVSHMEM_DIR", "none"), file=built)
END
    printf 'def _setup_device_hca_mapping(self):\n    self._setup_device_hca_mapping()\n' >"$work/DeepEP/deep_ep/buffer.py"
    mkdir "$work/DeepEP/deep_ep/buffers" "$work/DeepEP/tests/elastic"
    touch "$work/DeepEP/deep_ep/buffers/elastic.py" "$work/DeepEP/tests/test_internode.py" "$work/DeepEP/tests/elastic/test_ep.py"
    nvshmem=$(stand_in "$work/nvshmem")
    git -C "$work/nvshmem" tag v3.5.19-1
    deepep=$(stand_in "$work/DeepEP")
    apply() { # apply RECIPE SETTING: below the folder of the test, from the stand-ins, without packages of Ubuntu
        rm -rf "$work/opt"
        "$EPKIT_BUILD/epkit" install show "$1" |
            sed "s|/opt/deepep|$work/opt|g; s|https://github.com/NVIDIA/nvshmem.git|file://$work/nvshmem|;
                s|https://github.com/deepseek-ai/DeepEP.git|file://$work/DeepEP|; /^  os:/d; /^  release:/d; /^  arch:/d;
                s|packages: {git: .*|packages: {git: \"*\"}|" >"$work/$1.yaml"
        "$EPKIT_BUILD/epkit" install apply "$work/$1.yaml" --state "$work/state" --reboot never \
            --set "node=0,use_nvpeermem=0,cuda_home=$work/cuda,$2"
    }
    run -0 apply gcp-h200-ubuntu2404 "nvshmem_commit=$nvshmem,deepep_commit=$deepep,deepep_base=$deepep,deepep_ref=HEAD"
    [[ "$output" == *"NVSHMEM_IBGDA_SUPPORT is enabled correctly."*"DeepEP installation complete"* ]]
    [[ "$(cat "$work/opt/nvshmem/built")" == "90 1 0 OFF $work/cuda/include/cccl "*/links ]]
    [ "$(cat "$work/opt/python/deep_ep/built")" = "9.0 $work/opt/nvshmem" ]
    [ -e "$work/opt/DeepEP/tests/test_internode.py" ] && [ -e "$work/opt/unified-env.sh" ]
    # DeepEP 2: without NVSHMEM of its own.
    run -0 apply deepep-v2 "deepep_commit=$deepep"
    [ "$(cat "$work/opt/python/deep_ep/built")" = "9.0;10.0 none" ]
    [ ! -e "$work/opt/nvshmem" ]
    for recipe in gcp-h200-ubuntu2404 deepep-v2; do rm -rf "/var/log/epkit/install/$recipe"; done
    rmdir /var/log/epkit/install /var/log/epkit 2>/dev/null || true
}

# noticed ACTION TEXT LINE...: a Dockerfile of these lines is refused with this text
noticed() {
    local action=$1 text=$2
    shift 2
    printf '%s\n' "$@" >"$BATS_TEST_TMPDIR/Dockerfile"
    run -1 images "$action" "$BATS_TEST_TMPDIR/Dockerfile"
    [[ "$output" == *"$text"* ]]
}

@test "the rules notice planted mistakes" {
    shell='SHELL ["/bin/bash", "-euo", "pipefail", "-c"]'
    noticed lint "hides a failure" "FROM a:1" "$shell" 'RUN make || true'
    noticed lint "behind ;" "FROM a:1" "$shell" 'RUN cd /src; make'
    noticed lint "in a pipe" "FROM a:1" 'RUN make | tee log'
    noticed lint "without a tag" "FROM a" "$shell"
    noticed lint "another one tomorrow" "FROM a:latest" "$shell"
    noticed lint "a key, which everybody would share" "FROM a:1" "$shell" 'RUN ssh-keygen -A'
    noticed lint "image's history" "FROM a:1" 'ARG HF_TOKEN'
    noticed lint "without a checksum" "FROM a:1" "$shell" 'RUN curl -O https://example.com/x'
    noticed lint "and no commit" "FROM a:1" "$shell" 'RUN git clone --branch v1 https://example.com/x'
    noticed lint "without its digest" "FROM registry.k8s.io/a:1" "$shell"
    noticed lint "leaves the host keys" "FROM a:1" "$shell" 'RUN apt-get install -y openssh-server' 'RUN rm /etc/ssh/ssh_host_*'
    noticed lint "here-document" "FROM a:1" "$shell" 'RUN bash <<END && true'
    noticed lint "lets failures pass" "FROM a:1" "$shell" 'RUN set +e && make'
    noticed lint "does not wait" "FROM a:1" "$shell" 'RUN make & wait'
    noticed lint 'in $(...)' "FROM a:1" "$shell" 'RUN test -z "$(find /nowhere)"'
    noticed failures "succeeds although this fails: make" "FROM a:1" 'RUN make || true'
    noticed failures "succeeds although this fails: cd /src" "FROM a:1" 'RUN cd /src && make || true && install'
}

# archive LAYER...: a docker-archive of these folders, in $BATS_TEST_TMPDIR/image.tar
archive() {
    local layer work=$BATS_TEST_TMPDIR/archive
    rm -rf "$work"
    mkdir "$work"
    for layer in "$@"; do tar -cf "$work/${layer##*/}.tar" -C "$layer" .; done
    (cd "$work" && printf '%s\n' *.tar | jq -R . | jq -s '[{Layers: .}]' >manifest.json)
    (cd "$work" && tar -cf "$BATS_TEST_TMPDIR/image.tar" -- *)
}

@test "a key is found in each layer, under any name, and where a later layer hides it" {
    local at=$BATS_TEST_TMPDIR image=$BATS_TEST_TMPDIR/image.tar
    mkdir -p "$at/0/etc" "$at/1/srv/keys" "$at/2/root/.ssh" "$at/3/srv/keys"
    # What reads keys has their first line in it.
    printf 'text\0-----BEGIN PRIVATE KEY-----\0-----BEGIN %%s PRIVATE KEY-----\n\0' >"$at/0/etc/program"
    archive "$at/0"
    images layers "$image"
    openssl genpkey -algorithm ed25519 -out "$at/key" 2>/dev/null
    ssh-keygen -q -t ecdsa -N '' -f "$at/ssh"
    for key in "$at/key" "$at/ssh"; do
        cp "$key" "$at/1/srv/keys/any"
        : >"$at/3/srv/keys/.wh.any"
        archive "$at/0" "$at/1" "$at/3"
        run -1 images layers "$image"
        [[ "$output" == *"3 layers"*"layer 1: ./srv/keys/any has a private key in it"* ]]
    done
    echo "ssh-ed25519 AAAA" >"$at/2/root/.ssh/authorized_keys"
    archive "$at/0" "$at/2"
    run -1 images layers "$image"
    [[ "$output" == *"layer 1: ./root/.ssh/authorized_keys is a key"* ]]
}

@test "what buildah pushes is read layer by layer" {
    command -v buildah >/dev/null || skip "buildah is not installed"
    [ "$(id -u)" -eq 0 ] || skip "needs root"
    local work=$BATS_TEST_TMPDIR store=(--storage-driver vfs --root "$BATS_TEST_TMPDIR/root" --runroot "$BATS_TEST_TMPDIR/run")
    mkdir "$work/tree"
    ssh-keygen -q -t ed25519 -N '' -f "$work/tree/key"
    : >"$work/tree/nothing"
    printf 'FROM scratch\nCOPY key /srv/any\nCOPY nothing /srv/any\n' >"$work/tree/Dockerfile"
    buildah bud "${store[@]}" --layers --isolation chroot -q -t localhost/key:1 "$work/tree"
    buildah push "${store[@]}" -q localhost/key:1 "docker-archive:$work/image.tar:localhost/key:1"
    run -1 images layers "$work/image.tar"
    [[ "$output" == *"2 layers"*"layer 0: srv/any has a private key in it"* ]]
}

@test "buildah builds the small image, and a step that fails fails the build" {
    [ -n "${EPKIT_TEST_LONG:-}" ] || skip "compiles epkit in a container: only with EPKIT_TEST_LONG=1"
    command -v buildah >/dev/null || skip "buildah is not installed"
    command -v mmdebstrap >/dev/null || skip "mmdebstrap is not installed"
    [ "$(id -u)" -eq 0 ] || skip "needs root"
    need kubectl
    local work=$BATS_TEST_TMPDIR store=(--storage-driver vfs --root "$BATS_TEST_TMPDIR/root" --runroot "$BATS_TEST_TMPDIR/run")
    mkdir "$work/base" "$work/kubectl" "$work/tree"
    mmdebstrap --quiet --variant=apt --include=ca-certificates bookworm "$work/base/base.tar"
    printf 'FROM scratch\nADD base.tar /\n' >"$work/base/Dockerfile"
    buildah bud "${store[@]}" --isolation chroot -q -t localhost/base:1 "$work/base"
    cp "$("$PROGRAMS" path)/bin/kubectl" "$work/kubectl/"
    printf 'FROM scratch\nCOPY kubectl /bin/kubectl\n' >"$work/kubectl/Dockerfile"
    buildah bud "${store[@]}" --isolation chroot -q -t localhost/kubectl:1 "$work/kubectl"
    git -C "$EPKIT_SOURCE" ls-files -z | (cd "$EPKIT_SOURCE" && tar -c --null -T -) | tar -x -C "$work/tree"
    build() {
        buildah bud "${store[@]}" --isolation chroot --build-arg BASE=localhost/base:1 \
            --build-arg KUBECTL=localhost/kubectl:1 -t localhost/epkit:1 -f "$1" "$work/tree"
    }
    sed 's/^RUN apt-get update/RUN false \&\& apt-get update/' "$EPKIT_SOURCE/deploy/docker/epkit.Dockerfile" |
        sed '/^RUN scripts/d; /^RUN .opt.epkit.bin/d; s/^COPY --from=build.*//' >"$work/broken"
    run ! build "$work/broken"
    build "$EPKIT_SOURCE/deploy/docker/epkit.Dockerfile"
    container=$(buildah from "${store[@]}" localhost/epkit:1)
    buildah run "${store[@]}" --isolation chroot "$container" -- epkit version
    # In no layer, not only in the last one.
    buildah push "${store[@]}" -q localhost/epkit:1 "docker-archive:$work/image.tar:localhost/epkit:1"
    images layers "$work/image.tar"
}
