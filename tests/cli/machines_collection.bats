#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# shellcheck disable=SC2154 # $stderr is set by run
# The doctor on the whole collection of machines: healthy ones as the field has them, each check's fault and its
# neighbours, live and from snapshots, and no snapshot with an identifier in it. tests/machines/collection.py does it.

# bats file_tags=once
load common
load machines

# A copy of a virtual environment is on the disk of the original.
teardown() {
    [ ! -L "$BATS_TEST_TMPDIR/venv" ] || rm -rf "$(readlink "$BATS_TEST_TMPDIR/venv")"
}

# collection WHICH [OPTION...]
collection() {
    python3 -S "$MACHINES/collection.py" "$EPKIT" "$@"
}

# All machines of a collection live, and every third one from its snapshot as well; in the long tier "all" does the rest.
both() {
    collection "$1" --saved 3
}

# With sanitizers one look at some machines is enough: what is said of them is compared without.
unless_sanitized() {
    [ -z "${EPKIT_SANITIZED-}" ] || [ -n "${EPKIT_TEST_LONG-}" ] || skip "long tier with sanitizers"
}

# bats test_tags=both
@test "healthy machines of clouds, makers, schedulers and containers have no finding" {
    local n
    n=$(python3 -S "$MACHINES/machines.py" --field | wc --lines)
    [ "$n" -ge 30 ]
    unless_sanitized
    both field
}

# bats test_tags=both
@test "each rule finds its fault, and leaves its neighbours alone" {
    unless_sanitized
    both rules
}

# bats test_tags=both
@test "more machines of clouds, makers and sites, healthy and with a fault" {
    unless_sanitized
    both sites
}

# bats test_tags=both
@test "machines of public reports, and neighbours that look like them" {
    unless_sanitized
    both reports
    both public
    both trials
}

@test "advice fits how a machine boots, where it runs, and what one paste mends" {
    cd "$BATS_TEST_TMPDIR" || return 1
    local name names=(dgx-h200-deepep/pxe-iommu dgx-h200-deepep/nfs-root dgx-h200-deepep/systemd-boot gke-a3-ultra-cos-pod/lost-gpus
        docker-host-network/lost-gpus dgx-b200/three-interfaces dgx-b200/nccl-conf-home
        dgx-b200/nixl-over-nixl dgx-b200/flashinfer-cubin dgx-b200/ucx-tcp gb200/ucx-no-ipc aws-p5/plugin-path
        aws-p5/no-fabric-manager workstation-4090/nova docker-two-gpus/uvm-number slurm-one-gpu-a-task/eight-tasks
        cloud-vm-one-gpu/fabric gb200/unprivileged docker-two-gpus/numbers-of-node gcp-a3-mega/one-too-high
        dgx-b200/nccl-of-both l40s-nps4/fell-off hgx-h100-broadcom/deepep-v2)
    trees "${names[@]}"
    for name in "${names[@]}"; do
        epkit doctor --from "${name/\//.}" --json >>said || [ $? -eq 3 ]
    done
    jq -r '.checks[] | select(.outcome == "found") | .id + ": " + (.fix // "" | gsub("\n"; "; ")) + " | " + .advice[:60]' said >told
    cat told
    diff told - <<'END'
iommu:  | This node boots over the network, so no file on it decides: 
nic-handler:  | The driver needs the line options nvidia NVreg_EnableStreamM
iommu:  | Add iommu=pt to /etc/kernel/cmdline, then sudo kernel-instal
gpu-access:  | Restart the pod. It was given them, and its device cgroup ha
gpu-access:  | Restart the container. It was given them, and its device cgr
socket-interface: unset NCCL_SOCKET_IFNAME NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME; export GLOO_SOCKET_IFNAME=eno1np0 | Without GLOO_SOCKET_IFNAME, Gloo takes the address of the ho
nccl-disabled: sudoedit /root/.nccl.conf | This machine has RDMA NICs for data.
stack-owners: pip uninstall -y nixl_cu12 nixl_cu13; pip install --force-reinstall --no-deps nixl-cu13==1.2.0 | Uninstall all of them, since each removes files of the other
stack-needs: pip uninstall -y flashinfer_cubin | It is a cache, and not necessary. Or install it in version 0
stack-needs: unset UCX_TLS UCX_NET_DEVICES | UCX takes the best of all where it is told none. NCCL reads 
stack-needs: unset UCX_TLS | UCX takes the best of all where it is told none. NCCL reads 
net-plugin: export LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} | The EFA installer brings it; in a container it belongs in th
nvlink: sudo apt-get install nvidia-fabricmanager-580=580.126.09-1; sudo systemctl restart nvidia-fabricmanager | nvidia-fabricmanager has to run, in exactly the driver's ver
driver-skew: echo 'blacklist nova_core' | sudo tee /etc/modprobe.d/blacklist-nova_core.conf; sudo update-initramfs -u; sudo reboot | NVIDIA's driver cannot use GPUs that are bound to it. Instal
uvm:  | On the node, not in this container: remove the file, run nvi
gpu-access:  | NVLink is not used between the tasks, and DeepEP stops. Give
nvlink:  | The host of this virtual machine owns the NVSwitches, and it
nic-access:  | Start the container with --device /dev/infiniband.
imex:  | Give the process the channel: the device belongs to the user
visible-devices: unset CUDA_VISIBLE_DEVICES | This container has GPUs 0 to 1: name each at most once. With
fastrak-interfaces: export NCCL_FASTRAK_IFNAME=eth1,eth2,eth3,eth4,eth5,eth6,eth7,eth8; export NCCL_FASTRAK_CTRL_DEV=eth0; export NCCL_SOCKET_IFNAME=eth0 | One network more than the machine type has moves the names o
two-nccl: pip uninstall -y nvidia-nccl-cu12; pip install --force-reinstall --no-deps nvidia-nccl-cu13==2.32.3 | PyTorch is for CUDA 13. What asks for the other one belongs 
driver-skew:  | The driver found that it has fallen off the bus (/var/log/ke
stack-needs: export EP_DISABLE_GIN=1 | With EP_DISABLE_GIN=1 one node works over NVLink. Without it
END
}

# bats test_tags=both
@test "libraries for expert parallelism: complete, in part, of another version" {
    unless_sanitized
    both stacks
}

# stacks MACHINE ARGUMENT...: the rows of --stacks, live and from the snapshot, as "name state: text | fix"
stacks() {
    local machine=${1/\//.} from
    trees "$1"
    shift
    epkit topo --from "$machine" --save saved >/dev/null
    for from in "$machine" saved; do
        epkit doctor --from "$from" --json --stacks "$@" >"$from.json" || [[ $? == [35] ]]
        jq -r '.stacks[] | .name + " " + .state + ": " + .text + " | " + (.fix // "" | gsub("\n"; "; "))' "$from.json" >"$from.rows"
    done
    diff "$machine.rows" saved.rows >&2
    cat saved.rows
}

@test "--stacks names the first thing missing, with the command that mends it" {
    cd "$BATS_TEST_TMPDIR" || return 1
    local name names
    names=(deepep-v2 deepep-v2-part deepep-v2-nccl deepep-v2-cuda-home deepep-v25-nvcc sgl-gone sgl-owners sgl-v25
        nixl-torch flashinfer flashinfer-nvcc egg deepep-v1-part deepep-v1-gone deepep-v2-gone deepep-v25-gone deepep-v1-no-torch
        deepep-v1-no-nccl deepep-v2-empty-nccl deepep-v2-no-nccl-dist deepep-v2-nccl-not-told deepep-v2-torch-not-told
        deepep-v25-nvcc-not-told nixl-part nccl-ep-part epkit epkit-sgl epkit-part)
    names=("${names[@]/#/dgx-b200/}" a4/shm docker-host-network/lost-gpus-deepep workstation-4090/unlinked
        dgx-b200/nixl-ucx-of-image rtx-6000-server/deepep-v1 aws-p5/uccl)
    trees "${names[@]}"
    for name in "${names[@]}"; do
        stacks "$name"
    done >told
    cat told
    diff - told <<'END'
deepep-v2 runs: runs here | 
deepep-v2 missing: DeepEP 2 is installed in part: there is no deep_ep/_C.*.so | pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP@dd758ca
deepep-v2 missing: DeepEP 2 needs NCCL 2.30.4 or later, and 2.28.9 is loaded | pip install --no-deps 'nvidia-nccl-cu12>=2.30.4'
deepep-v2 missing: DeepEP 2 compiles its kernels when it runs, and there is no nvcc: /opt/cuda/bin/nvcc | export CUDA_HOME=/usr/local/cuda
deepep-v2.5 missing: DeepEP 2.5 needs nvcc 13.1 or later, and /usr/local/cuda/bin/nvcc is 13.0.1 | sudo apt-get install cuda-nvcc-13-1
sgl-deep-ep missing: sgl-deep-ep 0.1.2.post1 is registered, and its package deep_ep is not there | pip install --force-reinstall --no-deps sgl-deep-ep==0.1.2.post1
sgl-deep-ep missing: 2 distributions contain the package deep_ep: deep_ep-2.1.0 and sgl_deep_ep-0.1.2.post1 | pip uninstall -y deep_ep sgl_deep_ep; pip install --force-reinstall --no-deps sgl-deep-ep==0.1.2.post1
sgl-deep-ep runs: runs here | 
sgl-deep-ep-v25 runs: runs here | 
nixl-ep missing: NIXL EP has extensions for PyTorch 2.14, and none for 2.15.0+cu130 | pip install --upgrade nixl
flashinfer-moe-ep missing: FlashInfer moe_ep needs NCCL EP | pip install nccl-extensions
flashinfer-moe-ep missing: FlashInfer moe_ep compiles its kernels when it runs, and there is no nvcc: /usr/local/cuda/bin/nvcc | sudo apt-get install cuda-nvcc-12-9
deepep-v1 missing: deep_ep cannot be imported: it was built for another version of PyTorch: no library has _Z14THPStream_WrapRKN3c106StreamEi | 
deepep-v1 missing: DeepEP is installed in part: there is no deep_ep_cpp.*.so | NVSHMEM_DIR=/usr/local/nvshmem pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP@29d31c0
deepep-v1 missing: DeepEP 1.2.1+9af0e0d is registered, and its package deep_ep is not there | NVSHMEM_DIR=/usr/local/nvshmem pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP@29d31c0
deepep-v2 missing: DeepEP 2 2.1.0 is registered, and its package deep_ep is not there | pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP@dd758ca
deepep-v2.5 missing: DeepEP 2.5 2.5.0 is registered, and its package deep_ep is not there | pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP
deepep-v1 missing: DeepEP needs PyTorch, and Python finds none | pip install torch
deepep-v1 missing: torch cannot be imported: /usr/local/lib/python3.12/dist-packages/torch/lib/libtorch_cuda.so needs libnccl.so.2, which is not found | 
deepep-v2 missing: torch cannot be imported: /usr/local/lib/python3.12/dist-packages/torch/lib/../../nvidia/nccl/lib/libnccl.so.2 is damaged | 
deepep-v2 missing: DeepEP 2 finds no NCCL for its import: neither the package nor EP_NCCL_ROOT_DIR | pip install --no-deps 'nvidia-nccl-cu12>=2.30.4'
deepep-v2 not-known: the version of NCCL, of which DeepEP 2 needs 2.30.4 or later: /usr/local/lib/python3.12/dist-packages/torch/lib/../../nvidia/nccl/lib/libnccl.so.2: no metadata | 
deepep-v2 not-known: the version of PyTorch, of which DeepEP 2 needs 2.10 or later: /usr/local/lib/python3.12/dist-packages/torch has no metadata | 
deepep-v2.5 not-known: the version of nvcc, of which DeepEP 2.5 needs 13.1 or later: there is no version.json beside /opt/cuda/bin/nvcc | 
nixl-ep missing: NIXL EP is installed in part: there is no nixl_ep*/nixl_ep_cpp*.so | pip install --force-reinstall --no-deps nixl-cu13==1.5.1
nccl-ep missing: NCCL EP is installed in part: there is no nccl/_extensions/bindings/nccl_ep.*.so | pip install --force-reinstall --no-deps nccl-extensions==0.1.0
epkit runs: runs here | 
epkit runs: runs here | 
epkit missing: epkit is installed in part: there is no epkit/_C.*.so | pip install ./epkit
deepep-v1 missing: /dev/shm has only 64 MiB, and ranks share memory through it | sudo mount -o remount,size=1900544M /dev/shm
deepep-v1 missing: none of the 8 GPUs of this machine may be used by this process | 
deepep-v1 missing: deep_ep cannot be imported: it was built without the link of its GPU code: no library has __cudaRegisterLinkedBinary_ba346c27_12_intranode_cu_6b1dae6a | 
nixl-ep missing: NIXL EP needs a UCX with operations from GPUs, and /opt/ucx/lib/ucx has no libuct_ib_mlx5_gda | pip install nixl-cu13
deepep-v1 missing: DeepEP needs NVLinks between the GPUs, and these have none | 
END
}

@test "--stacks all of a machine without GPUs says the same from its snapshot" {
    cd "$BATS_TEST_TMPDIR" || return 1
    stacks docker-host-network/lost-gpus-deepep all >told
    cat told
    [ "$(wc --lines <told)" -ge 10 ]
    # None of them, with what each needs.
    stacks laptop all >told
    cat told
    [ "$(grep --count ' missing: .* needs PyTorch, and Python finds none | pip install' told)" -ge 9 ]
}

@test "--stacks: what a snapshot does not say is not absent" {
    cd "$BATS_TEST_TMPDIR" || return 1
    stacks dgx-b200/deepep-v1
    jq 'map_values(if type == "object" then with_entries(select(.key | test("/torch/(lib/|[.][.])") | not)) else . end)' saved >part
    run -5 --separate-stderr epkit doctor --from part --stacks
    [ "${lines[0]}" = "DeepEP 1.2.1+9af0e0d: where libtorch_cuda.so is: the snapshot does not say." ]
}

@test "--stacks of known, absent and unknown libraries" {
    cd "$BATS_TEST_TMPDIR" || return 1
    python3 -S "$MACHINES/machines.py" dgx-b200/deepep-v2 machine
    run -0 epkit doctor --from machine --stacks
    [ "${lines[0]}" = "DeepEP 2 2.1.0 runs here." ]
    run -0 epkit doctor --from machine --stacks deep_ep
    [ "${lines[0]}" = "DeepEP 2 2.1.0 runs here." ]
    run -0 epkit doctor --from machine --stacks all
    [[ "$output" == *"nccl-ep"*"flashinfer-moe-ep"* ]]
    run -3 epkit doctor --from machine --stacks nccl-ep
    [[ "$output" == *"not installed; what it needs is here"*"pip install nccl-extensions"* ]]
    for name in uccl nonesuch; do
        run -4 epkit doctor --from machine --stacks "$name"
        [[ "$output" == *"not known: $name"* ]]
        run -4 --separate-stderr epkit doctor --from machine --stacks "$name" --json
        [ "$(jq -c .stacks <<<"$output")" = "[]" ]
    done
    run -2 epkit doctor --from machine nccl-ep
    run -2 epkit doctor --from machine --stacks --fix
    python3 -S "$MACHINES/machines.py" empty nothing
    run -0 epkit doctor --from nothing --stacks
    [[ "$output" == "No known library for expert parallelism is on Python's path." ]]
}

@test "a second owner of deep_ep is found from a snapshot, which does not name it" {
    cd "$BATS_TEST_TMPDIR" || return 1
    local from
    python3 -S "$MACHINES/machines.py" dgx-b200/sgl-owner-of-a-site site
    epkit topo --from site --save saved >/dev/null
    for from in site saved; do
        run -3 --separate-stderr epkit doctor --from $from --json
        [ "$(jq -r '[.checks[] | select(.outcome == "found").id] | join(" ")' <<<"$output")" = stack-owners ]
    done
    [[ "$(epkit doctor --from site)" == *acme_deep_ep-1.0* ]]
    run ! grep -i acme saved
}

# PyTorch is that of the Python tests; its folder is copied by links beside it, and other wheels are installed there.
# bats test_tags=both
@test "--stacks on a virtual environment with the wheels of the package index" {
    [ -n "${EPKIT_TEST_LONG-}" ] || skip "long tier: downloads about 0.5 GB"
    local python venv site from
    python=$("$EPKIT_SOURCE/scripts/torch_venv.sh" 2>&1) || skip "$python"
    cd "$BATS_TEST_TMPDIR" || return 1
    venv=$(mktemp -d "${python%/bin/*}-stacks-XXXXXX")
    ln -s "$venv" venv
    cp -al "${python%/bin/*}/." "$venv"
    site=$(echo "$venv"/lib/python3*/site-packages)
    wheels() { "$venv/bin/python" -m pip install --quiet --no-deps --no-compile "$@" || skip "pip cannot install $*"; }
    # first EXPECTED: of the live machine, and of its snapshot
    first() {
        VIRTUAL_ENV=$venv PYTHONPATH='' epkit topo --save saved >/dev/null 2>&1 || [ $? -eq 4 ]
        for from in / saved; do
            VIRTUAL_ENV=$venv PYTHONPATH='' epkit doctor --stacks --from $from --json >row.json || [ $? -eq 3 ]
            jq -r '.stacks[] | .name + " " + .state + ": " + .text' row.json >row
            grep --extended-regexp --line-regexp "$1" row || { cat row && return 1; }
        done
    }
    VIRTUAL_ENV=$venv run -0 epkit doctor --stacks
    [[ "$output" == "No known library for expert parallelism"* ]]
    # PyTorch brings an older NCCL than the wheel was built with.
    wheels sgl-deep-ep==0.1.2.post1 nvidia-nccl-cu13==2.28.9 nvidia-nvshmem-cu13
    first "sgl-deep-ep missing: sgl-deep-ep needs NCCL 2.30.4 or later, and 2.28.9 is loaded"
    # The command that it gives, until nothing but the machine is missing.
    eval "set -- $(jq -r '.stacks[0].fix' row.json)"
    wheels "${@:3}"
    first "sgl-deep-ep missing: sgl-deep-ep (compiles its kernels when it runs, and there is no nvcc|needs an NVIDIA GPU).*"
    rm "$site"/deep_ep/_C*.so
    first "sgl-deep-ep missing: sgl-deep-ep is installed in part: there is no deep_ep/_C.\*.so"
}

@test "healthy says what nobody looked at, also from a snapshot" {
    cd "$BATS_TEST_TMPDIR" || return 1
    python3 -S "$MACHINES/machines.py" dgx-b200/unknown-stack stack
    epkit topo --from stack --save saved >/dev/null
    local from
    for from in stack saved; do
        run -0 epkit doctor --from "$from"
        [[ "$output" == *": no fault found; not known: uccl." ]]
    done
}

# bats test_tags=both
@test "nodes of further sites, with the NICs of each GPU" {
    unless_sanitized
    collection nodes --live
    # The long tier takes all of them through their snapshots.
    collection nodes --only aws-p5-docker
}

# bats test_tags=both
@test "Secure Boot, confidential guests, hidden switches, forward compatibility: what is beneath a machine" {
    unless_sanitized
    both platforms
}

# remedy NAME: what is said and advised about why the driver is not loaded
remedy() {
    trees "$1"
    epkit doctor --from "${1/\//.}" --only driver-skew --json |
        jq -r '.checks[] | select(.id == "driver-skew") | .text + " " + .fix + " " + .advice + " " + (.evidence[0] | .where + ": " + .what)'
}

@test "a driver that is not loaded: refused, not built, not installed or just not loaded, with the remedy for each" {
    cd "$BATS_TEST_TMPDIR" || return 1
    [[ "$(remedy hgx-h100-secure-boot/unsigned)" == *"rejected a module"*"mokutil --import"*"/var/log/kern.log: "* ]]
    [[ "$(remedy hgx-h100-secure-boot/unsigned)" != *"modprobe nvidia "* ]]
    [[ "$(remedy hgx-h100-secure-boot/unsigned-no-log)" == *"may have rejected it sudo modprobe nvidia"*"mokutil"* ]]
    [[ "$(remedy hgx-h100-tainted/locked-down)" == *"rejected a module"* ]]
    [[ "$(remedy hgx-h100-tainted/not-built)" == *"was not built for the running kernel"*"sudo dkms autoinstall"* ]]
    [[ "$(remedy hgx-h100-tainted/not-installed)" == *"there is no NVIDIA driver for the running kernel"* ]]
    [[ "$(remedy hgx-h100-tainted/not-installed)" != *"modprobe"* ]]
    [[ "$(remedy hgx-h100-tainted/not-loaded)" == *" sudo modprobe nvidia "* ]]
}

@test "the fabric manager of a host is not asked of its guest" {
    cd "$BATS_TEST_TMPDIR" || return 1
    python3 -S "$MACHINES/machines.py" kvm-shared-nvswitch/fabric guest
    epkit doctor --from guest --json >said || [ $? -eq 3 ]
    [ "$(jq -r '.checks[] | select(.id == "nvlink").fix' said)" = "" ] || [ "$(jq '.checks[] | select(.id == "nvlink").fix' said)" = null ]
    [[ "$(jq -r '.checks[] | select(.id == "nvlink").advice' said)" == "The host of this virtual machine"* ]]
}

@test "env does not switch on in a confidential guest what the doctor calls a fault there" {
    cd "$BATS_TEST_TMPDIR" || return 1
    python3 -S "$MACHINES/machines.py" tdx-hgx-b200-nics/gdr guest
    epkit env --from guest >said
    grep --line-regexp --quiet "unset NVSHMEM_IB_ENABLE_IBGDA" said
    run ! grep --quiet "^export NVSHMEM_IB" said
}

@test "WSL 2 is named, and not judged" {
    cd "$BATS_TEST_TMPDIR" || return 1
    python3 -S "$MACHINES/machines.py" wsl2 wsl2
    run -4 epkit doctor --from wsl2
    [[ "$output" == *"This is WSL 2"* ]]
    epkit topo --from wsl2 --save saved >/dev/null || [ $? -eq 4 ]
    run -4 epkit doctor --from saved
    [[ "$output" == *"This is WSL 2"* ]]
}

@test "a sandbox that hides the PCI bus is no machine without GPUs" {
    cd "$BATS_TEST_TMPDIR" || return 1
    python3 -S "$MACHINES/machines.py" docker-host-network gvisor # google/gvisor#14407
    rm -rf gvisor/sys/bus gvisor/sys/class gvisor/sys/devices/pci* gvisor/proc/driver
    run -4 epkit doctor --from gvisor
    [[ "$output" == *"a sandbox (gVisor, or one without /sys) hides where its GPUs"* ]]
}

# bats test_tags=both
@test "single details of healthy nodes, unusual or wrong" {
    unless_sanitized
    both details
}

# bats test_tags=both
@test "remedies name nothing of another operating system" {
    unless_sanitized
    python3 -S "$MACHINES/systems.py" "$EPKIT"
}

# bats test_tags=both
@test "commands that findings give help, and bring no other finding" {
    local names=()
    unless_sanitized
    # One for each kind of command; all of them in the long tier.
    [ -n "${EPKIT_TEST_LONG-}" ] || names=(a4/net-plugin-missing a4/libcuda-stub a4/one-nic a4/rdmav-drivers h100/acs
        h100/peermem a4/provider-missing a4/stale-copy dgx-h200-deepep/heap dgx-b200/nccl-hca dgx-b200/p2p a3u/hca-prefix
        dgx-b200/three-interfaces gcp-a3-mega/extra-network)
    python3 -S "$MACHINES/fixes.py" "$EPKIT" "${names[@]}"
}

@test "every check has a fault, and machines that look like one have none" {
    local checks
    checks=$(sed -n 's/^ *[XS](\([a-z0-9_]*\),.*/\1/p' "$EPKIT_SOURCE/machine/doctor/checks.h" | tr _ - | sort)
    [ "$(wc --lines <<<"$checks")" -ge 70 ]
    diff <(echo "$checks") <({
        python3 -S "$MACHINES/machines.py" --rules
        python3 -S "$MACHINES/machines.py" --variants
    } | cut -s -d' ' -f2- | xargs -n1 | grep --invert-match '^?' | sort -u)
    [ "$(python3 -S "$MACHINES/machines.py" --rules | grep --count --invert-match ' ')" -ge 20 ]
}

# bats test_tags=both
@test "every eighth machine, live, with sanitizers; in the long tier every machine" {
    [ -n "${EPKIT_SANITIZED-}" ] || skip "for builds with sanitizers"
    if [ -n "${EPKIT_TEST_LONG-}" ]; then collection all --live; else collection all --live --every 8; fi
}

# bats test_tags=both
@test "every other machine, live and from its snapshot" {
    [ -n "${EPKIT_TEST_LONG-}" ] || skip "long tier; the tests of single machines compare their snapshots as well"
    collection all
}

# bats test_tags=both
@test "a snapshot that an older epkit has saved says what its machine says" {
    unless_sanitized
    cd "$BATS_TEST_TMPDIR" || return 1
    local file machine told='.checks[] | select(.id | IN("clocks", "import-libraries") | not) | .id + " " + .outcome + " " + .text'
    mkdir saved
    for file in "$MACHINES"/older/*.json.gz; do
        machine=$(basename "$file" .json.gz)
        gzip --decompress --stdout "$file" >"saved/$machine"
        python3 -S "$MACHINES/machines.py" "${machine/.//}" "$machine"
        epkit doctor --from "$machine" --json >live || [ $? -eq 3 ]
        (cd saved && epkit doctor --from "$machine" --json >../old) || [[ $? == [35] ]]
        # Of why clocks are lowered, and of PyTorch's own libraries, it has saved nothing, and says so.
        diff <(jq -r "$told" live) <(jq -r "$told" old)
        [ "$(jq -r '.checks[] | select(.id | IN("clocks", "import-libraries")) | select(.outcome == "fine") | .id' old)" = "" ]
        # Comments name folders, of which a snapshot has pseudonyms.
        epkit env --from "$machine" | sed '/^#/d' >live
        (cd saved && epkit env --from "$machine") | sed '/^#/d' >old
        diff live old
        epkit topo --from "$machine" --json | jq .map >live
        (cd saved && epkit topo --from "$machine" --json | jq .map >../old)
        diff live old
    done
    [ "$(find saved -type f | wc --lines)" -ge 6 ]
}

# kind_of TREE VARIABLE: how env --check calls a variable there
kind_of() {
    epkit env --check --from "$1" --json >audit || [ $? -eq 3 ]
    valid env audit
    jq -r --arg name "$2" '(.audit + .advice)[] | select(.name == $name).kind' audit
}

@test "env --check judges lists of NICs by separators and ports, stale mappings, and what switches dma-buf off" {
    cd "$BATS_TEST_TMPDIR" || return 1
    local name
    for name in hca-list hca-port stale-mapping dmabuf dmabuf-peermem hca-list-right; do
        python3 -S "$MACHINES/machines.py" "dgx-h200-deepep/$name" "$name"
    done
    [ "$(kind_of hca-list NVSHMEM_HCA_LIST)" = harmful ]
    [ "$(kind_of hca-port NVSHMEM_HCA_LIST)" = harmful ]
    [ "$(kind_of stale-mapping NVSHMEM_HCA_PE_MAPPING)" = void ]
    [ "$(kind_of dmabuf NVSHMEM_IB_DISABLE_DMABUF)" = harmful ]
    [ -z "$(kind_of dmabuf-peermem NVSHMEM_IB_DISABLE_DMABUF)" ]
    [ -z "$(kind_of hca-list-right NVSHMEM_HCA_LIST)" ]
    printf 'NVSHMEM_HCA_LIST=\0' >>stale-mapping/proc/self/environ
    [ "$(kind_of stale-mapping NVSHMEM_HCA_LIST)" = void ]
}

@test "epkit nics finds a flapping link, damaged symbols and loss; what all ports have alike is no finding" {
    cd "$BATS_TEST_TMPDIR" || return 1
    local name
    for name in hgx-h100-worn/flaps dgx-b200/symbols hgx-h100-worn/loss hgx-h100-worn dgx-b200/switch-restarts \
        hgx-h100-pfc hgx-h100-pfc/discards hgx-h100-deepep-roce/carrier; do
        trees "$name"
        epkit topo --from "${name/\//.}" --save saved >/dev/null
        run --separate-stderr epkit nics --from saved --json
        echo "$output" >"${name/\//.}.json"
        valid nics "${name/\//.}.json"
        echo "$name $status $(jq -r '.faults | length' "${name/\//.}.json")" >>said
    done
    cat said
    diff said - <<'END'
hgx-h100-worn/flaps 3 1
dgx-b200/symbols 3 1
hgx-h100-worn/loss 3 8
hgx-h100-worn 0 0
dgx-b200/switch-restarts 0 0
hgx-h100-pfc 0 0
hgx-h100-pfc/discards 3 1
hgx-h100-deepep-roce/carrier 3 1
END
    jq -e '.devices[5].counters[] | select(.name == "ethtool/rx_prio0_discards").total == 9000000' hgx-h100-pfc.discards.json
    jq -e '.devices[5].counters[] | select(.name == "ethtool/rx_prio3_pause").total == 0' hgx-h100-pfc.discards.json
    [ "$(jq -r '.faults[0]' hgx-h100-pfc.discards.json)" = "mlx5_5: 9000000 packets were dropped at the port since boot" ]
    # Folder and snapshot say the same.
    epkit nics --from hgx-h100-pfc.discards --json | jq .faults >folder || [ $? -eq 3 ]
    diff folder <(jq .faults hgx-h100-pfc.discards.json)
}
