# SPDX-License-Identifier: Apache-2.0
# What the tests of deploy/ share. EPKIT_SOURCE is set by ctest.
bats_require_minimum_version 1.5.0

CHART="${EPKIT_SOURCE:?the source tree}/deploy/helm/epkit"
PROGRAMS="$EPKIT_SOURCE/tests/cluster/programs.sh"
PATH="$("$PROGRAMS" path)/bin:$PATH"
IMAGE=registry.example/nemo-deepep:25.11
# Nothing of the user's own configuration, and none of helm's caches.
export HELM_CONFIG_HOME="$BATS_FILE_TMPDIR/helm" HELM_CACHE_HOME="$BATS_FILE_TMPDIR/helm" \
    HELM_DATA_HOME="$BATS_FILE_TMPDIR/helm"

# need PROGRAM...: they are built from Go modules, which takes 20 minutes of one processor: in the long tier only.
need() {
    local program
    if [ -n "${EPKIT_TEST_LONG:-}" ] && [ -z "${EPKIT_PROGRAMS_BUILT:-}" ]; then
        "$PROGRAMS" build
        export EPKIT_PROGRAMS_BUILT=1
    fi
    for program in "$@"; do
        [ -x "$("$PROGRAMS" path)/bin/$program" ] ||
            skip "$program is not built (tests/cluster/programs.sh build, or EPKIT_TEST_LONG=1)"
    done
}

# template ARGUMENT...: the chart as helm renders it, with an image
template() {
    helm template r "$CHART" --set workload.image="$IMAGE" "$@"
}

# yaml_to_json: the YAML documents of standard input, one a line
yaml_to_json() {
    python3 -c 'import json,sys,yaml
for document in yaml.safe_load_all(sys.stdin):
    if document: print(json.dumps(document))'
}
