#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# update.sh EPKIT [NAME...] - write what is expected of the golden machines (all, or those named) anew, from what EPKIT
# says now. Read the difference before you commit it.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
epkit=$(realpath "${1:?usage: update.sh EPKIT [NAME...]}")
shift
if [ $# -eq 0 ]; then
    # shellcheck disable=SC2046
    set -- $(python3 "$here/machines.py" --list)
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
for name in "$@"; do
    python3 "$here/machines.py" "$name" "$name"
    rm -rf "${here:?}/expected/$name"
    "$here/outputs.sh" "$epkit" "$name" "$here/expected/$name"
done
