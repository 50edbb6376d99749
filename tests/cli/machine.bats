#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# What is said about the machine, on this one and on a made-up one.

load common

# device ADDRESS CLASS VENDOR DEVICE: on the PCI bus below $BATS_TEST_TMPDIR/root
device() {
    local folder="$BATS_TEST_TMPDIR/root/sys/devices/pci0000:00/$1"
    mkdir -p "$folder" "$BATS_TEST_TMPDIR/root/sys/bus/pci/devices"
    echo "$2" >"$folder/class"
    echo "$3" >"$folder/vendor"
    echo "$4" >"$folder/device"
    echo "$3" >"$folder/subsystem_vendor"
    echo 0x1 >"$folder/subsystem_device"
    head -c 256 /dev/zero >"$folder/config"
    ln -s "../../../devices/pci0000:00/$1" "$BATS_TEST_TMPDIR/root/sys/bus/pci/devices/$1"
}

machine() {
    epkit bench --quick --only plan --boot fork --json | jq .machine
}

@test "GPUs on the PCI bus are found: NVIDIA's, and no other function or vendor" {
    device 0000:00:05.0 0x030200 0x10de 0x2330
    device 0000:00:05.1 0x040300 0x10de 0x22ba
    device 0000:00:06.0 0x030000 0x1002 0x744c
    device 0000:00:07.0 0x030000 0x10de 0x2684
    export HWLOC_FSROOT="$BATS_TEST_TMPDIR/root" HWLOC_HIDE_ERRORS=1
    [ "$(machine 2>/dev/null | jq -c '[.gpus[].pci]')" = '["0000:00:05.0","0000:00:07.0"]' ]
}

@test "this machine: cores, memory and kernel are those of the system" {
    machine >"$BATS_TEST_TMPDIR/machine.json"
    cd "$BATS_TEST_TMPDIR"
    [ "$(jq .cores machine.json)" -eq "$(nproc)" ]
    [ "$(jq -r .kernel machine.json)" = "$(uname -r)" ]
    [ "$(jq .memory_bytes machine.json)" -gt $((1 << 26)) ]
}

@test "nothing in it names the machine" {
    machine >"$BATS_TEST_TMPDIR/machine.json"
    run jq -r 'keys[]' "$BATS_TEST_TMPDIR/machine.json"
    [ "$(xargs <<<"$output")" = "arch cores cpu gpu_driver gpus kernel memory_bytes mpi mpi_missing numa_nodes os" ]
}
