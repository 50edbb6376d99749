# SPDX-License-Identifier: Apache-2.0
# Shared by the tests on nodes with their own systemd. EPKIT_SOURCE and EPKIT_BUILD are set by ctest.
bats_require_minimum_version 1.5.0

NODE="$EPKIT_SOURCE/tests/install/node.sh"
CACHE=${EPKIT_NODE_CACHE:-$EPKIT_BUILD/node-cache}

# Prints the reason why nodes cannot run here, or nothing.
no_nodes() {
    local program
    if [ "$(id -u)" -ne 0 ]; then echo 'nodes need root'; return; fi
    for program in systemd-nspawn nsenter; do
        if ! command -v "$program" >/dev/null; then echo "$program is not installed"; return; fi
    done
    if [ -z "${EPKIT_TEST_LONG:-}${EPKIT_TEST_NODES:-}" ]; then
        echo 'it takes minutes and downloads Debian: EPKIT_TEST_LONG=1, or EPKIT_TEST_NODES=1 for fewer kills'
    elif ! "$NODE" template "$CACHE" >"$BATS_FILE_TMPDIR/template.log" 2>&1; then
        echo "the template could not be made: $(tail -1 "$BATS_FILE_TMPDIR/template.log")"
    fi
}

# Boots a node: its root folder is $ROOT.
node_up() {
    local why
    why=$(no_nodes)
    if [ -n "$why" ]; then
        echo "$why" >"$BATS_FILE_TMPDIR/skip"
        return 0
    fi
    ROOT=$(mktemp -d "${TMPDIR:-/var/tmp}/epkit-node.XXXXXX")/node
    export ROOT
    "$NODE" make "$CACHE" "$ROOT" "$EPKIT_BUILD"
    mkdir -p "$ROOT/root/recipes"
    cp "$EPKIT_SOURCE"/tests/install/recipes/*.yaml "$ROOT/root/recipes/"
    "$NODE" boot "$ROOT"
    on true
}

node_down() {
    if [ -z "${ROOT:-}" ]; then return 0; fi
    "$NODE" off "$ROOT" || true
    rm -rf "${ROOT%/node}"
}

skip_without_node() {
    if [ -e "$BATS_FILE_TMPDIR/skip" ]; then skip "$(cat "$BATS_FILE_TMPDIR/skip")"; fi
}

# Runs a command on the node, with a deadline.
on() {
    timeout --kill-after=10 600 "$NODE" on "$ROOT" "$@" 3>&- 4>&-
}

# Prints the node's disk: names, kinds, modes, owners, targets and contents; not what changes from boot to boot, nor
# logs, nor the folder of the installation itself.
snapshot() {
    local skip=(./proc ./sys ./run ./tmp ./var/tmp ./var/log ./dev ./root ./var/lib/epkit ./var/lib/systemd
        ./etc/resolv.conf ./etc/.updated ./var/.updated)
    local prune=(-path ./opt/epkit)
    local path
    for path in "${skip[@]}"; do prune+=(-o -path "$path"); done
    (
        cd "$ROOT" || exit 1
        find . -xdev \( "${prune[@]}" \) -prune -o -printf '%p %y %m %U:%G %l\n' | LC_ALL=C sort
        find . -xdev \( "${prune[@]}" \) -prune -o -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
    )
}

# same FILE: the node is unchanged since FILE was written by `snapshot >FILE`, except for databases whose order or previous
# state depends on the path and not on the result, and accounts, which packages leave when they are removed.
same() {
    local books=(-e status-old -e 'debconf/[a-z]*.dat-old' -e aux-cache -e extended_states
        -e '/etc/\(passwd\|group\|shadow\|gshadow\|subuid\|subgid\)-\?\( \|$\)')
    snapshot | grep -v "${books[@]}" >"$BATS_TEST_TMPDIR/now"
    grep -v "${books[@]}" "$1" | diff - "$BATS_TEST_TMPDIR/now" || {
        # A record of dpkg that is not that of an installed package, for who looks for the cause
        grep -E '^(Package: .*|Status: .*[^d]|Triggers-.*|Config-Version: .*)$' "$ROOT/var/lib/dpkg/status" |
            grep -B1 -vE '^(Package: |--)' || true
        return 1
    }
}

# Waits until the recipe is complete, also when another run holds the lock, or until nothing has changed for a minute.
finish() {
    local recipe=$1 before='' now stuck=0 round=0 action
    shift
    while [ "$stuck" -lt 30 ] && [ "$round" -lt 100 ]; do
        round=$((round + 1))
        # A run that was killed after its last step leaves the unit, which ends it at the next boot.
        if [ ! -e "$ROOT/etc/systemd/system/epkit-install-$recipe.service" ] &&
            on epkit install status "$recipe" "$@" >/dev/null 2>&1; then
            return 0
        fi
        # A run that was killed before its first record has nothing to resume.
        action=apply
        if [ -e "$ROOT/var/lib/epkit/install/$recipe/recipe.yaml" ]; then action=resume; fi
        on epkit install $action "$recipe" "$@" >"$BATS_TEST_TMPDIR/resume" 2>&1 || true
        now=$(on sh -c "cat /var/lib/epkit/install/*/journal.jsonl /var/log/epkit/install/*/*.log | cksum" || true)
        if [ "$now" = "$before" ]; then stuck=$((stuck + 1)); else stuck=0; fi
        before=$now
        sleep 1
    done
    cat "$BATS_TEST_TMPDIR/resume"
    return 1
}

# Between 0 and N tenths of a second.
random_pause() {
    sleep "$(printf '%d.%d' $((RANDOM % $1 / 10)) $((RANDOM % 10)))"
}
