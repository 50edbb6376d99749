#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# verbs.sh - the cases over RDMA (cases.bats) in a guest with Soft-RoCE. An emulated machine takes some ten minutes for
# them; without EPKIT_TEST_LONG only those below run, in half a minute: with one processor, since ranks that poll on a
# second one, which is emulated as well, take another half.
set -euo pipefail

short='the cases that every network passes|32 of 32 cases between two nodes'
if grep -q "^VERBS_INCLUDE_DIR:PATH=.*NOTFOUND" "$EPKIT_BUILD/CMakeCache.txt"; then
    echo "skipped: this build is without the network verbs: libibverbs-dev is not installed"
    exit 77
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cases=()
[ -n "${EPKIT_TEST_LONG:-}" ] || {
    cases=(--filter "$short")
    export EPKIT_GUEST_CPUS=1
}
EPKIT_GUEST_SECONDS=2000 "$EPKIT_SOURCE/tests/verbs/guest.sh" run "$folder" \
    bats --tap --print-output-on-failure "${cases[@]}" "$EPKIT_SOURCE/tests/verbs/cases.bats"
