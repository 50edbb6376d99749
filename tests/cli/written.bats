#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Every file that a command makes or opens for writing, with its flags and modes, under umask 0. One that is not in these
# lists is a fault of the command, or a new row with a reason. Programs that epkit starts write what they want.
#
# shellcheck disable=SC2016 # programs of inner shells

load common

PRIVATE='/proc/self/fd/N: chmod 0700' # of the folder that was made just before

setup() {
    command -v strace >/dev/null || skip 'strace is not installed'
    [ -z "${EPKIT_SANITIZED-}" ] || skip 'LeakSanitizer does not work under strace'
    cd "$BATS_TEST_TMPDIR" || exit 1
    unset JOBSET_NAME LWS_LEADER_ADDRESS JOB_COMPLETION_INDEX SLURM_JOB_NODELIST
    export TMPDIR=$PWD
    printf '#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n' >ssh
    printf 'a: NCCL WARN\n' >log
    chmod +x ssh
    mkdir -m 755 bin
    umask 0
}

# writes CODES ARGUMENT... <<EXPECTED: the command, with the PATH in SEARCH, ends with one of these codes, and writes that
writes() {
    local codes=$1 got=0
    shift
    cat >expected
    limited 60 strace -f -y -qq -s 4096 -o trace -E "PATH=${SEARCH:-$PATH}" -e 'trace=execve,clone,clone3,fork,vfork,open,openat,openat2,creat,mknod,mknodat,mkdir,mkdirat,rename,renameat,renameat2,link,linkat,symlink,symlinkat,chmod,fchmod,fchmodat,?fchmodat2,truncate,bind' \
        "$EPKIT" "$@" >said 2>&1 </dev/null || got=$?
    cat said
    [[ " $codes " == *" $got "* ]]
    python3 -S "$EPKIT_SOURCE/tests/cli/written.py" "$EPKIT" trace >written
    diff -u expected written
}

# replaced FOLDER NAME...: files that are written beside their name and renamed
replaced() {
    for name in "${@:2}"; do echo "$1.$name.epkit-XXXXXX: new 0600, fchmod 0644, renameat $1$name"; done
}

# run_folder FOLDER MODE LOG...: what launch writes there, and on the node
run_folder() {
    printf '%s\n' "$PRIVATE" 'epkit-launch-XXXXXX: mkdirat 0700' 'epkit-launch-XXXXXX/probe: new 0600, fchmod 0700'
    printf '%s\n' "$1: mkdirat $2" "$1/testbed-logs: mkdirat 0755"
    replaced "$1/testbed-logs/" hostfile-1pernode.txt hostfile run.json
    for name in coordinator.log "${@:3}"; do echo "$1/testbed-logs/$name: new 0600, fchmod 0644"; done
}

@test "what reads and prints writes nothing" {
    for words in version env doctor 'env --check' 'doctor --json' 'doctor --stacks' topo nics 'parse log' 'completion bash' \
        'install list' 'install plan gdrcopy' 'doctor --hosts a,b --ssh ./ssh' 'watch --idle 1 log' \
        'deploy check --gpus 8 --kubectl false' 'triangulate --hosts a,b --plan' 'triangulate --hosts a,b --run ./bin/{hosts}'; do
        echo "$words"
        # shellcheck disable=SC2086 # words
        writes '0 1 2 3 4' $words </dev/null
    done
}

@test "run, test, bench: memory and pipes, and the folder of the report" {
    local own='/dev/null: O_RDWR'$'\n''/proc/N/fd/N: O_RDWR|O_NONBLOCK'
    writes 0 test intranode "${SMALL[@]}" --only 1 <<<"$own"
    writes 0 run --quick --output report < <(echo "$own" && echo 'report: mkdirat 0755' &&
        replaced report/ report.html report.json run.json)
    # Without mpirun: Open MPI writes files of its own within the ranks.
    SEARCH=$PWD/bin writes 0 bench "${SMALL[@]}" --iters 2 <<<"$own"
}

@test "launch: a folder of the run, one for files on the node, one for mpirun" {
    echo 'echo script' >script
    writes 0 launch --ssh ./ssh --hosts a --checks report --out new --workload script \
        < <(run_folder new 0755 doctor-a.json worker-a.log | sed '3a epkit-launch-XXXXXX/workload: new 0600, fchmod 0700')
    writes 0 launch --ssh ./ssh --hosts a --checks skip echo x < <(run_folder epkit-run-TIME-program-XXXXXX 0700 worker-a.log)
    command -v mpirun >/dev/null || return 0
    writes 0 launch --ssh ./ssh --hosts "$(hostname)" --checks skip --with mpirun --no-logs true <<END
$PRIVATE
epkit-launch-XXXXXX: mkdirat 0700
epkit-launch-XXXXXX/probe: new 0600, fchmod 0700
epkit-mpirun-XXXXXX: mkdirat 0700
epkit-mpirun-XXXXXX/.hostfile.epkit-XXXXXX: new 0600, fchmod 0644, renameat epkit-mpirun-XXXXXX/hostfile
socket:[N]/epkit-launch-N: bind
END
}

@test "report: page and history" {
    mkdir -m 755 logs
    mv log logs/worker-a.log
    writes 4 report logs --output page --history history < <(
        echo 'history: new 0600, fchmod 0644'
        echo 'page: mkdirat 0755'
        replaced page/ report.html report.json
    )
    writes 4 report logs --output page --history history \
        < <(echo 'history: O_RDWR|O_NOFOLLOW|O_APPEND|O_NONBLOCK' && replaced page/ report.html report.json)
}

@test "snapshots of machines and clusters, counters of NICs" {
    writes '0 4' topo --save machine < <(replaced '' machine)
    writes '0 4' nics --output nics < <(replaced '' nics)
    writes '0 4' nics --output /dev/stdout <<<'/proc/self/fd/N: O_WRONLY|O_TRUNC|O_NONBLOCK'
    tr '\0' '\n' <"$EPKIT_SOURCE/tests/fuzz/corpus/deploy/job" | sed '$d' >job.yaml
    printf '%s\n' '#!/bin/sh' 'case "$*" in' '*version*) echo "{\"serverVersion\": {\"gitVersion\": \"v1.34.1\"}}" ;;' \
        '*/apis*) echo "{\"groups\": []}" ;;' "*) echo '{\"items\": []}' ;;" 'esac' >bin/kubectl
    chmod +x bin/kubectl
    writes 3 deploy check -f job.yaml --kubectl ./bin/kubectl --save cluster <<END
.cluster.epkit-XXXXXX: new 0600, fchmod 0600, renameat cluster
$PRIVATE
epkit-deploy-XXXXXX: mkdirat 0700
epkit-deploy-XXXXXX/0.json: new 0600, fchmod 0600
epkit-deploy-XXXXXX/1.json: new 0600, fchmod 0600
END
}

@test "install: the state, scripts and logs" {
    printf 'recipe: one\ntitle: t\nsteps:\n  - {id: one, type: file, title: t, why: w, budget: 5s, path: /etc/one, content: x}\n' \
        >one.yaml
    mkdir -m 755 m
    local state=m/var/lib/epkit/install/one
    writes 0 install apply ./one.yaml --root m < <(
        for folder in m/var{,/lib{,/epkit{,/install{,/one}}}}; do echo "$folder: mkdirat 0755, fchmod 0755"; done
        replaced $state/ recipe.yaml
        replaced $state/ settings.json | sed s/0644/0600/
        printf '%s: mkdirat 0755\n' $state/before{,/one}
        replaced $state/before/one/ undo.sh | sed s/0644/0600/
        echo $state/journal.jsonl: new 0600, fchmod 0644
        echo $state/lock: new 0600, fchmod 0600
        echo "$state/scripts: mkdirat 0755"
        replaced $state/scripts/ one.apply.sh | sed s/0644/0600/
        for folder in m/var/log{,/epkit{,/install{,/one}}}; do echo "$folder: mkdirat 0755, fchmod 0755"; done
        echo m/var/log/epkit/install/one/one.log: new 0600, fchmod 0644
    )
    writes 0 install uninstall one --root m < <(
        printf '%s: O_RDWR|O_NOFOLLOW|O_APPEND|O_NONBLOCK\n' $state/{journal.jsonl,lock} m/var/log/epkit/install/one/one.log
    )
}
