#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit topo, on made-up machines and on this one.
#
# shellcheck disable=SC2154 # $stderr is set by run

load common
load machines

setup_file() {
    make_trees a4 h100 h100-4nic h100-16nic gb200 vm-flat laptop empty
}

setup() {
    cd "$BATS_FILE_TMPDIR" || return 1
}

# query TREE FILTER [option...]: of the JSON document
query() {
    epkit topo --from "$1" --json "${@:3}" | jq -c "$2"
}

# path TREE ROW COLUMN
path() {
    query "$1" ".matrix[] | select(.name == \"$2\").paths[\"$3\"]" --only matrix
}

@test "A4: the verdict, and the tree with switches, GPUs and NICs at their places" {
    run -0 --separate-stderr epkit topo --from a4 --only tree
    [ "$stderr" = "" ]
    [ "${lines[0]}" = "8 x NVIDIA B200 and 8 NICs (mlx5_0..mlx5_7, 400 Gb/s RoCE), each GPU its own nearest NIC." ]
    [ "${lines[1]}" = "pci0000:8a  NUMA node 0, CPUs 0-55,112-167" ]
    [ "${lines[2]}" = "    0000:8b:00.0  switch" ]
    [ "${lines[3]}" = "        0000:8f:00.0  GPU 0  NVIDIA B200  PCIe 32 GT/s x16" ]
    [ "${lines[5]}" = "        0000:91:00.0  mlx5_0  400 Gb/s RoCE (gpu0rdma0)  PCIe 32 GT/s x16" ]
    # Root ports and downstream ports are passed over; network controllers without RDMA are no NICs.
    [[ "$output" != *0000:8a:01.0* ]]
    [[ "$output" != *0000:00:0c.0* ]]
}

@test "A4: the matrix in the terms of nvidia-smi topo -m" {
    [ "$(path a4 GPU0 GPU0)" = '"X"' ]
    [ "$(path a4 GPU0 GPU7)" = '"NV18"' ]
    [ "$(path a4 GPU0 mlx5_1)" = '"PIX"' ]
    [ "$(path a4 GPU0 mlx5_2)" = '"PHB"' ]
    [ "$(path a4 GPU0 mlx5_4)" = '"SYS"' ]
    [ "$(path a4 mlx5_4 GPU0)" = '"SYS"' ]
    [ "$(path gb200 GPU0 mlx5_1)" = '"NODE"' ]
    [ "$(path vm-flat GPU0 GPU1)" = '"PHB"' ]
    # As a table: a row and a column for each device.
    run epkit topo --from a4 --only matrix
    [ "$(grep -c '^GPU[0-9]\|^mlx5_' <<<"$output")" -eq 16 ]
    grep -q '^GPU0 .* NV18 .* PIX .* PHB .* SYS .* 0-55,112-167  *0$' <<<"$output"
}

@test "A4: the map and its forms, and what NVSHMEM would choose by itself" {
    local map="0:mlx5_0:1,1:mlx5_1:1,2:mlx5_2:1,3:mlx5_3:1,4:mlx5_4:1,5:mlx5_5:1,6:mlx5_6:1,7:mlx5_7:1"
    [ "$(query a4 .forms.DEEP_EP_DEVICE_TO_HCA_MAPPING)" = "\"$map\"" ]
    [ "$(query a4 '[.forms.ranks[].NVSHMEM_HCA_LIST]')" = "[\"$(seq -f 'mlx5_%g:1' -s '","' 0 7)\"]" ]
    [ "$(query a4 '[.nvshmem[].device] | unique')" = '["mlx5_0:1","mlx5_2:1","mlx5_4:1","mlx5_6:1"]' ]
    run epkit topo --from a4 --only map
    [[ "$output" == *"DEEP_EP_DEVICE_TO_HCA_MAPPING=$map"* ]]
    [[ "$output" == *"NCCL_IB_HCA==mlx5_0:1,"* ]]
    [[ "$output" == *"EPKIT_VERBS_DEVICE=mlx5_0:1,"* ]]
    [[ "$output" == *"would share mlx5_0, mlx5_2, mlx5_4 and mlx5_6, and mlx5_1, mlx5_3, mlx5_5 and mlx5_7 would be idle."* ]]
}

@test "fewer NICs than GPUs, more, management NICs" {
    run epkit topo --from h100-4nic
    [[ "${lines[0]}" == *"4 of the NICs shared by up to 2 GPUs." ]]
    [[ "$output" == *"mlx5_2  uplink: the default route goes over it; NODE from the nearest GPU, and 4 other NICs are nearer to one"* ]]
    [[ "$output" == *"mlx5_3  management: NODE from the nearest GPU, and 4 other NICs are nearer to one"* ]]
    # Each GPU has two, and none is idle.
    [ "$(query h100-16nic '.map[7].devices')" = '["mlx5_16:1","mlx5_17:1"]' ]
    run epkit topo --from h100 --only nics
    [[ "${lines[0]}" == *"(mlx5_0..mlx5_3 and mlx5_6..mlx5_9, 400 Gb/s InfiniBand)"* ]]
    [ "$(query h100 '[.nics[] | select(.role != "data").name]')" = '["mlx5_4","mlx5_5"]' ]
}

@test "a GPU and no NIC; NICs and no GPU" {
    run -0 epkit topo --from laptop
    [ "${lines[0]}" = "1 x NVIDIA GeForce RTX 4060 Laptop GPU and no RDMA NIC." ]
    [ "$(query laptop '[.map[0].device, .forms.NCCL_IB_HCA]')" = '[null,null]' ]
    cp -r h100 nics-only
    rm nics-only/epkit-overlay.json nics-only/sys/bus/pci/devices/0000:{1b,43,52,61,9d,c3,d1,df}:00.0
    run -0 epkit topo --from nics-only
    [[ "${lines[0]}" == "No NVIDIA GPU and 8 NICs ("*"InfiniBand)." ]]
}

@test "without an answer of the driver the reason is said, and the rest is there" {
    cp -r a4 silent
    rm silent/epkit-overlay.json
    run -0 epkit topo --from silent --only tree
    [[ "$output" == *"The driver did not answer ("*"NVLinks and compute capabilities are not known."* ]]
    [ "$(query silent '[.gpus[0].answered, .gpus[0].compute_capability, .driver.answered]')" = '[false,null,false]' ]
    [ "$(path silent GPU0 GPU1)" = '"PIX"' ]
}

@test "the documents fit the schema, whole and in parts" {
    for tree in a4 h100 h100-4nic gb200 vm-flat laptop empty; do
        epkit topo --from "$tree" --json >"$tree.json" || [ $? -eq 4 ]
        valid topo "$tree.json"
    done
    [ "$(jq -c keys a4.json)" = '["cut","driver","epkit","forms","gpus","hidden_gpus","map","matrix","nics","not_read","numa","nvshmem","pci","schema_version","subcommand","verdict"]' ]
    epkit topo --from a4 --json --only nics >nics.json
    valid topo nics.json
    [ "$(jq -c keys nics.json)" = '["epkit","nics","not_read","schema_version","subcommand","verdict"]' ]
    [ "$(jq -c '.nics[0].ports[0].gids[] | select(.type == "RoCE v2" and .kind == "IPv4").index' a4.json)" = 3 ]
    [ "$(jq -c '.gpus[0] | [.compute_capability, .nvlinks_switch, .fabric]' a4.json)" = '["10.0",18,"ready"]' ]
}

@test "neither GPU nor NIC: one line that says where was looked, exit code 4" {
    run -4 --separate-stderr epkit topo --from empty
    [ "$stderr" = "" ]
    [ "${#lines[@]}" -eq 1 ]
    [[ "$output" == "Neither a GPU nor an RDMA NIC: "*"/sys/bus/pci/devices"*"/sys/class/infiniband"* ]]
    run -4 epkit topo --from empty --json
    [ "$(jq -r .verdict <<<"$output")" = "$(epkit topo --from empty)" ]
}

@test "this machine: shown or said to have nothing, and the same from its snapshot" {
    local here=0 there=0
    epkit topo >here.txt 2>here.err || here=$?
    [ "$here" -eq 0 ] || [ "$here" -eq 4 ]
    [ ! -s here.err ]
    epkit topo --save here.json >saving.txt 2>saving.err || [ $? -eq "$here" ]
    grep -q "saved as here.json" saving.err
    epkit topo --from here.json >there.txt || there=$?
    [ "$there" -eq "$here" ]
    diff here.txt saving.txt
    diff here.txt there.txt
}

@test "a snapshot says the same as the machine, and nothing identifies it" {
    epkit topo --from a4 --save a4.snapshot >saving.txt 2>saving.err
    for format in "" --json; do
        # shellcheck disable=SC2086 # no word where it is empty
        diff <(epkit topo --from a4 $format) <(epkit topo --from a4.snapshot $format)
    done
    # Saved again it stays as it is.
    epkit topo --from a4.snapshot --save again.snapshot >/dev/null 2>&1
    diff <(epkit topo --from a4.snapshot --json) <(epkit topo --from again.snapshot --json)
    # The output itself names no UUID and no address of a port.
    run ! grep -E 'GPU-[0-9a-f]{8}|[0-9a-f]{4}:[0-9a-f]{4}:[0-9a-f]{4}' <(epkit topo --from a4 --json)
}

@test "--save refuses what it cannot write before anything is read" {
    mkdir -p folder
    run -2 --separate-stderr epkit topo --from a4 --save folder
    [ "$output" = "" ]
    [[ "$stderr" == *"'folder' is a folder"* ]]
    run -2 --separate-stderr epkit topo --from a4 --save -
    [[ "$stderr" == *"standard output has the machine itself; name a file"* ]]
    [ ! -e ./- ]
    run -2 --separate-stderr epkit topo --from a4 --save nowhere/file
    [[ "$stderr" == *"nothing can be written in 'nowhere': No such file or directory"* ]]
    # What is there is replaced, as with any other output file.
    echo old >old.json
    epkit topo --from a4 --save old.json >/dev/null 2>&1
    [ "$(epkit topo --from old.json | head -n 1)" = "$(epkit topo --from a4 | head -n 1)" ]
}

@test "the snapshot is written although nobody reads what is shown" {
    bash -c "'$EPKIT' topo --from a4 --save unread.json 2>/dev/null | true" || true
    epkit topo --from unread.json >/dev/null
}

@test "--from refuses what is no machine" {
    echo "{}" >no-snapshot
    run -2 --separate-stderr epkit topo --from no-snapshot
    [[ "$stderr" == *"--from: "* ]]
    run -2 --separate-stderr epkit topo --from nothing-here
}

@test "an output that cannot be written is a failure" {
    run -1 --separate-stderr bash -c "'$EPKIT' topo --from a4 >/dev/full"
    run -1 --separate-stderr bash -c "'$EPKIT' topo --from a4 --json >/dev/full"
}

@test "hostile trees: loops, more devices than anybody has, missing files" {
    mkdir -p wild/sys/bus/pci/devices wild/sys/devices/pci0000:00 wild/sys/class/infiniband
    # Links in a circle, a device that is its own parent, one without any file.
    ln -s 0000:00:00.0 wild/sys/bus/pci/devices/0000:00:00.0
    ln -s 0000:00:02.0 wild/sys/bus/pci/devices/0000:00:01.0
    ln -s 0000:00:01.0 wild/sys/bus/pci/devices/0000:00:02.0
    mkdir -p wild/sys/devices/pci0000:00/0000:00:03.0/0000:00:03.0
    echo 0x030200 >wild/sys/devices/pci0000:00/0000:00:03.0/0000:00:03.0/class
    echo 0x10de >wild/sys/devices/pci0000:00/0000:00:03.0/0000:00:03.0/vendor
    ln -s ../../../devices/pci0000:00/0000:00:03.0/0000:00:03.0 wild/sys/bus/pci/devices/0000:00:03.0
    mkdir wild/sys/bus/pci/devices/0000:00:04.0
    ln -s mlx5_0 wild/sys/class/infiniband/mlx5_0
    run -0 epkit topo --from wild
    [[ "${lines[0]}" == "1 x NVIDIA "* ]]
    epkit topo --from wild --json | valid topo

    mkdir -p crowd/sys/bus/pci/devices
    (cd crowd/sys/bus/pci/devices && seq 0 99999 | xargs touch)
    run -4 --separate-stderr thrifty 20 "$EPKIT" topo --from crowd
    [[ "$output" == *"PCI devices could not be read (/sys/bus/pci/devices: "* ]]

    # Beside GPUs as well: what cannot be read is not the same as nothing.
    cp -r laptop crowded
    mkdir -p crowded/sys/class/infiniband
    (cd crowded/sys/class/infiniband && seq 0 19999 | xargs touch)
    run -0 epkit topo --from crowded --only tree
    [[ "${lines[1]}" == "Devices may be missing, these could not be read: /sys/class/infiniband: "* ]]

    mkdir -p many/sys/bus/pci/devices many/sys/class/infiniband
    for i in {1..300}; do mkdir -p "many/sys/class/infiniband/nic$i/ports/1"; done
    run -0 epkit topo --from many --only tree
    [[ "$output" == *"There are more devices than are shown."* ]]
}

@test "a compressed snapshot: what to do" {
    cd "$BATS_TEST_TMPDIR" || return 1
    echo '{"epkit_snapshot": 1}' >snapshot.json
    for program in gzip xz zstd; do
        command -v "$program" >/dev/null || continue
        "$program" -c snapshot.json >packed
        run -2 --separate-stderr epkit topo --from packed
        [[ "$stderr" == *"--from: packed: it is compressed: decompress it first"* ]]
    done
}
