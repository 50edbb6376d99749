#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# run.sh [ARGUMENT...] - on a bare machine: install the build dependencies, build, and run `epkit run`.
set -euo pipefail
cd "$(dirname "$0")"

scripts/packages.sh build
scripts/build.sh release --command
exec build/epkit run "$@"
