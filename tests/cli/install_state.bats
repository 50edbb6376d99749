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
            run -2 --separate-stderr epkit install resume "$name" --root "$root"
            shown=${name#./}
            [[ "$stderr" == *"recipe ${shown%.yaml} was not applied here"*"epkit install apply ${shown%.yaml}"* ]]
        done
        run -2 epkit install resume --root "$root"
        [[ "$output" == *"None was applied here"* ]]
    done
    [ -z "$(ls m)" ]
    [ "$(find n -type f)" = n/bin/sh ]
}

@test "status without a name: all recipes that were applied, with the attempts of their steps; other actions name them" {
    mkdir m
    recipe files >files.yaml
    recipe other | sed 's,/etc/one,/etc/two,' >other.yaml
    epkit install apply files.yaml --root m
    run -0 --separate-stderr epkit install status --root m
    [ "${lines[0]}" = "Recipe files is installed." ]
    epkit install apply other.yaml --root m
    echo changed >m/etc/two
    epkit install apply other.yaml --root m
    run -0 --separate-stderr epkit install status --root m
    [[ "$output" == *"Recipe files is installed."*"Recipe other is installed."* ]]
    [ "$(awk '$1 == "one" { print $3 }' <<<"$output" | xargs)" = "1 2" ]
    rm m/etc/one
    run -3 --separate-stderr epkit install status --root m
    [[ "$output" == *"Recipe files is not complete"*"Recipe other is installed."* ]]
    run -2 epkit install uninstall --root m
    [[ "$output" == *"2 were applied here: "*files* && "$output" == *other* ]]
}

@test "an apply that is refused writes nothing, and changes nothing of an earlier one's" {
    mkdir m
    printf 'ID=plan9\nVERSION_ID=4\n' >os-release
    recipe files 'target: {os: unix, release: "7"}' >unix.yaml
    recipe files 'variables: {word: {kind: word, help: h}}' >word.yaml
    mkdir -p m/etc
    cp os-release m/etc/
    run -4 epkit install apply unix.yaml --root m
    run -2 epkit install apply word.yaml --root m
    run epkit install apply debian-tools --root m
    [ "$status" -eq 2 ] || [ "$status" -eq 4 ]
    [ "$(find m -type f)" = m/etc/os-release ]
    recipe files >files.yaml
    epkit install apply files.yaml --root m
    find m -type f -exec sha256sum {} + | sort >before
    run -2 epkit install apply word.yaml --root m
    rm m/etc/one
    run -4 epkit install apply unix.yaml --root m
    echo -n x >m/etc/one && echo >>m/etc/one
    find m -type f -exec sha256sum {} + | sort | diff before -
    epkit install resume --root m
}

@test "an uninstall reports recipes that were never applied, that had changed nothing, and that are undone" {
    recipe files >files.yaml
    mkdir m
    run -0 epkit install uninstall files.yaml --root m
    [[ "$output" == *"Nothing to uninstall: recipe files was not applied here"* ]]
    [ -z "$(ls m)" ]
    run -0 --separate-stderr epkit install uninstall files.yaml --root m --json
    valid install <<<"$output"
    [ "$(jq -r .steps[0].state <<<"$output")" = todo ]
    run -2 epkit install uninstall --root m
    [ -z "$(ls m)" ]
    mkdir m/etc
    echo x >m/etc/one
    epkit install apply files.yaml --root m
    run -0 epkit install uninstall --root m
    [[ "$output" == *"it had changed nothing"* ]]
    rm m/etc/one
    epkit install apply files.yaml --root m
    run -0 epkit install uninstall --root m
    [[ "$output" == *"its logs are in $PWD/m/var/log/epkit/install/files."* ]]
    [ -e m/var/log/epkit/install/files/one.log ]
    # And once more.
    run -0 epkit install uninstall files.yaml --root m
    [[ "$output" == *"Nothing to uninstall"* ]]
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
    "$@" "${WITHOUT_SYSTEMD[@]}" "$EPKIT" install apply ./slow.yaml --state "$PWD/state" >out 2>&1 3>&- &
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
    local action log=m/var/log/epkit/install/files/one.log
    recipe files >files.yaml
    mkdir m
    epkit install apply files.yaml --root m
    (cd m/var/lib/epkit/install/files && rm -r -- * && : >recipe.yaml)
    rm m/etc/one
    run -0 epkit install uninstall files.yaml --root m
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
    run -2 epkit install apply files.yaml --root m --state "$long"
    [[ "$output" == *"--state: it is longer than 250 characters"* ]]
    [ -z "$(ls m)" ]
    mkdir -p "m$long$long"
    run -1 epkit install apply files.yaml --root "m$long$long"
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
    run -0 limited 60 unshare -m sh inside.sh "$EPKIT"
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
    run -1 epkit install apply ./copies.yaml --root m
    epkit install uninstall copies --root m
    diff -r before m/dst
    # As if it had been killed when it had saved the folder, before it recorded that.
    run -1 epkit install apply ./copies.yaml --root m
    kept=$(find m -path '*/before/set' -type d)/kept
    mkdir -p "$kept"
    cp -a m/dst/folder "$kept"
    echo provider >m/src/libprovider-1.so
    epkit install apply ./copies.yaml --root m
    [ "$(cat m/dst/folder/file)" = inside ]
    epkit install uninstall copies --root m
    diff -r before m/dst
}

@test "a folder at the place for the user's version of a file: nothing is changed, and nothing is left" {
    local action log=m/var/log/epkit/install/files/one.log
    recipe files >files.yaml
    mkdir m
    epkit install apply files.yaml --root m
    echo mine >m/etc/one
    mkdir m/etc/one.epkit-old
    for action in apply uninstall; do
        rm -f "$log"
        run -1 epkit install $action files.yaml --root m
        [[ "$output" == *"$log"* ]]
        grep -q 'm/etc/one.epkit-old, which is a folder: move that folder away and try again$' "$log"
        [ "$(cat m/etc/one)" = mine ]
        [ ! -e m/etc/one.epkit-new ]
    done
    rmdir m/etc/one.epkit-old
    epkit install uninstall files.yaml --root m
    [ "$(cat m/etc/one.epkit-old)" = mine ]
}

@test "user changes of a file since it was written are saved next to it, and uninstall reports that it leaves them" {
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
    echo 'mine again' >m/etc/one
    run -0 --separate-stderr epkit install uninstall files --root m
    [ "$(grep -c "^  left     $PWD/m/etc/one.epkit-old: the file as it was changed" <<<"$output")" -eq 1 ]
    [ "$(cat m/etc/one)" = original ]
    [ "$(cat m/etc/one.epkit-old)" = 'mine again' ]
    rm m/etc/one.epkit-old
    # No user changes: another version of the recipe, the original restored, the file removed.
    epkit install apply files.yaml --root m
    sed -i 's/content: x/content: y/' files.yaml
    epkit install apply files.yaml --root m
    [ "$(cat m/etc/one)" = y ]
    echo original >m/etc/one
    epkit install apply files.yaml --root m
    rm m/etc/one
    epkit install apply files.yaml --root m
    run -0 --separate-stderr epkit install uninstall files --root m --json
    valid install <<<"$output"
    [ "$(jq -c .left <<<"$output")" = '[]' ]
    [ "$(cat m/etc/one)" = original ]
    [ "$(ls m/etc)" = one ]
}

@test "a link that was there before is put back, also if it leads nowhere" {
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

@test "dpkg is run again while another process holds its lock, which is named; its error message is passed on" {
    [ "$(id -u)" -eq 0 ] || skip 'dpkg --configure needs root'
    mkdir -p dpkg/info dpkg/updates dpkg/triggers
    : >dpkg/available
    export DPKG_ADMINDIR=$PWD/dpkg EPKIT_STATE=$PWD
    configure() { sh -euc '. "$1"; epkit_configure' - "$EPKIT_SOURCE/cmd/install/prelude.sh"; }
    # One unpacked package, whose script fails at first.
    printf 'Package: %s\nStatus: install ok unpacked\nMaintainer: t\nArchitecture: all\nVersion: 1\nDescription: t\n\n' one >dpkg/status
    : >dpkg/info/one.list
    printf '#!/bin/sh\n[ ! -e %s/broken ]\n' "$PWD" >dpkg/info/one.postinst
    chmod +x dpkg/info/one.postinst
    touch broken
    run -1 configure
    [[ "$output" == *"installed one package post-installation script subprocess returned error exit status 1"* ]]
    rm broken
    cat >hold.py <<'END'
import fcntl, sys
file = open("dpkg/lock-frontend", "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
END
    mkfifo until
    python3 hold.py <until >held 3>&- &
    holder=$!
    exec 9>until
    within 20 grep -q held held
    configure >out 2>&1 3>&- 9>&- &
    waiting=$!
    within 20 grep -q "locked by another process with pid $holder" out
    exec 9>&-
    wait "$waiting"
    grep -q '^Status: install ok installed' dpkg/status
    wait
}
