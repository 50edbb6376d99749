#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit launch as root over a real sshd, while another user plants links, files and folders where it writes, here and on
# the nodes, and exchanges them during the launch: nothing of root's changes, and nothing is written elsewhere.
#
# shellcheck disable=SC2016 # programs of inner shells

load common

MALLORY=(setpriv --reuid 54321 --regid 54321 --clear-groups)
ROUNDS=4
[ -z "${EPKIT_TEST_LONG:-}" ] || ROUNDS=100

setup_file() {
    hosts_up 2
}

teardown_file() {
    hosts_down
}

setup() {
    [ -z "$HOSTS_WHY" ] || skip "$HOSTS_WHY"
    for host in login h1 h2; do
        on "$host" sh -c 'rm -rf /tmp/* && mount -t tmpfs none /root/victim 2>/dev/null || { mkdir -p /run/victim /root/victim && mount --bind /run/victim /root/victim; }
            rm -rf /root/victim/* && echo precious >/root/victim/file'
    done
}

# unharmed HOST...: the victim of each is as it was
unharmed() {
    local host
    for host; do
        [ "$(on "$host" sh -c 'cd /root/victim && find . -printf "%P:%m:%u " && cat file')" = "$(printf ':%s:root file:644:root precious' "$(on "$host" stat -c %a /root/victim)")" ] || {
            on "$host" ls -lR /root/victim
            return 1
        }
    done
}

# exchange HOST NAME: begins to put a link to the victim, a FIFO, and a link to its file at NAME there, in turn
exchange() {
    on "$1" "${MALLORY[@]}" perl -MPOSIX -e '
        my $name = shift;
        for (my $i = 0;; $i++) {
            unlink "$name.aside";
            $i % 3 == 1 ? mkfifo("$name.aside", 0666) : symlink($i % 3 ? "/root/victim/file" : "/root/victim", "$name.aside");
            rename $name, "$name.before";
            rename "$name.aside", $name;
            unlink $name;
            rename "$name.before", $name;
        }' "$2" 3>&- &
    EXCHANGES+=($!)
}

stop() {
    local host
    for host in login h1 h2; do on "$host" pkill --uid 54321 || true; done
    wait "${EXCHANGES[@]}" || true
}

@test "the folder of the run belongs to another user, who exchanges what is in it" {
    EXCHANGES=()
    on login "${MALLORY[@]}" mkdir -p /tmp/hers/testbed-logs
    for name in '' /testbed-logs /testbed-logs/worker-h1.log /testbed-logs/coordinator.log /testbed-logs/run.json; do
        exchange login "/tmp/hers$name"
    done
    for _ in $(seq $ROUNDS); do
        run launch --out /tmp/hers --checks skip --hosts 'h[1-2]' -- sh -c 'seq 200'
        output=${lines[-1]}
        echo "$status: $output"
        [ "$status" -eq 0 ] || [ "$status" -eq 1 ]
    done
    stop
    unharmed login h1 h2
    [ -z "$(on login find /tmp -user root -perm /022 ! -type l ! -path /tmp)" ]
}

@test "the default folder in a sticky one, files on nodes whose /tmp another user fills" {
    EXCHANGES=()
    for host in h1 h2; do
        on "$host" "${MALLORY[@]}" sh -c 'cd /tmp && for i in 1 2 3 4 5 6; do ln -s /root/victim epkit-launch-AAAAA$i; mkfifo epkit-launch-BBBBB$i; mkdir -p epkit-launch-CCCCC$i/d; done'
        exchange "$host" /tmp/epkit-launch-DDDDDD
    done
    on login "${MALLORY[@]}" sh -c 'cd /tmp && for i in 1 2 3; do ln -s /root/victim epkit-run-$i; done'
    for _ in $(seq $ROUNDS); do
        run -0 on login sh -c 'echo "cat \$0; ls -ld \$(dirname \$0)" >/tmp/script && cd /tmp && exec "$@"' x "$EPKIT" launch "${PATIENT[@]}" \
            --checks skip --hosts 'h[1-2]' --workload /tmp/script
        [ "$(grep -c 'drwx------ .*root' <<<"$output")" -eq 2 ]
    done
    stop
    unharmed login h1 h2
    [ -z "$(on login find /tmp -name 'epkit-run-2*' -type d ! -perm 700)" ]
    [ -z "$(on h1 find /tmp -user root ! -path /tmp)" ]
    # Where names can be exchanged, nothing is executed.
    for host in h1 h2; do on "$host" "${MALLORY[@]}" mkdir -p /tmp/hers; done
    run on login sh -c 'cd /tmp && exec "$@"' x "$EPKIT" launch "${PATIENT[@]}" --checks skip --hosts 'h[1-2]' \
        --remote-epkit "env TMPDIR=/tmp/hers $EPKIT" --workload /tmp/script
    [ "$status" -ne 0 ]
    unharmed login h1 h2
    [ -z "$(on h1 ls /tmp/hers)" ]
}

@test "a pod that waits for the launch: another user has its name, and sends signals" {
    # It has the name of one that waits, and sends the code 9 to those that do.
    on h2 "${MALLORY[@]}" perl -e '
        $0 = "epkit-follow";
        $SIG{RTMIN} = "IGNORE";
        for (;;) {
            for (</proc/[0-9]*/comm>) { /(\d+)/ and open(my $f, "<", $_) and <$f> eq "epkit-follow\n" and kill 34, $1 }
            select(undef, undef, undef, 0.01);
        }' 3>&- &
    EXCHANGES=($!)
    within 20 on h2 pgrep -x epkit-follow
    for i in 0 1; do echo "198.18.77.$((i + 1)) demo-workload-0-$i.demo" >>"$HOSTS_DIR/hosts"; done
    on h2 env JOBSET_NAME=demo NNODES=2 JOB_COMPLETION_INDEX=1 sh -c \
        "timeout 600 $EPKIT launch --no-logs -- anything; echo \$? >$HOSTS_DIR/waited" 3>&- &
    run on h1 env JOBSET_NAME=demo NNODES=2 JOB_COMPLETION_INDEX=0 timeout 600 "$EPKIT" launch "${PATIENT[@]}" --no-logs \
        --checks skip --hostfiles no -- sh -c 'exit 7'
    echo "$output"
    [ "$status" -eq 7 ]
    within 60 test -s "$HOSTS_DIR/waited"
    [ "$(cat "$HOSTS_DIR/waited")" -eq 7 ]
    stop
}
