#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# bats.sh FOLDER/SUBJECT [BATS-OPTION...] - runs the cases of tests/FOLDER/SUBJECT.bats on the build in EPKIT_BUILD
# (build/ without it); with --filter PATTERN those whose names match.
set -euo pipefail

EPKIT_SOURCE=$(cd "$(dirname "$0")/.." && pwd)
EPKIT_BUILD=$(realpath "${EPKIT_BUILD:-$EPKIT_SOURCE/build}")
EPKIT_SANITIZED=$(sed -n 's/^EPKIT_SANITIZE:[A-Z]*=//p' "$EPKIT_BUILD/CMakeCache.txt")
export EPKIT_SOURCE EPKIT_BUILD EPKIT_SANITIZED EPKIT=$EPKIT_BUILD/epkit
# Python compiles the modules of the tests once for a build, not in each process. With -S, as most are started, it does not
# look for installed packages, which takes longer than many a check.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$EPKIT_BUILD/pycache

suite=$1
shift
command -v bats >/dev/null || {
    echo 'skipped: bats is not installed'
    exit 77
}
place=()
case $suite in
cli/doctor) ;; # it mounts on /dev/shm
cli/*) place=("$EPKIT_SOURCE/tests/in_memory.sh") ;;
esac
# Cases with the tag "once" are the same in every build, and in the medium tier are run with sanitizers alone; in a file of
# such, "both" marks those that are not.
if [ -n "${EPKIT_ONCE-}" ] && [ -z "$EPKIT_SANITIZED" ]; then
    set -- --filter-tags '!once' --filter-tags both "$@"
fi
exec "${place[@]}" bats --tap --print-output-on-failure "$@" "$EPKIT_SOURCE/tests/$suite.bats"
