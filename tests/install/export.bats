#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The output of 'epkit install export', run by its target programs: a shell on a node, ansible-playbook, cloud-init.
#
# shellcheck disable=SC2154 # set by run

load node

RECIPES=(debian-tools epkit-only gcp-b200-ubuntu2404 gcp-h200-ubuntu2404 gdrcopy gke-driver-copy)

setup() {
    [ -n "${EPKIT_TEST_LONG:-}" ] || skip 'only with EPKIT_TEST_LONG=1'
    cd "$BATS_TEST_TMPDIR" || exit 1
    EPKIT_DOCA_SHA256=$(printf 'a%.0s' $(seq 64))
    export EPKIT_DOCA_SHA256 EPKIT_GDRCOPY_COMMIT=1234567
    # Excludes the user's configuration, and the Python of a development environment.
    export HOME=$BATS_TEST_TMPDIR ANSIBLE_LOCALHOST_WARNING=0 ANSIBLE_NOCOLOR=1 PATH=/usr/bin:$PATH
}

teardown() {
    node_down
}

epkit() { "$EPKIT_BUILD/epkit" "$@"; }

play() {
    ansible-playbook -i localhost, -c local -e ansible_become=false "$@"
}

@test "ansible-playbook accepts every playbook, and check mode reports what would change" {
    command -v ansible-playbook >/dev/null || skip 'ansible-playbook is not installed (ansible-core)'
    for recipe in "${RECIPES[@]}"; do
        epkit install export ansible "$recipe" >"$recipe.yaml"
        play --syntax-check "$recipe.yaml"
    done
    play --check --diff debian-tools.yaml | tee log
    grep -qE 'localhost +: ok=2 +changed=2 +unreachable=0 +failed=0 +skipped=1' log
    grep -q "^+run_step 'openmpi'" log
    [ ! -e /var/lib/epkit/install/debian-tools ]
}

@test "ansible-playbook applies a recipe; the second run changes nothing; a step that fails fails the play" {
    command -v ansible-playbook >/dev/null || skip 'ansible-playbook is not installed (ansible-core)'
    [ "$(id -u)" -eq 0 ] || skip 'needs root, for a folder of its own in the place of /var/lib/epkit'
    unshare --mount true 2>/dev/null || skip 'mount namespaces are not allowed here'
    cat >files.yaml <<END
recipe: played
title: two files
steps:
  - {id: one, type: file, title: a file, why: w, budget: 5s, path: $PWD/out/one, content: "{{ not_a_variable }}"}
  - {id: two, type: command, title: t, why: w, budget: 5s, needs: [one], run: "test ! -e $PWD/broken && touch $PWD/out/two", creates: [$PWD/out/two], undo: rm -f $PWD/out/two}
END
    epkit install export ansible ./files.yaml >play.yaml
    touch broken
    # This test has its own state folder.
    cat >inside <<'END'
set -euo pipefail
mount --make-rprivate /
mkdir -p /var/lib/epkit
mount -t tmpfs tmpfs /var/lib/epkit
run() { ansible-playbook -i localhost, -c local -e ansible_become=false play.yaml >"$1" 2>&1 || echo "failed" >>"$1"; }
run broken.log
rm broken
run first.log
run second.log
END
    had=$([ -d /var/lib/epkit ] && echo yes || true)
    unshare --mount bash inside
    [ -n "$had" ] || rmdir /var/lib/epkit
    cat broken.log first.log second.log
    grep -qx failed broken.log
    grep -qE 'localhost +: ok=3 +changed=1 +unreachable=0 +failed=0' first.log
    grep -qE 'localhost +: ok=3 +changed=0 +unreachable=0 +failed=0' second.log
    # Braces in the content are not an Ansible template.
    [ "$(cat out/one)" = '{{ not_a_variable }}' ]
    [ -e out/two ]
}

# cloud-init ARGUMENT...: runs the installed one, or one from its package. The package is not installed: it would set up
# this machine as a cloud machine at the next boot.
cloud_init() {
    if command -v cloud-init >/dev/null; then
        cloud-init "$@"
    else
        PYTHONPATH=$PWD/root/usr/lib/python3/dist-packages python3 root/usr/bin/cloud-init "$@"
    fi
}

@test "cloud-init accepts all user data, and refuses other files" {
    if ! command -v cloud-init >/dev/null; then
        mkdir -p debs/partial root
        apt-get -qq -y --download-only --no-install-recommends -o "Dir::Cache::archives=$PWD/debs" -o Debug::NoLocking=1 \
            install cloud-init || skip 'apt has no cloud-init to offer'
        for deb in debs/cloud-init_*.deb debs/python3-*.deb; do dpkg -x "$deb" root; done
    fi
    for recipe in "${RECIPES[@]}"; do
        epkit install export cloud-init "$recipe" >"$recipe.yaml"
        cloud_init schema --config-file "$recipe.yaml" 2>&1 | tee log
        grep -q '^Valid' log
    done
    printf '#cloud-config\nruncmd: {all: wrong}\n' >wrong.yaml
    run cloud_init schema --config-file wrong.yaml
    [ "$status" -ne 0 ]
    [[ "$output" == *runcmd* ]]
}

@test "the script on a node: debian-tools is installed, a second run does nothing, a missing package fails the tests" {
    HOME=/root node_up
    skip_without_node
    epkit install export sh debian-tools >"$ROOT/root/debian-tools.sh"
    run on sh /root/debian-tools.sh
    echo "$output"
    # It has requested its reboot, if any.
    if [ "$status" -eq 75 ]; then
        boots=$("$NODE" boots "$ROOT")
        on systemctl reboot || true
        for _ in $(seq 600); do [ "$("$NODE" boots "$ROOT")" = "$boots" ] || break; sleep 0.2; done
        "$NODE" boot_wait "$ROOT"
        run on sh /root/debian-tools.sh
        echo "$output"
    fi
    [ "$status" -eq 0 ]
    [[ "$output" == *'ok      mpirun starts two processes'* ]]
    run -0 on sh /root/debian-tools.sh
    [[ "$output" != *'step '* ]]
    # epkit reports the same steps as done.
    on epkit install verify debian-tools
    run on epkit install plan debian-tools
    echo "$output"
    on apt-get -qqy remove perftest
    run -1 on sh /root/debian-tools.sh
    [[ "$output" == *'FAILED  ib_write_bw runs'* ]]
}
