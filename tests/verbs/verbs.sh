#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# verbs.sh - the cases over RDMA (cases.bats) in a guest with Soft-RoCE. In the long tier: an emulated machine takes
# some ten minutes for them.
set -euo pipefail

if [ -z "${EPKIT_TEST_LONG:-}" ]; then
    echo "skipped: in the long tier only"
    exit 77
fi
if grep -q "^VERBS_INCLUDE_DIR:PATH=.*NOTFOUND" "$EPKIT_BUILD/CMakeCache.txt"; then
    echo "skipped: this build is without the network verbs: libibverbs-dev is not installed"
    exit 77
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
EPKIT_GUEST_SECONDS=2000 "$EPKIT_SOURCE/tests/verbs/guest.sh" run "$folder" \
    bats --tap "$EPKIT_SOURCE/tests/verbs/cases.bats"
