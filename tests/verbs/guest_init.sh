#!/bin/busybox sh
# shellcheck shell=dash
# SPDX-License-Identifier: Apache-2.0
# The first process of the guest (guest.sh): modules, files, two RDMA devices, the command, the end.
B=/bin/busybox
$B mount -t proc proc /proc
$B mount -t sysfs sysfs /sys
$B mount -t devtmpfs devtmpfs /dev

end() {
    [ -z "${1:-}" ] || $B echo "$1" >/dev/console
    $B sync
    $B poweroff -f
}

while read -r module; do
    $B insmod "/modules/$module" || end "insmod $module failed"
done </modules/order

mount_share() {
    $B mount -t 9p -o "trans=virtio,version=9p2000.L,msize=512000,$3" "$1" "$2"
}
mount_share host /host ro,cache=loose || end "no files of the host"
$B mount -t tmpfs tmpfs /top
$B mkdir /top/upper /top/work
$B mount -t overlay -o lowerdir=/host,upperdir=/top/upper,workdir=/top/work overlay /root || end "no overlay"
for folder in proc sys dev; do
    $B mount --move /$folder /root/$folder
done
$B ln -s /proc/self/fd /root/dev/fd
$B mkdir -p /root/dev/shm /root/dev/pts /root/run /root/tmp
$B mount -t tmpfs tmpfs /root/dev/shm
$B mount -t devpts devpts /root/dev/pts
$B mount -t tmpfs tmpfs /root/run
$B mkdir /root/run/guest
mount_share dir /root/run/guest cache=none || end "no folder of the host"

$B cat >/root/run/start <<'END'
cd /
ip link set lo up
ip link add veth0 type veth peer name veth1
for i in 0 1; do
    ip address add 10.9.$i.1/24 dev veth$i
    ip link set veth$i up mtu 4200
    rdma link add rxe$i type rxe netdev veth$i
done
ulimit -l unlimited
. /run/guest/environment
eval "cd $(cat /run/guest/folder)"
eval "$(cat /run/guest/command)" </dev/null >/run/guest/output 2>&1
echo $? >/run/guest/status
END
$B chroot /root /bin/bash /run/start
end
