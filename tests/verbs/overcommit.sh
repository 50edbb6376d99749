#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# overcommit.sh - groups whose memory runs out where the kernel commits no more than there is (vm.overcommit_memory = 2).
# The setting is the whole machine's, so in a guest (guest.sh); in the long tier, because an emulated machine is slow.
set -euo pipefail

if [ -z "${EPKIT_TEST_LONG:-}" ]; then
    echo "skipped: in the long tier only"
    exit 77
fi
if [ -n "${EPKIT_SANITIZE:-}" ]; then
    echo "skipped: sanitizers reserve more address space than there is memory"
    exit 77
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/cases" <<'END'
set -u
echo 2 >/proc/sys/vm/overcommit_memory
echo 70 >/proc/sys/vm/overcommit_ratio
grep -E '^Commit' /proc/meminfo
code=0
"$EPKIT_BUILD/tests/unit/test_host_short_memory" || code=1
"$EPKIT_BUILD/tests/unit/test_reserve" || code=1
# Sizes around what there is: each is run, or refused, or fails with a reason, and no rank ends by a signal.
for tokens in 64 2048 4096 8192; do
    "$EPKIT" test intranode --ranks 2 --tokens "$tokens" --hidden 2048 --only 1 --timeout 300 >/tmp/out 2>/tmp/err
    status=$?
    echo "epkit test with $tokens tokens: exit status $status: $(head -n 1 /tmp/err)"
    case $status in
    0) ;;
    1 | 2) grep -qi memory /tmp/err || code=1 ;;
    *) code=1 ;;
    esac
    if grep -i 'signal\|SIGBUS' /tmp/out /tmp/err; then
        code=1
    fi
done
exit $code
END
EPKIT_GUEST_SECONDS=1000 EPKIT_GUEST_MEMORY=1G "$(dirname "${BASH_SOURCE[0]}")/guest.sh" run "$folder" \
    bash /run/guest/cases
