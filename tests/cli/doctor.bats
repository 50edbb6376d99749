#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit doctor: its texts, its JSON, which checks it runs, --fix on a machine that is live as far as it can see, --hosts
# with a made-up ssh. What each check finds is in machines*.bats and in the unit tests.
#
# shellcheck disable=SC2154 # $stderr is set by run
# shellcheck disable=SC2016 # programs of inner shells
# shellcheck disable=SC2030,SC2031 # what run sets is used in the test that calls it

load common
load machines

setup_file() {
    make_trees a4 h100 gb200 empty laptop a4/shm a4/driver-skew a4/testbed-env h100/peermem
    cd "$BATS_FILE_TMPDIR" || return 1
    made_up_ssh >ssh
    chmod +x ssh
}

setup() {
    cd "$BATS_FILE_TMPDIR" || return 1
    unset EPKIT_SSH EPKIT_SSH_PORT
}

# refused TEXT ARGUMENT...: exit code 2, nothing on standard output
refused() {
    local text="$1"
    shift
    run -2 --separate-stderr epkit doctor "$@"
    [ -z "$output" ]
    [[ "$stderr" == *"$text"* ]]
}

# --- texts ---

@test "a healthy machine gets one line, and exit code 0" {
    run -0 --separate-stderr epkit doctor --from a4
    [[ "$output" =~ ^"Healthy: 8 x B200, 8 x 400 Gb/s RoCE, "[0-9]+" checks, nothing found; runs here: DeepEP 1.2.1+29d31c0."$ ]]
    [ -z "$stderr" ]
}

@test "findings: the sentence first, a table, and each with evidence, cause and command" {
    cp -r a4.shm two
    printf 'NVSHMEM_IBGDA_SUPPORT=1\0' >>two/proc/self/environ
    run -3 --separate-stderr epkit doctor --from two
    [ -z "$stderr" ]
    [ "${lines[0]}" = "2 findings on two, 1 of them serious: /dev/shm has only 64 MiB, and ranks share memory through it; and more." ]
    [[ "${lines[1]}" == "SEVERITY ID "*" GROUP "*" WHAT"* ]]
    # Serious ones first.
    [[ "${lines[2]}" == "serious  shm "* ]]
    [[ "${lines[3]}" == "warning  void-variables "* ]]
    [[ "$output" == *"shm (limits, failure mode 38)"*"  seen      /proc/self/mounts: tmpfs /dev/shm "*"  why       "* ]]
    [[ "$output" == *"  run       sudo mount -o remount,size="*"M /dev/shm"* ]]
    [[ "$output" == *"void-variables (nvshmem, failure mode 41)"* ]]
}

@test "neither GPU nor NIC: one line, and exit code 4" {
    run -4 --separate-stderr epkit doctor --from empty
    [ "${#lines[@]}" -eq 1 ]
    [ -z "$stderr" ]
    run -4 --separate-stderr epkit doctor --from empty --json
    valid doctor <<<"$output"
    [ "$(jq '.facts.gpus' <<<"$output")" = "[]" ]
}

@test "checks that cannot be completed: a verdict of its own, exit code 5, and what to do" {
    cp -r a4 blind
    rm blind/var/log/kern.log blind/proc/self/limits
    run -5 --separate-stderr epkit doctor --from blind
    [[ "${lines[0]}" == "Not known whether blind is healthy: "*" checks found nothing, 3 could not be completed; memlock: /proc/self/limits: No such file or directory." ]]
    [[ "$output" == *"memlock (limits): not known"*"  do        Make the named file or device readable"* ]]
    epkit doctor --from blind --json >blind.json || [ $? -eq 5 ]
    [ "$(jq -c '[.state, .healthy, .counts.found]' blind.json)" = '["not-known",false,0]' ]
    [ "$(jq -c '[.checks[] | select(.id == "memlock") | .outcome, .open]' blind.json)" = '["unknown",true]' ]
    run -5 --separate-stderr epkit doctor --from blind --only memlock
    [[ "$output" == "Not known whether blind is healthy: 0 checks found nothing, 1 could not be completed"* ]]
}

@test "where /sys is not mounted, it is not known whether there are NICs" {
    cp -r a4 nosys
    rm -r nosys/sys
    mkdir nosys/sys
    run -5 --separate-stderr epkit doctor --from nosys
    [[ "$output" == *"port-down (nic): not known"*"whether there is an RDMA NIC: /sys is not mounted here"* ]]
    epkit topo --from nosys --save nosys.json
    run -5 --separate-stderr epkit doctor --from nosys.json
    [[ "$output" == *"whether there is an RDMA NIC: /sys is not mounted here"* ]]
}

@test "what only root sees leaves a verdict as it is, and is named" {
    cp -r a4 user
    rm user/var/log/kern.log
    run -0 --separate-stderr epkit doctor --from user
    [[ "$output" =~ ^"Healthy: 8 x B200, 8 x 400 Gb/s RoCE, "[0-9]+" checks, nothing found; 1 could not be completed (gpu-errors); runs here: DeepEP 1.2.1+29d31c0."$ ]]
    epkit doctor --from user --json |
        jq --exit-status '[.checks[] | select(.outcome == "unknown")] | length == 1
            and (.[0] | .id == "gpu-errors" and (.open | not) and .would_tell == "Run epkit doctor as root.")'
}

@test "a check that does not apply" {
    run -0 --separate-stderr epkit doctor --from laptop --only imex
    [[ "$output" == "Nothing to find on laptop: none of the 1 checks applies to it." ]]
}

# --- which checks ---

@test "--list has a row for each check, --explain says something of each" {
    local n=0
    while read -r id; do
        run -0 --separate-stderr epkit doctor --explain "$id"
        [[ "${lines[0]}" == "$id: "* ]]
        for word in group symptom cause remedy see; do
            [[ "$output" == *"  $word"* ]]
        done
        n=$((n + 1))
    done < <(epkit doctor --list | tail -n +2 | cut -d' ' -f1)
    [ "$n" -ge 41 ]
    [ "$(epkit doctor --list --json | jq '.list | length')" -eq "$n" ]
}

@test "--only takes ids and groups" {
    [ "$(epkit doctor --only limits,acs --list --json | jq -c '[.list[].id]')" = '["memlock","shm","nofile","processes","processors","ptrace","acs"]' ]
    [ "$(epkit doctor --only nic --from a4 --json | jq -c '[.checks[].group] | unique')" = '["nic"]' ]
    run -0 --separate-stderr epkit doctor --only gid --from a4.shm
    [ "$output" = "Healthy: 8 x B200, 8 x 400 Gb/s RoCE, 1 check, nothing found." ]
}

@test "JSON fits its schema" {
    for tree in a4 laptop a4.shm a4.testbed-env h100.peermem blind; do
        epkit doctor --from "$tree" --json >document.json || [[ $? =~ ^[35]$ ]]
        valid doctor document.json
        # All counts together are all checks.
        [ "$(jq '(.counts | .fine + .found + .not_here + .unknown) == (.checks | length)' document.json)" = true ]
        [ "$(jq '.healthy == (.state == "healthy") and (.state == "findings") == (.counts.found > 0)' document.json)" = true ]
    done
    epkit doctor --list --json | valid doctor
    epkit doctor --explain one-nic --json | valid doctor
}

@test "the same machine gives the same document" {
    epkit doctor --from a4.testbed-env --json >first.json || [ $? -eq 3 ]
    epkit doctor --from a4.testbed-env --json >second.json || [ $? -eq 3 ]
    cmp first.json second.json
}

@test "--pid looks at another process's environment" {
    # A process that has NVSHMEM's variable, on a machine without GPUs: there is nothing to find, but it is read.
    NVSHMEM_IB_GID_INDEX=3 sleep 2400 3>&- &
    local pid=$!
    run --separate-stderr epkit doctor --pid $pid --json
    kill $pid
    [ "$status" -eq 4 ] || [ "$status" -eq 0 ] || [ "$status" -eq 3 ]
    [ "$(jq -r .facts.environment.NVSHMEM_IB_GID_INDEX <<<"$output")" = 3 ]
}

@test "wrong usage" {
    refused "there is no check 'onenic'; did you mean 'one-nic'?" --explain onenic
    refused "there is no check 'zzzzzz'; --list names them" --explain zzzzzz
    refused "there is no check 'nci'; did you mean 'nic'?" --only gid,nci
    refused "there is no check ''" --only gid,,acs
    refused "--fix runs commands on this machine" --fix --from a4
    refused "--fix and --json do not go together" --fix --json
    refused "--yes needs --fix" --yes
    refused "--ssh, --port and --remote-command need --hosts" --ssh x
    refused "--ssh, --port and --remote-command need --hosts" --port 222
    refused "--hosts and --from do not go together" --hosts hosts --from a4
    refused "--hosts and --fix do not go together" --hosts hosts --fix
    refused "--list and --explain do not go together" --list --explain acs
    refused "--from: " --from nowhere
    refused "--pid" --pid 5 --from a4
}

# --- --fix ---

# Not in live(), which tests `run`: a skip would end that alone.
need_namespaces() {
    mkdir -p probe
    unshare --user --map-root-user --mount mount -t tmpfs tmpfs probe 2>/dev/null ||
        skip "no user and mount namespaces here"
    rmdir probe
}

# live COMMAND: on a machine whose /sys and /proc/driver are those of a tree with 8 H100, and where modprobe is a script.
# In namespaces of its own, so that nothing real is touched.
live() {
    rm -rf live bin
    cp -al h100.peermem live # what is new in it is in folders of its own
    mkdir bin
    cat >bin/modprobe <<'SCRIPT'
#!/bin/sh
echo "modprobe $*" >>"$MODPROBE_LOG"
[ -z "$MODPROBE_FAILS" ] || { echo "modprobe: ERROR: could not insert 'nvidia_peermem': Invalid argument" >&2; exit 1; }
mkdir -p /sys/module/nvidia_peermem
echo live >/sys/module/nvidia_peermem/initstate
SCRIPT
    chmod +x bin/modprobe
    : >modprobe.log
    # A root that is put together anew: the machine that runs the tests may be a container, in which less is safe.
    MODPROBE_LOG="$PWD/modprobe.log" PATH="$PWD/bin:$PATH" EPKIT_COMMAND="$EPKIT" unshare --user --map-root-user --mount \
        env --unset=container --unset=KUBERNETES_SERVICE_HOST sh -ec '
            mkdir -p root
            mount -t tmpfs tmpfs root
            for place in /*; do
                if [ -L "$place" ]; then
                    cp --no-dereference "$place" root/
                elif [ -d "$place" ]; then
                    mkdir "root$place"
                    mount --rbind "$place" "root$place"
                fi
            done
            mount --bind live/sys root/sys
            mount --bind live/proc/driver root/proc/driver
            mount -t tmpfs -o size=64m tmpfs root/dev/shm
            exec chroot root sh -ec "cd \"\$0\"; exec timeout --kill-after=10 1200 \"\$@\"" "$PWD" "$@"' sh "$@"
}

@test "--fix --yes runs what is safe, checks again, and says that it is fixed" {
    need_namespaces
    run -0 --separate-stderr live "$EPKIT" doctor --only peermem --fix --yes
    [[ "$output" == *"Plan:"*" 1. sudo modprobe nvidia-peermem"*"fixes peermem: "* ]]
    [[ "$output" == *"modprobe nvidia-peermem: done"*"Checking again:"*"peermem: fixed"* ]]
    [ "$(cat modprobe.log)" = "modprobe nvidia-peermem" ]
}

@test "--fix makes /dev/shm larger: a real remount" {
    need_namespaces
    run -0 --separate-stderr live "$EPKIT" doctor --only shm --fix --yes
    [[ "$output" == *"/dev/shm has only 64 MiB"*"mount -o remount,size="*": done"*"shm: fixed"* ]]
}

@test "a fix that fails: its output is shown, the finding is still there, exit code 1" {
    need_namespaces
    MODPROBE_FAILS=1 run -1 --separate-stderr live "$EPKIT" doctor --only peermem --fix --yes
    [[ "$output" == *"ended with exit status 1"*"| modprobe: ERROR: could not insert"*"peermem: still there"* ]]
    [[ "$stderr" == *"1 of 1 commands failed"* ]]
}

@test "--fix without a terminal and without --yes shows the plan and runs nothing" {
    need_namespaces
    run -2 --separate-stderr live "$EPKIT" doctor --only peermem --fix
    [[ "$output" == *"Plan:"*"modprobe nvidia-peermem"* ]]
    [[ "$stderr" == *"there is no terminal to ask on: use --yes"* ]]
    [ ! -s modprobe.log ]
}

@test "--fix asks on a terminal, and takes no for an answer" {
    command -v script >/dev/null || skip "no script(1) here"
    need_namespaces
    run -3 live sh -c 'echo n | script -qec "$EPKIT_COMMAND doctor --only peermem --fix" /dev/null'
    [[ "$output" == *"Run it? [y/N]"*"Nothing was run."* ]]
    [ ! -s modprobe.log ]
    run -0 live sh -c 'echo y | script -qec "$EPKIT_COMMAND doctor --only peermem --fix" /dev/null'
    [ -s modprobe.log ]
}

@test "what is not safe is left to people" {
    need_namespaces
    run --separate-stderr live "$EPKIT" doctor --only peermem,memlock --fix --yes
    [ "$status" -eq 0 ] || [ "$status" -eq 3 ]
    run --separate-stderr live sh -c 'ulimit -l 64; exec setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock "$EPKIT_COMMAND" doctor --only memlock --fix --yes'
    echo "$output$stderr"
    if [[ "$output" == *"may lock 64 KiB"* ]]; then
        [ "$status" -eq 3 ]
        [[ "$output" == *"To run manually"*"memlock"*"hard limit"*"--fix cannot fix any of this."* ]]
        [ ! -s modprobe.log ]
    else
        skip "capabilities cannot be given up here"
    fi
}

# --- --hosts ---

# An ssh that needs no network: the name of the host says how it answers.
made_up_ssh() {
    cat <<SCRIPT
#!/bin/bash
echo "\$*" >>"$BATS_FILE_TMPDIR/ssh.log"
while [[ "\$1" == -* ]]; do shift 2; done
host="\${1#*@}"
doctor() { cd "$BATS_FILE_TMPDIR" && exec "$EPKIT" doctor --json --from "\$1"; }
case "\$host" in
good*) doctor a4 ;;
small) doctor a4.shm ;;
skewed) doctor a4.driver-skew ;;
empty*) doctor empty ;;
greeting) echo "Welcome to {this} node" | tr -d '{}'; doctor a4 ;;
noname) echo "ssh: Could not resolve hostname noname: Name or service not known" >&2; exit 255 ;;
refused) echo "ssh: connect to host refused port 22: Connection refused" >&2; exit 255 ;;
slow) echo "ssh: connect to host slow port 22: Connection timed out" >&2; exit 255 ;;
stranger) echo "root@stranger: Permission denied (publickey)." >&2; exit 255 ;;
bare) echo "bash: line 1: epkit: command not found" >&2; exit 127 ;;
old) echo "epkit: error: unknown verb 'doctor'" >&2; exit 2 ;;
newer) "$EPKIT" doctor --json --from "$BATS_FILE_TMPDIR/a4" | jq '.schema_version = 99' ;;
release) "$EPKIT" doctor --json --from "$BATS_FILE_TMPDIR/a4" | jq '.epkit = "99.0.0"' ;;
unset) "$EPKIT" doctor --json --from "$BATS_FILE_TMPDIR/a4" | jq '.facts.environment = {}' ;;
nonics) "$EPKIT" doctor --json --from "$BATS_FILE_TMPDIR/a4" | jq '.facts.nics = []' ;;
mapped) "$EPKIT" doctor --json --from "$BATS_FILE_TMPDIR/a4" |
    jq '.facts.environment.DEEP_EP_DEVICE_TO_HCA_MAPPING |= sub("7:mlx5_7"; "7:other")' ;;
garbage) head -c 300000 /dev/urandom ;;
torn) "$EPKIT" doctor --json --from "$BATS_FILE_TMPDIR/a4" | head -c 2000 ;;
other) echo '{"subcommand": "topo", "schema_version": 1}' ;;
wrong) echo '{"subcommand": "doctor", "schema_version": 1, "epkit": 7, "checks": [1, {"outcome": "found"}], "facts":
    {"gpus": [null, 3], "nics": [[], "x"], "kernel": [], "environment": {"A": 1}}}' ;;
escape) "$EPKIT" doctor --json --from "$BATS_FILE_TMPDIR/a4" | jq '.facts.kernel = "\\u001b[31mred"' ;;
silent) exit 0 ;;
hanging) sleep 1000 ;;
together*) until [ "\$(wc -l <"$BATS_FILE_TMPDIR/ssh.log")" -ge 21 ]; do sleep 0.05; done; doctor a4 ;;
rack*) "$EPKIT" doctor --json --from "$BATS_FILE_TMPDIR/gb200" |
    jq --arg host "\$host" '.facts.nvlink_domain = (if \$host == "rack3" then "b" else "a" end) + ".32766"' ;;
dying) kill -9 \$\$ ;;
esac
SCRIPT
}

# compare SECONDS HOST...
compare() {
    local seconds="$1"
    shift
    printf '%s\n' "$@" >hosts
    run --separate-stderr epkit doctor --hosts hosts --ssh ./ssh --timeout "$seconds"
    echo "$output$stderr"
}

@test "--hosts: nodes that are alike get one line" {
    compare 600 good1 good2 good3
    [ "$status" -eq 0 ]
    [ "$output" = "Healthy: 3 nodes, nothing found, no differences." ]
    # A list as of epkit launch.
    run -0 --separate-stderr epkit doctor --hosts 'good[1-3]' --ssh ./ssh --timeout 600
    [ "$output" = "Healthy: 3 nodes, nothing found, no differences." ]
    run -2 --separate-stderr epkit doctor --hosts 'a,,b' --ssh ./ssh
    [[ "$stderr" == *"--hosts: there is an empty name"* ]]
    # One node, without a file.
    run -0 --separate-stderr epkit doctor --hosts me@good1 --ssh ./ssh --timeout 600 --json
    [ "$(jq -r '.hosts[].host' <<<"$output")" = me@good1 ]
}

@test "--hosts: differences come first, with what most have and who differs; then findings" {
    compare 600 good1 skewed good2 small
    [ "$status" -eq 3 ]
    [[ "${lines[0]}" == *"difference"*" between 4 nodes, 2 findings; 0 of 4 did not answer." ]]
    [[ "$output" == *"Differences:"*"finding driver-skew"*"no"*"skewed"*"yes"*"Findings:"*"serious  driver-skew skewed"* ]]
    [[ "$output" == *"shm"*"small"* ]]
}

@test "--hosts: facts of which one node has another value" {
    printf 'good1\nrelease\ngood2\n' >hosts
    run -3 --separate-stderr epkit doctor --hosts hosts --ssh ./ssh --json
    valid doctor <<<"$output"
    [ "$(jq -c '.differences' <<<"$output")" = \
        '[{"fact":"epkit","value":"'"$(jq -r .epkit <<<"$output")"'","nodes":2,"others":[{"value":"99.0.0","nodes":["release"]}]}]' ]
}

@test "--hosts: a node that does not answer is named with the layer that failed" {
    printf '%s\n' good noname refused slow stranger bare old newer garbage torn other silent dying hanging >hosts
    # The others answer in time, if not in this one then in a longer one: how fast they are is the machine's affair.
    local seconds
    for seconds in 5 30 180; do
        run --separate-stderr epkit doctor --hosts hosts --ssh ./ssh --timeout "$seconds" --json
        [ "$(jq '[.hosts[] | select(.failed_at == "timeout")] | length' <<<"$output")" -gt 2 ] || break
    done
    [ "$status" -eq 1 ]
    valid doctor <<<"$output"
    [ "$(jq -r '.hosts[] | "\(.host) \(.failed_at)"' <<<"$output" | xargs)" = \
        "good null noname DNS refused TCP slow timeout stranger authentication bare epkit old version newer version garbage answer torn answer other answer silent answer dying answer hanging timeout" ]
    [ "$(jq -r '.hosts[] | select(.host == "hanging").why' <<<"$output")" = "no answer within $seconds s" ]
    compare "$seconds" good refused hanging
    [ "$status" -eq 1 ]
    [[ "$output" == *"No answer from:"*"refused TCP"*"Connection refused"*"hanging timeout"* ]]
    # And what to do, once for each layer.
    compare "$seconds" refused noname bare
    [ "$(grep -c '^  TCP: is the host up' <<<"$output")" -eq 1 ]
    [[ "$output" == *"--port N chooses another"*"epkit: install epkit there in PATH"* ]]
}

@test "--hosts: a greeting in front of the answer is no harm; wrong types and escapes in it are none either" {
    compare 600 good greeting
    [ "$status" -eq 0 ]
    compare 600 good1 good2 wrong
    [ "$status" -eq 3 ]
    compare 600 good1 good2 escape
    [ "$status" -eq 3 ]
    [[ "$output" == *"?[31mred"* ]]
}

@test "--hosts: all at once, each with the deadline" {
    : >ssh.log
    # Each of these answers when all have been called.
    # shellcheck disable=SC2046
    compare 600 $(seq -f 'together%.0f' 1 21)
    [ "$status" -eq 0 ]
    [ "$output" = "Healthy: 21 nodes, nothing found, no differences." ]
    [ "$(wc -l <ssh.log)" -eq 21 ]
}

@test "--hosts: what ssh is called with" {
    : >ssh.log
    printf '%s\n' '# the job' '' 'good1 slots=8 max_slots=8' ' root@good2:222 # second' '[2001:db8::1]:23' >hosts
    EPKIT_SSH="./ssh -i key" run --separate-stderr epkit doctor --hosts hosts --timeout 600 --only nic,acs
    LC_ALL=C sort ssh.log >calls
    cat >expected <<'CALLS'
-i key -o BatchMode=yes -o LogLevel=DEBUG1 -p 222 good1 epkit doctor --json --only nic,acs
-i key -o BatchMode=yes -o LogLevel=DEBUG1 -p 222 root@good2 epkit doctor --json --only nic,acs
-i key -o BatchMode=yes -o LogLevel=DEBUG1 -p 23 2001:db8::1 epkit doctor --json --only nic,acs
CALLS
    diff expected calls
    : >ssh.log
    echo good1 >hosts
    epkit doctor --hosts hosts --ssh ./ssh --remote-command "/opt/epkit/bin/epkit doctor --json"
    [ "$(cat ssh.log)" = "-o BatchMode=yes -o LogLevel=DEBUG1 -p 222 good1 /opt/epkit/bin/epkit doctor --json" ]
    # The port as for epkit launch: 222, or EPKIT_SSH_PORT.
    printf '%s\n' good1 good2:23 >hosts
    for port in "--port 24" "-p 24" "" "--port 0"; do
        : >ssh.log
        # shellcheck disable=SC2086 # words
        EPKIT_SSH_PORT=24 epkit doctor --hosts hosts --ssh ./ssh $port
        [ "$(sed 's/ epkit.*//; s/.*DEBUG1 //' ssh.log | LC_ALL=C sort | xargs)" = \
            "-p 23 good2$([ "$port" = "--port 0" ] || echo " -p 24 good1")$([ "$port" != "--port 0" ] || echo " good1")" ]
    done
    EPKIT_SSH_PORT=ssh run -2 --separate-stderr epkit doctor --hosts hosts --ssh ./ssh
    [[ "$stderr" == *"the variable EPKIT_SSH_PORT is 'ssh', not a port from 0 to 65535"* ]]
}

@test "--hosts: nodes with nothing to look at are compared as well" {
    compare 600 empty1 empty2
    [ "$status" -eq 4 ]
    compare 600 good1 good2 empty1
    [ "$status" -eq 3 ]
    [[ "$output" == *"GPUs"*"8 x NVIDIA B200"*"empty1"*"none"* ]]
}

@test "--hosts: nodes of different NVLink domains" {
    compare 600 rack1 rack2
    [ "$status" -eq 0 ]
    compare 600 rack1 rack2 rack3
    [ "$status" -eq 3 ]
    run ! epkit doctor --hosts hosts --ssh ./ssh --timeout 600 --json
    [ "$(jq -c '.differences' <<<"$output")" = \
        '[{"fact":"NVLink domain","value":"a.32766","nodes":2,"others":[{"value":"b.32766","nodes":["rack3"]}]}]' ]
}

@test "--hosts: a node of another kind is one difference, and so are an environment and NICs that are not there" {
    printf '%s\n' good1 good2 good3 good4 empty1 >hosts
    run --separate-stderr epkit doctor --hosts hosts --ssh ./ssh --json
    [ "$(jq -c '.differences[] | [.fact, .value, .nodes, .others]' <<<"$output")" = \
        '["GPUs","8 x NVIDIA B200",4,[{"value":"none, no NIC; not compared further","nodes":["empty1"]}]]' ]
    valid doctor <<<"$output"
    printf '%s\n' good1 good2 unset >hosts
    run --separate-stderr epkit doctor --hosts hosts --ssh ./ssh --json
    [ "$(jq -c '[.differences[].fact]' <<<"$output")" = '["environment of the stack"]' ]
    printf '%s\n' good1 good2 nonics >hosts
    run --separate-stderr epkit doctor --hosts hosts --ssh ./ssh --json
    [ "$(jq -c '[.differences[].fact]' <<<"$output")" = '["NICs"]' ]
    # A value is cut near the place where it differs.
    compare 600 good1 good2 mapped
    grep -F '...' <<<"$output" | grep -F ',7:other'
    [ "$(wc -L <<<"$output")" -lt 190 ]
}

# refused_file TEXT LINE...
refused_file() {
    local text="$1"
    shift
    printf '%s\n' "$@" >hosts
    refused "$text" --hosts hosts --ssh ./ssh
}

@test "--hosts: files that are refused, with the line" {
    refused_file "hosts, line 3: 'a' is already in line 1" a b a
    refused_file "hosts, line 2: 'user@a:22' is already in line 1" user@a:22 user@a:22
    refused_file "line 1: '-oProxyCommand=x' is not a host" "-oProxyCommand=x"
    refused_file "line 1: 'user@-x' is not a host" "user@-x"
    refused_file "line 1: 'a;reboot' is not a host" 'a;reboot'
    refused_file "line 1: 'a:99999' is not a host" a:99999
    refused_file "line 1: 'a:' is not a host" a:
    refused_file "line 1: 'eight' after the host is not a setting like slots=8" "a eight"
    refused_file "the file contains no host" "# nothing" ""
    refused_file "is not a host" "$(printf 'a%.0s' $(seq 2000))"
    refused "nowhere: No such file or directory; a single host is written USER@nowhere or nowhere:PORT" --hosts nowhere --ssh ./ssh
    refused "./nowhere: No such file or directory" --hosts ./nowhere --ssh ./ssh
    refused "not a regular file" --hosts . --ssh ./ssh
    mkfifo fifo
    refused "not a regular file" --hosts fifo --ssh ./ssh
}

@test "--hosts: an ssh that is not there" {
    echo good1 >hosts
    run -1 --separate-stderr epkit doctor --hosts hosts --ssh ./nowhere
    [[ "$output" == "None of 1 node answered."*"good1 ssh"*"./nowhere: No such file or directory"* ]]
    refused "--ssh: no program" --hosts hosts --ssh " "
}

# --- cost ---

@test "under a second, and at most 200 ms of processor time" {
    # Of three the best: others may be at work on this machine. A build with sanitizers takes several times as much.
    local best=9999 took
    if nm "$EPKIT" | grep -q __asan_init; then
        skip "a build with sanitizers"
    fi
    for _ in 1 2 3; do
        took=$(python3 - "$EPKIT" <<'PYTHON'
import resource, subprocess, sys
subprocess.run([sys.argv[1], "doctor", "--from", "a4"], stdout=subprocess.DEVNULL, timeout=60, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(round((used.ru_utime + used.ru_stime) * 1000))
PYTHON
        )
        [ "$took" -ge "$best" ] || best=$took
    done
    echo "$best ms"
    [ "$best" -le 200 ]
}
