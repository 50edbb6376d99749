#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# docs/quickstart.md, step "Test", as a reader does it who has nothing else: on bare machines and under Slurm. The nodes
# look like A4; NVSHMEM, DeepEP's test and nccl-tests are stand-ins.
#
# shellcheck disable=SC2154,SC2016 # set by run; programs of inner shells

load common
load ../page

setup_file() {
    hosts_up_slurm 2
    [ -z "$HOSTS_WHY" ] || return 0
    deepep_tree a4
    # A program of MPI has the name of its library in it; this one prints what all_reduce_perf prints.
    mkdir -p "$HOSTS_DIR/node/opt/nccl-tests/build" "$HOSTS_DIR/node/usr/local/bin"
    ln -s "$EPKIT" "$HOSTS_DIR/node/usr/local/bin/epkit"
    printf 'h1\nh2\n' >"$HOSTS_DIR/work/hostfile"
    printf '%s\n' '#include <stdio.h>' 'const char *library = "libmpi.so.40";' \
        'int main(void) { puts("# nThread 1 nGpus 1"); return !library; }' >"$HOSTS_DIR/nccl.c"
    cc -o "$HOSTS_DIR/node/opt/nccl-tests/build/all_reduce_perf" "$HOSTS_DIR/nccl.c"
    deepep_mount h1 h2
    # Bare machines have their sshd at port 22.
    for host in h1 h2; do
        on "$host" /usr/sbin/sshd -p 22 -h "$HOSTS_DIR/hostkey" -o PidFile=none -o PermitRootLogin=prohibit-password \
            -o UsePAM=no -o StrictModes=no -o UseDNS=no -E "$HOSTS_DIR/$host/sshd22.log"
        "$HOSTS" wait "$HOSTS_DIR" "$host" 22
    done
}

teardown_file() {
    hosts_down
}

# reader NAME=VALUE... COMMANDS: they are typed on the host login, one after the other, where epkit is in PATH
reader() {
    on login env -C "$HOSTS_DIR/work" PATH="$EPKIT_BUILD:$PATH" "${@:1:$#-1}" timeout 900 bash -exc "${*: -1}" 2>&1
}

@test "environment and verify: the rows of the page" {
    local command typed
    # A finding is one of what the stand-in for a node lacks: libcuda.so.1, and processors.
    is_known() { ! grep -E '^(serious|warning|hint) ' <<<"$output" | grep -vE '^serious +(libcuda|processors) '; }
    page_row 'VM, Slurm' '2. Environment'
    run -0 on h1 env PATH="$EPKIT_BUILD:$PATH" bash -c "$command && epkit env --check"
    [[ "$output" == "The environment is right for this machine"* ]]
    mapfile -t typed < <(page_section '3. Verify' | grep '^| VM | `epkit topo`' | grep -oE '`[^`]+`' | tr -d '`')
    [ "${#typed[@]}" -eq 2 ]
    run -0 on h1 env PATH="$EPKIT_BUILD:$PATH" bash -c "${typed[0]}"
    [[ "$output" == "8 x NVIDIA B200 and 8 NICs "*"each GPU its own nearest NIC."* ]]
    run reader "${typed[1]}"
    [[ "$output" == *"0 differences between 2 nodes, "*"; 0 of 2 did not answer."* ]]
    is_known
    page_row Slurm '3. Verify'
    run reader SLURM_CONF="$HOSTS_DIR/slurm/slurm.conf" "$command"
    [ "$(grep -c ' on this machine' <<<"$output")" -eq 2 ]
    is_known
}

@test "bare machines: the block of the page, and what it expects" {
    # nccl-tests are a stand-in without figures, which is no result; so each command is typed on its own.
    local line n=0 all=
    while IFS= read -r line; do
        run reader EPKIT_SSH_PORT=22 "$line"
        echo "$line -> $status: $output"
        all+=$output$'\n'
        n=$((n + 1))
        [[ "$line" == *" nccl "* ]] || [ "$status" -eq 0 ]
        [[ "$line" != *" nccl "* ]] || [[ "$output" == *"nccl ran on 2 nodes"*"all ended with status 0"* ]]
        [[ "$line" != *deepep-internode* ]] || deepep_is_right "$output" h1 h2
    done < <(page_commands 'VM · 5 min')
    [ "$n" -eq 5 ]
    page_expects 'VM · 5 min' "$all"
    [[ "$all" == *"internode: 32/32 cases passed"*"test_internode, 2 nodes: 32/32 cases passed"* ]]
}

@test "Slurm: the page's job, by srun" {
    rm -f "$HOSTS_DIR"/work/slurm-*.out
    run -0 reader SLURM_CONF="$HOSTS_DIR/slurm/slurm.conf" "$(page_commands 'Slurm · 5 min')"
    has_ended() { reader SLURM_CONF="$HOSTS_DIR/slurm/slurm.conf" 'test -z "$(squeue -h)"'; }
    within 300 has_ended
    output=$(cat "$HOSTS_DIR"/work/slurm-*.out)
    echo "$output"
    [[ "$output" == *"test_internode, 2 nodes: 32/32 cases passed"* ]]
    deepep_is_right "$output" h1 h2
}

# pod STACK ARGUMENT...: 'epkit launch' as the first of the chart's two pods, with the variables of the chart for this stack
pod() {
    local stack=$1 chart
    shift
    chart=$("$(dirname "$HELM")/helm" template r "$EPKIT_SOURCE/deploy/helm/epkit" --set workload.image=i,workload.gpus=16,stack="$stack" |
        python3 -c 'import sys, yaml
for document in yaml.safe_load_all(sys.stdin):
    if document and document["kind"] == "JobSet":
        pod = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        for variable in pod["containers"][0]["env"]:
            if "value" in variable:
                print(variable["name"] + "=" + variable["value"])')
    mapfile -t chart <<<"$chart"
    on h1 env -C "$HOSTS_DIR/work" "${chart[@]}" JOB_COMPLETION_INDEX=0 timeout 600 "$EPKIT" launch "${PATIENT[@]}" --wait 60 --no-logs --hostfiles no "$@" 2>&1
}

@test "the environment in which a DeepEP process starts: each way to start it, on A4, A3 Ultra and A4X" {
    local machine way how=(--no-logs --checks report --hosts 'h[1-2]')
    HELM=$("$EPKIT_SOURCE/tests/cluster/programs.sh" path)/bin/helm
    for way in 0 1; do echo "198.18.77.$((way + 1)) r-workload-0-$way.r.default.svc.cluster.local" >>"$HOSTS_DIR/hosts"; done
    for machine in gke-a4x a3u a4; do
        deepep_umount h1 h2
        deepep_tree "$machine"
        deepep_mount h1 h2
        for way in recipe ssh mpirun srun older-script image host managed; do
            case $way in
            # As a user of the recipe or of the image does: sources the script, and starts the program.
            recipe) run on h1 bash -c '. /opt/deepep/unified-env.sh && cd /opt/deepep/DeepEP &&
                RANK=1 /opt/epkit/bin/epkit env -- python3 tests/test_internode.py 2>&1 | sed "s/^/h1: /; s/started 1/started 0/"' ;;
            ssh | mpirun) run launch "${how[@]}" --with "$way" deepep-internode ;;
            srun) run reader SLURM_CONF="$HOSTS_DIR/slurm/slurm.conf" "salloc -Q -N2 epkit launch --connect-timeout 60 --no-logs --connect srun deepep-internode" ;;
            older-script)
                cp "$HOSTS_DIR/node/opt/deepep/unified-env.sh" "$HOSTS_DIR/unified-env.sh"
                echo 'export NVSHMEM_HOME=/opt/deepep/nvshmem NVSHMEM_DISABLE_CUDA_VMM=1' >"$HOSTS_DIR/node/opt/deepep/unified-env.sh"
                run launch "${how[@]}" deepep-internode
                [[ "$output" == *"h2: started 1 "*" 4G"* ]]
                cp "$HOSTS_DIR/unified-env.sh" "$HOSTS_DIR/node/opt/deepep/unified-env.sh"
                ;;
            *)
                [ -x "$HELM" ] || continue
                run pod "$way" deepep-internode
                output=${output//r-workload-0-0.r.default.svc.cluster.local: /h1: }
                output=${output//r-workload-0-1.r.default.svc.cluster.local: /h2: }
                ;;
            esac
            echo "--- $machine $way: $output"
            if [ "$way" = recipe ]; then deepep_is_right "$output" h1; else deepep_is_right "$output" h1 h2; fi
        done
    done
}
