#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# installer.sh, the init container of the DaemonSet, with a real epkit in a root folder and a PID namespace of its own:
# process 1 there is the node. The test is the agent.
#
# shellcheck disable=SC2154,SC2016,SC2030,SC2031 # set by run; texts of scripts

load common

setup() {
    [ "$(id -u)" -eq 0 ] || skip "needs root, for a root folder of its own"
    unshare --mount true 2>/dev/null || skip "mount namespaces are not allowed here"
    [ -x "$EPKIT" ] || skip "epkit is not built"
    SHARED=$BATS_TEST_TMPDIR/shared
    mkdir "$SHARED"
}

# When unshare ends, process 1 of its namespace ends, and with it the whole namespace.
teardown() {
    [ -z "${POD:-}" ] || kill -KILL "$POD" 2>/dev/null || true
}

# recipe NAME [LINES]: one that writes /etc/epkit-test-NAME
recipe() {
    cat >"$SHARED/$1.yaml" <<END
recipe: $1
title: a file
$2
steps:
  - {id: one, type: file, title: a file, why: for the test, budget: 5s, path: /etc/epkit-test-$1, content: "$1"}
END
}

# pod NAME=VALUE...: installer.sh on a node that is a copy of this root folder; its files come to $SHARED/etc at the end,
# and the names of the processes that are left to $SHARED/left. $POD_BY is exec for one in the background, whose process
# is to be unshare. TERM for process 1 is one for the container.
pod() {
    ${POD_BY:-} unshare --mount --pid --fork --kill-child bash -euc '
        base=$1 scripts=$2 epkit=$3 shared=$4 node=$5
        shift 5
        mount --make-rprivate /
        mount -t tmpfs tmpfs "$base"
        mkdir "$base/upper" "$base/work" "$base/root"
        mount -t overlay overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" "$base/root"
        cd "$base/root"
        mount -t proc proc proc
        mount --bind /dev dev
        mount -t tmpfs tmpfs run
        mkdir -p scripts run/epkit-agent image opt data
        mount --bind "$shared" run/epkit-agent
        cp "$scripts"/*.sh scripts/
        cp "$epkit" image/epkit
        mkdir -p old
        pivot_root . old
        cd /
        eval "$node"
        code=0
        # The container has folders of its own.
        unshare --mount sh -euc "mount -t tmpfs none /data; mkdir -p \$(readlink -m /opt); mount -t tmpfs none /opt
            mkdir -p /opt/epkit/bin; cp /image/epkit /opt/epkit/bin; exec \"\$@\"" - \
            env "$@" bash /scripts/group.sh bash /scripts/installer.sh &
        main=$!
        trap "kill -TERM $main" TERM
        echo $$ >/run/epkit-agent/up
        wait "$main" || code=$?
        # A signal ended wait.
        ! kill -0 "$main" 2>/dev/null || wait "$main" || code=$?
        ps -e -o pid=,comm= >/run/epkit-agent/all
        awk "\$1 != 1 && \$2 != \"ps\" { print \$2 }" /run/epkit-agent/all >/run/epkit-agent/left
        mkdir -p /run/epkit-agent/etc
        cp /etc/epkit-test-* /run/epkit-agent/etc/ 2>/dev/null || true
        exit "$code"' - \
        "$(mktemp -d -p "$BATS_TEST_TMPDIR")" "$EPKIT_SOURCE/deploy/daemonset/base" "$EPKIT" "$SHARED" "${NODE_HAS-}" "$@"
}

phase_is() { [ "$(cat "$SHARED/phase" 2>/dev/null)" = "$1" ]; }
phase_is_one_of() { [[ " $* " == *" $(cat "$SHARED/phase" 2>/dev/null) "* ]]; }

@test "a value that is missing ends the installation before the node is cordoned" {
    recipe asks 'variables: {sum: {kind: sha256, env: EPKIT_TEST_SUM, help: the checksum}}'
    run -1 pod EPKIT_RECIPE=/run/epkit-agent/asks.yaml
    phase_is failed
    [[ "$output" == *"missing  variable sum"*"deepep-installer-settings"*"nothing was changed"* ]]
    # The agent cordons a waiting node: the node never waited.
    [[ "$output" != *"phase: waiting"* ]]
    [ ! -e "$SHARED/etc/epkit-test-asks" ]
}

@test "several recipes, in their order; nothing changes before the grant" {
    recipe first
    recipe second
    POD_BY="exec"
    pod EPKIT_RECIPE='/run/epkit-agent/first.yaml /run/epkit-agent/second.yaml' >"$BATS_TEST_TMPDIR/log" 2>&1 3>&- &
    POD=$!
    within 120 phase_is_one_of waiting failed
    phase_is waiting
    run ! grep -q 'phase: installing' "$BATS_TEST_TMPDIR/log"
    cp "$SHARED/boot" "$SHARED/grant"
    wait "$POD"
    POD=
    cat "$BATS_TEST_TMPDIR/log"
    phase_is "done"
    grep -q 'epkit-installer: installation complete' "$BATS_TEST_TMPDIR/log"
    [ "$(cat "$SHARED/etc/epkit-test-first")" = first ]
    [ "$(cat "$SHARED/etc/epkit-test-second")" = second ]
}

@test "a reboot by kured is left to kured" {
    cat >"$SHARED/reboots.yaml" <<'END'
recipe: reboots
title: a step with a reboot
reboots: 1
steps:
  - {id: one, type: command, title: t, why: w, budget: 5s, run: ": >/etc/epkit-test-reboots", creates: [/etc/epkit-test-reboots], undo: rm -f /etc/epkit-test-reboots, reboot: after}
END
    POD_BY="exec"
    pod EPKIT_RECIPE=/run/epkit-agent/reboots.yaml REBOOT_BY=kured >"$BATS_TEST_TMPDIR/log" 2>&1 3>&- &
    POD=$!
    within 120 phase_is_one_of waiting failed
    cp "$SHARED/boot" "$SHARED/grant"
    within 120 phase_is_one_of rebooting failed "done"
    within 60 grep -q 'kured reboots the node' "$BATS_TEST_TMPDIR/log"
    cat "$BATS_TEST_TMPDIR/log"
    phase_is rebooting
    grep -qx 'Rebooting the node to load driver and modules...' "$BATS_TEST_TMPDIR/log"
    # It stays until the node goes down, or the pod is deleted: then all of it ends.
    kill -0 "$POD"
    end_pod
    [ "$status" -eq 143 ]
    [ ! -s "$SHARED/left" ]
    phase_is rebooting
}

# TERM for the container in the background; its exit code comes to $status
end_pod() {
    kill -TERM "$(pgrep -P "$POD")"
    status=0
    wait "$POD" || status=$?
    POD=
    cat "$SHARED/left"
}

@test "the end of the pod ends all of it, and no step of the recipe" {
    cat >"$SHARED/slow.yaml" <<'END'
recipe: slow
title: a step that takes its time
steps:
  - {id: one, type: command, title: t, why: w, budget: 60s, run: "touch /run/epkit-agent/started; until [ -e /run/epkit-agent/go ]; do sleep 0.1; done; : >/run/epkit-agent/step-ended", creates: [/etc/epkit-test-slow], undo: "true"}
END
    POD_BY="exec"
    pod EPKIT_RECIPE=/run/epkit-agent/slow.yaml >"$BATS_TEST_TMPDIR/log" 2>&1 3>&- &
    POD=$!
    within 120 phase_is_one_of waiting failed
    cp "$SHARED/boot" "$SHARED/grant"
    within 120 test -e "$SHARED/started"
    # The step is in progress and continues without the pod, as dpkg has to.
    kill -TERM "$(pgrep -P "$POD")"
    within 120 test -s "$SHARED/left"
    cat "$BATS_TEST_TMPDIR/log" "$SHARED/left"
    grep -qx sh "$SHARED/left"
    run ! grep -qvxE 'sh|sleep' "$SHARED/left"
    phase_is installing
}

@test "/opt of the node: a link, planted names, a folder of another user" {
    recipe first
    cp /proc/sys/kernel/random/boot_id "$SHARED/grant"
    NODE_HAS='mkdir data/victim && mv opt data/opt && ln -s /data/opt opt && chmod 1777 data/opt
        for name in epkit-installer epkit-installer.new epkit-installer.old; do ln -s /data/victim opt/$name; done
        mkdir data/victim/bin
        for name in cat sh find rm tar mkdir mv env; do
            printf "#!/bin/bash\necho %s >>/run/epkit-agent/ran\nexec /bin/%s \"\$@\"\n" "$name" "$name" >data/victim/bin/$name
        done
        chmod +x data/victim/bin/*
        ln -sf /bin/false usr/bin/epkit
        echo nonsense >data/victim/preloaded.so
        ln -s /data/victim opt/epkit'
    run -0 pod EPKIT_RECIPE=/run/epkit-agent/first.yaml PATH="/opt/epkit/bin:$PATH" LD_PRELOAD=/data/victim/preloaded.so
    phase_is "done"
    # The container has no such file, and says so; a program of the node would have tried to load it.
    [[ "$output" == *'cannot open shared object file'* ]]
    [[ "$output" != *'file too short'* && "$output" != *'invalid ELF header'* ]]
    [ ! -e "$SHARED/ran" ]
    [ "$(cat "$SHARED/etc/epkit-test-first")" = first ]
    # Others may make names in a sticky folder.
    for planted in 'ln -s /nowhere' mkfifo 'mkdir -p' 'ln -s /dev/full'; do
        NODE_HAS="chmod 1777 opt
            for name in epkit-installer epkit-installer.new epkit-installer.old; do $planted opt/\$name && chown -h 54321 opt/\$name; done"
        run -0 pod EPKIT_RECIPE=/run/epkit-agent/first.yaml
        phase_is "done"
    done
    for folder in data data/opt; do
        for change in 'chown 54321' 'chgrp 54321' 'chmod 777'; do
            NODE_HAS="mv opt data/opt && ln -s /data/opt opt && chmod 775 data/opt data && $change $folder"
            run -1 pod EPKIT_RECIPE=/run/epkit-agent/first.yaml
            [[ "$output" == *"/$folder: not only root may rename what is in it"*"nothing was changed"* ]]
            phase_is failed
        done
    done
}

@test "nonsense for REBOOT_BY is refused before anything" {
    recipe first
    run -1 pod EPKIT_RECIPE=/run/epkit-agent/first.yaml REBOOT_BY=cron
    [[ "$output" == *"REBOOT_BY is 'cron': it must be epkit or kured; nothing was changed"* ]]
    phase_is failed
}
