#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# epkit run under mpirun, with a number of ranks that not all matrices support.

load common

setup() {
    [ -e "$EPKIT_BUILD/libepkit-mpi.so" ] || skip "libepkit-mpi is not built"
    command -v mpirun >/dev/null || skip "mpirun is not installed"
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    cd "$BATS_TEST_TMPDIR" || return 1
}

@test "three ranks: internode is not run, and as the table and both reports say" {
    limited 60 mpirun -n 3 --oversubscribe --bind-to none "$EPKIT" run --quick --output here --seed 4 >out
    cat out
    grep -Eq '^internode +not run, 3 ranks do not make 2 nodes$' out
    valid run here/report.json
    [ "$(jq -c '[.suites[].matrix], [.not_run[].matrix], .command' here/report.json | xargs)" = \
        "[intranode,lowlatency] [internode] mpirun -n 3 epkit run --quick --seed 4" ]
    grep -q 'not run</td><td colspan="2">3 ranks do not make 2 nodes</td>' here/report.html
    grep -qF '<code>mpirun -n 3 epkit run --quick --seed 4</code>' here/report.html
}
