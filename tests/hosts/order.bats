#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The order of the nodes: by physical location, from a metadata server on each host, commands, files and labels. Rank 0,
# MASTER_ADDR and the first line of the hostfiles always agree.
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

# After a failure too: the next test is to find the host as it was.
teardown() {
    [ -z "${HOST_WITH_ETC:-}" ] || on "$HOST_WITH_ETC" sh -c 'umount /etc/hosts; umount /etc' || true
}

# other_etc HOST FOLDER: a copy of /etc, which is FOLDER, takes the place of /etc on the host during this test
other_etc() {
    HOST_WITH_ETC=$1
    on "$1" sh -c "mount --bind $2 /etc && mount --bind $HOSTS_DIR/hosts /etc/hosts"
}

# serve HOST HOW [LOCATION]: a metadata server on the loopback of the host.
serve() {
    on "$1" python3 -S "$EPKIT_SOURCE/tests/hosts/metadata.py" 8080 "${@:2}" >/dev/null 2>&1 3>&- 4>&- &
    within 60 on "$1" bash -c 'exec 3<>/dev/tcp/127.0.0.1/8080' 2>/dev/null
}

stop_serving() {
    local host
    for host in h1 h2 h3 h4; do on "$host" pkill -f metadata.py || true; done
}

# order ARGUMENT...: launches on all hosts; checks that all agree on the order, and sets $order to the hosts by rank.
order() {
    rm -rf "$HOSTS_DIR/work/run"
    run -0 --separate-stderr on login env -C "$HOSTS_DIR" GCE_METADATA_HOST="${METADATA-127.0.0.1:8080}" timeout 600 \
        "$EPKIT" launch "${PATIENT[@]}" --out "$HOSTS_DIR/work/run" --hosts 'h[1-4]' "$@" -- \
        sh -c 'echo rank=$RANK $(hostname) $MASTER_ADDR'
    order=$(grep -o 'rank=.*' <<<"$output" | sort | cut -d' ' -f2 | xargs)
    [ "$(grep -o 'rank=.*' <<<"$output" | cut -d' ' -f3 | sort -u)" = "${order%% *}" ]
    [ "$(cut -d' ' -f1 "$HOSTS_DIR/work/run/testbed-logs/hostfile" | xargs)" = "$order" ]
    [ "$(cut -d' ' -f1 "$HOSTS_DIR/work/run/testbed-logs/hostfile-1pernode.txt" | xargs)" = "$order" ]
    [ "$(jq -r '.hosts[].name' "$HOSTS_DIR/work/run/testbed-logs/run.json" | xargs)" = "$order" ]
    [ "$(jq -r .master "$HOSTS_DIR/work/run/testbed-logs/run.json")" = "${order%% *}" ]
}

@test "a metadata server with shuffled locations" {
    serve h1 good /block2/sub1/hostb
    serve h2 good /block1/sub9/hostz
    serve h3 good /block2/sub1/hosta
    serve h4 good /block1/sub1/hostq
    order
    stop_serving
    [ "$order" = "h4 h2 h3 h1" ]
    [ "$(jq -r '.hosts[0].location' "$HOSTS_DIR/work/run/testbed-logs/run.json")" = /block1/sub1/hostq ]
    [[ "$stderr" != *"is not known"* ]]
}

@test "error page, page with status 200, empty answer: no location, sorted last, and reported" {
    serve h1 page
    serve h2 lie
    serve h3 good /b/only
    serve h4 empty
    order
    stop_serving
    [ "$order" = "h3 h1 h2 h4" ]
    [[ "$stderr" == *"the location of 3 of 4 nodes is not known, so they come last: h1: http://127.0.0.1:8080/"*"HTTP status 404"* ]]
    grep -q 'h2 has no location: .*the answer is not a location' "$HOSTS_DIR/work/run/testbed-logs/coordinator.log"
    grep -q 'h4 has no location: .*the answer is empty' "$HOSTS_DIR/work/run/testbed-logs/coordinator.log"
}

@test "a metadata server that does not answer, and a missing one" {
    long
    serve h1 hang
    serve h4 good /a
    order
    stop_serving
    [ "$order" = "h4 h1 h2 h3" ]
    grep -qi 'h1 has no location: .*time' "$HOSTS_DIR/work/run/testbed-logs/coordinator.log"
    grep -qi 'h2 has no location: .*connect' "$HOSTS_DIR/work/run/testbed-logs/coordinator.log"
}

@test "a command, labels of a pod, Slurm" {
    order --location-cmd 'case $(hostname) in h2) echo a;; h1) echo b;; h3) exit 3;; *) echo two words;; esac'
    [ "$order" = "h2 h1 h3 h4" ]
    [[ "$stderr" == *"2 of 4 nodes is not known"*"h3: the command for the location ended with status 3"* ]]
    cp -a /etc "$HOSTS_DIR/podinfo-etc"
    mkdir "$HOSTS_DIR/podinfo-etc/podinfo"
    printf 'a="b"\ntopology.kubernetes.io/zone="z"\nkubernetes.io/hostname="n"\n' >"$HOSTS_DIR/podinfo-etc/podinfo/labels"
    other_etc h2 "$HOSTS_DIR/podinfo-etc"
    order --location kubernetes
    [ "$order" = "h2 h1 h3 h4" ]
    [ "$(jq -r '.hosts[0].location' "$HOSTS_DIR/work/run/testbed-logs/run.json")" = /z/n ]
    [[ "$stderr" == *"h1: /etc/podinfo/labels cannot be read"* ]]
    order --location slurm
    [ "$order" = "h1 h2 h3 h4" ]
    [[ "$stderr" == *"4 of 4 nodes is not known"*"SLURM_TOPOLOGY_ADDR is not set"* ]]
}

@test "without a source of locations the given order stays, without a message" {
    METADATA='' order --location none
    [ "$order" = "h1 h2 h3 h4" ]
    [[ "$stderr" != *"location"* ]]
}

@test "hostfiles at the paths of the testbed: rewritten atomically" {
    long
    cp -a /etc "$HOSTS_DIR/etc"
    other_etc h1 "$HOSTS_DIR/etc"
    on h1 mount -t tmpfs tmpfs /tmp
    on h1 sh -c 'echo old slots=8 >/etc/job-worker-services.txt'
    run -0 --separate-stderr on h1 timeout 600 "$EPKIT" launch "${PATIENT[@]}" --no-logs --checks skip --hostfiles yes --hosts h2,h1 hostname
    [ "$(on h1 cat /etc/job-worker-services.txt)" = "$(printf 'h2 slots=8\nh1 slots=8')" ]
    [ "$(on h1 cat /tmp/hostfile-1pernode.txt)" = "$(printf 'h2 slots=1\nh1 slots=1')" ]
    # Without anything else, these are the hosts.
    run --separate-stderr on h1 timeout 600 "$EPKIT" launch "${PATIENT[@]}" --no-logs --checks skip hostname
    [[ "$output" == *"hostname ran on 2 nodes"* ]]
}
