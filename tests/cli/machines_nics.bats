#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Faults of NICs, of their libraries, of limits and of the topology, on made-up machines. Each yields its finding and no other.

load common
load machines

setup_file() {
    # shellcheck disable=SC2046
    make_trees $(variants_of_file "$BATS_TEST_FILENAME")
}

@test "h100/slow-link-pcie: half the lanes" {
    fault h100/slow-link-pcie
}

@test "h100/slow-link-rate: half the rate" {
    fault h100/slow-link-rate
}

@test "h100/storage: storage NICs are left alone" {
    fault h100/storage
}

@test "h100/storage-port-down: cable pulled beside storage NICs" {
    fault h100/storage-port-down
}

@test "h100/storage-link-layer: one port is Ethernet as those for storage are" {
    fault h100/storage-link-layer
}

@test "a3u/gid-ipv6: network with IPv6 only" {
    fault a3u/gid-ipv6
}

@test "a3u/gid-ipv6-told: network with IPv6 only, and told so" {
    fault a3u/gid-ipv6-told
}

@test "h100/pod-without-rdma: pod that was given no RDMA device" {
    fault h100/pod-without-rdma
}

@test "vm-flat/workstation: two ports with one cable" {
    fault vm-flat/workstation
}

@test "a4/gid: no IPv4 GID" {
    fault a4/gid
}

@test "a4/gid-index: index of a RoCE v1 GID" {
    fault a4/gid-index
}

@test "h100/port-down: cable pulled" {
    fault h100/port-down
}

@test "a4/port-down: cable pulled under a mapping" {
    fault a4/port-down
}

@test "h100/link-layer: one port is Ethernet" {
    fault h100/link-layer
    # Certain: a rail on a switch with its GPU, without an address, and seven like it of the other kind.
    jq --exit-status '.checks[] | select(.id == "link-layer")
        | .fix == "sudo mlxconfig -d 0000:5e:00.0 set LINK_TYPE_P1=IB" and .fix_class == "cuts-off"' h100.link-layer.doctor.tree
}

@test "a4/nic-access: device files not for this user" {
    fault a4/nic-access
}

@test "a4/nic-access-absent: device files not in the container" {
    fault a4/nic-access-absent
}

@test "a4/provider-missing: core library without its provider" {
    fault a4/provider-missing
}

@test "a4/provider-missing-core: no libibverbs at all" {
    fault a4/provider-missing-core
}

@test "a4/verbs-mixed: core and provider of different sets" {
    fault a4/verbs-mixed
}

@test "a4/rdmav-drivers: providers as a folder" {
    fault a4/rdmav-drivers
}

@test "a4/verbs-from-gib: gIB before the system" {
    fault a4/verbs-from-gib
}

@test "a4/memlock: little locked memory" {
    fault a4/memlock
}

@test "a4/shm: /dev/shm of a container" {
    fault a4/shm
}

@test "laptop/shm: small /dev/shm, one GPU" {
    fault laptop/shm
}

@test "gb200/imex: no IMEX channel" {
    fault gb200/imex
}

@test "gb200/imex-fabric: fabric not joined" {
    fault gb200/imex-fabric
}

@test "a4/visible-devices: permuted" {
    fault a4/visible-devices
}

@test "a4/visible-devices-uuid: by UUID" {
    fault a4/visible-devices-uuid
}

@test "h100/acs: requests are redirected" {
    fault h100/acs
}

@test "h100/iommu: translation on" {
    fault h100/iommu
}

@test "laptop/iommu: one GPU behind the IOMMU" {
    fault laptop/iommu
}

@test "h100/no-devices: a step of Slurm without GPUs" {
    fault h100/no-devices
}

@test "h100/one-task: a shell that is the only task" {
    fault h100/one-task
}

@test "a4/affinity: bound to the other NUMA node" {
    fault a4/affinity
}

@test "h100/job: job with two of the GPUs" {
    fault h100/job
}
