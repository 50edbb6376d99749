#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# packages.sh GROUP... - install what the groups need: build, test, long, fuzz, cluster, nodes, dist, cuda.
#
# Installs missing packages with apt, which needs root and Debian 12, Ubuntu 24.04 or later. Silent, and without use of
# the network, if nothing is missing.
set -euo pipefail

# group, test for its presence, Debian package(s)
#   command:NAME   a command in PATH
#   pkg:NAME       a library that pkg-config knows
#   file:PATH      a file
#   compiles:LINE  a C source line that the compiler accepts
#   imports:NAME   a Python module
#   fuzzes:        clang finds libFuzzer
#   browser:       a Chromium, under any of its names, or none that apt could install (Ubuntu has it only as a snap)
needs() {
    cat <<'END'
build  command:cmake                       cmake
build  command:ninja                       ninja-build
build  command:cc                          gcc
build  compiles:#include<stdio.h>          libc6-dev
build  command:pkg-config                  pkg-config
build  pkg:jansson                         libjansson-dev
build  pkg:smartcols                       libsmartcols-dev
build  pkg:yaml-0.1                        libyaml-dev
build  compiles:#include<infiniband/verbs.h> libibverbs-dev
test   command:make                        make
test   command:ccache                      ccache
test   command:g++                         g++
test   command:clang                       clang
test   command:clang-format                clang-format
test   command:clang-tidy                  clang-tidy
test   command:shellcheck                  shellcheck
test   command:bats                        bats
test   command:python3                     python3
test   imports:numpy                       python3-numpy
test   imports:yaml                        python3-yaml
test   command:/usr/bin/python3-config     python3-dev
test   imports:ensurepip                   python3-venv
test   command:jq                          jq
test   command:git                         git
test   command:scdoc                       scdoc
test   command:objdump                     binutils
test   command:mpicc                       libopenmpi-dev
test   command:mpirun                      openmpi-bin
test   file:/usr/sbin/sshd                 openssh-server
test   command:ssh                         openssh-client
test   command:ip                          iproute2
test   command:pgrep                       procps
test   command:perl                        perl
test   command:strace                      strace
test   pkg:cmocka                          libcmocka-dev
test   browser:                            chromium
nodes  command:systemd-nspawn              systemd-container
nodes  command:mmdebstrap                  mmdebstrap
nodes  command:dpkg-scanpackages           dpkg-dev
long   file:/usr/sbin/slurmctld            slurmctld
long   file:/usr/sbin/slurmd               slurmd
long   command:srun                        slurm-client
long   file:/usr/sbin/munged               munge
long   command:qemu-system-x86_64          qemu-system-x86
long   command:busybox                     busybox-static
long   command:cpio                        cpio
long   command:modprobe                    kmod
long   command:rdma                        iproute2
long   file:/etc/libibverbs.d/rxe.driver   ibverbs-providers
fuzz   fuzzes:                             libclang-rt-dev
cluster command:etcd                        etcd-server
cluster command:systemd-nspawn              systemd-container
cluster command:mmdebstrap                  mmdebstrap
cluster command:containerd                  containerd
cluster command:runc                        runc
cluster command:buildah                     buildah
cluster command:/usr/lib/cni/bridge         containernetworking-plugins
dist   command:readelf                     binutils
dist   command:scdoc                       scdoc
cuda   command:g++                         g++
END
}

is_there() {
    case "$1" in
    command:*) command -v "${1#command:}" >/dev/null ;;
    file:*) [ -e "${1#file:}" ] ;;
    pkg:*) pkg-config --exists "${1#pkg:}" 2>/dev/null ;;
    browser:) command -v chromium chromium-browser google-chrome >/dev/null || ! grep -qx ID=debian /etc/os-release ;;
    fuzzes:) echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' |
        clang -fsanitize=fuzzer -x c -o /dev/null - 2>/dev/null ;;
    # apt's modules belong to the Python in /usr/bin, which another one may precede in PATH.
    imports:*) python3 -c "import ${1#imports:}" 2>/dev/null || /usr/bin/python3 -c "import ${1#imports:}" 2>/dev/null ;;
    compiles:*) printf '%s\n' "${1#compiles:}" | cc -x c -fsyntax-only - 2>/dev/null ;;
    esac
}

# Missing packages of the groups, one per line.
missing() {
    local group probe packages
    needs | while read -r group probe packages; do
        if [[ " $* " == *" $group "* ]] && ! is_there "$probe"; then
            printf '%s\n' "$packages"
        fi
    done
}

# One line, on stderr, so that the output of the main job stays clean; the output of apt only if it fails.
install() {
    printf 'installing with apt: %s\n' "$*" >&2
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    # Not an error if a source does not answer: the package may be in another one, or already known.
    apt-get update -qq >"$log" 2>&1 || true
    if ! DEBIAN_FRONTEND=noninteractive apt-get install -y -qq -o Dpkg::Use-Pty=0 \
        --no-install-recommends "$@" >>"$log" 2>&1; then
        cat "$log" >&2
        printf 'packages.sh: apt could not install: %s\n' "$*" >&2
        exit 1
    fi
}

mapfile -t packages < <(missing "$@")
[ "${#packages[@]}" -gt 0 ] || exit 0

command=(apt-get install -y --no-install-recommends "${packages[@]}")
if ! command -v apt-get >/dev/null; then
    printf 'packages.sh: missing here, under the names of Debian: %s\n' "${packages[*]}" >&2
    printf 'There is no apt-get on this machine: install what they correspond to and try again.\n' >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    printf 'packages.sh: missing here: %s\nInstall them as root and try again:\n    %s\n' "${packages[*]}" "${command[*]}" >&2
    exit 1
fi
install "${packages[@]}"
# A command may still be missing, for instance if an older one precedes it in PATH.
mapfile -t packages < <(missing "$@")
if [ "${#packages[@]}" -gt 0 ]; then
    printf 'packages.sh: installed, but not found: %s\n' "${packages[*]}" >&2
    exit 1
fi
