#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit launch on four hosts: what runs, with which environment, what is printed and kept.
#
# shellcheck disable=SC2154 # $stderr is set by run
# shellcheck disable=SC2016 # programs of inner shells

load common

setup_file() {
    hosts_up 4
}

teardown_file() {
    hosts_down
}

@test "hostname on all nodes: output with the node in front, a verdict, exit code 0" {
    run -0 --separate-stderr launch --no-logs --checks skip --hosts 'h[1-4]' hostname
    [ "$(sort <<<"$output" | head -n 4)" = "$(printf '%s\n' 'h1: h1' 'h2: h2' 'h3: h3' 'h4: h4')" ]
    [[ "${lines[4]}" == "hostname ran on 4 nodes with 4 ranks: all ended with status 0 "* ]]
    all_clean 10 h1 h2 h3 h4
}

@test "RANK, WORLD_SIZE and the others count nodes or ranks; MASTER_ADDR is the first node" {
    local show='echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $NODE_RANK/$NNODES $GPUS_PER_NODE $MASTER_ADDR:$MASTER_PORT"'
    run -0 --separate-stderr launch --no-logs --hosts h3,h1 -- sh -c "$show"
    [[ "$output" == *"h3: 0/2 0/1 0/2 8 h3:29500"* ]]
    [[ "$output" == *"h1: 1/2 0/1 1/2 8 h3:29500"* ]]
    run -0 --separate-stderr launch --no-logs --hosts h3,h1 --world ranks --gpus-per-node 2 --master-port 4711 -- sh -c "$show"
    [[ "$output" == *"h3/1: 1/4 1/2 0/2 2 h3:4711"* ]]
    [[ "$output" == *"h1/0: 2/4 0/2 1/2 2 h3:4711"* ]]
    run --separate-stderr launch --no-logs --hosts h3,h1 --world nodes --per-node 2 -- sh -c "$show"
    [[ "$output" == *"h1/1: 1/2 1/2 1/2 8 h3:29500"* ]]
}

@test "a first node that is given as localhost: MASTER_ADDR is its hostname" {
    local name
    for name in localhost 127.0.0.1; do
        run -0 --separate-stderr launch --no-logs --hosts "$name,h1" -- sh -c 'echo $RANK $MASTER_ADDR'
        [[ "$output" == *"$name: 0 login"* && "$output" == *"h1: 1 login"* ]]
    done
    run -0 --separate-stderr launch --no-logs --hosts localhost,h1 --per-node 1 epkit-test internode -- --tokens 8 --hidden 256
    run --separate-stderr launch --no-logs --hosts localhost -- sh -c 'echo $RANK $MASTER_ADDR'
    [[ "$output" == *"localhost: 0 localhost"* ]]
}

@test "a first node whose hostname another node cannot resolve: MASTER_ADDR is never the loopback" {
    local config=$HOSTS_DIR/login/root.ssh/config name
    cp "$config" "$HOSTS_DIR/config"
    { printf '%s\n' 'Host near' '  HostName localhost' && cat "$HOSTS_DIR/config"; } >"$config"
    grep -v login "$HOSTS_DIR/hosts" >"$HOSTS_DIR/hosts.h1"
    on h1 mount --bind "$HOSTS_DIR/hosts.h1" /etc/hosts
    # It fails there at once; at the loopback it would wait for itself until the deadline.
    for name in localhost 127.0.0.1 near; do
        run --separate-stderr launch --no-logs --hosts "$name,h1" -- sh -c 'echo $RANK $MASTER_ADDR'
        [ "$status" -eq 0 ] || break
        [[ "$output" == *"h1: 1 login"* ]] || break
    done
    on h1 umount /etc/hosts
    cp "$HOSTS_DIR/config" "$config"
    [ "$status" -eq 0 ]
    [[ "$name" == near && "$output" == *"h1: 1 login"* ]]
}

@test "under mpirun as well" {
    long
    local show='echo "$RANK/$WORLD_SIZE $LOCAL_RANK $NODE_RANK $MASTER_ADDR $OMPI_COMM_WORLD_RANK"'
    run -0 --separate-stderr launch --no-logs --hosts h3,h1 --with mpirun --per-node 2 -- sh -c "$show"
    [[ "$output" == *"h3/0: 0/4 0 0 h3 0"* ]]
    [[ "$output" == *"h1/1: 3/4 1 1 h3 3"* ]]
    all_clean 10 h1 h3
}

@test "mpirun, and a host with two names" {
    run launch --no-logs --hosts h1,198.18.77.1 --with mpirun -- true
    [ "$status" -eq 1 ]
    [[ "$output" == *"another node of this run is this host, where mpirun starts all ranks together: name each host once"* ]]
}

@test "launched on a host that is one of the nodes, and not the first" {
    long
    run -0 --separate-stderr on h3 env -C "$HOSTS_DIR" timeout 600 "$EPKIT" launch "${PATIENT[@]}" --no-logs --hosts h1,h3 \
        --with mpirun -- sh -c 'echo $RANK $MASTER_ADDR'
    [[ "$output" == *"h1: 0 h1"* && "$output" == *"h3: 1 h1"* ]]
    # With names that differ from the hostnames, as for pods: mpirun knows its own host only by its hostname.
    printf '198.18.77.%s h%s.pods.example\n' 1 1 3 3 >>"$HOSTS_DIR/hosts"
    run -0 --separate-stderr on h3 env -C "$HOSTS_DIR" timeout 600 "$EPKIT" launch "${PATIENT[@]}" --no-logs \
        --hosts h1.pods.example,h3.pods.example --with mpirun -- sh -c 'echo $RANK $MASTER_ADDR'
    [[ "$output" == *"h1.pods.example: 0 h1.pods.example"* && "$output" == *"h3.pods.example: 1 h1.pods.example"* ]]
    all_clean 10 h1 h3
}

@test "one address at several ports: each is a node, with its own name and log" {
    on h1 sh -c "/usr/sbin/sshd -p 223 -h $HOSTS_DIR/hostkey -o PidFile=none -o UsePAM=no -o StrictModes=no -E $HOSTS_DIR/second.log"
    "$HOSTS" wait "$HOSTS_DIR" h1 223
    run --separate-stderr launch --out ports --hosts h1,h1:223,h2 -- sh -c 'echo $RANK $MASTER_ADDR'
    on h1 pkill -f 'sshd -p 223' || true
    [ "$status" -eq 0 ]
    [[ "$output" == *"h1-ssh: 0 h1"* && "$output" == *"h1-223: 1 h1"* && "$output" == *"h2: 2 h1"* ]]
    [ "$(cat "$HOSTS_DIR/work/ports/testbed-logs/worker-h1-223.log")" = "1 h1" ]
}

@test "epkit-test internode over TCP: 32 of 32 cases on four hosts, without MPI" {
    run -0 --separate-stderr launch --no-logs --hosts 'h[1-4]' --per-node 1 --checks skip epkit-test internode -- --tokens 8 --hidden 256
    [[ "$output" == *"internode: 32/32 cases passed (4 ranks on 4 nodes"* ]]
    all_clean 10 h1 h2 h3 h4
}

@test "epkit-test internode over Open MPI: 32 of 32 cases on four hosts" {
    run -0 --separate-stderr launch --no-logs --hosts 'h[1-4]' --per-node 1 --checks skip --with mpirun epkit-test internode -- --tokens 8 --hidden 256
    [[ "$output" == *"internode: 32/32 cases passed (4 ranks on 4 nodes"* ]]
    # The verdict of the parser, behind that of the launch.
    [[ "$output" == *"all ended with status 0 "*$'\n'"epkit test: 32/32 cases passed"* ]]
    all_clean 10 h1 h2 h3 h4
}

@test "every named job begins with the doctor, hostname too, and ends with what the parser says of its output" {
    run -0 --separate-stderr launch --json --out parsed --hosts h1,h2 --per-node 1 epkit-test internode -- --tokens 8 --hidden 256
    valid <<<"$output"
    [ "$(jq -c '[.result.runs[].cases | .passed, .failed]' <<<"$output")" = '[32,0]' ]
    cd "$HOSTS_DIR/work"
    # 'epkit parse' gives the same verdict for the folder, also later.
    [ "$(jq -r .result.verdict <<<"$output")" = "$("$EPKIT" parse --json parsed | jq -r .verdict)" ]
    [ "$(jq -r .subcommand parsed/testbed-logs/doctor-h1.json)" = doctor ]
    # A program that ends with status 0 but whose output reports a failure is no success. Here it is DeepEP's test.
    mkdir -p "$HOSTS_DIR/deepep/tests"
    cat >"$HOSTS_DIR/deepep/tests/test_intranode.py" <<'END'
print("[config] num_tokens=2048, hidden=7168, num_topk=8", flush=True)
print("[testing] Running with BF16, without top-k (async=False, previous=False) ...", flush=True)
print("AssertionError: calc_diff 0.3", flush=True)
END
    on h1 sh -c "mount -t tmpfs tmpfs /opt && mkdir -p /opt/deepep && ln -s $HOSTS_DIR/deepep /opt/deepep/DeepEP"
    for logs in --no-logs --out=failing; do
        run -1 --separate-stderr launch "$logs" --checks skip --hosts h1 deepep-intranode
        [[ "$output" == *"all ended with status 0 "*$'\n'"test_intranode, 1 node: 0/24 cases passed"* ]]
    done
    # Output that is not recognised is no result.
    echo 'print("hello")' >"$HOSTS_DIR/deepep/tests/test_intranode.py"
    run --separate-stderr launch --no-logs --checks skip --hosts h1 deepep-intranode
    on h1 umount /opt
    [ "$status" -eq 1 ]
    run -0 --separate-stderr launch --out named --hosts h1 hostname
    [ "$(jq -r .subcommand named/testbed-logs/doctor-h1.json)" = doctor ]
}

@test "control characters in the output of a node are shown as '?', and kept in its log" {
    run -0 --separate-stderr launch --out hostile --hosts h1 -- printf 'a\033]0;x\007b\342\200\256c\377\303\244\n'
    [[ "$output" == "h1: a?]0;x?b?c?ä"$'\n'* ]]
    [ "$(cat "$HOSTS_DIR/work/hostile/testbed-logs/worker-h1.log")" = "$(printf 'a\033]0;x\007b\342\200\256c\377\303\244')" ]
}

@test "the locale that epkit sets for programs that it parses does not reach the ranks" {
    run -0 --separate-stderr on login env LC_ALL=C.UTF-8 timeout 600 "$EPKIT" launch "${PATIENT[@]}" --no-logs --hosts h1 \
        --ssh 'ssh -o SendEnv=LC_ALL' -- sh -c 'echo "locale=$LC_ALL"'
    [[ "$output" == *"h1: locale="$'\n'* ]]
}

@test "the environment is what is named, and what scripts set; a preload reaches the program alone" {
    echo 'export FROM_SCRIPT=yes FOO=script; export EPKIT_PRELOAD=/lib/of/script.so' >"$HOSTS_DIR/script"
    run -0 --separate-stderr on login env NAMED='a,b c' OTHER=x LD_PRELOAD=/no/such.so timeout 600 "$EPKIT" launch \
        "${PATIENT[@]}" --no-logs --hosts h1,h2 -x NAMED -x FOO=given --source "$HOSTS_DIR/script" --source '?/nowhere' \
        -- sh -c 'echo "$NAMED|$OTHER|$FROM_SCRIPT|$FOO|$LD_PRELOAD"'
    [[ "$output" == *"h1: a,b c||yes|given|/no/such.so"* ]]
    # The linker warns about timeout and epkit here and about the program there, but not about ssh in between.
    [ "$(grep -c 'cannot be preloaded' <<<"$stderr")" -eq 2 ]
    run --separate-stderr launch --no-logs --hosts h1 --with mpirun --preload /no/such.so -- sh -c 'echo $LD_PRELOAD'
    [[ "$output" == *"h1: /no/such.so"* ]]
    # A script that is not there is named, unless it may be missing.
    run -1 --separate-stderr launch --no-logs --hosts h1 --source /nowhere -- true
    [[ "$output" == *"start: sourcing scripts failed: "*"/nowhere: No such file or directory; epkit: /nowhere ended with status 1"* ]]
}

@test "--debug sets the debugging variables" {
    long
    run --separate-stderr launch --no-logs --hosts h1 --debug -- sh -c 'echo $NVSHMEM_DEBUG "${NVSHMEM_DEBUG_FILE-}" $NCCL_DEBUG'
    [[ "$output" == *"h1: WARN,INFO  INFO"* ]]
}

@test "--workload copies the script and passes arguments; it is removed afterwards" {
    printf '#!/bin/bash\necho "workload $RANK $* $0"\n' >"$HOSTS_DIR/work.sh"
    run -0 --separate-stderr launch --no-logs --hosts h1,h2 --workload "$HOSTS_DIR/work.sh" -- one two
    [[ "$output" == *"h2: workload 1 one two /tmp/epkit-launch-"* ]]
    [ -z "$(on h2 sh -c 'ls -d /tmp/epkit-launch-* 2>/dev/null')" ]
}

@test "the folder of a run: run.json, a log for each node, hostfiles; a secret stays out of it" {
    run -0 --separate-stderr launch --out run1 --hosts h2,h1 -x HF_TOKEN=hush -x FOO=1 -- sh -c 'echo out; echo err >&2'
    cd "$HOSTS_DIR/work/run1/testbed-logs"
    [ "$(sort worker-h1.log | xargs)" = "err out" ]
    [ "$(cat hostfile)" = "$(printf 'h2 slots=8\nh1 slots=8')" ]
    [ "$(cat hostfile-1pernode.txt)" = "$(printf 'h2 slots=1\nh1 slots=1')" ]
    [ "$(jq -c '[.schema_version, .job, .exit_code, .nodes, .hosts[0].name, .hosts[0].rank, .hosts[1].log]' run.json)" = \
        '[1,"program",0,2,"h2",0,"worker-h1.log"]' ]
    [ "$(jq -r .environment.FOO run.json)" = 1 ]
    run ! grep -r hush .
    [ -f coordinator.log ]
}

@test "--json: one document on standard output, the nodes' output on standard error" {
    run -0 --separate-stderr launch --json --no-logs --checks skip --hosts h1,h2 hostname
    valid <<<"$output"
    [[ "$stderr" == *"h1: h1"* ]]
    run -5 --separate-stderr launch --json --no-logs --hosts h1,h2 -- sh -c 'exit $((RANK * 5))'
    valid <<<"$output"
    [ "$(jq -c '[.failed_host, .reason, .exit_code, .hosts[1].exit_code]' <<<"$output")" = '["h2","program",5,5]' ]
}

@test "hosts of JobSet, LeaderWorkerSet, an Indexed Job and PBS; the first instance does the work" {
    long
    on login sh -c "grep -q demo /etc/hosts" || for i in 0 1; do
        echo "198.18.77.$((i + 1)) demo-workload-0-$i.demo lws-0-$i.lws.ns job-$i.svc" >>"$HOSTS_DIR/hosts"
    done
    echo "198.18.77.1 lws-0.lws.ns" >>"$HOSTS_DIR/hosts"
    run -0 --separate-stderr on login env JOBSET_NAME=demo NNODES=2 JOB_COMPLETION_INDEX=0 timeout 600 "$EPKIT" launch \
        "${PATIENT[@]}" --no-logs --hostfiles no -- sh -c 'echo $MASTER_ADDR'
    [[ "$output" == *"demo-workload-0-1.demo: demo-workload-0-0.demo"* ]]
    # Scripts add to the paths of the container; its settings stay.
    echo 'export NCCL_DEBUG=INFO LD_LIBRARY_PATH=$LD_LIBRARY_PATH:/script' >"$HOSTS_DIR/adds.sh"
    run -0 --separate-stderr on login env JOBSET_NAME=demo NNODES=2 JOB_COMPLETION_INDEX=0 NCCL_DEBUG=WARN LD_LIBRARY_PATH=/pod timeout 600 \
        "$EPKIT" launch "${PATIENT[@]}" --no-logs --hostfiles no --source "$HOSTS_DIR/adds.sh" -- sh -c 'echo $NCCL_DEBUG $LD_LIBRARY_PATH'
    [[ "$output" == *"demo-workload-0-1.demo: WARN /pod:/script"* ]]
    # The pods: the second one waits for the first, and ends with its exit code; twice, as a script would.
    on h2 env JOBSET_NAME=demo NNODES=2 JOB_COMPLETION_INDEX=1 sh -c \
        "for i in 1 2; do timeout 600 $EPKIT launch --no-logs -- anything; echo status \$?; done" >"$HOSTS_DIR/pod" 2>&1 3>&- &
    run --separate-stderr on h1 env JOBSET_NAME=demo NNODES=2 JOB_COMPLETION_INDEX=0 sh -c "cd $HOSTS_DIR; for i in 1 2; do \
        timeout 600 $EPKIT launch --connect-timeout 60 --no-logs --hostfiles no -- sh -c 'exit 9'; done"
    wait $!
    cat "$HOSTS_DIR/pod"
    [ "$(grep -c 'status 9' "$HOSTS_DIR/pod")" -eq 4 ]
    run --separate-stderr on login env LWS_LEADER_ADDRESS=lws-0.lws.ns LWS_GROUP_SIZE=2 LWS_WORKER_INDEX=0 \
        timeout 600 "$EPKIT" launch "${PATIENT[@]}" --no-logs --hostfiles no -- sh -c 'echo $MASTER_ADDR'
    [[ "$output" == *"lws-0-1.lws.ns: lws-0.lws.ns"* ]]
    printf 'h1\nh1\nh2\n' >"$HOSTS_DIR/pbs"
    run --separate-stderr on login env PBS_NODEFILE="$HOSTS_DIR/pbs" timeout 600 "$EPKIT" launch "${PATIENT[@]}" --no-logs --checks skip hostname
    [[ "$output" == *"hostname ran on 2 nodes"* ]]
}

@test "a pod that waits is told of the end when the first one has written everything" {
    local out=$HOSTS_DIR/first
    grep -q demo "$HOSTS_DIR/hosts" || for i in 0 1; do
        echo "198.18.77.$((i + 1)) demo-workload-0-$i.demo" >>"$HOSTS_DIR/hosts"
    done
    on h2 env JOBSET_NAME=demo NNODES=2 JOB_COMPLETION_INDEX=1 timeout 600 "$EPKIT" launch --no-logs -- anything \
        >"$HOSTS_DIR/second" 2>&1 3>&- &
    # The pipe is full, so the first one cannot write its document until it is read.
    on h1 env JOBSET_NAME=demo NNODES=2 JOB_COMPLETION_INDEX=0 sh -c "{ head -c 65536 /dev/zero; timeout 600 $EPKIT launch \
        ${PATIENT[*]} --json -o $out --checks skip --hostfiles no -- true; } | { until [ -e $out.go ]; do sleep 0.1; done; cat >$out.json; }" 3>&- &
    within 60 grep -rqsE '"ended": ?"2' "$out"
    sleep 1
    [[ "$(cat "$HOSTS_DIR/second")" != *"has ended"* ]]
    touch "$out.go"
    wait
    tail -c +65537 "$out.json" | valid
    [[ "$(cat "$HOSTS_DIR/second")" == *"the launch by demo-workload-0-0.demo has ended with status 0" ]]
}

@test "ib-write-bw and DeepEP where they are not installed: exit code 4, and what is missing" {
    long
    run -4 --separate-stderr launch --no-logs --checks skip --hosts h1,h2 deepep-internode
    [[ "$output" == *"DeepEP (its tests) is not installed: 'epkit install list' names the recipes that bring it. There is no tests/test_internode.py or tests/legacy/test_internode.py below /opt/deepep/DeepEP"* ]]
    run -4 --separate-stderr launch --no-logs --checks skip --hosts h1,h2 nccl all_reduce
    [[ "$output" == *"nccl-tests is not installed: build it with MPI=1"* ]]
    run -4 --separate-stderr launch --no-logs --checks skip --hosts h1,h2 ib-write-bw
}

@test "nccl takes the name of a test or of its program" {
    run -4 --separate-stderr launch --no-logs --checks skip --hosts h1,h2 nccl sendrecv_perf
    [[ "$output" == *"There is no sendrecv_perf below"* ]]
}

# perftest: an ib_write_bw that prints its arguments, in front of the PATH of the ranks
perftest() {
    mkdir -p "$HOSTS_DIR/perftest"
    printf '#!/bin/sh\necho measured "$@"\n' >"$HOSTS_DIR/perftest/ib_write_bw"
    chmod +x "$HOSTS_DIR/perftest/ib_write_bw"
}

@test "ib-write-bw with a node that is given as localhost: its peer connects to its hostname" {
    perftest
    for name in localhost 127.0.0.1; do
        run --separate-stderr launch --no-logs --checks skip -x "PATH=$HOSTS_DIR/perftest:$PATH" --hosts $name,h1 ib-write-bw mlx5_0
        [[ "$output" == *"h1: device mlx5_0 to login"* ]]
    done
}

@test "ib-write-bw measures the NICs of GPUs, not those for management, or those that are named" {
    perftest
    "$EPKIT_SOURCE/tests/machines/machines.py" hgx-h100-bonded-management "$HOSTS_DIR/managed"
    for host in h1 h2; do
        on "$host" sh -c "mkdir -p $HOSTS_DIR/sys.$host && cp -a $HOSTS_DIR/managed/sys/. $HOSTS_DIR/sys.$host && mount --bind $HOSTS_DIR/sys.$host /sys"
    done
    on h1 sh -c 'cd /sys/class/infiniband && [ -e mlx5_20 ]'
    run --separate-stderr launch --no-logs --checks skip -x "PATH=$HOSTS_DIR/perftest:$PATH" --hosts h1,h2 ib-write-bw
    [ "$(grep -c 'h1: measured' <<<"$output")" -eq 8 ]
    [ "$(grep -c 'h2: measured' <<<"$output")" -eq 8 ]
    [[ "$output" == *"h1: measured -d mlx5_0 -i 1 -F -p 18516"$'\n'* ]]
    [[ "$output" == *"h2: measured -d mlx5_7 -i 1 -F -p 18523 h1"* ]]
    [[ "$output" != *mlx5_2[0-9]* ]]
    run --separate-stderr launch --no-logs --checks skip -x "PATH=$HOSTS_DIR/perftest:$PATH" --hosts h1,h2 ib-write-bw mlx5_20 mlx5_1:2
    for host in h1 h2; do on "$host" umount /sys; done
    [ "$(grep -c ': measured' <<<"$output")" -eq 4 ]
    # RoCE
    [[ "$output" == *"h1: measured -d mlx5_20 -i 1 -F -p 18516 -x 3"* ]]
    [[ "$output" == *"h2: measured -d mlx5_1 -i 2 "* ]]
    # A node without such devices, and words that are no devices.
    run -4 --separate-stderr launch --no-logs --checks skip -x "PATH=$HOSTS_DIR/perftest:$PATH" --hosts h1,h2 ib-write-bw
    [[ "$output" == *"epkit: there is no RDMA device"* ]]
    for word in -a 'mlx5_0;x' mlx5_0: ''; do
        run -2 --separate-stderr launch --no-logs --checks skip --hosts h1,h2 ib-write-bw -- "$word"
        [[ "$stderr" == *"ib-write-bw: '$word' is not a device like mlx5_0"* ]]
    done
}

@test "DeepEP's test is started with one process per node, its arguments, its folder" {
    mkdir -p "$HOSTS_DIR/deepep/tests"
    printf 'import os, sys\nprint(os.getcwd(), os.environ["RANK"], os.environ["WORLD_SIZE"], *sys.argv)\n' \
        >"$HOSTS_DIR/deepep/tests/test_internode.py"
    for host in h1 h2; do
        on "$host" sh -c "mount -t tmpfs tmpfs /opt && mkdir -p /opt/deepep && ln -s $HOSTS_DIR/deepep /opt/deepep/DeepEP"
    done
    run --separate-stderr launch --no-logs --checks skip --hosts h1,h2 deepep-internode -- --num-tokens 64
    echo "$output$stderr"
    # Every rank ended with 0, but their output is not a result.
    [ "$status" -eq 1 ]
    [[ "$output$stderr" == *"Nothing was recognised"* ]]
    [[ "$output" == *"h2: "*"/deepep 1 2 tests/test_internode.py --num-tokens 2048 --hidden 7168 --num-experts 256 --num-topk 8 --num-tokens 64"* ]]
    # A checkout of DeepEP 2 has them elsewhere, and one of its own, in two places.
    mkdir "$HOSTS_DIR/deepep/tests/legacy" "$HOSTS_DIR/deepep/tests/ep"
    mv "$HOSTS_DIR/deepep/tests/test_internode.py" "$HOSTS_DIR/deepep/tests/legacy/"
    cp "$HOSTS_DIR/deepep/tests/legacy/test_internode.py" "$HOSTS_DIR/deepep/tests/ep/test_ep.py"
    run -1 --separate-stderr launch --no-logs --checks skip --hosts h1,h2 deepep-internode
    [[ "$output" == *"h2: "*"/deepep 1 2 tests/legacy/test_internode.py --num-tokens 2048 "* ]]
    run -1 --separate-stderr launch --no-logs --checks skip --hosts h1,h2 deepep-v2
    [[ "$output" == *"h2: "*"/deepep 1 2 tests/ep/test_ep.py --num-tokens 4096 --hidden 7168 --num-experts 256 --num-topk 8"* ]]
    rm -r "$HOSTS_DIR/deepep/tests"
    for host in h1 h2; do on "$host" umount /opt; done
}

@test "a DeepEP job starts in the environment that epkit env calls right, by ssh and mpirun, also on a node with an older script" {
    # quickstart.bats has all ways to start it, on more machines.
    local starter
    deepep_tree a4
    deepep_mount h1 h2
    for starter in ssh mpirun script; do
        [ "$starter" != script ] || printf '%s\n' 'export NVSHMEM_HOME=/opt/deepep/nvshmem NVSHMEM_DISABLE_CUDA_VMM=1' \
            >"$HOSTS_DIR/node/opt/deepep/unified-env.sh"
        run --separate-stderr launch --no-logs --checks report --with "${starter/script/ssh}" --hosts h1,h2 deepep-internode
        echo "$starter: $output$stderr"
        deepep_is_right "$output" h1 h2 || break
        [[ "$stderr" != *two-nvshmem* ]] || break
    done
    deepep_umount h1 h2
    # The last one was reached, and its heap is large enough.
    [ "$starter" = script ]
    deepep_is_right "$output" h1 h2
    [[ "$output" == *"h2: started 1 /opt/deepep/nvshmem/lib/libnvshmem_host.so.3 4G"* && "$stderr" != *two-nvshmem* ]]
}

@test "nccl-tests that were built without MPI are refused, with what to build them with" {
    command -v cc >/dev/null || skip "there is no C compiler"
    mkdir -p "$HOSTS_DIR/nccl"
    # A program of MPI has the name of its library in it.
    printf 'const char *library = "%s";\nint main(void) { return !library; }\n' libc.so.6 >"$HOSTS_DIR/program.c"
    cc -o "$HOSTS_DIR/nccl/all_reduce_perf" "$HOSTS_DIR/program.c"
    mpi_too() { sed s/libc.so.6/libmpi.so.40/ "$HOSTS_DIR/program.c" >"$HOSTS_DIR/mpi.c" && cc -o "$HOSTS_DIR/nccl/all_reduce_perf" "$HOSTS_DIR/mpi.c"; }
    on h1 sh -c "mount -t tmpfs tmpfs /opt && mkdir -p /opt/nccl-tests && ln -s $HOSTS_DIR/nccl /opt/nccl-tests/build"
    run -4 --separate-stderr launch --no-logs --checks skip --hosts h1 nccl all_reduce
    [[ "$output" == *"/opt/nccl-tests/build/all_reduce_perf was built without MPI"*"build nccl-tests with MPI=1 MPI_HOME="* ]]
    mpi_too
    run --separate-stderr launch --no-logs --checks skip --hosts h1 nccl all_reduce
    on h1 umount /opt
    [[ "$output" != *"without MPI"* && "$output" == *"all ended with status 0"* ]]
}

# deepep_that HOST FIGURE: a test of DeepEP on all hosts that reaches 70 GB/s, on HOST so much
deepep_that() {
    mkdir -p "$HOSTS_DIR/deepep/tests"
    cat >"$HOSTS_DIR/deepep/tests/test_internode.py" <<END
import os, socket
figure = "$2" if socket.gethostname() == "$1" else "70.00"
print("[config] num_tokens=2048, hidden=7168, num_topk_groups=2, num_topk=8", flush=True)
for best in "dispatch (FP8)", "dispatch (BF16)", "combine":
    print(f"[tuning] Best {best}: SMs 24, NVL chunk 16, RDMA chunk 8: 12 + 345 us, {figure} GB/s (RDMA), 258.0 GB/s (NVL)", flush=True)
END
    for host in h1 h2 h3 h4; do
        on "$host" sh -c "mountpoint -q /opt || mount -t tmpfs tmpfs /opt; mkdir -p /opt/deepep; ln -sfn $HOSTS_DIR/deepep /opt/deepep/DeepEP"
    done
}

@test "after a slow result a hint names the command that finds the node" {
    deepep_that h3 6.50
    run -3 --separate-stderr launch --no-logs --checks skip --hosts 'h[1-4]' deepep-internode
    [[ "$stderr" == *"'epkit triangulate' finds the node"* ]]
    deepep_that nobody 0
    run -0 --separate-stderr launch --no-logs --checks skip --hosts 'h[1-4]' deepep-internode
    [[ "$stderr" != *"triangulate"* ]]
    for host in h1 h2 h3 h4; do on "$host" umount /opt; done
    all_clean 10 h1 h2 h3 h4
}

@test "what the NICs moved during the run, and what the doctor finds before it" {
    "$EPKIT_SOURCE/tests/machines/machines.py" a4/shm "$HOSTS_DIR/a4"
    # The NICs of a fake machine, whose counters can be written.
    on h1 sh -c "mkdir -p $HOSTS_DIR/sys && cp -a $HOSTS_DIR/a4/sys/. $HOSTS_DIR/sys && mount --bind $HOSTS_DIR/sys /sys"
    run --separate-stderr launch --out run2 --checks report --hosts h1,h2 -- sh -c '
        file=/sys/class/infiniband/mlx5_3/ports/1/counters/port_xmit_data
        [ $(hostname) = h2 ] || echo $(($(cat $file) + 1000)) >$file'
    [ "$status" -eq 0 ]
    # The doctor judges the environment that the job will have: of -x, and of scripts there.
    echo 'export NVSHMEM_IBGDA_NIC_HANDLER=neither' >"$HOSTS_DIR/script"
    run --separate-stderr launch --no-logs --checks report --hosts h1 true
    [[ "$stderr" != *void-variables* ]]
    run --separate-stderr launch --no-logs --checks report --hosts h1 --source "$HOSTS_DIR/script" -x NVSHMEM_REMOTE_TRANSPORT=ibgda true
    on h1 umount /sys
    echo "$stderr"
    [[ "$stderr" == *"doctor: void-variables on h1: 2 variables"* ]]
    cd "$HOSTS_DIR/work/run2/testbed-logs"
    [ "$(jq -c '.hosts[0].nics[] | select(.tx_bytes > 0)' run.json)" = '{"device":"mlx5_3","port":1,"tx_bytes":4000,"rx_bytes":0}' ]
    [ "$(jq -c '.hosts[1].nics' run.json)" = '[]' ]
    [ "$(jq -r .subcommand doctor-h1.json)" = doctor ]
    # The doctor saw those NICs there, and what it found is in the record.
    [ "$(jq '.facts.nics | length' doctor-h1.json)" -gt 0 ]
    [ "$(jq '.findings | length' run.json)" -eq "$(jq '[.checks[] | select(.outcome == "found")] | length' doctor-h1.json)" ]
}
