#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The state of 'epkit install' apart from its steps: the state of a recipe, the journal, signals, the lock of dpkg.
#
# shellcheck disable=SC2154 # $stderr is set by run
# shellcheck disable=SC2016,SC1003 # for other shells, lines that go on

load common
load install

setup() {
    cd "$BATS_TEST_TMPDIR" || exit 1
}

# A recipe of one file: recipe NAME [MORE-LINES-OF-THE-HEAD]
recipe() {
    printf 'recipe: %s\ntitle: a file\n%s\nsteps:\n' "$1" "${2:-}"
    echo '  - {id: one, type: file, title: t, why: w, budget: 5s, path: /etc/one, content: x}'
}

@test "a resume of what was never applied is refused by name, and nothing is written" {
    recipe files >files.yaml
    mkdir -p m n/bin
    cp /bin/true n/bin/sh
    for root in m n; do
        for name in ./files.yaml debian-tools epkit-only; do
            run --separate-stderr epkit install resume "$name" --root "$root"
            [ "$status" -eq 2 ]
            shown=${name#./}
            [[ "$stderr" == *"recipe ${shown%.yaml} was not applied here"*"epkit install apply ${shown%.yaml}"* ]]
        done
        run epkit install resume --root "$root"
        [ "$status" -eq 2 ]
        [[ "$output" == *"None was applied here"* ]]
    done
    [ -z "$(ls m)" ]
    [ "$(find n -type f)" = n/bin/sh ]
}

@test "an apply that is refused writes nothing, and changes nothing of an earlier one's" {
    mkdir m
    printf 'ID=plan9\nVERSION_ID=4\n' >os-release
    recipe files 'target: {os: unix, release: "7"}' >unix.yaml
    recipe files 'variables: {word: {kind: word, help: h}}' >word.yaml
    mkdir -p m/etc
    cp os-release m/etc/
    run epkit install apply unix.yaml --root m
    [ "$status" -eq 4 ]
    run epkit install apply word.yaml --root m
    [ "$status" -eq 2 ]
    run epkit install apply debian-tools --root m
    [ "$status" -eq 2 ] || [ "$status" -eq 4 ]
    [ "$(find m -type f)" = m/etc/os-release ]
    recipe files >files.yaml
    epkit install apply files.yaml --root m
    find m -type f -exec sha256sum {} + | sort >before
    run epkit install apply word.yaml --root m
    [ "$status" -eq 2 ]
    rm m/etc/one
    run epkit install apply unix.yaml --root m
    [ "$status" -eq 4 ]
    echo -n x >m/etc/one && echo >>m/etc/one
    find m -type f -exec sha256sum {} + | sort | diff before -
    epkit install resume --root m
}

@test "an uninstall reports recipes that were never applied, that had changed nothing, and that are undone" {
    recipe files >files.yaml
    mkdir m
    run epkit install uninstall files.yaml --root m
    [ "$status" -eq 0 ]
    [[ "$output" == *"Nothing to uninstall: recipe files was not applied here"* ]]
    [ -z "$(ls m)" ]
    run --separate-stderr epkit install uninstall files.yaml --root m --json
    [ "$status" -eq 0 ]
    valid install <<<"$output"
    [ "$(jq -r .steps[0].state <<<"$output")" = todo ]
    run epkit install uninstall --root m
    [ "$status" -eq 2 ]
    [ -z "$(ls m)" ]
    mkdir m/etc
    echo x >m/etc/one
    epkit install apply files.yaml --root m
    run epkit install uninstall --root m
    [ "$status" -eq 0 ]
    [[ "$output" == *"it had changed nothing"* ]]
    rm m/etc/one
    epkit install apply files.yaml --root m
    run epkit install uninstall --root m
    [ "$status" -eq 0 ]
    [[ "$output" == *"its logs are in $PWD/m/var/log/epkit/install/files."* ]]
    [ -e m/var/log/epkit/install/files/one.log ]
    # And once more.
    run epkit install uninstall files.yaml --root m
    [ "$status" -eq 0 ]
    [[ "$output" == *"Nothing to uninstall"* ]]
}

@test "a journal of another version is refused with its line, and stays as it is" {
    recipe files >files.yaml
    mkdir m
    epkit install apply files.yaml --root m
    journal=m/var/lib/epkit/install/files/journal.jsonl
    echo '{"v":99,"boot":"b","event":"begin"}' >>"$journal"
    cp "$journal" before
    for action in status apply resume uninstall; do
        run epkit install $action files --root m
        [ "$action" != apply ] || run epkit install apply files.yaml --root m
        [ "$status" -eq 1 ]
        [[ "$output" == *"journal.jsonl:$(wc -l <before): not of version 1"*"or move the file away"* ]]
        cmp "$journal" before
    done
    rm "$journal"
    epkit install uninstall files --root m
    [ ! -e m/etc ]
}

# slow_apply PROGRAM...: by this program, an apply of this machine whose step has begun and waits; its number is in $apply.
slow_apply() {
    cat >slow.yaml <<END
recipe: slow
title: a step that takes its time
steps:
  - {id: slow, type: command, title: t, why: w, budget: 90s, run: "echo begun >$PWD/begun; until [ -e $PWD/go ]; do sleep 0.1; done",
     check: "test -e $PWD/go", undo: "true"}
END
    rm -f begun go
    # Without systemd: the machine that runs the tests may have it.
    "$@" unshare -m sh -c '[ ! -d /run/systemd ] || mount -t tmpfs none /run/systemd; exec "$@"' - \
        "$EPKIT" install apply ./slow.yaml --state "$PWD/state" >out 2>&1 3>&- &
    apply=$!
    within 20 test -s begun
}

# ended STATUS: the apply did
ended() {
    local status=0
    wait $apply || status=$?
    cat out
    [ "$status" -eq "$1" ]
}

@test "an uninstall that was killed while it removed the state is completed by the next one" {
    recipe files >files.yaml
    mkdir m
    epkit install apply files.yaml --root m
    mv m/var/lib/epkit/install/files m/var/lib/epkit/install/.files.removed
    run epkit install resume ./files.yaml --root m
    [ "$status" -eq 2 ]
    run epkit install uninstall files.yaml --root m
    [ "$status" -eq 0 ]
    [[ "$output" != *"Nothing to uninstall"* ]]
    [ ! -e m/var/lib/epkit ]
}

@test "concurrent runs of apply and uninstall report each other, and nothing else" {
    recipe files >files.yaml
    mkdir m
    for action in apply uninstall uninstall; do
        for _ in $(seq 40); do epkit install $action files.yaml --root m || true; done >/dev/null 2>>errors 3>&- &
        started+=($!)
    done
    wait "${started[@]}" || true
    grep error: errors | grep -v -e 'is installing this recipe now' -e 'another run has just uninstalled' >others || true
    cat others
    [ ! -s others ]
    epkit install apply files.yaml --root m
    epkit install uninstall files --root m
    [ ! -e m/etc ]
    [ ! -e m/var/lib/epkit ]
}

@test "folders whose path is too long are refused, and no other folder is used" {
    recipe files >files.yaml
    mkdir m
    long=$(printf '/%.0saaaaaaaaa' $(seq 30))
    run epkit install apply files.yaml --root m --state "$long"
    [ "$status" -eq 2 ]
    [[ "$output" == *"--state: it is longer than 250 characters"* ]]
    [ -z "$(ls m)" ]
    mkdir -p "m$long$long"
    run epkit install apply files.yaml --root "m$long$long"
    [ "$status" -eq 1 ]
    [[ "$output" == *"its path is longer than 380 characters"* ]]
    [ -z "$(find m -type f)" ]
}

@test "a read-only root is reported, and can be planned" {
    unshare -m mount -t tmpfs none /mnt 2>/dev/null || skip 'nothing can be mounted here'
    recipe files >files.yaml
    mkdir m
    cat >inside.sh <<'END'
set -eu
mount -t tmpfs none m
mkdir m/etc
mount -o remount,ro m
code=0
"$1" install plan files.yaml --root m || code=$?
test $code = 3
"$1" install uninstall files.yaml --root m
code=0
"$1" install apply files.yaml --root m || code=$?
test $code = 1
# Written, and then no longer.
mount -o remount,rw m
"$1" install apply files.yaml --root m
mount -o remount,ro m
"$1" install status files --root m
code=0
"$1" install uninstall files --root m || code=$?
test $code = 1
mount -o remount,rw m
"$1" install uninstall files --root m
test ! -e m/etc/one
END
    run limited 60 unshare -m sh inside.sh "$EPKIT"
    echo "$output"
    [ "$status" -eq 0 ]
    [ "$(grep -c 'epkit: error: .*Read-only file system' <<<"$output")" -eq 2 ]
    [[ "$output" == *"Nothing to uninstall"* ]]
}

@test "SIGHUP, SIGQUIT, SIGINT and SIGTERM end an apply with a line that says how to continue" {
    [ "$(id -u)" -eq 0 ] || skip 'an apply of this machine needs root'
    for number in 1 2 3 15; do
        slow_apply env --default-signal=HUP,INT,QUIT,TERM
        kill "-$number" $apply
        ended $((128 + number))
        touch go
        grep -q "interrupted; the current step is completed, and 'epkit install resume slow' continues" out
        epkit install resume slow --state "$PWD/state"
        epkit install uninstall slow --state "$PWD/state"
    done
    # Under nohup it continues.
    slow_apply nohup
    kill -HUP $apply
    sleep 1
    touch go
    ended 0
    epkit install uninstall slow --state "$PWD/state"
    rm -rf /var/log/epkit/install/slow
    rmdir /var/log/epkit/install /var/log/epkit 2>/dev/null || true
}

@test "Python packages that were in the folder before are restored, also after a kill in the middle" {
    [ "$(id -u)" -eq 0 ] || skip 'pip for this machine needs root'
    python3 -m pip --version >/dev/null 2>&1 || skip 'pip is not installed'
    wheels index thing 1.0 2.0
    mkdir -p target/bin
    wheel thing 0.5 .
    python3 -m zipfile -e thing-0.5-py3-none-any.whl target
    echo mine >target/other.py
    cp -a target before
    recipe() {
        printf 'recipe: python\ntitle: t\nsteps:\n  - {id: one, type: pip, title: t, why: w, budget: 9s, target: "%s", index: "%s", packages: {thing: "%s"}}\n' \
            "$PWD/target" "file://$PWD/index" "$1" >python.yaml
    }
    recipe 1.0
    epkit install apply ./python.yaml --state "$PWD/state"
    # As if it had been killed while it moved the packages in, before it recorded them.
    rm -r state/python/copies/one state/python/stamp state/python/before/one/complete target/thing.py
    epkit install resume python --state "$PWD/state"
    recipe 2.0
    epkit install apply ./python.yaml --state "$PWD/state"
    [ "$(PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=target python3 -c 'import thing; print(thing.version)')" = 2.0 ]
    [ "$(cd target && echo *.dist-info)" = thing-2.0.dist-info ]
    epkit install uninstall python --state "$PWD/state"
    diff -r before target
    rm -rf /var/log/epkit/install/python
    rmdir /var/log/epkit/install /var/log/epkit 2>/dev/null || true
}

@test "an interrupted set of copies: uninstall and resume lose no previous file" {
    mkdir -p m/src/folder m/dst/folder
    echo core >m/src/libcore.so.1
    echo inside >m/src/folder/file
    echo theirs >m/dst/libcore.so.1
    echo theirs >m/dst/folder/file
    cp -a m/dst before
    cat >copies.yaml <<'END'
recipe: copies
title: a set
steps:
  - {id: set, type: copyset, title: t, why: w, budget: 5s, to: /dst, files: [/src/libcore.so*, /src/folder, /src/libprovider*.so]}
END
    run epkit install apply ./copies.yaml --root m
    [ "$status" -eq 1 ]
    epkit install uninstall copies --root m
    diff -r before m/dst
    # As if it had been killed when it had saved the folder, before it recorded that.
    run epkit install apply ./copies.yaml --root m
    [ "$status" -eq 1 ]
    kept=$(find m -path '*/before/set' -type d)/kept
    mkdir -p "$kept"
    cp -a m/dst/folder "$kept"
    echo provider >m/src/libprovider-1.so
    epkit install apply ./copies.yaml --root m
    [ "$(cat m/dst/folder/file)" = inside ]
    epkit install uninstall copies --root m
    diff -r before m/dst
}

@test "a module option that is overridden later, in any file, does not count as configured" {
    cat >options.yaml <<'END'
recipe: options
title: t
steps:
  - {id: one, type: modprobe, title: t, why: w, budget: 5s, module: some-module, options: {an_option: "1"}}
END
    mkdir -p m/proc m/etc/modprobe.d m/run/modprobe.d m/usr/lib/modprobe.d
    epkit install apply options.yaml --root m
    state() { epkit install plan options.yaml --root m --json | jq -r '.steps[0] | .state + " " + .text'; }
    # later FILE LINE...: this file has these lines, and does set it later
    later() {
        printf '%s\n' "${@:2}" >"m$1"
        [ "$(state)" = "wrong $1 sets the same option later, and the last one counts" ]
        rm "m$1"
    }
    later /etc/modprobe.d/zzz.conf 'options some_module an_option=0'
    later /etc/modprobe.d/zzz.conf '# options' '  options some-module  b=2 an-option=0'
    later /etc/modprobe.d/zzz.conf 'options some-module b=2 \' '  an_option=0'
    later /run/modprobe.d/zzz.conf 'options some-module an_option=0'
    later /usr/lib/modprobe.d/zzz.conf 'options some-module an_option=0'
    later /proc/cmdline 'quiet some_module.an_option=0 splash'
    # What does not.
    for line in 'options some_module_b an_option=0' 'options some_module other_an_option=0 an_option2=0' '#options some_module an_option=0'; do
        echo "$line" >m/etc/modprobe.d/zzz.conf
        [[ "$(state)" == "done "* ]]
    done
    echo 'options some_module an_option=0' >m/usr/lib/modprobe.d/zzz.conf # its namesake in /etc is read
    echo 'options some_module an_option=0' >m/etc/modprobe.d/aaa.conf
    echo 'some_module_b.an_option=0 an_option=0' >m/proc/cmdline
    [[ "$(state)" == "done "* ]]
}

@test "an option that is set later to the same value is configured, whatever came between" {
    cat >options.yaml <<'END'
recipe: options
title: t
steps:
  - {id: one, type: modprobe, title: t, why: w, budget: 5s, module: some-module, options: {an_option: "1", text: "a=1;"}}
END
    mkdir -p m/proc m/etc/modprobe.d m/usr/lib/modprobe.d
    epkit install apply options.yaml --root m
    state() { epkit install plan options.yaml --root m --json | jq -r '.steps[0] | .state + " " + .text'; }
    for line in 'some_module.an_option=1' 'quiet some-module.an-option=1 some_module.text="a=1;" splash' \
        '"some_module.text=a=1;" x="y some_module.an_option=0"' 'some_module.an_option=0 some_module.an_option=1'; do
        echo "$line" >m/proc/cmdline
        [[ "$(state)" == "done "* ]]
    done
    # One of two is enough, and the last setting counts.
    for line in 'some_module.an_option=1 some_module.text=b' 'some_module.an_option=1 some_module.an_option=0' \
        'some_module.an_option=10' 'some_module.an_option='; do
        echo "$line" >m/proc/cmdline
        [ "$(state)" = "wrong /proc/cmdline sets the same option later, and the last one counts" ]
    done
    : >m/proc/cmdline
    echo 'options some_module an_option="1"' >m/etc/modprobe.d/zzz.conf
    echo 'options some_module an_option=0' >m/etc/modprobe.d/zzy.conf
    [[ "$(state)" == "done "* ]]
    echo 'options some_module an_option=0' >m/usr/lib/modprobe.d/zzzz.conf
    [ "$(state)" = "wrong /usr/lib/modprobe.d/zzzz.conf sets the same option later, and the last one counts" ]
    echo 'some_module.an_option=1' >m/proc/cmdline
    [[ "$(state)" == "done "* ]]
}

@test "user changes of a file since it was written are saved next to it, by apply and uninstall" {
    recipe files >files.yaml
    mkdir -p m/etc
    echo original >m/etc/one
    epkit install apply files.yaml --root m
    [ ! -e m/etc/one.epkit-old ]
    echo mine >m/etc/one
    chmod 600 m/etc/one
    epkit install apply files.yaml --root m
    [ "$(cat m/etc/one)" = x ]
    [ "$(cat m/etc/one.epkit-old)" = mine ]
    [ "$(stat -c %a m/etc/one.epkit-old)" = 600 ]
    grep -q 'm/etc/one was changed since epkit wrote it: that is kept as' m/var/log/epkit/install/files/one.log
    echo 'mine again' >m/etc/one
    epkit install uninstall files --root m
    [ "$(cat m/etc/one)" = original ]
    [ "$(cat m/etc/one.epkit-old)" = 'mine again' ]
    [ "$(cat m/etc/one.epkit-old.1)" = mine ]
    [ "$(stat -c %a m/etc/one.epkit-old.1)" = 600 ]
    rm m/etc/one.epkit-old m/etc/one.epkit-old.1
    # No user changes: another version of the recipe, the original restored, the file removed.
    epkit install apply files.yaml --root m
    sed -i 's/content: x/content: y/' files.yaml
    epkit install apply files.yaml --root m
    [ "$(cat m/etc/one)" = y ]
    echo original >m/etc/one
    epkit install apply files.yaml --root m
    rm m/etc/one
    epkit install apply files.yaml --root m
    epkit install uninstall files --root m
    [ "$(cat m/etc/one)" = original ]
    [ "$(ls m/etc)" = one ]
}

@test "a link that was there before is not taken for a change of the user, also if it leads nowhere" {
    recipe files >files.yaml
    for target in nowhere ../etc/real /etc/elsewhere; do
        mkdir -p m/etc
        echo real >m/etc/real
        ln -s "$target" m/etc/one
        epkit install apply files.yaml --root m
        [ ! -L m/etc/one ]
        # As an undo leaves it that was killed before it could say that it was complete.
        ln -sf "$target" m/etc/one
        epkit install uninstall files --root m
        [ "$(readlink m/etc/one)" = "$target" ]
        [ "$(ls m/etc)" = "one
real" ]
        # A link of the user to another place is.
        epkit install apply files.yaml --root m
        ln -sf mine m/etc/one
        epkit install uninstall files --root m
        [ "$(readlink m/etc/one)" = "$target" ]
        [ "$(readlink m/etc/one.epkit-old)" = mine ]
        rm -r m
    done
}

@test "an interrupted uninstall ends by the signal, also with --json, and continues where it was" {
    [ "$(id -u)" -eq 0 ] || skip 'an uninstall of this machine needs root'
    cat >slow.yaml <<END
recipe: slow
title: an undo that takes its time
steps:
  - {id: one, type: command, title: t, why: w, budget: 20m, run: "touch $PWD/done", check: "test -e $PWD/done",
     undo: "touch $PWD/undoing; while [ ! -e $PWD/go ]; do sleep 0.1; done; rm -f $PWD/done"}
END
    for number in 2 15; do
        rm -f undoing go
        epkit install apply ./slow.yaml --state "$PWD/state"
        env --default-signal=INT,TERM "$EPKIT" install uninstall slow --state "$PWD/state" --json >out 2>err 3>&- &
        uninstall=$!
        within 20 test -e undoing
        kill "-$number" $uninstall
        status=0
        wait $uninstall || status=$?
        cat err out
        [ "$status" -eq $((128 + number)) ]
        [ "$(jq -s length out)" -eq 1 ]
        [ "$(jq -r .result out)" = interrupted ]
        valid install out
        grep -q "interrupted; the current step is completed, and 'epkit install uninstall slow' continues" err
        touch go
        epkit install uninstall slow --state "$PWD/state"
        [ ! -e "done" ]
    done
    rm -rf /var/log/epkit/install/slow
    rmdir /var/log/epkit/install /var/log/epkit 2>/dev/null || true
}

# --- the lock of dpkg ---

# prelude.sh with the locks and the database of this folder; dpkg itself is the real one.
own_prelude() {
    mkdir -p dpkg/info dpkg/updates dpkg/triggers
    : >dpkg/status
    : >dpkg/available
    sed "s,/var/lib/dpkg/,\${LOCKS:-$PWD/dpkg}/,g" "$EPKIT_SOURCE/cmd/install/prelude.sh" >prelude.sh
    export DPKG_ADMINDIR=$PWD/dpkg EPKIT_STATE=$PWD
    cat >hold.py <<'END'
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
END
}

@test "the holder of dpkg's lock is that of this file, not of one with the same inode elsewhere" {
    own_prelude
    unshare -m true 2>/dev/null || skip 'nothing can be mounted here'
    cat >inside.sh <<'END'
set -eu
for folder in a b; do
    mkdir $folder
    mount -t tmpfs none $folder
    touch $folder/lock-frontend
done
test "$(stat -c %i a/lock-frontend)" = "$(stat -c %i b/lock-frontend)"
mkfifo until
python3 hold.py b/lock-frontend <until >held &
exec 8>until
until grep -q held held; do sleep 0.1; done
. ./prelude.sh
LOCKS=$PWD/a epkit_lock_holder >none
LOCKS=$PWD/b epkit_lock_holder >holder
echo "$! $PWD/b/lock-frontend" | diff - holder
test ! -s none
# A file of a lower layer and of an upper one: inode numbers of overlayfs differ from /proc/locks.
mkdir o o/lower o/up o/work o/all
mount -t tmpfs none o
mkdir o/lower o/up o/work o/all
touch o/lower/lock-frontend
if mount -t overlay none -o "lowerdir=o/lower,upperdir=o/up,workdir=o/work" o/all 2>/dev/null; then
    python3 hold.py o/all/lock-frontend <until >held2 8>&- &
    until grep -q held held2; do sleep 0.1; done
    LOCKS=$PWD/o/all epkit_lock_holder >holder
    echo "$! $PWD/o/all/lock-frontend" | diff - holder
fi
exec 8>&-
wait
END
    run limited 20 unshare -m sh inside.sh
    echo "$output"
    [ "$status" -eq 0 ]
}

@test "a process outside of the container that holds dpkg's lock is not reported under another process's name" {
    own_prelude
    unshare -pf true 2>/dev/null || skip 'there can be no PID namespace here'
    mkfifo until
    python3 hold.py dpkg/lock-frontend <until >held 3>&- &
    exec 9>until
    within 20 grep -q held held
    run limited 20 unshare -pf --mount-proc sh -euc 'sed -i "s/-ge 300/-ge 1/" prelude.sh; . ./prelude.sh; epkit_await_lock'
    exec 9>&-
    wait
    [ "$status" -eq 1 ]
    [[ "$output" == "waiting for a process that cannot be seen from here, which holds $PWD/dpkg/lock-frontend"* ]]
}

@test "a process that acquires dpkg's lock between the wait for it and dpkg is waited for as well" {
    [ "$(id -u)" -eq 0 ] || skip 'dpkg --configure needs root'
    own_prelude
    cat >inside.sh <<'END'
set -eu
# The first wait finds no holder, and then another process is faster.
sed 's/^epkit_await_lock()/real_await_lock()/' prelude.sh >renamed.sh
. ./renamed.sh
epkit_await_lock() {
    if [ ! -e raced ]; then
        : >raced
        python3 hold.py dpkg/lock-frontend <until >held 8>&- &
        exec 8>until
        until grep -q held held; do sleep 0.1; done
        return 0
    fi
    exec 8>&-
    real_await_lock
}
mkfifo until
epkit_configure
echo configured
wait
END
    run limited 30 sh inside.sh
    echo "$output"
    [ "$status" -eq 0 ]
    [ "${lines[-1]}" = configured ]
}

@test "dpkg's lock is held while it runs, and its error message is passed on" {
    [ "$(id -u)" -eq 0 ] || skip 'dpkg --configure needs root'
    own_prelude
    # One unpacked package, whose script prints the holder of the lock.
    printf 'Package: %s\nStatus: install ok unpacked\nMaintainer: t\nArchitecture: all\nVersion: 1\nDescription: t\n\n' one >dpkg/status
    : >dpkg/info/one.list
    printf '#!/bin/sh\nset -eu\n. %s/prelude.sh\nepkit_lock_holder >%s/seen\n[ ! -e %s/broken ]\n' "$PWD" "$PWD" "$PWD" >dpkg/info/one.postinst
    chmod +x dpkg/info/one.postinst
    touch broken
    run limited 30 sh -euc '. ./prelude.sh; epkit_configure'
    echo "$output"
    [ "$status" -eq 1 ]
    [[ "$output" == *"installed one package post-installation script subprocess returned error exit status 1"* ]]
    grep -q "^[0-9]* $PWD/dpkg/lock-frontend\$" seen
    rm broken
    limited 30 sh -euc '. ./prelude.sh; epkit_configure'
    grep -q '^Status: install ok installed' dpkg/status
}

@test "a hold of a package applies only to its architecture" {
    command -v apt-mark >/dev/null || skip 'apt is not installed'
    native=$(dpkg --print-architecture)
    own_prelude
    printf '%s\nriscv64\n' "$native" >dpkg/arch
    for word in "thing $native install" "thing riscv64 hold" "other $native hold"; do
        read -r name architecture wanted <<<"$word"
        printf 'Package: %s\nStatus: %s ok installed\nVersion: 1\nArchitecture: %s\nMulti-Arch: same\nMaintainer: m <m@example.org>\nDescription: d\n\n' \
            "$name" "$wanted" "$architecture" >>dpkg/status
        printf '/.\n' >"dpkg/info/$name:$architecture.list"
    done
    cat >apt.conf <<END
Dir::State "$PWD/apt";
Dir::State::status "$PWD/dpkg/status";
APT::Architectures { "$native"; "riscv64"; };
DPkg::Options { "--admindir=$PWD/dpkg"; };
END
    mkdir -p apt before
    export APT_CONFIG=$PWD/apt.conf EPKIT_BEFORE=$PWD/before
    held() { dpkg-query -W -f='${Status} ${Package}:${Architecture}\n' | sed -n 's/^hold [^ ]* [^ ]* //p' | sort | tr '\n' ' '; }
    [ "$(held)" = "other:$native thing:riscv64 " ]
    apt-mark showhold >before/hold
    cat before/hold
    # As for a step that lists both and is applied.
    sh -euc '. ./prelude.sh; epkit_hold unhold thing=1 "other:'"$native"'=1"'
    held
    [ "$(held)" = "thing:riscv64 " ]
    sh -euc '. ./prelude.sh; epkit_hold hold thing=1 "other:'"$native"'"'
    [ "$(held)" = "other:$native thing:riscv64 " ]
    sh -euc '. ./prelude.sh; epkit_hold unhold thing:riscv64'
    [ "$(held)" = "other:$native " ]
}
