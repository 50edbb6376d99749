#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# corpus.sh NAME PROGRAM ARGUMENT... - runs a fuzz target with the folders of its corpus as further arguments. Texts that
# others of the tree have are not kept a second time.
set -euo pipefail

name=$1
shift
root=$(cd "$(dirname "$0")/../.." && pwd)
folders=("$root/tests/fuzz/corpus/$name")
case $name in
parse)
    samples=$(mktemp -d)
    trap 'rm -rf "$samples"' EXIT
    python3 -S "$root/tests/parse/samples.py" write "$samples"
    python3 -S -B "$root/tests/parse/corpus.py" "$samples"
    folders=("$samples")
    ;;
redact)
    samples=$(mktemp -d)
    trap 'rm -rf "$samples"' EXIT
    python3 "$root/tests/cli/secrets.py" words | split -l 1 - "$samples/"
    folders+=("$samples")
    ;;
recipe) folders+=("$root/recipes" "$root/tests/install/recipes") ;;
esac
"$@" "${folders[@]}"
