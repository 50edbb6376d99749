#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Faults of the driver and of GPUs, on made-up machines. Each yields its finding and no other.

load common
load machines

setup_file() {
    # shellcheck disable=SC2046
    make_trees $(variants_of_file "$BATS_TEST_FILENAME")
}

@test "h100/peermem: no way for a NIC into GPU memory" {
    fault h100/peermem
}

@test "h100/nv-peer-mem: the module of Mellanox" {
    fault h100/nv-peer-mem
}

@test "a4/driver-option: no reboot since the option" {
    fault a4/driver-option
}

@test "a4/driver-option-overruled: a later line wins" {
    fault a4/driver-option-overruled
}

@test "h100/signed-modules: modules signed by the distribution" {
    fault h100/signed-modules
}

@test "a4/doca-packages: modules of DOCA in another place" {
    fault a4/doca-packages
}

@test "a4/doca-kernel: DOCA too old for the kernel" {
    fault a4/doca-kernel
}

@test "a4/driver-skew: driver updated and not reloaded" {
    fault a4/driver-skew
}

@test "a4/driver-skew-library: libraries of another node" {
    fault a4/driver-skew-library
    # No reboot mends LD_LIBRARY_PATH.
    jq --exit-status '.checks[] | select(.id == "driver-skew")
        | (.fix | startswith("export LD_LIBRARY_PATH=")) and (.fix | contains("/usr/local/nvidia") | not)
            and .fix_class == "safe"' a4.driver-skew-library.doctor.tree
}

@test "h100/driver-absent: driver not loaded" {
    fault h100/driver-absent
}

@test "gb200/iommu-gb200: passthrough on Grace" {
    fault gb200/iommu-gb200
}

@test "a4/gpu-errors-ecc: uncorrected memory error" {
    fault a4/gpu-errors-ecc
}

@test "a4/gpu-errors-remap: row remap waits for a reset" {
    fault a4/gpu-errors-remap
}

@test "a4/gpu-errors-xid: fallen off the bus" {
    fault a4/gpu-errors-xid
}

@test "h100/gpu-recovered: recovered by a reset" {
    fault h100/gpu-recovered
}

@test "h100/gpu-errors-lost: NVML lists one GPU less" {
    fault h100/gpu-errors-lost
}

@test "a4/nvlink: some links down" {
    fault a4/nvlink
}

@test "h100/nvlink-cards: cards without bridges" {
    fault h100/nvlink-cards
}

@test "h100/nvlink-fabric: fabric manager is off" {
    fault h100/nvlink-fabric
}

@test "clocks: heat and the power supply are told apart, and hardware counts as an error" {
    python3 "$MACHINES/machines.py" gcp-a4-mig-off/hot "$BATS_TEST_TMPDIR/hot"
    python3 "$MACHINES/machines.py" gcp-a4-mig-off/warm "$BATS_TEST_TMPDIR/warm"
    python3 "$MACHINES/machines.py" gcp-a4-mig-off/power-brake "$BATS_TEST_TMPDIR/power"
    python3 "$MACHINES/machines.py" gcp-a4-mig-off/clocks-untold "$BATS_TEST_TMPDIR/untold"
    clocks() {
        epkit doctor --only clocks --from "$BATS_TEST_TMPDIR/$1" --json >"$BATS_TEST_TMPDIR/document" || true
        jq --raw-output ".checks[0] | $2" "$BATS_TEST_TMPDIR/document"
    }
    # GPU 5 is worse than GPU 2, and is named first; both are evidence.
    [[ "$(clocks hot .text)" == *"the hardware lowers the clocks to half or less because it is too hot, and other"* ]]
    [ "$(clocks hot '"\(.severity) \(.evidence | length)"')" = 'serious 2' ]
    [[ "$(clocks hot .advice)" == *fans* ]]
    [ "$(clocks warm .severity)" = warning ]
    [[ "$(clocks power .text)" == *"(power brake)" ]]
    [[ "$(clocks power .advice)" == *"power supplies"* ]]
    [ "$(clocks untold .outcome)" = not_here ]
}
