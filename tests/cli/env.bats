#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit env: what it writes is read by those it is for, and a command gets the same.
#
# shellcheck disable=SC2016 # $ is for the shells that read the scripts
# shellcheck disable=SC2030,SC2031,SC2154 # what run sets

load common
load machines

# Shells that source the script, those that are here.
SHELLS=(sh dash bash zsh)
# A folder that has to be quoted in every format.
ODD="/opt/it's \$HOME \"q\" #1"

setup_file() {
    make_trees a4 a4/testbed-env a4/mapping-inactive a3u h100 laptop empty
    # NVSHMEM in a folder with an odd name, which DeepEP's extension does not lead to.
    make_odd "$BATS_FILE_TMPDIR/odd" "$ODD"
}

# make_odd TREE HOME: the machine a4 with NVSHMEM in HOME
make_odd() {
    cp -r "$BATS_FILE_TMPDIR/a4" "$1"
    mkdir -p "$1$(dirname "$2")"
    mv "$1/opt/deepep/nvshmem" "$1$2"
    tr '\0' '\n' <"$BATS_FILE_TMPDIR/a4/proc/self/environ" | grep -v -e ^NVSHMEM_HOME= -e ^LD_ |
        { cat && echo "NVSHMEM_HOME=$2"; } | tr '\n' '\0' >"$1/proc/self/environ"
}

setup() {
    cd "$BATS_FILE_TMPDIR" || return 1
}

# clean NAME=VALUE... COMMAND: in an environment of its own
clean() {
    env -i PATH="$PATH" HOME=/root "$@"
}

# The variables that are advised for every process of a node, "NAME=value" or "-NAME", sorted.
advised() {
    epkit env --from "$1" --json |
        jq -r '.variables[] | select(.scope == "node") | if .action == "unset" then "-" + .name else .name + "=" + .value end' |
        sort
}

@test "the script is read by every shell, twice, and sets what is advised and nothing else" {
    local shell found=0
    epkit env --from a4 >script
    for shell in "${SHELLS[@]}"; do
        command -v "$shell" >/dev/null || continue
        found=$((found + 1))
        clean OTHER=kept TORCH_NCCL_USE_COMM_NONBLOCKING=0 "$shell" -euc 'env >before; . ./script; env >once; . ./script; env >twice'
        # Shells count in SHLVL what they start.
        sed -i -e /^SHLVL=/d -e /^_=/d before once twice
        diff once twice
        # What went is what is to be unset; what came is what is to be set, and the marker of what to preload.
        comm -23 <(sort before) <(sort once) | diff - <(echo TORCH_NCCL_USE_COMM_NONBLOCKING=0)
        comm -13 <(sort before) <(sort once) | grep -v ^EPKIT_PRELOAD= >came
        diff <(sort came) <(advised a4 | grep -v ^-)
    done
    [ "$found" -ge 2 ]
}

@test "a folder is put in front of a search path once, and what was there stays" {
    local shell path
    epkit env --from a4 >script
    for path in /keep "/keep:/usr/lib/x86_64-linux-gnu:/opt/deepep/nvshmem/lib:/usr/local/gib/lib64:/end" \
        /usr/lib/x86_64-linux-gnu:/opt/deepep/nvshmem/lib:/usr/local/gib/lib64 /opt/deepep; do
        for shell in "${SHELLS[@]}"; do
            command -v "$shell" >/dev/null || continue
            clean LD_LIBRARY_PATH="$path" "$shell" -euc '. ./script; . ./script; echo "$LD_LIBRARY_PATH"' >"got"
            echo "$shell: $path: $(cat got)"
            [ "$(grep -o /opt/deepep/nvshmem/lib got | wc -l)" -eq 1 ]
            grep -q '^/usr/lib/x86_64-linux-gnu:/opt/deepep/nvshmem/lib:/usr/local/gib/lib64\(:\|$\)' got
            if [[ "$path" == *keep* ]]; then
                grep -q ':/keep\(:\|$\)' got
            fi
            # A command is given the same.
            diff got <(clean LD_LIBRARY_PATH="$path" "$EPKIT" env --from a4 -- sh -c 'echo "$LD_LIBRARY_PATH"' 2>/dev/null)
        done
    done
}

# ranks EXPECTED NAME=VALUE...: the NIC that a rank with these variables gets, from the script and for a command
ranks() {
    local expected="$1" shell
    shift
    for shell in "${SHELLS[@]}"; do
        command -v "$shell" >/dev/null || continue
        [ "$(clean "$@" "$shell" -euc '. ./script; echo "${NVSHMEM_HCA_LIST-none}"')" = "$expected" ] ||
            { echo "$shell $*: not $expected" && return 1; }
    done
    [ "$(clean "$@" "$EPKIT" env --from a4 -- sh -c 'echo "${NVSHMEM_HCA_LIST-none}"' 2>/dev/null)" = "$expected" ] ||
        { echo "env -- $*: not $expected" && return 1; }
}

@test "each rank gets the NIC of its GPU, by the variables of its launcher" {
    epkit env --from a4 >script
    ranks none
    ranks mlx5_3:1 LOCAL_RANK=3
    ranks mlx5_7:1 LOCAL_RANK=7 LOCAL_WORLD_SIZE=8
    ranks mlx5_5:1 OMPI_COMM_WORLD_LOCAL_RANK=5 OMPI_COMM_WORLD_LOCAL_SIZE=8
    ranks mlx5_2:1 MPI_LOCALRANKID=2 MPI_LOCALNRANKS=8
    ranks mlx5_1:1 PMI_LOCAL_RANK=1
    ranks mlx5_6:1 SLURM_LOCALID=6 "SLURM_STEP_TASKS_PER_NODE=8(x2)"
    ranks mlx5_4:1 SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE=1 LOCAL_RANK=4 LOCAL_WORLD_SIZE=8
    ranks mlx5_2:1 LOCAL_RANK=1 CUDA_VISIBLE_DEVICES=3,2,1,0
    ranks mlx5_5:1 LOCAL_RANK=1 CUDA_VISIBLE_DEVICES=5
}

# In each task of Slurm its GPU is number 0; what the task may open tells which of the node it is.
@test "one GPU a task: the script goes by the device files that may be opened" {
    local shell
    mkdir -p dev
    epkit env --from a4 | sed "s|/dev/nvidia|$PWD/dev/nvidia|g" >script
    epkit env --from a4 --format slurm | sed "s|/dev/nvidia|$PWD/dev/nvidia|g" >prolog
    grep -q "$PWD/dev/nvidia" script
    for shell in "${SHELLS[@]}"; do
        command -v "$shell" >/dev/null || continue
        rm -f dev/*
        touch dev/nvidia5
        for visible in CUDA_VISIBLE_DEVICES=0 UNUSED=1; do
            run clean LOCAL_RANK=5 LOCAL_WORLD_SIZE=8 "$visible" "$shell" -euc \
                '. ./script; echo "$NVSHMEM_HCA_LIST ${DEEP_EP_DEVICE_TO_HCA_MAPPING-none}"'
            echo "$shell $visible: $output"
            [ "$output" = "mlx5_5:1 none" ]
        done
        run clean SLURM_LOCALID=5 SLURM_STEP_TASKS_PER_NODE=8 CUDA_VISIBLE_DEVICES=0 "$shell" ./prolog
        [[ "$output" == *"export NVSHMEM_HCA_LIST=mlx5_5:1"* ]]
        [[ "$output" == *"unset DEEP_EP_DEVICE_TO_HCA_MAPPING"* ]]
        # Two of the GPUs, and all of them.
        touch dev/nvidia2
        run clean LOCAL_RANK=1 CUDA_VISIBLE_DEVICES=0,1 "$shell" -euc '. ./script; echo "$NVSHMEM_HCA_LIST"'
        [ "$output" = mlx5_5:1 ]
        touch dev/nvidia{0..7}
        run clean LOCAL_RANK=3 "$shell" -euc '. ./script; echo "$NVSHMEM_HCA_LIST ${DEEP_EP_DEVICE_TO_HCA_MAPPING%%,*}"'
        [ "$output" = "mlx5_3:1 0:mlx5_0:1" ]
    done
}

@test "no NIC is chosen for a program that starts its ranks itself" {
    epkit env --from a4 >script
    ranks none OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1
    ranks none LOCAL_RANK=0 LOCAL_WORLD_SIZE=1
    # in a batch script, and in the only task of each node
    ranks none SLURM_LOCALID=0
    ranks none SLURM_LOCALID=0 "SLURM_STEP_TASKS_PER_NODE=1(x2)"
    ranks none SLURM_LOCALID=0 "SLURM_STEP_TASKS_PER_NODE=1,1(x3)"
    # and not for ranks that have no GPU
    ranks none LOCAL_RANK=8
    ranks none LOCAL_RANK=-1
    ranks none LOCAL_RANK=2 CUDA_VISIBLE_DEVICES=0,1
    ranks none LOCAL_RANK=x
    # what somebody has chosen stays
    ranks mlx5_6:1 NVSHMEM_HCA_LIST=mlx5_6:1
}

@test "what to preload reaches one program, not launchers, not the shell" {
    local shell
    mkdir -p bin
    printf '#!/bin/sh\necho "launcher: ${LD_PRELOAD-none}"\n' >bin/mpirun
    chmod +x bin/mpirun
    epkit env --from a4 >script
    for shell in "${SHELLS[@]}"; do
        command -v "$shell" >/dev/null || continue
        run -0 --separate-stderr clean PATH="$PWD/bin:$PATH" "$shell" -euc '
            . ./script
            echo "shell: ${LD_PRELOAD-none}"
            epkit_preload printenv LD_PRELOAD
            epkit_preload sh -c "exit 7" || echo "status $?"
            epkit_preload mpirun -n 2 x'
        [ "${lines[0]}" = "shell: none" ]
        [ "${lines[1]}" = /opt/deepep/nvshmem/lib/libnvshmem_host.so.3 ]
        [ "${lines[2]}" = "status 7" ]
        [ "${lines[3]}" = "launcher: none" ]
        [[ "$stderr" == *"put 'epkit env --' in front of the program"* ]]
    done
}

@test "odd characters in a path reach the program as they are" {
    local shell
    epkit env --from odd >script
    for shell in "${SHELLS[@]}"; do
        command -v "$shell" >/dev/null || continue
        [[ "$(clean "$shell" -euc '. ./script; printenv LD_LIBRARY_PATH')" == *":$ODD/lib:"* ]]
    done
    [[ "$(clean "$EPKIT" env --from odd -- printenv LD_LIBRARY_PATH 2>/dev/null)" == *":$ODD/lib:"* ]]
    epkit env --from odd --format docker | grep -qF "LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu:$ODD/lib:/usr/local/gib/lib64"
    epkit env --from odd --format slurm >prolog
    clean sh ./prolog | grep -qFx "export LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu:$ODD/lib:/usr/local/gib/lib64"
    epkit env --from odd --json | jq -e --arg odd ":$ODD/lib:" '[.variables[] | select(.value // "" | contains($odd))] | length == 1'
}

@test "docker: comments and NAME=value, as they stand" {
    local tree
    for tree in a4 a3u odd h100; do
        epkit env --from "$tree" --format docker >file
        run -1 grep -vE '^(#.*|[A-Z][A-Z0-9_]*=.*|)$' file
        diff <(grep -v -e '^#' -e '^$' file | sort) <(advised "$tree" | grep -v ^-)
    done
    # What such a file cannot say is said in a comment.
    epkit env --from a4 --format docker >file
    grep -q '^#     7: mlx5_7:1$' file
    grep -q '^# LD_PRELOAD=' file
    grep -q '^# TORCH_NCCL_USE_COMM_NONBLOCKING must not be set' file
}

# yaml FILE: its list as NAME=value, sorted; Kubernetes makes $ of $$
yaml() {
    python3 - "$1" <<'PYTHON' | sort
import json, re, sys
text = open(sys.argv[1], encoding="utf-8").read()
try:
    import yaml
    rows = yaml.safe_load(text)
except ImportError:
    # The shape that is written, and no other: a name, and a value in double quotes as in JSON.
    rows, lines = [], [line for line in text.split("\n") if line and not line.startswith("#")]
    for name, value in zip(lines[::2], lines[1::2], strict=True):
        rows.append({"name": re.fullmatch(r"- name: ([A-Z0-9_]+)", name)[1],
                     "value": json.loads(re.fullmatch(r'  value: (".*")', value)[1])})
for row in rows:
    assert set(row) == {"name", "value"} and isinstance(row["value"], str), row
    print(row["name"] + "=" + row["value"].replace("$$", "$"))
PYTHON
}

@test "k8s: a list of names and values in YAML" {
    local tree
    for tree in a4 a3u odd h100; do
        epkit env --from "$tree" --format k8s >list
        diff <(yaml list) <(advised "$tree" | grep -v ^-)
    done
    [ "$(epkit env --from laptop --format k8s | grep -v '^#')" = "[]" ]
}

@test "slurm: a task prolog whose lines make the environment of a task" {
    epkit env --from a4 --format slurm >prolog
    [ "$(head -1 prolog)" = "#!/bin/sh" ]
    clean SLURM_LOCALID=5 "SLURM_STEP_TASKS_PER_NODE=8(x4)" sh -eu ./prolog >said
    run -1 grep -vE '^(export [A-Z][A-Z0-9_]*=.*|unset [A-Z][A-Z0-9_]*)$' said
    diff <(sed -e 's/^export //' -e 's/^unset /-/' said | grep -v ^NVSHMEM_HCA_LIST | sort) <(advised a4)
    grep -qx 'export NVSHMEM_HCA_LIST=mlx5_5:1' said
    run ! grep LD_PRELOAD= said
    # The path of the task is kept behind the folders.
    clean LD_LIBRARY_PATH=/keep sh ./prolog | grep -q '^export LD_LIBRARY_PATH=.*:/keep$'
    # One task on a node starts its ranks itself.
    clean SLURM_LOCALID=0 "SLURM_STEP_TASKS_PER_NODE=1(x4)" sh ./prolog >said
    run ! grep NVSHMEM_HCA_LIST said
}

@test "scripts are clean for shellcheck" {
    command -v shellcheck >/dev/null || skip "shellcheck is not installed"
    epkit env --from a4 >script
    shellcheck -s sh script
    epkit env --from odd --format slurm >prolog
    shellcheck -s sh -e SC2016 prolog # the odd folder has a $ in it
}

@test "JSON fits the schema" {
    local tree
    for tree in a4 a3u odd h100 laptop a4.testbed-env; do
        epkit env --from "$tree" --json | valid env
        { epkit env --from "$tree" --check --json || [ $? -eq 3 ]; } | valid env
    done
    { epkit env --from empty --json || [ $? -eq 4 ]; } | valid env
    { epkit env --from empty --check --json || [ $? -eq 4 ]; } | valid env
}

# --- a command ---

@test "a command keeps its exit status, its signals, its arguments and its input" {
    run -42 epkit env --from a4 -- sh -c 'exit 42'
    run -143 epkit env --from a4 -- sh -c 'kill -TERM $$'
    run --separate-stderr epkit env --from a4 -- printf '<%s>' "a b" '$x' --check ''
    [ "$output" = '<a b><$x><--check><>' ]
    [ "$(echo text | epkit env --from a4 -- cat)" = text ]
    # It is the same process, so that a signal to it is one to the command.
    "$EPKIT" env --from a4 -- sleep 2400 3>&- &
    local process=$!
    within 10 sh -c "grep -q sleep /proc/$process/comm"
    kill -TERM "$process"
    local ended=0
    wait "$process" || ended=$?
    [ "$ended" -eq 143 ]
}

@test "a command that is not there, or cannot be executed" {
    run -127 --separate-stderr epkit env --from a4 -- no-such-command
    [[ "$stderr" == *"no-such-command cannot be executed: No such file"* ]]
    : >not-executable
    run -126 --separate-stderr epkit env --from a4 -- ./not-executable
}

@test "a command sees the advice, and what must not be set is gone" {
    clean TORCH_NCCL_USE_COMM_NONBLOCKING=0 NVSHMEM_ENABLE_NIC_PE_MAPPING=1 KEPT=1 "$EPKIT" env --from a4 -- env 2>/dev/null |
        sort >got
    diff <(grep -v -e ^PATH= -e ^HOME= -e ^KEPT= -e ^_= got) <(advised a4 | grep -v ^-)
    grep -qx KEPT=1 got
}

# A library that is on this machine too, at the same path, so that it can be preloaded: a copy of one of the system.
make_preloadable() {
    local home="$BATS_TEST_TMPDIR/nvshmem"
    make_odd "$BATS_TEST_TMPDIR/tree" "$home"
    mkdir -p "$home/lib"
    cp -L "$(ldd "$(command -v env)" | sed -n 's/.*=> \(.*libc\.so\.[^ ]*\) .*/\1/p')" "$home/lib/libnvshmem_host.so.3"
    cp "$home/lib/libnvshmem_host.so.3" "$BATS_TEST_TMPDIR/tree$home/lib/libnvshmem_host.so.3.5.19"
}

@test "LD_PRELOAD is for the command, and launchers go without it" {
    make_preloadable
    mkdir -p bin
    printf '#!/bin/sh\necho "launcher: ${LD_PRELOAD-none}"\n' | tee bin/mpirun bin/srun bin/torchrun >bin/ssh
    chmod +x bin/*
    run --separate-stderr clean LD_PRELOAD= "$EPKIT" env --from "$BATS_TEST_TMPDIR/tree" -- printenv LD_PRELOAD
    [ "$output" = "$BATS_TEST_TMPDIR/nvshmem/lib/libnvshmem_host.so.3" ]
    [ -z "$stderr" ]
    local launcher
    for launcher in mpirun srun torchrun ssh; do
        run --separate-stderr clean "$EPKIT" env --from "$BATS_TEST_TMPDIR/tree" -- "./bin/$launcher" -n 2 x
        [ "$output" = "launcher: none" ]
        [[ "$stderr" == *"LD_PRELOAD is left out"*"$launcher ... epkit env -- PROGRAM"* ]]
    done
    run --separate-stderr clean "$EPKIT" env --from "$BATS_TEST_TMPDIR/tree" -- sh -c 'echo "$1: ${LD_PRELOAD-none}"' x -m torch.distributed.run
    [ "$output" = "-m: none" ]
    [[ "$stderr" == *"LD_PRELOAD is left out"* ]]
}

@test "a library that is not on this machine is not preloaded" {
    run --separate-stderr epkit env --from a4 -- sh -c 'echo "${LD_PRELOAD-none}"'
    [ "$output" = none ]
    [[ "$stderr" == *"/opt/deepep/nvshmem/lib/libnvshmem_host.so.3 is not on this machine"* ]]
}

# --- judging ---

@test "--check: the environment that is advised is right" {
    run -0 epkit env --from a4 --check
    [ "$output" = "The environment is right for this machine." ]
    run -0 epkit env --from h100 --check
    [[ "${lines[0]}" == "The environment sets nothing of NVSHMEM, DeepEP or NCCL; 1 variable is advised." ]]
}

@test "--check: the testbed's script is not" {
    run -3 epkit env --from a4.testbed-env --check
    [[ "${lines[0]}" == *"NVSHMEM_ENABLE_NIC_PE_MAPPING (harmful)"* ]]
    epkit env --from a4.testbed-env --check --json >said || [ $? -eq 3 ]
    jq -e '.audit[0].name == "NVSHMEM_ENABLE_NIC_PE_MAPPING" and .audit[0].advised == null' said
    jq -e '[.audit[] | select(.name == "NVSHMEM_REMOTE_TRANSPORT").kind] == ["value"]' said
    jq -e '.findings == (.audit | length)' said
    jq -e '[.audit[].name] | index("NVSHMEM_HCA_LIST") == null' said
}

@test "--check: what the doctor finds about a variable" {
    local tree="$BATS_TEST_TMPDIR/tree" setting kind
    cp -r a4 "$tree"
    while read -r kind setting; do
        { cat a4/proc/self/environ && printf '%s\0' "$setting"; } >"$tree/proc/self/environ"
        epkit env --from "$tree" --check --json >said || [ $? -eq "$([ "$kind" = differs ] && echo 0 || echo 3)" ]
        valid env said
        [ "$(jq -r --arg name "${setting%%=*}" '(.audit + .advice)[] | select(.name == $name).kind' said)" = "$kind" ] ||
            { cat said && false; }
    done <<'END'
harmful NCCL_SOCKET_IFNAME=eth9
harmful GLOO_SOCKET_IFNAME=eth9
harmful NCCL_P2P_DISABLE=1
harmful NCCL_IB_GID_INDEX=9
harmful NCCL_IB_HCA=ibp
differs NCCL_IB_HCA=mlx5_0
differs NCCL_IB_DISABLE=1
harmful CUDA_VISIBLE_DEVICES=0-7
unknown DEEPEP_DEVICE_TO_HCA_MAPPING=0:mlx5_0:1
END
    { cat a4/proc/self/environ && printf '%s\0' MASTER_ADDR=localhost WORLD_SIZE=16 RANK=0 LOCAL_WORLD_SIZE=8; } >"$tree/proc/self/environ"
    epkit env --from "$tree" --check --json >said || [ $? -eq 3 ]
    [ "$(jq -c '[.audit[] | [.name, .kind]]' said)" = '[["MASTER_ADDR","harmful"]]' ]
    # One row for a variable.
    tr '\0' '\n' <a4/proc/self/environ | sed 's/^\(DEEP_EP_DEVICE_TO_HCA_MAPPING\)=.*/\1=0:mlx5_0:1/; s/^NCCL_NET=.*/NCCL_NET=Socket/' |
        tr '\n' '\0' >"$tree/proc/self/environ"
    epkit env --from "$tree" --check --json >said || [ $? -eq 3 ]
    [ "$(jq -c '[.audit[] | [.name, .kind]], [.advice[] | [.name, .kind]]' said | xargs)" = \
        "[[DEEP_EP_DEVICE_TO_HCA_MAPPING,harmful]] [[NCCL_NET,differs]]" ]
    jq -e '.audit[0].advised | endswith(",7:mlx5_7:1")' said
}

@test "the script mends the testbed's: the doctor finds neither fault any more" {
    local tree="$BATS_TEST_TMPDIR/mended"
    run -3 epkit doctor --from a4.testbed-env
    epkit env --from a4.testbed-env >script
    cp -r a4.testbed-env "$tree"
    (
        # What the testbed has, then the script: as its process would have it.
        xargs -0 env -i sh -c '. ./script; exec env -0' <a4.testbed-env/proc/self/environ >"$tree/proc/self/environ"
    )
    epkit doctor --from "$tree" --json >said || [ $? -eq 3 ]
    [ "$(ids said)" = "" ]
    epkit env --from "$tree" --check --json >said || { [ $? -eq 3 ] && jq -c '.audit[]' said; }
    jq -e '[.audit[] | select(.kind == "harmful" or .kind == "void" or .kind == "value")] == []' said
}

@test "--check --pid judges the environment of a process" {
    env -i PATH="$PATH" NVSHMEM_REMOTE_TRANSPORT=ibgda NVSHMEM_USE_GDRCOPY=1 NVSHMEM_HOME=/nowhere sleep 2400 3>&- &
    local process=$!
    within 10 sh -c "grep -q sleep /proc/$process/comm"
    run epkit env --check --json --pid "$process"
    kill "$process"
    [ "$status" -eq 3 ]
    jq -e '[.audit[] | select(.kind != "missing") | .name] == ["NVSHMEM_HOME", "NVSHMEM_REMOTE_TRANSPORT", "NVSHMEM_USE_GDRCOPY"]' <<<"$output"
    jq -e '[.audit[] | select(.kind != "missing") | .kind] == ["path", "value", "void"]' <<<"$output"
}

@test "--check says so when an environment cannot be read" {
    cp -r a4 "$BATS_TEST_TMPDIR/without"
    rm "$BATS_TEST_TMPDIR/without/proc/self/environ"
    run -1 --separate-stderr epkit env --from "$BATS_TEST_TMPDIR/without" --check
    [[ "$stderr" == *"cannot be read"* ]]
}

# --- nothing here, wrong usage ---

@test "a machine without GPUs and NICs: one line, exit code 4" {
    local arguments
    for arguments in "" --check "--format k8s" "-- true"; do
        # shellcheck disable=SC2086 # several words
        run -4 --separate-stderr epkit env --from empty $arguments
        [ "${#lines[@]}" -eq 1 ]
        [ -z "$stderr" ]
    done
}

@test "what stands in a script's place there is harmless to whoever runs it" {
    run bash -c "script=\$('$EPKIT' env --from empty); eval \"\$script\"; echo done"
    [ "$output" = "done" ]
}

# refused TEXT ARGUMENTS...: exit code 2, and the text on standard error
refused() {
    local text="$1"
    shift
    run -2 --separate-stderr epkit env "$@"
    [ -z "$output" ]
    [[ "$stderr" == *"$text"* ]]
}

@test "wrong usage is told" {
    refused "put '--' in front of the command" --from a4 true
    refused "do not go with a command" --from a4 --check -- true
    refused "do not go with a command" --from a4 --json -- true
    refused "do not go with a command" --from a4 --format sh -- true
    refused "does not go with --format" --from a4 --check --format sh
    refused "does not go with --format docker" --from a4 --json --format docker
    refused "--pid goes with --check" --pid 1
    refused "--pid is a process of this machine" --check --pid 1 --from a4
    refused "--pid: process 2147483647" --check --pid 2147483647
    refused "format" --format toml
    refused "--from" --from /no/such/machine
}
