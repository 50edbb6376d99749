# SPDX-License-Identifier: Apache-2.0
# Shared by the tests on several hosts. The hosts exist as long as a test file runs.
bats_require_minimum_version 1.5.0

EPKIT="${EPKIT_BUILD:?the build tree}/epkit"
HOSTS="${EPKIT_SOURCE:?the source tree}/tests/hosts/hosts.sh"
# Deadline of each layer: generous where it must not be reached, for a loaded machine.
# shellcheck disable=SC2034
PATIENT=(--connect-timeout 60)

# Why a test file has no hosts, if it has none.
export HOSTS_WHY="${HOSTS_WHY:-}"

setup() {
    [ -z "$HOSTS_WHY" ] || skip "$HOSTS_WHY"
}

# hosts_up N: starts N hosts, unless HOSTS_WHY is set; this machine may not be able to run them.
hosts_up() {
    [ -n "$HOSTS_WHY" ] || HOSTS_WHY=$("$HOSTS" check) || true
    [ -z "$HOSTS_WHY" ] || return 0
    HOSTS_DIR=$(mktemp -d "$EPKIT_BUILD/hosts-XXXXXX")
    export HOSTS_DIR
    "$HOSTS" up "$HOSTS_DIR" "$1"
}

hosts_down() {
    [ -n "${HOSTS_DIR:-}" ] || return 0
    "$HOSTS" down "$HOSTS_DIR"
    rm -rf "$HOSTS_DIR"
}

on() {
    "$HOSTS" on "$HOSTS_DIR" "$@"
}

# launch ARGUMENT...: runs on the host login, in a folder of this test.
launch() {
    mkdir -p "$HOSTS_DIR/work"
    on login env -C "$HOSTS_DIR/work" timeout --kill-after=20 600 "$EPKIT" launch "${PATIENT[@]}" "$@"
}

# within SECONDS COMMAND...: repeats the command until it succeeds; six times as long on a loaded machine.
within() {
    local tries=$(($1 * 30))
    shift
    while ! "$@"; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || return 1
        sleep 0.2
    done
}

# No new process runs on a host.
is_clean() {
    [ -z "$("$HOSTS" ps "$HOSTS_DIR" "$1")" ]
}

# all_clean SECONDS HOST...
all_clean() {
    local seconds=$1 host
    shift
    for host in "$@"; do
        within "$seconds" is_clean "$host" || {
            echo "left on $host:"
            "$HOSTS" ps "$HOSTS_DIR" "$host"
            return 1
        }
    done
}

# is_running HOST TEXT: a process with TEXT in its command line
is_running() {
    "$HOSTS" ps "$HOSTS_DIR" "$1" | grep -qF -- "$2"
}

long() {
    [ -n "${EPKIT_TEST_LONG:-}" ] || skip "in the long tier only"
}

valid() {
    python3 "$EPKIT_SOURCE/tests/cli/validate.py" "$EPKIT_SOURCE/cmd/launch/schema.json" "$@"
}
