#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# guest.sh run DIR COMMAND... - runs a command in a virtual machine whose kernel has RDMA devices, as many kernels of
# test machines have none: Soft-RoCE, rxe0 and rxe1 over the ends of a veth pair. Each reaches itself.
#
# The guest sees the files of this machine, read-only with a layer in its memory above them, and DIR, which both write.
# Nothing is installed or left. It needs qemu-system-x86, busybox-static, cpio, kmod, rdma-core and ibverbs-providers,
# and apt-get, which fetches a kernel of Debian that is kept in ~/.cache/epkit-tests.
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
    for program in qemu-system-x86_64 busybox cpio depmod modprobe apt-get dpkg-deb timeout; do
        command -v "$program" >/dev/null || no_guest "$program is not installed"
    done
    # A static one runs in an initrd.
    [ "$(uname -m)" = x86_64 ] || no_guest "the guest is an x86-64 machine"
    [ -e /etc/libibverbs.d/rxe.driver ] || no_guest "ibverbs-providers is not installed"
}

# The newest kernel that apt knows, unpacked; its folder is printed.
fetch_kernel() {
    local package folder
    package=$(apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1)
    [ -n "$package" ] || no_guest "apt knows no linux-image-amd64 here"
    folder="$cache/$package"
    mkdir -p "$cache"
    (
        flock 9
        [ ! -e "$folder" ] || exit 0
        # Folders of runs that were killed.
        rm -rf "$folder".part-*
        part=$(mktemp -d "$folder.part-XXXXXX")
        cd "$part"
        apt-get -qq -o APT::Sandbox::User=root download "$package" >&2
        dpkg-deb -x ./*.deb .
        rm ./*.deb
        depmod -b . "$(ls lib/modules)"
        mv "$part" "$folder"
    ) 9>"$folder.lock" || no_guest "the kernel $package could not be fetched"
    echo "$folder"
}

# initrd KERNEL-FOLDER FILE
make_initrd() {
    local kernel="$1" file="$2" version work module
    version=$(ls "$kernel/lib/modules")
    work=$(mktemp -d)
    mkdir -p "$work"/{bin,proc,sys,dev,run,modules,host,top,root}
    cp "$(command -v busybox)" "$work/bin/busybox"
    for module in "${modules[@]}"; do
        modprobe -d "$kernel" -S "$version" --show-depends "$module"
    done | sed -n 's/^insmod \([^ ]*\).*/\1/p' | awk '!seen[$0]++' >"$work/modules/order.host"
    while read -r module; do
        cp "$module" "$work/modules/"
        basename "$module"
    done <"$work/modules/order.host" >"$work/modules/order"
    cp "$(dirname "${BASH_SOURCE[0]}")/guest_init.sh" "$work/init"
    chmod +x "$work/init"
    (cd "$work" && find . | cpio --quiet -o -H newc) | gzip -1 >"$file"
    rm -rf "$work"
}

run_guest() {
    local dir kernel status=0
    dir=$(realpath "$1")
    shift
    require
    kernel=$(fetch_kernel)
    case "$kernel" in skipped:*) echo "$kernel" && exit 77 ;; esac
    make_initrd "$kernel" "$dir/initrd"
    rm -f "$dir/status"
    printf '%q ' "$@" >"$dir/command"
    declare -px | grep -E '^declare -x (EPKIT|BATS|PATH=|OMPI)' >"$dir/environment" || true
    printf '%q' "$PWD" >"$dir/folder"
    timeout --kill-after=5 "$SECONDS_MAX" qemu-system-x86_64 -machine q35 -accel "$ACCELERATOR" -cpu max -smp 2 -m "$MEMORY" \
        -nodefaults -no-user-config -display none -no-reboot -serial "file:$dir/console" \
        -kernel "$kernel"/boot/vmlinuz-* -initrd "$dir/initrd" -append "console=ttyS0 panic=-1 quiet" \
        -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
        -virtfs "local,path=$dir,mount_tag=dir,security_model=none" \
        </dev/null >"$dir/qemu" 2>&1 || status=$?
    rm -f "$dir/initrd"
    cat "$dir/output" 2>/dev/null || true
    if [ -s "$dir/status" ]; then
        exit "$(cat "$dir/status")"
    fi
    echo "the guest has ended without a status (qemu: $status); its console:" >&2
    tail -n 40 "$dir/console" "$dir/qemu" >&2 || true
    [ "$status" -eq 124 ] && exit 124
    exit 1
}

case "${1:-}" in
run)
    shift
    run_guest "$@"
    ;;
*)
    echo "usage: guest.sh run DIR COMMAND..." >&2
    exit 2
    ;;
esac
