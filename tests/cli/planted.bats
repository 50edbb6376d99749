#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Links that another user has planted where root's epkit writes or reads: nothing is written through them.
#
# shellcheck disable=SC2154,SC2016 # $stderr is set by run; programs of inner shells

load common

MALLORY=54321

setup() {
    [ "$(id -u)" -eq 0 ] || skip 'links of another user need root'
    cd "$BATS_TEST_TMPDIR" || exit 1
    printf '#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n' >ssh
    chmod +x ssh
    unset JOBSET_NAME LWS_LEADER_ADDRESS JOB_COMPLETION_INDEX SLURM_JOB_NODELIST TMPDIR
    mkdir victim victim/empty hers
    echo precious >victim/file
    chown $MALLORY hers
}

# plant TARGET LINK: as the other user
plant() {
    ln -s "$PWD/victim/$1" "$2"
    chown -h $MALLORY "$2"
}

# Is the victim as it was?
unharmed() {
    [ "$(cat victim/file)" = precious ]
    [ "$(find victim -printf '%P:%m ')" = "$VICTIM" ]
}

launch() {
    VICTIM=$(find victim -printf '%P:%m ')
    run --separate-stderr epkit launch --ssh "$PWD/ssh" --connect-timeout 60 --hosts a "$@"
    echo "$* -> $status: $output $stderr"
}

# A run folder with one log.
run_folder() {
    mkdir -p "$1"
    echo 'a: NCCL WARN' >"$1/worker-a.log"
}

@test "launch: the names of its files are links" {
    mkdir hers/testbed-logs
    for name in coordinator.log worker-a.log doctor-a.json run.json run.json.new hostfile; do
        plant file hers/testbed-logs/$name
    done
    launch --out hers --checks report echo hello
    [ "$status" -eq 0 ]
    unharmed
    [ "$(cat hers/testbed-logs/worker-a.log)" = hello ]
    [ -z "$(find hers/testbed-logs -name '*.new' -prune -o -type l -print)" ]
    # A second name of the same file.
    rm hers/testbed-logs/coordinator.log
    ln victim/file hers/testbed-logs/coordinator.log
    launch --out hers --checks skip echo hello
    [ "$status" -eq 0 ]
    unharmed
}

@test "launch: the folder, or one in its path, is a link" {
    plant empty hers/link
    for folder in hers/link hers/link/deep/er; do
        launch --out "$folder" --checks skip echo hello
        [ "$status" -eq 1 ]
        [[ "$stderr" == *'a link in its path belongs to another user'* ]]
        unharmed
    done
    plant empty hers/testbed-logs
    launch --out hers --checks skip echo hello
    [ "$status" -eq 1 ]
    [[ "$stderr" == *'a link or a file has its name'* ]]
    unharmed
    # Links of one's own are followed.
    mkdir mine
    ln -s mine own
    launch --out own --checks skip echo hello
    [ "$status" -eq 0 ]
    [ "$(cat mine/testbed-logs/worker-a.log)" = hello ]
    chmod o+w mine/testbed-logs
    launch --out own --checks skip echo hello
    [ "$status" -eq 1 ]
    [[ "$stderr" == *'every user may write in it'* ]]
}

@test "launch: the default folder is new, and only its owner's" {
    mkdir sticky
    chmod 1777 sticky
    cd sticky
    for _ in 1 2; do
        run -0 env -C . "$EPKIT" launch --ssh "$BATS_TEST_TMPDIR/ssh" --hosts a --checks skip echo hello
    done
    [ "$(stat -c %a epkit-run-*-*-??????)" = $'700\n700' ]
}

@test "launch: the folder for files of another user, where names can be replaced" {
    echo 'echo script' >script
    launch --no-logs --checks skip --workload script
    [ "$status" -eq 0 ]
    TMPDIR=$PWD/hers launch --no-logs --checks skip --workload script
    [ "$status" -ne 0 ]
    unharmed
    [ -z "$(ls hers)" ]
}

@test "report: page and history" {
    run_folder logs
    VICTIM=$(find victim -printf '%P:%m ')
    for name in report.html report.json; do plant file hers/$name; done
    plant file hers/history
    plant empty hers/link
    run epkit report logs -o hers
    [ ! -L hers/report.html ]
    [ ! -L hers/report.json ]
    unharmed
    run -1 epkit report logs -o hers/link
    [[ "$output" == *'a link in its path belongs to another user'* ]]
    run -1 epkit report logs -o new --history hers/history
    unharmed
    run -2 epkit run --quick -o hers/link/report
    plant file hers/snapshot
    run epkit topo --save hers/link/machine
    [ "$status" -ne 0 ]
    run epkit topo --save hers/snapshot
    unharmed
    run -1 epkit nics -o hers/link/nics
    [[ "$output" == *'a link in its path belongs to another user'* ]]
    plant file hers/nics
    run epkit nics -o hers/nics
    [ "$status" -ne 0 ]
    unharmed
    ln -s "$PWD/mine" hers/mine
    : >mine
    run epkit nics -o hers/mine
    [ -s mine ]
    run epkit nics -o /dev/stdout
    [ -n "$output" ]
    # A pipe that nobody reads; a file that others may write to is replaced by one that they may not.
    mkfifo -m 666 pipe
    run -1 epkit nics -o pipe
    [[ "$output" == *'a pipe that nobody reads'* ]]
    : >shared
    chmod 666 shared
    run epkit nics -o shared
    [ "$(stat -c %a shared)" = 644 ]
}

@test "snapshots: a device, a pipe and what leads to standard output are not replaced by a file" {
    printf '%s\n' '#!/bin/sh' 'case "$*" in' '*version*) echo "{\"serverVersion\": {\"gitVersion\": \"v1.34.1\"}}" ;;' \
        "*) echo '{\"items\": [], \"groups\": []}' ;;" 'esac' >kube
    chmod +x kube
    mknod null c 1 3
    mkfifo pipe
    ln -s /proc/self/fd/1 standard
    for file in null pipe standard; do
        for command in topo 'deploy check --gpus 8 --kubectl ./kube'; do
            run -1 bash -c '"$0" $1 --save "$2" >out 2>&1; code=$?; cat out; exit $code' "$EPKIT" "$command" $file
            [[ "$output" == *"$file"*'cannot be written: it is not a regular file'* ]]
        done
    done
    [ -c null ] && [ -p pipe ] && [ -L standard ]
}

@test "parse, report: links in the folder of a run are not followed" {
    run_folder secret
    mkdir run
    ln -s "$PWD/secret" hers/run
    chown -h $MALLORY hers/run
    for command in parse report; do
        run -2 epkit $command hers/run
        [[ "$output" == *'a link in its path belongs to another user'* ]]
    done
    ln -s secret own
    run -4 epkit parse own
    ln -s ../secret run/testbed-logs
    for command in parse report; do
        run -2 epkit $command run
        [[ "$output" == *'testbed-logs in it is a link'* ]]
    done
    rm run/testbed-logs
    ln -s ../secret run/pod-logs
    ln -s ../secret/worker-a.log run/worker-b.log
    for command in parse report; do
        run -2 epkit $command run
        [[ "$output" == *'there is no *.log'* ]]
    done
    run_folder run/testbed-logs
    ln -s ../../secret run/testbed-logs/pod-logs
    run epkit parse --json run
    [ "$status" -ne 2 ]
    # A second name of a file of root in a folder of another user.
    mkdir hers/second own/second
    ln secret/worker-a.log own/second/worker-b.log
    run -4 epkit parse own/second
    mv own/second/worker-b.log hers/second
    chown $MALLORY hers/second
    for command in parse report; do
        run ! epkit $command hers/second
        [[ "$output" == *'it has a second name, which may be that of another file'* ]]
    done
    run epkit report run -o page
    [ "$(jq .parsed.totals.lines page/report.json)" = 1 ]
}

@test "parse: a log that becomes a pipe while another one is read" {
    local parse
    mkdir run
    truncate -s 2G run/worker-a.log
    : >run/worker-b.log
    mkfifo pipe
    timeout 300 "$EPKIT" parse run >said 2>&1 &
    parse=$!
    within 60 bash -c "readlink /proc/[0-9]*/fd/* 2>/dev/null | grep -qxF '$PWD/run/worker-a.log'"
    mv pipe run/worker-b.log
    status=0
    wait $parse || status=$?
    cat said
    [ "$status" -eq 2 ]
    grep -q 'run/worker-b.log: it is a device or a pipe, not a log' said
}

@test "install --root: absolute links stay in the root" {
    cat >one.yaml <<'END'
recipe: one
title: a recipe
steps:
  - {id: one, type: file, title: a file, why: a test, budget: 5s, path: /etc/one, content: text}
END
    for link in var var/lib var/log var/lib/epkit; do
        rm -rf m outside
        mkdir -p outside "m/$(dirname $link)" "m$PWD/outside"
        ln -s "$PWD/outside" "m/$link"
        # Without a shell in the root, scripts run outside of it.
        run -0 epkit install apply ./one.yaml --root m
        [ -z "$(ls outside)" ]
        [ -n "$(ls "m$PWD/outside")" ]
        [ "$(cat m/etc/one)" = text ]
        run -0 epkit install status ./one.yaml --root m
        run -0 epkit install uninstall ./one.yaml --root m
        [ -z "$(ls outside)" ]
        [ -z "$(find "m$PWD/outside" -type f ! -path '*/log/*' ! -name '*.log')" ]
    done
    # It would lead to another machine's state outside.
    rm -rf m
    mkdir m
    ln -s "$PWD/outside" m/var
    run -1 epkit install plan ./one.yaml --root m
    [[ "$output" == *'leads nowhere'* ]]
}

@test "install --root: a link of another user to the root is not followed" {
    printf 'recipe: one\ntitle: t\nsteps:\n  - {id: one, type: file, title: t, why: w, budget: 5s, path: /etc/one, content: x}\n' \
        >one.yaml
    plant empty hers/m
    for action in plan apply status; do
        run -1 epkit install $action ./one.yaml --root hers/m
        [[ "$output" == *'hers/m: a link in its path belongs to another user'* ]]
    done
    [ -z "$(ls victim/empty)" ]
    mkdir m
    ln -s m own
    run -0 epkit install apply ./one.yaml --root own
    [ -e m/etc/one ]
}

@test "install --root: the state has no links" {
    cat >one.yaml <<'END'
recipe: one
title: a recipe
steps:
  - {id: one, type: file, title: a file, why: a test, budget: 5s, path: /etc/one, content: text}
END
    local state=m/var/lib/epkit/install/one
    for link in scripts before before/one before/one/complete before/one/left before/one/undo.sh before/dropped stamp \
        lock; do
        for action in apply uninstall; do
            rm -rf m host
            mkdir -p m/etc host/one "$state/before" "$(dirname $state/$link)"
            echo precious >host/one/file
            [ ! -d "$state/$link" ] || rmdir "$state/$link"
            ln -s "$PWD/host" "$state/$link"
            run -1 epkit install $action ./one.yaml --root m
            echo "$link: $output"
            [[ "$output" == *"$PWD/$state/$link: a link"* ]]
            [ "$(find host -printf '%P ')" = ' one one/file ' ]
            [ ! -e m/etc/one ]
        done
    done
    # What the step replaces may be a link, and its copy is one; what leads to the copy may not.
    rm -rf m host
    mkdir -p m/etc "$state/before/one" host/etc
    ln -s nowhere m/etc/one
    run -0 epkit install apply ./one.yaml --root m
    run -0 epkit install apply ./one.yaml --root m
    run -0 epkit install uninstall ./one.yaml --root m
    [ "$(readlink m/etc/one)" = nowhere ]
    mkdir -p "$state/before/one/old"
    echo precious >host/etc/one
    ln -s "$PWD/host/etc" "$state/before/one/old/etc"
    run -1 epkit install apply ./one.yaml --root m
    [ "$(cat host/etc/one)" = precious ]
}

@test "install --root: links beside the file of a step, and a pipe in its place" {
    printf 'recipe: one\ntitle: t\nsteps:\n  - {id: one, type: file, title: t, why: w, budget: 5s, path: /etc/one, content: x}\n' \
        >one.yaml
    mkdir -p m/etc
    VICTIM=$(find victim -printf '%P:%m ')
    mkfifo m/etc/one
    for action in apply apply uninstall; do
        ln -sf "$PWD/victim/file" m/etc/one.epkit-new
        ln -sf "$PWD/victim/file" m/etc/one.epkit-old
        run -0 epkit install $action ./one.yaml --root m
        unharmed
        [ "$action" = uninstall ] || echo changed >m/etc/one
    done
    [ -p m/etc/one ]
    [ "$(cat m/etc/one.epkit-old)" = changed ]
}

@test "install --root: a folder on the way to the file of a step that another user can exchange with a link" {
    local folder change
    printf 'recipe: one\ntitle: t\nsteps:\n  - {id: one, type: file, title: t, why: w, budget: 5s, path: /srv/a/one, content: x}\n' \
        >one.yaml
    for folder in srv srv/a srv/links; do
        for change in "chown -h $MALLORY" 'chmod 777'; do
            rm -rf m
            mkdir -p m/srv/links m/data/a
            ln -s ../data/a m/srv/links/a
            if [ $folder = srv/links ]; then ln -s links/a m/srv/a; else mkdir m/srv/a; fi
            $change m/$folder
            run -1 epkit install apply ./one.yaml --root m
            echo "$change $folder -> $output"
            [[ "$output" == *"/m/$folder/: user "*" owns it, its mode is "*": another user could lead this step elsewhere"* ]]
            [ -z "$(find m ! -type d ! -type l ! -path 'm/var/*')" ]
        done
    done
    # A sticky folder, where what comes next may be made by others, or is root's.
    rm -rf m
    mkdir -p m/srv
    chmod 1777 m/srv
    run -1 epkit install apply ./one.yaml --root m
    [[ "$output" == *"/m/srv/: user root owns it, its mode is 1777, which lets others make what is not there yet"* ]]
    mkdir m/srv/a
    run -0 epkit install apply ./one.yaml --root m
    [ "$(cat m/srv/a/one)" = x ]
    run -0 epkit install uninstall ./one.yaml --root m
}

# steps_shell SHELL LINE: a function of prelude.sh as a step in that shell runs it, with programs of bin before others
steps_shell() {
    PATH=$PWD/bin:$PATH EPKIT_ROOT=$PWD/m EPKIT_STATE=$PWD/m/state EPKIT_BEFORE=$PWD/m/state/before EPKIT_STEP=one \
        timeout 60 "$1" -euc "umask 022; . '$EPKIT_SOURCE/cmd/install/prelude.sh'; $2"
}

@test "install: what another user puts beside the file of a step after its place was cleared, or was written" {
    local shell planted program
    VICTIM=$(find victim -printf '%P:%m ')
    for shell in dash bash; do
        for planted in "ln -s '$PWD/victim/file'" "ln -s '$PWD/victim/none'" 'ln -s /dev/full' mkfifo mkdir; do
            for program in rm cp chmod sync; do
                rm -rf m bin
                mkdir -p m/etc m/state/before bin
                printf '#!/bin/sh\n/bin/%s "$@" || exit\nfor at; do :; done\ncase $at in *.epkit-new) at=%s; /bin/rm -rf $at; %s $at; echo >%s ;; esac\n' \
                    $program "$PWD/m/etc/one.epkit-new" "$planted" "$PWD/planted" >bin/$program
                chmod +x bin/$program
                run steps_shell "$shell" 'epkit_write 0755 /etc/one "$(echo text)"'
                echo "$shell, $planted after $program -> $status: $output"
                [ "$status" -ne 124 ]
                unharmed
                # What was there before the file is written is replaced.
                [ "$program$planted" = rmmkdir ] || [ "$program" != rm ] || [ "$status$(cat m/etc/one)$(stat -c %a m/etc/one)" = 0text755 ]
            done
        done
        rm -rf m bin
        mkdir -p m/etc m/state/before bin
        run -0 steps_shell "$shell" 'epkit_write 0600 /etc/one text'
        [ "$(cat m/etc/one)$(stat -c %a m/etc/one)" = text600 ]
        # The folder of a set.
        printf '#!/bin/sh\n/bin/rm "$@"\nfor at; do :; done\ncase $at in *.epkit-one) ln -s "%s" "$at" ;; esac\n' "$PWD/victim/empty" >bin/rm
        chmod +x bin/rm
        run ! steps_shell "$shell" 'epkit_set_begin /set'
        [[ "$output" == *'/m/set.epkit-one'*xist* ]]
    done
    [ -e planted ]
}

@test "install: another user who may read the state does not hold up a run" {
    local open action
    printf 'recipe: one\ntitle: t\nsteps:\n  - {id: one, type: file, title: t, why: w, budget: 5s, path: /etc/one, content: x}\n' \
        >one.yaml
    open=$(mktemp -d)
    chmod 755 "$open"
    run -0 epkit install apply ./one.yaml --root "$open"
    find "$open" >names
    setpriv --reuid $MALLORY --clear-groups bash -c 'while read -r name; do
            { exec {held}<"$name" && flock -n $held && echo "$name"; } 2>/dev/null
        done
        echo all
        exec sleep 600' <names >held 3>&- &
    within 60 grep -qx all held
    for action in apply uninstall; do
        run timeout 60 "$EPKIT" install $action ./one.yaml --root "$open"
        echo "$action: $status: $output"
        [ "$status" -eq 0 ] || break
    done
    kill $!
    [ "$status" -eq 0 ]
    [ "$(wc -l <held)" -gt 9 ]
    rm -r "$open"
}

@test "install --root: scripts of another user are not run outside of the root" {
    local state=m/var/lib/epkit/install/one
    printf 'recipe: one\ntitle: t\nsteps:\n  - {id: one, type: file, title: t, why: w, budget: 5s, path: /etc/one, content: x}\n' \
        >one.yaml
    mkdir m
    for name in . before before/one before/one/undo.sh recipe.yaml; do
        for change in "chown $MALLORY" 'chmod g+w' 'chmod o+w'; do
            epkit install apply ./one.yaml --root m
            echo "touch $PWD/ran" >>$state/before/one/undo.sh
            cp -a $state before
            $change $state/$name
            run -1 epkit install uninstall ./one.yaml --root m
            [[ "$output" == *"$PWD/$state"*': another user '* ]]
            [ ! -e ran ]
            [ -e m/etc/one ]
            rm -rf $state
            mv before $state
            run -0 epkit install uninstall ./one.yaml --root m
            [ -e ran ]
            rm ran
        done
    done
}

@test "install --root: status, plan and uninstall read the state of the root, never one outside" {
    local state=var/lib/epkit/install/one
    printf 'recipe: one\ntitle: t\nsteps:\n  - {id: one, type: file, title: t, why: w, budget: 5s, path: /etc/one, content: x}\n' \
        >one.yaml
    mkdir host
    run -0 epkit install apply ./one.yaml --root host
    for link in var var/lib var/lib/epkit var/lib/epkit/install $state $state/recipe.yaml $state/settings.json; do
        rm -rf m
        mkdir -p m/etc
        cp -a host/etc/one m/etc
        run -0 epkit install apply ./one.yaml --root m
        rm -r "m/$link"
        ln -s "$PWD/host/$link" "m/$link"
        for action in status uninstall resume; do
            # By its name, and as the only recipe that was applied.
            for name in one ''; do
                run epkit install $action $name --root m
                echo "$link: $action $name -> $status: $output"
                [ "$status" -ne 0 ]
                [[ "$output" != *'All steps are done'* ]]
            done
        done
        [ -e host/$state/before/one/undo.sh ]
        [ -e m/etc/one ]
    done
    # The journal, and the files that say what was applied.
    command -v strace >/dev/null || return 0
    for link in journal.jsonl before before/one before/one/complete; do
        rm -rf m
        mkdir m
        run -0 epkit install apply ./one.yaml --root m
        rm -r "m/$state/$link"
        ln -s "$PWD/host/$state/$link" "m/$state/$link"
        strace -f -qq -e trace=open,openat,openat2,newfstatat,faccessat,faccessat2,access -o trace "$EPKIT" install status one --root m || true
        echo "$link: $(grep "$link" trace)"
        run ! grep -F "/$link\"" trace
    done
}

@test "install --root: who owns a folder above the state may not replace it while scripts run" {
    printf 'recipe: one\ntitle: t\nsteps:\n  - {id: one, type: file, title: t, why: w, budget: 5s, path: /etc/one, content: x}\n' \
        >one.yaml
    for folder in . m m/var m/var/lib m/var/lib/epkit m/var/lib/epkit/install; do
        rm -rf m
        mkdir m
        run -0 epkit install apply ./one.yaml --root m
        chown $MALLORY $folder
        run -1 epkit install uninstall ./one.yaml --root m
        chown 0 .
        [[ "$output" == *"$(realpath $folder): another user owns it"*'scripts run outside of m'* ]]
        [ -e m/etc/one ]
        run -0 epkit install status one --root m
    done
    # That user can.
    setpriv --reuid $MALLORY --clear-groups "$EPKIT" version || skip "another user cannot run $EPKIT"
    open=$(mktemp -d)
    chmod 755 "$open"
    mv m "$open"
    chown -R $MALLORY "$open/m"
    run -0 setpriv --reuid $MALLORY --clear-groups "$EPKIT" install uninstall one --root "$open/m"
    [ ! -e "$open/m/etc/one" ]
    rm -r "$open"
}

@test "install --state: who owns it, or a folder above it, may not replace what root runs" {
    printf 'recipe: one\ntitle: t\nsteps:\n  - {id: one, type: file, title: t, why: w, budget: 5s, path: %s/one, content: x}\n' \
        "$PWD" >one.yaml
    mkdir -p above/state
    for folder in above above/state; do
        rm -f one
        run -0 epkit install apply ./one.yaml --state "$PWD/above/state"
        chown $MALLORY $folder
        for action in apply uninstall; do
            run -1 epkit install $action ./one.yaml --state "$PWD/above/state"
            [[ "$output" == *"$PWD/$folder: another user owns it or may write to it, and its scripts run as root"* ]]
        done
        chown -R 0 above
        [ -e one ]
        run -0 epkit install uninstall ./one.yaml --state "$PWD/above/state"
    done
}

@test "modes do not allow others to write, whatever the umask" {
    run_folder logs
    for mask in 0 077; do
        rm -rf m new history out
        (
            umask $mask
            epkit launch --ssh "$PWD/ssh" --hosts a --checks skip --out new/out echo hello
            epkit report new/out --history history || [ $? -eq 4 ]
            epkit topo --save new/machine || [ $? -eq 4 ]
            epkit nics -o new/nics || [ $? -eq 4 ]
        )
        [ -z "$(find new history -perm /022 ! -type l)" ]
    done
}

@test "a full disk and the limits of the shell are named" {
    mkdir -p m/etc/small
    printf 'recipe: one\ntitle: t\nsteps:\n  - {id: one, type: file, title: t, why: w, budget: 5s, path: /etc/small/one, content: "%s"}\n' \
        "$(head -c 9000 /dev/zero | tr '\0' x)" >one.yaml
    run -1 bash -c 'ulimit -f 0; trap "" XFSZ; exec "$0" topo --save machine' "$EPKIT"
    [[ "$output" == *'machine: cannot be written: the limit of the file size is reached (ulimit -f)'* ]]
    [ ! -e machine ]
    # Mounts of this shell only.
    unshare -m mount -t tmpfs none m 2>/dev/null || skip "nothing can be mounted here"
    run -1 unshare -m sh -c 'mount -t tmpfs -o size=8k none m/etc/small && exec "$0" install apply ./one.yaml --root m' "$EPKIT"
    [[ "$output" == *"no space is left in $PWD/m/etc/small ("*' KiB)'* ]]
}

@test "launch: a rank of mpirun gives nothing to another user who listens where its agent would" {
    setpriv --reuid $MALLORY --regid $MALLORY --clear-groups perl -MSocket -e '
        alarm 300; my ($s, $c, $number); socket($s, AF_UNIX, SOCK_SEQPACKET, 0) && bind($s, pack("S", AF_UNIX) . "\0epkit-launch-$ARGV[0]") && listen($s, 9) or die;
        $| = 1; print "ready\n"; accept($c, $s); sysread($c, $number, 4) == 4 and print "taken\n"' "$$" >said 3>&- 4>&- &
    until grep -q ready said; do sleep 0.1; done
    EPKIT_LAUNCH_SPEC="{\"launch\":\"$$\",\"argv\":[\"true\"]}" OMPI_COMM_WORLD_RANK=0 run -1 epkit __exec
    [[ "$output" == *"no agent of this launch runs on the node"* ]]
    wait
    [ "$(cat said)" = ready ]
}
