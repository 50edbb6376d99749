# SPDX-License-Identifier: Apache-2.0
# Functions shared by the tests of deploy/. EPKIT_SOURCE is set by ctest.
bats_require_minimum_version 1.5.0

CHART="${EPKIT_SOURCE:?the source tree}/deploy/helm/epkit"
PROGRAMS="$EPKIT_SOURCE/tests/cluster/programs.sh"
PATH="$("$PROGRAMS" path)/bin:$PATH"
IMAGE=registry.example/nemo-deepep:25.11
# Nothing of the user's own configuration, and none of helm's caches.
export HELM_CONFIG_HOME="$BATS_FILE_TMPDIR/helm" HELM_CACHE_HOME="$BATS_FILE_TMPDIR/helm" \
    HELM_DATA_HOME="$BATS_FILE_TMPDIR/helm"

# not_here REASON: skips the test. In setup_file, which sets whole_file, bats before 1.9 treats a skip as a failure: there
# the reason is stored for setup() of each test, which calls skip_file, and setup_file has to return.
not_here() {
    [ -n "${whole_file:-}" ] || skip "$1"
    printf '%s\n' "$1" >"$BATS_FILE_TMPDIR/skipped"
    return 1
}

skip_file() {
    [ ! -e "$BATS_FILE_TMPDIR/skipped" ] || skip "$(cat "$BATS_FILE_TMPDIR/skipped")"
}

# need PROGRAM...: they are built from Go modules, which takes 20 minutes of one processor: in the long tier only.
need() {
    local program
    if [ -n "${EPKIT_TEST_LONG:-}" ] && [ -z "${EPKIT_PROGRAMS_BUILT:-}" ] && ! "$PROGRAMS" have; then
        command -v go >/dev/null || not_here "there is no Go (1.25 or later) to build the cluster's programs with" || return 1
        "$PROGRAMS" build
        export EPKIT_PROGRAMS_BUILT=1
    fi
    for program in "$@"; do
        [ -x "$("$PROGRAMS" path)/bin/$program" ] ||
            not_here "$program is not built (tests/cluster/programs.sh build, or EPKIT_TEST_LONG=1)" || return 1
    done
}

# It starts hundreds of times, for a tenth of a second each: of that a third is for other processors and collections.
kubectl() {
    GOGC=off GOMAXPROCS=1 command kubectl "$@"
}

# template ARGUMENT...: the chart as helm renders it, with an image
template() {
    helm template r "$CHART" --set workload.image="$IMAGE" "$@"
}

# yaml_to_json: the YAML documents of standard input, one a line
yaml_to_json() {
    python3 -c 'import json,sys,yaml
for document in yaml.load_all(sys.stdin, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    if document: print(json.dumps(document))'
}

# --- a cluster for each test file that needs one ---

# shellcheck disable=SC2034 # for the tests
EPKIT="${EPKIT_BUILD:-$EPKIT_SOURCE/build}/epkit"

# cluster_up NODES QUOTA: in setup_file
cluster_up() {
    export CLUSTER="$BATS_FILE_TMPDIR/cluster"
    # Ports of this run: several trees may be tested on one machine.
    PORT=$((20000 + $$ % 200 * 50))
    export PORT KUBECONFIG="$CLUSTER/kubeconfig"
    local step
    for step in up "nodes $1" jobset lws kueue "queue $2"; do
        # shellcheck disable=SC2086 # words
        "$EPKIT_SOURCE/tests/cluster/kube.sh" ${step%% *} "$CLUSTER" ${step#"${step%% *}"} || return 1
    done
}

cluster_down() {
    if [ -d "${CLUSTER:-/nowhere}" ]; then
        "$EPKIT_SOURCE/tests/cluster/kube.sh" down "$CLUSTER"
    fi
}

# within SECONDS COMMAND...: the command succeeds at last
within() {
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.3
    done
}
