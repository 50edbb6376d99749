# SPDX-License-Identifier: Apache-2.0
# Shared by the tests of the command. EPKIT_SOURCE and EPKIT_BUILD are set by ctest.
bats_require_minimum_version 1.5.0

EPKIT="${EPKIT_BUILD:?the build tree}/epkit"
if [ ! -x "$EPKIT" ]; then
    echo "$EPKIT is not there" >&2
    exit 1
fi
# Deadlines only end tests that hang: a loaded machine may slow everything down by a factor of ten and more.
PATIENCE=20
# Small groups and rows: the machine may have only two cores. Deadlines of the library are shorter than ctest's.
# shellcheck disable=SC2034
SMALL=(--ranks 2 --tokens 16 --hidden 512 --timeout 120)

# limited SECONDS COMMAND...: ended if it takes PATIENCE times SECONDS
limited() {
    timeout --kill-after=10 $(($1 * PATIENCE)) "${@:2}"
}

# thrifty SECONDS COMMAND...: ended if it uses more CPU time than that, which does not depend on the load
thrifty() {
    (ulimit -t "$1" && limited 60 "${@:2}")
}

# No test may wait forever.
epkit() {
    limited 60 "$EPKIT" "$@"
}

valid() {
    python3 -S "$EPKIT_SOURCE/tests/cli/validate.py" "$EPKIT_SOURCE/cmd/$1/schema.json" "${@:2}"
}

# The commands that the help lists.
all_commands() {
    epkit help | sed -n '/^Commands:/,/^$/s/^  \([a-z][a-z]*\)  *.*/\1/p'
}

# Long names of the options of a command, with dashes, from the help.
options() {
    epkit help "$1" | sed '/^Examples:/,$d' | sed -n 's/^  *\(-., \)*\(--[a-z-]*\).*/\2/p'
}

# Processes of this binary started by the current test, without zombies.
living() {
    local process
    find /proc/[0-9]*/exe -maxdepth 0 -lname "$(readlink -f "$EPKIT")" 2>/dev/null | cut -d/ -f3 |
        while read -r process; do
            if grep -qsF "EPKIT_TEST_MARK=$BATS_TEST_TMPDIR" "/proc/$process/environ"; then
                echo "$process"
            fi
        done
}

# within SECONDS COMMAND...: repeats the command until it succeeds, for at most PATIENCE times SECONDS
within() {
    local tries=$(($1 * 10 * PATIENCE))
    shift
    while ! "$@"; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || return 1
        sleep 0.1
    done
}
