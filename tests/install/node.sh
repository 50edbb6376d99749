#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A node with its own systemd that can really reboot (new boot id) and lose power: a container of systemd-nspawn.
#
#   node.sh template CACHE         makes CACHE/template, once: Debian 12 with systemd and a package repository in
#                                  /srv/repo that holds the packages of debian-tools and epkit-only, older ones of some
#   node.sh make CACHE ROOT BUILD  a node's root folder, with the epkit of the build tree in /opt/epkit
#   node.sh boot ROOT              boots it in the background and waits until it is up
#   node.sh boot_wait ROOT         waits until it is up again
#   node.sh on ROOT COMMAND...     runs a command inside
#   node.sh cut ROOT               power cut: every process is killed at once (the page cache of the host survives, so
#                                  so unsynced writes are not lost, unlike in a real power cut)
#   node.sh boots ROOT             how often it has booted
#   node.sh off ROOT               ends it for good
#
# Needs root, systemd-container; for the template mmdebstrap, dpkg-dev and the Debian mirror that this machine uses.
set -euo pipefail

PACKAGES=(rdma-core ibverbs-utils ibverbs-providers perftest libfabric1 libfabric-bin openmpi-bin pciutils ethtool iproute2 numactl)
OLDER=(perftest libfabric1 libfabric-bin) # also with a version 0.9-1
VERSION=2                                 # of the template: one of another version is made anew

fail() {
    printf 'node.sh: %s\n' "$1" >&2
    exit 1
}

# nspawn as a plain container: no machined, no unit, the network of the host.
spawn() {
    systemd-nspawn -q --register=no --keep-unit --resolv-conf=off "$@"
}

mirror() {
    local found
    found=$(sed -n 's/^URIs: *\([^ ]*\).*/\1/p' /etc/apt/sources.list.d/*.sources 2>/dev/null | grep debian | head -1)
    printf '%s\n' "${found:-http://deb.debian.org/debian}"
}

repository() {
    local root=$1 package deb work
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    spawn -D "$root" --pipe sh -ec "apt-get -q update; apt-get -qy install --download-only --no-install-recommends \
        ${PACKAGES[*]}"
    mkdir -p "$root/srv/repo"
    mv "$root"/var/cache/apt/archives/*.deb "$root/srv/repo/"
    work=$(mktemp -d)
    for package in "${OLDER[@]}"; do
        deb=$(find "$root/srv/repo" -name "${package}_*.deb")
        dpkg-deb -R "$deb" "$work/$package"
        sed -i 's/^Version: .*/Version: 0.9-1/; s/libfabric1 (= [^)]*)/libfabric1 (= 0.9-1)/' \
            "$work/$package/DEBIAN/control"
        dpkg-deb --root-owner-group -b "$work/$package" "$root/srv/repo/${package}_0.9-1_amd64.deb" >/dev/null
    done
    rm -rf "$work"
    (cd "$root/srv/repo" && dpkg-scanpackages --multiversion . >Packages 2>/dev/null)
    rm -rf "$root"/etc/apt/sources.list.d/* "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/*
    echo 'deb [trusted=yes] file:/srv/repo ./' >"$root/etc/apt/sources.list"
}

template() {
    local cache=$1
    [ "$(cat "$cache/template.version" 2>/dev/null)" != "$VERSION" ] || return 0
    rm -rf "$cache/template" "$cache/template.version" "$cache/base.tar"
    mkdir -p "$cache/template"
    mmdebstrap --quiet --variant=minbase --include=systemd,systemd-sysv,dbus,udev,kmod,procps bookworm \
        "$cache/base.tar" "$(mirror)"
    tar -xf "$cache/base.tar" -C "$cache/template"
    rm "$cache/base.tar"
    repository "$cache/template"
    # Disables what changes from node to node, or from boot to boot.
    rm -f "$cache/template/etc/machine-id"
    echo 0123456789abcdef0123456789abcdef >"$cache/template/etc/machine-id"
    ln -sf /dev/null "$cache/template/etc/systemd/system/systemd-resolved.service"
    for timer in apt-daily apt-daily-upgrade dpkg-db-backup e2scrub_all fstrim; do
        ln -sf /dev/null "$cache/template/etc/systemd/system/$timer.timer"
    done
    echo "$VERSION" >"$cache/template.version"
}

make() {
    local cache=$1 root=$2 build=$3 library
    mkdir -p "$root"
    cp -a --reflink=auto "$cache/template/." "$root"
    mkdir -p "$root/opt/epkit"
    cp "$build/epkit" "$build"/libepkit.so* "$root/opt/epkit/"
    while read -r library; do
        if [ ! -e "$root/usr/lib/x86_64-linux-gnu/${library##*/}" ]; then
            cp -L "$library" "$root/opt/epkit/"
        fi
    done < <(ldd "$build/epkit" | sed -n 's/.*=> \(\/[^ ]*\) .*/\1/p' | grep -v libepkit)
    printf '#!/bin/sh\nexec env LD_LIBRARY_PATH=/opt/epkit /opt/epkit/epkit "$@"\n' >"$root/usr/local/bin/epkit"
    chmod +x "$root/usr/local/bin/epkit"
    mkdir -p "$root/etc/systemd/system.conf.d" # the unit that resumes starts the binary itself
    printf '[Manager]\nDefaultEnvironment=LD_LIBRARY_PATH=/opt/epkit\n' >"$root/etc/systemd/system.conf.d/epkit.conf"
}

# The first process of the container: the child of nspawn in a PID namespace of its own.
leader() {
    local pid
    for pid in $(pgrep -P "$(cat "$1.node/pid")"); do
        if [ "$(readlink "/proc/$pid/ns/pid")" != "$(readlink /proc/self/ns/pid)" ]; then
            printf '%s\n' "$pid"
            return 0
        fi
    done
    return 1
}

# At a shutdown systemd stops all processes before it ends them, and nsenter stops when its child does: then no process
# would reap the child, and the container would never end. So this loop continues nsenter.
on() {
    local root=$1 pid watcher code=0
    shift
    nsenter -t "$(leader "$root")" -a -- /usr/bin/env -i \
        PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "$@" &
    pid=$!
    trap 'kill "$pid" 2>/dev/null || :' TERM
    while kill -0 "$pid" 2>/dev/null; do
        if grep -qs '^State:.T' "/proc/$pid/status"; then kill -CONT "$pid"; fi
        sleep 0.3
    done >/dev/null 2>&1 3>&- 4>&- &
    watcher=$!
    wait "$pid" || code=$?
    kill "$watcher" 2>/dev/null || :
    return "$code"
}

# With --keep-unit nspawn exits with 133 when the container reboots, and its caller starts it again.
boot() {
    local root=$1
    mkdir -p "$root.node"
    rm -f "$root.node/off"
    # shellcheck disable=SC2016 # for the inner shell
    setsid "$(dirname "$0")/../own_cgroup.sh" bash -c 'root=$1
        while [ ! -e "$root.node/off" ]; do
            echo boot >>"$root.node/boots"
            systemd-nspawn -q -D "$root" --register=no --keep-unit --resolv-conf=off --console=pipe -b \
                >>"$root.node/console" 2>&1 </dev/null &
            echo $! >"$root.node/pid"
            wait $!
            [ $? = 133 ] || break
        done' - "$root" >/dev/null 2>&1 </dev/null 3>&- 4>&- &
    boot_wait "$root"
}

boot_wait() {
    local root=$1 state
    for _ in $(seq 600); do
        sleep 0.2
        state=$("$0" on "$root" systemctl is-system-running 2>/dev/null || :)
        case $state in
        running | degraded) return 0 ;;
        esac
    done
    fail "$root did not boot; its console is $root.node/console"
}

cut() {
    local root=$1 pid first
    pid=$(cat "$root.node/pid")
    first=$(leader "$root" || :)
    kill -9 "$pid" 2>/dev/null || :
    if [ -n "$first" ]; then kill -9 "$first" 2>/dev/null || :; fi
    for _ in $(seq 300); do
        if ! kill -0 "$pid" 2>/dev/null && ! kill -0 "${first:-$pid}" 2>/dev/null; then return 0; fi
        sleep 0.1
    done
    fail "$root does not end"
}

action=${1:?what to do}
shift
case $action in
template) template "$(realpath -m "$1")" ;;
make) make "$(realpath "$1")" "$(realpath -m "$2")" "$(realpath "$3")" ;;
boot) boot "$(realpath "$1")" ;;
boot_wait) boot_wait "$(realpath "$1")" ;;
on)
    root=$(realpath "$1")
    shift
    on "$root" "$@"
    ;;
cut) cut "$(realpath "$1")" ;;
off)
    root=$(realpath "$1")
    touch "$root.node/off"
    cut "$root"
    ;;
boots) wc -l <"$(realpath "$1").node/boots" ;;
*) fail "unknown action '$action'" ;;
esac
