#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Unusual ways to log in: aliases and jumps of ssh's configuration, IPv6 addresses, banners, start-up
# files that print, changed host keys, hosts that require a password, users other than root.
#
# shellcheck disable=SC2154,SC2016 # $stderr is set by run; quotes for other shells

load common

setup_file() {
    hosts_up 3
    [ -z "$HOSTS_WHY" ] || return 0
    echo '*** Authorised use only. Connection refused to others; Permission denied, epkit: not found. ***' >"$HOSTS_DIR/banner"
    echo 'nosuchmodule load cuda; echo "Welcome to {\"epkit\": 1}"; printf "no line end"' >"$HOSTS_DIR/talks"
    cp "$HOSTS_DIR/login/root.ssh/config" "$HOSTS_DIR/config"
}

teardown_file() {
    hosts_down
}

teardown() {
    [ -z "${HOSTS_DIR:-}" ] || cp "$HOSTS_DIR/config" "$HOSTS_DIR/login/root.ssh/config"
}

# configure LINE...: ssh's configuration on the launching host, in front of the usual one
configure() {
    { printf '%s\n' "$@" && cat "$HOSTS_DIR/config"; } >"$HOSTS_DIR/login/root.ssh/config"
}

# listens HOST PORT OPTION...: starts another sshd there
listens() {
    local host=$1 port=$2
    shift 2
    on "$host" /usr/sbin/sshd -p "$port" -h "$HOSTS_DIR/hostkey" -o PidFile=none -o UsePAM=no -o StrictModes=no "${@/#/-o}"
    "$HOSTS" wait "$HOSTS_DIR" "$host" "$port"
}

@test "an alias, and a host behind another one: the ranks get a name that they can resolve" {
    configure 'Host gpu-a' '  HostName h2' 'Host gpu-b' '  HostName h3' '  ProxyJump h1:222'
    run -0 --separate-stderr launch --no-logs --checks skip --hosts gpu-b,gpu-a -- sh -c 'echo "$RANK $MASTER_ADDR"'
    [[ "$output" == *"gpu-b: 0 h3"* && "$output" == *"gpu-a: 1 h3"* ]]
    # A name that a node can resolve stays as the user gave it: ssh's target may be an address that is valid only outside.
    configure 'Host h2' '  HostName h3'
    run --separate-stderr launch --no-logs --checks skip --hosts h2 -- sh -c 'echo "$MASTER_ADDR on $(hostname)"'
    [[ "$output" == *"h2: h2 on h3"* ]]
    configure 'Host gpu-a' '  HostName h2' 'Host gpu-b' '  HostName h3' '  ProxyJump h1:222'
    run -0 --separate-stderr launch --no-logs --checks skip --hosts gpu-a,gpu-b epkit-test internode -- --tokens 8 --hidden 256
    [[ "$output" == *"32/32 cases passed"* ]]
}

@test "IPv6 addresses, with user and port; mpirun does not accept them and would wait for ever" {
    for n in 1 2; do on "h$n" ip -6 addr add "fd00::$n/64" dev eth0 nodad; done
    on login ip -6 addr add fd00::250/64 dev eth0 nodad
    run -0 --separate-stderr launch --no-logs --checks skip --hosts '[fd00::1],root@[fd00::2]:222' hostname
    [[ "$output" == *"fd00::1: h1"* && "$output" == *"fd00::2: h2"* ]]
    run -0 --separate-stderr launch --no-logs --checks skip --hosts 'fd00::1,[fd00::2]' epkit-test internode -- --tokens 8 --hidden 256
    [[ "$output" == *"32/32 cases passed"* ]]
    run -2 --separate-stderr launch --no-logs --checks skip --hosts 'fd00::1,fd00::2' --with mpirun hostname
    [[ "$stderr" == *"mpirun does not accept IPv6 addresses: give the node a name"* ]]
    # Brackets elsewhere are ranges, and these are invalid.
    for list in 'h[1-3:2]' 'h[a:b]' 'h1[fd00::1]'; do
        run -2 --separate-stderr launch --no-logs --hosts "$list" hostname
        [[ "$stderr" == *"'$list' is not a host"* ]]
    done
}

@test "the text of a banner is not the reason of a failed login, and a host that requires a password is named" {
    listens h3 2222 "Banner=$HOSTS_DIR/banner"
    listens h3 2223 "Banner=$HOSTS_DIR/banner" AuthorizedKeysFile=none PasswordAuthentication=yes
    run -0 --separate-stderr launch --no-logs --checks skip --hosts h3:2222 hostname
    # After the login epkit is missing, which has its own message.
    run -1 --separate-stderr launch --no-logs --checks skip --hosts h3:2222 --remote-epkit /nowhere/epkit hostname
    [[ "$stderr" == *"h3: epkit: "*"/nowhere/epkit: not found"* && "$stderr" != *Authorised* ]]
    run -1 --separate-stderr launch --no-logs --checks skip --hosts h3:2223,h1 hostname
    [[ "$stderr" == *"h3: authentication: "*"Permission denied (publickey,password"* && "$stderr" != *Authorised* ]]
}

@test "a changed host key is reported, with what to do" {
    ssh-keygen -q -t ed25519 -N '' -f "$HOSTS_DIR/other"
    echo "[h2]:222 $(cut -d' ' -f1,2 "$HOSTS_DIR/other.pub")" >"$HOSTS_DIR/login/root.ssh/known"
    configure 'Host *' '  StrictHostKeyChecking yes' '  UserKnownHostsFile /root/.ssh/known'
    run -1 --separate-stderr launch --no-logs --checks skip --hosts h2 hostname
    [[ "$stderr" == *"h2: authentication: its host key has changed"*"ssh-keygen -R"* ]]
    [[ "$stderr" != *@@* ]]
}

@test "a start-up file that prints errors: the node runs, and its output is not the reason when the connection is lost later" {
    on h2 mount --bind "$HOSTS_DIR/talks" /root/.bashrc
    run -0 --separate-stderr launch --no-logs --checks skip --hosts h1,h2 hostname
    [[ "$output" == *"h2: h2"* ]]
    mkdir -p "$HOSTS_DIR/work"
    launch --no-logs --checks skip --hosts h1,h2 -- sh -c 'sleep 600' >"$HOSTS_DIR/out" 2>&1 3>&- &
    launched=$!
    within 20 is_running h2 "sleep 600"
    on h2 sh -c 'kill -KILL $(pgrep -f "[_]_node")'
    status=0
    wait "$launched" || status=$?
    on h2 umount /root/.bashrc
    cat "$HOSTS_DIR/out"
    [ "$status" -eq 1 ]
    grep -q "h2: the connection was lost" "$HOSTS_DIR/out"
    run ! grep -q nosuchmodule "$HOSTS_DIR/out"
    all_clean 40 h1 h2
}

@test "another user than root, with a home and without" {
    { cat /etc/passwd && echo 'eve:x:2000:2000::/tmp/eve:/bin/sh' && echo 'adam:x:2001:2001::/nonexistent:/bin/sh'; } >"$HOSTS_DIR/passwd"
    { cat /etc/shadow && echo 'eve:*:19000:0:99999:7:::' && echo 'adam:*:19000:0:99999:7:::'; } >"$HOSTS_DIR/shadow"
    cp "$HOSTS_DIR/h1/root.ssh/authorized_keys" "$HOSTS_DIR/keys"
    chmod 600 "$HOSTS_DIR/shadow"
    chmod 755 "$HOSTS_DIR"
    chmod 644 "$HOSTS_DIR/keys"
    on h1 sh -c "mount --bind $HOSTS_DIR/passwd /etc/passwd && mount --bind $HOSTS_DIR/shadow /etc/shadow && mkdir /tmp/eve && chown 2000 /tmp/eve"
    listens h1 2227 "AuthorizedKeysFile=$HOSTS_DIR/keys"
    on h1 setpriv --reuid 2000 --clear-groups test -x "$EPKIT" || skip "this tree is root's alone"
    for user in eve adam; do
        run -0 --separate-stderr launch --no-logs --checks skip --hosts "$user@h1:2227,h2" -- sh -c 'echo "$(id -un) $RANK"'
        [[ "$output" == *"h1: $user 0"* && "$output" == *"h2: root 1"* ]]
    done
}

@test "a second Ctrl-C kills at once, without the grace time" {
    mkdir -p "$HOSTS_DIR/work"
    launch --no-logs --checks skip --grace 15 --hosts h1,h2 -- sh -c 'trap "" TERM; while :; do sleep 601; done' >"$HOSTS_DIR/out" 2>&1 3>&- &
    launched=$!
    within 20 is_running h1 "sleep 601"
    within 20 is_running h2 "sleep 601"
    on login sh -c 'kill -INT $(pgrep -xo epkit)'
    within 10 grep -q "ending everything" "$HOSTS_DIR/out"
    on login sh -c 'kill -INT $(pgrep -xo epkit)'
    within 10 grep -q "killing everything" "$HOSTS_DIR/out"
    status=0
    wait "$launched" || status=$?
    cat "$HOSTS_DIR/out"
    [ "$status" -eq 130 ]
    run ! grep -q "did not confirm that everything has ended" "$HOSTS_DIR/out"
    all_clean 20 h1 h2
}
