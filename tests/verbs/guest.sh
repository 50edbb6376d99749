#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# guest.sh run DIR COMMAND... - runs a command in a virtual machine whose kernel has RDMA devices, as many kernels of
# test machines have none: Soft-RoCE, rxe0 and rxe1 over the ends of a veth pair. Each reaches itself.
#
# The guest sees the files of this machine, read-only with a layer in its memory above them, and DIR, which both write.
# It needs qemu-system-x86, busybox-static, cpio, kmod, rdma-core and ibverbs-providers, and apt-get, which fetches a
# kernel of Debian that is kept in ~/.cache/epkit-tests. However this script ends, the guest ends with it.
#
# Exit status: the command's; 77 and a reason where such a guest cannot be had; 124 when it did not end in time.
set -euo pipefail

SECONDS_MAX="${EPKIT_GUEST_SECONDS:-600}"
MEMORY="${EPKIT_GUEST_MEMORY:-4G}"
# Emulation is slow, and works everywhere; virtual machines that offer /dev/kvm may fail with it.
ACCELERATOR="${EPKIT_GUEST_ACCELERATOR:-tcg,thread=multi}"
cache="${XDG_CACHE_HOME:-$HOME/.cache}/epkit-tests"
modules=(virtio_pci 9pnet_virtio 9p overlay veth crc32_generic crc32_pclmul ib_uverbs rdma_rxe)

no_guest() {
    echo "skipped: $*"
    exit 77
}

require() {
    local program
    for program in qemu-system-x86_64 busybox cpio depmod modprobe apt-get dpkg-deb timeout setpriv flock; do
        command -v "$program" >/dev/null || no_guest "$program is not installed"
    done
    [ "$(uname -m)" = x86_64 ] || no_guest "the guest is an x86-64 machine"
    [ -e /etc/libibverbs.d/rxe.driver ] || no_guest "ibverbs-providers is not installed"
}

# unpack_kernel PACKAGE FOLDER: the folder is there whole or not at all.
unpack_kernel() {
    local part
    rm -rf "$2".part-* # of runs that were killed
    part=$(mktemp -d "$2.part-XXXXXX") || return
    (cd "$part" && apt-get -qq -o APT::Sandbox::User=root download "$1" >&2) &&
        dpkg-deb -x "$part"/*.deb "$part" &&
        rm "$part"/*.deb &&
        depmod -b "$part" "$(ls "$part/lib/modules")" &&
        mv "$part" "$2"
}

# The newest kernel that apt knows, unpacked; its folder to $kernel.
find_kernel() {
    local package
    package=$(apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1)
    [ -n "$package" ] || no_guest "apt knows no linux-image-amd64 here"
    kernel="$cache/$package"
    mkdir -p "$cache"
    exec 9>"$kernel.lock"
    flock 9
    [ -d "$kernel/boot" ] || unpack_kernel "$package" "$kernel" || no_guest "the kernel $package could not be fetched"
    exec 9>&-
}

# make_initrd FILE
make_initrd() {
    local version module
    version=$(ls "$kernel/lib/modules")
    mkdir -p "$work"/{bin,proc,sys,dev,run,modules,host,top,root}
    cp "$(command -v busybox)" "$work/bin/busybox"
    for module in "${modules[@]}"; do
        modprobe -d "$kernel" -S "$version" --show-depends "$module" >>"$work/needed" ||
            no_guest "the kernel in $kernel has no module $module"
    done
    sed -n 's/^insmod \([^ ]*\).*/\1/p' "$work/needed" | awk '!seen[$0]++' | while read -r module; do
        cp "$module" "$work/modules/"
        basename "$module" >>"$work/modules/order"
    done
    rm "$work/needed"
    cp "$(dirname "${BASH_SOURCE[0]}")/guest_init.sh" "$work/init"
    chmod +x "$work/init"
    (cd "$work" && find . | cpio --quiet -o -H newc) | gzip -1 >"$1"
}

# shellcheck disable=SC2317 # by a trap
clean_up() {
    if [ -n "$guest" ]; then
        kill "$guest" 2>/dev/null || true
        wait "$guest" 2>/dev/null || true
    fi
    rm -rf "$work"
    [ -z "$dir" ] || rm -f "$dir/initrd"
}

run_guest() {
    local status=0
    require
    find_kernel
    trap clean_up EXIT
    trap 'exit 143' TERM INT HUP
    dir=$(realpath "$1")
    shift
    work=$(mktemp -d)
    make_initrd "$dir/initrd"
    rm -f "$dir/status" "$dir/output"
    printf '%q ' "$@" >"$dir/command"
    declare -px | grep -E '^declare -x (EPKIT|BATS|PATH=|OMPI)' >"$dir/environment" || true
    printf '%q' "$PWD" >"$dir/folder"
    setpriv --pdeathsig KILL timeout --foreground --kill-after=5 "$SECONDS_MAX" setpriv --pdeathsig KILL \
        qemu-system-x86_64 -machine q35 -accel "$ACCELERATOR" -cpu max -smp "${EPKIT_GUEST_CPUS:-2}" -m "$MEMORY" \
        -nodefaults -no-user-config -display none -no-reboot -serial "file:$dir/console" \
        -kernel "$kernel"/boot/vmlinuz-* -initrd "$dir/initrd" -append "console=ttyS0 panic=-1 quiet" \
        -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
        -virtfs "local,path=$dir,mount_tag=dir,security_model=none" \
        </dev/null >"$dir/qemu" 2>&1 &
    guest=$!
    wait "$guest" || status=$?
    guest=
    cat "$dir/output" 2>/dev/null || true
    if [ -s "$dir/status" ]; then
        exit "$(cat "$dir/status")"
    fi
    echo "the guest has ended without a status (qemu: $status); its console:" >&2
    tail -n 40 "$dir/console" >&2 || true
    tail -n 5 "$dir/qemu" >&2 || true
    [ "$status" -eq 124 ] && exit 124
    exit 1
}

work='' dir='' guest='' kernel=''
case "${1:-}" in
run)
    [ $# -ge 3 ] || { echo "usage: guest.sh run DIR COMMAND..." >&2 && exit 2; }
    shift
    run_guest "$@"
    ;;
*)
    echo "usage: guest.sh run DIR COMMAND..." >&2
    exit 2
    ;;
esac
