#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# run.sh [ARGUMENT...] - from a bare machine to the main job: install what the build needs, build, and run `epkit run`.
set -euo pipefail
cd "$(dirname "$0")"

scripts/packages.sh build
scripts/build.sh release --command
exec build/epkit run "$@"
