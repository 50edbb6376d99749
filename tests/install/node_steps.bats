#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Single steps of epkit install on a node: one that outlives its run, one that never ends, two runs at
# once, a reboot that is left to an agent; with systemd, and without it.
#
# shellcheck disable=SC2016 # for shells on the node

load node

setup_file() {
    node_up
    if [ -e "$BATS_FILE_TMPDIR/skip" ]; then return 0; fi
    cat >"$ROOT/root/recipes/slow.yaml" <<'END'
recipe: test-slow
title: a step that takes its time
steps:
  - id: slow
    type: command
    title: slow
    why: for the test
    budget: 10s
    run: |
      echo begun >>/root/begun
      sleep 10
      echo over >/root/over
    creates: [/root/over]
    undo: rm -f /root/over
END
    cat >"$ROOT/root/recipes/endless.yaml" <<'END'
recipe: test-endless
title: a step that never ends
steps:
  - id: endless
    type: command
    title: endless
    why: for the test
    budget: 1s
    deadline: 3s
    run: |
      echo 'still at it'
      sleep 1000
    creates: [/root/never]
    undo: "true"
END
}

teardown_file() {
    node_down
}

setup() {
    skip_without_node
    rm -f "$ROOT/root/begun" "$ROOT/root/over"
}

# epkit as on a machine without systemd: it looks for a folder.
without() {
    on unshare -m sh -c 'mount -t tmpfs none /run/systemd && exec "$@"' - "$@"
}

strike() {
    on sh -c 'for p in /proc/[0-9]*/exe; do case $(readlink "$p") in */opt/epkit/epkit)
        p=${p%/exe}; kill -9 "${p#/proc/}" ;; esac; done' || true
}

begun() {
    local _
    for _ in $(seq 300); do
        if [ -s "$ROOT/root/begun" ]; then return 0; fi
        sleep 0.1
    done
    return 1
}

# outlives WAY: epkit is killed while a step runs; the next run waits for the step and does not begin it again.
outlives() {
    "$1" epkit install apply /root/recipes/slow.yaml >/dev/null 2>&1 &
    begun
    strike
    wait || true
    [ ! -e "$ROOT/root/over" ]
    run -0 "$1" epkit install apply /root/recipes/slow.yaml
    [[ "$output" == *"a step of an earlier run is still running: waiting for it"* ]]
    [ "$(wc -l <"$ROOT/root/begun")" -eq 1 ]
    [ -e "$ROOT/root/over" ]
    on epkit install uninstall test-slow
}

# ends WAY: a step is ended at its deadline, and the error says so.
ends() {
    run -1 "$1" epkit install apply /root/recipes/endless.yaml
    [[ "$output" == *"step 'endless' was stopped at its deadline of 3 s"* ]]
    [[ "$output" == *"still at it"* ]]
    run on sh -c 'pgrep -f "^sleep 1000"'
    [ -z "$output" ]
    run -3 on epkit install status test-endless
    [[ "$output" == *"last failure: step endless"* ]]
    on epkit install uninstall test-endless
}

@test "under systemd a step outlives its run" {
    outlives on
}

@test "without systemd a step outlives its run" {
    outlives without
}

@test "under systemd a step ends at its deadline" {
    ends on
}

@test "without systemd a step ends at its deadline" {
    ends without
}

@test "a second run at the same time reports the process of the first" {
    on epkit install apply /root/recipes/slow.yaml >"$BATS_TEST_TMPDIR/first" 2>&1 &
    begun
    run -1 on epkit install apply /root/recipes/slow.yaml
    [[ "$output" == *"is installing this recipe now"* ]]
    run -3 on epkit install plan /root/recipes/slow.yaml
    wait
    [ "$(wc -l <"$ROOT/root/begun")" -eq 1 ]
    on epkit install uninstall test-slow
}

@test "a reboot is left to an agent, or not made" {
    local boots
    boots=$("$NODE" boots "$ROOT")
    run -3 on epkit install apply /root/recipes/reboot.yaml --reboot never
    [[ "$output" == *"a reboot is needed for step 'reboot'"* ]]
    [ ! -e "$ROOT/etc/epkit-test-behind" ]
    # Nor does the run that resumes after a reboot make one.
    grep -q '^ExecStart=.* install resume test-reboot .*--reboot never' "$ROOT/etc/systemd/system/epkit-install-test-reboot.service"
    for _ in 1 2; do
        run -3 on epkit install apply /root/recipes/reboot.yaml --reboot sentinel --no-resume-unit
        [[ "$output" == *"Rebooting the node to load driver and modules..."* ]]
    done
    on test -e /run/reboot-required
    [ ! -e "$ROOT/etc/systemd/system/epkit-install-test-reboot.service" ]
    [ "$(grep -c '"event":"reboot"' "$ROOT/var/lib/epkit/install/test-reboot/journal.jsonl")" -eq 1 ]
    on systemctl reboot || true
    for _ in $(seq 600); do
        if [ "$("$NODE" boots "$ROOT")" -gt "$boots" ]; then break; fi
        sleep 0.2
    done
    "$NODE" boot_wait "$ROOT"
    run -0 on epkit install apply /root/recipes/reboot.yaml --reboot sentinel --no-resume-unit
    [[ "$output" == *"behind the reboot"* ]]
    on epkit install uninstall test-reboot
}

@test "the root folder of another system is installed by chroot" {
    mkdir -p "$ROOT/srv/image"
    "$NODE" make "$CACHE" "$ROOT/srv/image" "$EPKIT_BUILD"
    run -0 on epkit install apply debian-tools --root /srv/image
    on test -x /srv/image/usr/bin/ib_write_bw
    on test ! -e /usr/bin/ib_write_bw
    run -0 on epkit install plan debian-tools --root /srv/image
    on epkit install uninstall debian-tools --root /srv/image
    on test ! -e /srv/image/usr/bin/ib_write_bw
    rm -rf "$ROOT/srv/image"
}
