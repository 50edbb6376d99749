#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit launch when something goes wrong: each fault is named with node and layer, the exit code is right, and nothing
# is left on any host. Tests of the long tier wait for a deadline.
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

# The programs that start ranks; the long tier tests both.
starters() {
    echo ssh
    [ -z "${EPKIT_TEST_LONG:-}" ] || echo mpirun
}

# fails NODE LAYER TEXT ARGUMENT...: nothing starts; the node is named with the layer.
fails() {
    local node=$1 layer=$2 text=$3
    shift 3
    run -1 --separate-stderr launch --no-logs --checks skip --json "$@" hostname
    valid <<<"$output"
    [ "$(jq -r '.hosts[] | select(.failed_at) | "\(.name) \(.failed_at)"' <<<"$output")" = "$node $layer" ]
    [[ "$(jq -r '.hosts[] | select(.failed_at).why' <<<"$output")" == *"$text"* ]]
    [[ "$(jq -r .verdict <<<"$output")" == "hostname was not started: 1 of "*" nodes did not answer; $node: $layer: "* ]]
    all_clean 20 h1 h2 h3 h4
}

@test "a name that is unknown" {
    fails nowhere DNS "Could not resolve hostname" --hosts h1,nowhere,h2
    # One that is waited for is named meanwhile, as a pod that is not there yet.
    run -1 --separate-stderr launch --no-logs --checks skip --wait 14 --hosts h1,nowhere hostname
    [[ "$stderr" == *"1/2, "*" s: nodes answer; nowhere: DNS: "*"Could not resolve hostname"* ]]
}

@test "ssh refused" {
    fails h3 TCP "Connection refused" --hosts h1,h2,h3:223
}

@test "a host that is down: no answer to TCP" {
    long
    # Its neighbour entry is there, so that packets go out and nothing comes back, as behind a switch.
    on login ip neigh replace 198.18.77.99 lladdr 02:00:00:00:00:99 dev eth0
    fails 198.18.77.99 TCP "no TCP connection within 3 s" --hosts h1,198.18.77.99 --connect-timeout 3
}

# Starts a server on port 2222 of a host that sends $2 and then nothing; prints its PID.
mute_server() { # HOST TEXT
    on "$1" perl -e 'use IO::Socket::INET; fork and exit; open STDOUT, ">/dev/null"; open STDERR, ">/dev/null";
        my $s = IO::Socket::INET->new(LocalPort => 2222, Listen => 5, ReuseAddr => 1) or die;
        my @c; while (my $c = $s->accept) { print $c $ARGV[0]; $c->flush; push @c, $c }' "$2" 3>&- 4>&-
}

stop_mute_server() { # HOST
    on "$1" pkill -f LocalPort || true
}

@test "TCP without a banner, and a hang after the banner" {
    long
    mute_server h4 ""
    run -1 --separate-stderr launch --no-logs --checks skip --hosts h1,h4:2222 --connect-timeout 5 hostname
    [[ "$stderr" == *"h4: banner: TCP is connected, but the ssh server sent no banner within 5 s"* ]]
    stop_mute_server h4
    mute_server h4 $'SSH-2.0-OpenSSH_9.2p1\r\n'
    # It may be late: it is tried again as long as one waits.
    SECONDS=0
    run -1 --separate-stderr launch --no-logs --checks skip --wait 8 --hosts h1,h4:2222 --connect-timeout 5 hostname
    [ "$SECONDS" -ge 10 ]
    [[ "$stderr" == *"h4: authentication: the ssh server sent its banner, but did not complete the login within 5 s"* ]]
    [[ "$output" == *"shows why it does not; --connect-timeout gives slow nodes more time"* ]]
    stop_mute_server h4
    all_clean 20 h1 h4
}

@test "no permission" {
    long
    mv "$HOSTS_DIR/h2/root.ssh/authorized_keys" "$HOSTS_DIR/keys"
    run --separate-stderr launch --no-logs --checks skip --hosts h1,h2 hostname
    mv "$HOSTS_DIR/keys" "$HOSTS_DIR/h2/root.ssh/authorized_keys"
    [ "$status" -eq 1 ]
    [[ "$stderr" == *"h2: authentication: "*"Permission denied"* ]]
}

@test "another version of epkit, and none at all" {
    # Escapes the dots: any byte between the digits may be machine code.
    version=$(epkit_version)
    version=${version//./[.]}
    sed "s/$version/9.9.9/g" "$EPKIT" >"$HOSTS_DIR/other"
    chmod +x "$HOSTS_DIR/other"
    # The library holds the version.
    mkdir -p "$HOSTS_DIR/lib"
    for library in "$EPKIT_BUILD"/libepkit.so*; do
        sed "s/$version/9.9.9/g" "$library" >"$HOSTS_DIR/lib/${library##*/}"
    done
    on h2 mount --bind "$HOSTS_DIR/other" "$EPKIT"
    for library in "$EPKIT_BUILD"/libepkit.so.?; do
        on h2 mount --bind "$HOSTS_DIR/lib/${library##*/}" "$(readlink -f "$library")"
    done
    run --separate-stderr launch --no-logs --checks skip --hosts h1,h2 hostname
    on h2 sh -c "umount $EPKIT; umount $(readlink -f "$EPKIT_BUILD"/libepkit.so)"
    [ "$status" -eq 1 ]
    [[ "$stderr" == *"h2: version: epkit 9.9.9 is installed there, and this is $(epkit_version)"* ]]
    fails h1 epkit "not found" --hosts h1 --remote-epkit /nowhere/epkit
}

@test "an epkit that hangs" {
    long
    printf '#!/bin/sh\nsleep 100\n' >"$HOSTS_DIR/hangs"
    chmod +x "$HOSTS_DIR/hangs"
    run -1 --separate-stderr launch --no-logs --checks skip --hosts h1 --connect-timeout 6 --remote-epkit "$HOSTS_DIR/hangs" hostname
    [[ "$stderr" == *"h1: command: no answer within 6 s"* ]]
    # It is not epkit and does not detect the end of the launcher.
    on h1 pkill -f hangs || true
    on h1 pkill -x sleep || true
}

epkit_version() {
    "$EPKIT" version --json | jq -r .epkit
}

@test "a full disk on a node" {
    # The tree may be below /tmp, and then the host needs it there.
    on h3 sh -e -c 'mkdir /run/tmp
        mount -t tmpfs -o size=32k tmpfs /run/tmp
        for folder; do
            case $folder in /tmp/*) ;; *) continue ;; esac
            top=${folder#/tmp/} top=${top%%/*}
            [ ! -e "/run/tmp/$top" ] || continue
            mkdir "/run/tmp/$top"
            mount --rbind "/tmp/$top" "/run/tmp/$top"
        done
        mount --rbind /run/tmp /tmp' sh "$EPKIT_SOURCE" "$EPKIT_BUILD"
    run --separate-stderr launch --no-logs --checks skip --hosts h1,h3 hostname
    on h3 sh -c 'umount -R /tmp && umount -R /run/tmp && rmdir /run/tmp'
    [ "$status" -eq 1 ]
    [[ "$stderr" == *"h3: disk: writing 65536 bytes to /tmp: No space left on device"* ]]
    all_clean 20 h1 h3
}

@test "a full disk for the logs: reported once, the run continues, and does not count as complete" {
    long
    on login sh -c "mkdir -p $HOSTS_DIR/small && mount -t tmpfs -o size=64k tmpfs $HOSTS_DIR/small"
    run --separate-stderr launch --out "$HOSTS_DIR/small/run" --hosts h1 -- sh -c 'seq 100000; echo the end'
    on login umount "$HOSTS_DIR/small"
    [ "$status" -eq 1 ]
    [[ "$output" == *"h1: the end"* ]]
    [ "$(grep -c 'worker.*No space\|log of h1.*No space' <<<"$stderr")" -eq 1 ]
}

@test "a rank that fails: its status is that of epkit, the others are ended everywhere" {
    for with in $(starters); do
        run -7 --separate-stderr launch --no-logs --with "$with" --hosts 'h[1-4]' --grace 1 -- \
            sh -c 'if [ $(hostname) = h3 ]; then sleep 1; exit 7; fi; (setsid sleep 4321 &); sleep 4322'
        [[ "$output" == *"program failed on h3 first: exit status 7"* ]]
        all_clean 20 h1 h2 h3 h4 login
    done
}

@test "a rank that is killed, and one that ignores SIGTERM" {
    long
    run -139 --separate-stderr launch --no-logs --hosts h1,h2 --grace 1 -- \
        sh -c '[ $RANK = 0 ] && { trap "" TERM; while :; do sleep 1; done; }; sleep 1; kill -SEGV $$'
    [[ "$output" == *"program failed on h2 first: killed by signal 11"* ]]
    all_clean 20 h1 h2
}

@test "a program that is not there" {
    long
    run -127 --separate-stderr launch --no-logs --hosts h1,h2 -- no-such-program
    [[ "$output" == *"no-such-program: No such file or directory"* ]]
}

@test "the deadline of everything, and a line when nodes are silent" {
    long
    run -124 --separate-stderr launch --no-logs --hosts h1,h2 --timeout 8 --silent 2 --grace 1 -- sh -c 'echo begun; sleep 4321'
    [[ "$output" == *"did not end within 8 s"* ]]
    [[ "$stderr" == *"h1 has written nothing for "*" s; its last line: begun"* ]]
    all_clean 20 h1 h2
}

# begin ARGUMENT...: a launch in the background, until its ranks run on h1 and h2; $pid.
begin() {
    mkdir -p "$HOSTS_DIR/work"
    # The shell returns epkit's end as an exit code: nsenter would end by that signal itself, which is ignored here.
    # shellcheck disable=SC2016 # for that shell
    "$HOSTS" on "$HOSTS_DIR" login sh -c '"$@"; exit $?' sh \
        "$EPKIT" launch "${PATIENT[@]}" --no-logs --hosts h1,h2 --grace 1 "$@" -- \
        sh -c 'trap "" HUP; (setsid sleep 4321 &); sleep 4321' >"$HOSTS_DIR/output" 2>&1 3>&- &
    pid=$!
    within 60 is_running h1 "sleep 4321"
    within 60 is_running h2 "sleep 4321"
}

# Waits for the launch; $status is its exit code.
ended() {
    status=0
    wait "$pid" || status=$?
    cat "$HOSTS_DIR/output"
}

# The PID of epkit on the host login.
launcher() {
    on login pgrep -f "^$EPKIT launch" | head -n 1
}

@test "Ctrl-C ends everything everywhere" {
    for with in $(starters); do
        begin --with "$with"
        on login kill -INT "$(launcher)"
        ended
        [ "$status" -eq 130 ]
        all_clean 20 h1 h2 login
    done
}

@test "epkit is killed by SIGKILL: nothing is left" {
    for with in $(starters); do
        begin --with "$with"
        on login kill -KILL "$(launcher)"
        all_clean 60 h1 h2 login
        wait $pid || true
    done
}

@test "a node loses power in the middle" {
    begin
    "$HOSTS" kill "$HOSTS_DIR" h2
    ended
    [ "$status" -eq 1 ]
    grep -q '^epkit: h2: the connection was lost' "$HOSTS_DIR/output"
    all_clean 20 h1 login
    "$HOSTS" start "$HOSTS_DIR" h2
}

@test "the connection breaks in the middle: the launcher names the node, and the node ends its ranks by itself" {
    long
    begin
    "$HOSTS" cut "$HOSTS_DIR" h2
    ended
    [ "$status" -eq 1 ]
    grep -q '^epkit: h2: the connection was lost' "$HOSTS_DIR/output"
    all_clean 20 h1 login
    within 120 sh -c "! '$HOSTS' ps '$HOSTS_DIR' h2 | grep -q 'sleep 4321'"
    "$HOSTS" plug "$HOSTS_DIR" h2
    all_clean 120 h2
}

@test "the agent of a node is killed: the node is named, its ranks end" {
    long
    begin
    on h2 pkill -KILL -f __node
    ended
    [ "$status" -eq 1 ]
    grep -q '^epkit: h2: the connection was lost' "$HOSTS_DIR/output"
    all_clean 30 h1 h2
}

@test "the folder of a killed agent is removed by the next launch on its node" {
    printf '#!/bin/sh\nexec sleep 500\n' >"$HOSTS_DIR/sleeps"
    launch --no-logs --checks skip --hosts h2 --workload "$HOSTS_DIR/sleeps" >"$HOSTS_DIR/output" 2>&1 3>&- &
    within 60 is_running h2 'sleep 500'
    folder=$(on h2 sh -c 'ls -d /tmp/epkit-launch-*')
    # The folder of a live agent stays.
    run -0 --separate-stderr launch --no-logs --checks skip --hosts h2 hostname
    on h2 test -e "$folder/workload"
    on h2 pkill -KILL -f __node
    wait $! || true
    run -0 --separate-stderr launch --no-logs --checks skip --hosts h2 hostname
    on h2 test ! -e "$folder"
    all_clean 30 h2
}
