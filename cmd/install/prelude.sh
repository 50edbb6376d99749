# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
# prelude.sh - functions that the scripts of steps call; every script begins with them.
#
# EPKIT_ROOT, EPKIT_STATE, EPKIT_STEP and EPKIT_BEFORE are explained in types.h. A script may be killed at any instant
# and run again: what a step replaces is copied completely, and marked as complete, before anything changes; files are
# written next to their target, synced and renamed.

# --- packages ---

# Prints "PROCESS FILE" for the holder of one of dpkg's locks, or nothing. The kernel is queried for the lock itself,
# because on overlayfs and btrfs devices and inodes in /proc/locks differ from those of stat. 0 is a process outside of
# this container, -1 one that holds it with its open file. perl is essential on Debian and Ubuntu.
epkit_lock_holder() {
    # shellcheck disable=SC2016 # perl's variables
    perl -MFcntl -e 'for my $path (@ARGV) {
            my $lock = pack("s s x4 q q l x4", F_WRLCK, 0, 0, 0, 0); # struct flock of 64 bits: all of the file
            open(FILE, "<", $path) and fcntl(FILE, F_GETLK, $lock) or next;
            my ($type, $process) = (unpack("s s x4 q q l x4", $lock))[0, 4];
            if ($type != F_UNLCK) { print "$process $path\n"; last }
        }' /var/lib/dpkg/lock-frontend /var/lib/dpkg/lock
}

# epkit_process NUMBER: its description for messages.
epkit_process() {
    if [ "$1" -gt 0 ]; then
        echo "process $1 ($(cat "/proc/$1/comm" 2>/dev/null || echo unknown))"
    else
        echo 'a process that cannot be seen from here'
    fi
}

# The last line of the log names the process that is waited for, also when the deadline of the step ends the wait.
epkit_await_lock() {
    waited=0
    while holder=$(epkit_lock_holder) && [ -n "$holder" ]; do
        process=$(epkit_process "${holder%% *}")
        if [ "$waited" -ge 300 ]; then
            echo "$process has held ${holder#* } for $waited s: let it end, then resume" >&2
            return 1
        fi
        if [ $((waited % 10)) -eq 0 ]; then
            echo "waiting for $process, which holds ${holder#* }"
        fi
        sleep 1
        waited=$((waited + 1))
    done
}

# epkit_dpkg ARGUMENT...: runs dpkg, which does not wait for its lock. The lock is acquired here and held while dpkg
# runs, so that a process that acquires it between the wait and dpkg is waited for as well. The deadline of the step
# ends the wait.
epkit_dpkg() {
    while epkit_await_lock; do
        code=0
        # shellcheck disable=SC2016 # perl's variables
        perl -MFcntl -e '$^F = 255; # the lock stays open when dpkg is executed
            my ($path, $lock) = (shift, pack("s s x4 q q l x4", F_WRLCK, 0, 0, 0, 0));
            sysopen(FILE, $path, O_RDWR | O_CREAT, 0640) or die "$path: $!\n";
            fcntl(FILE, F_SETLK, $lock) or exit 75;
            $ENV{DPKG_FRONTEND_LOCKED} = 1;
            exec("dpkg", @ARGV) or die "dpkg: $!\n"' /var/lib/dpkg/lock-frontend "$@" || code=$?
        if [ "$code" -ne 75 ]; then return "$code"; fi
    done
    return 1
}

# apt keeps its lists and downloads in the folder of the recipe's state: those of the machine stay unchanged.
epkit_apt() {
    mkdir -p "$EPKIT_STATE/apt/lists/partial" "$EPKIT_STATE/apt/cache/archives/partial"
    if id _apt >/dev/null 2>&1; then # apt's own user makes the downloads
        chown _apt "$EPKIT_STATE/apt/lists/partial" "$EPKIT_STATE/apt/cache/archives/partial"
    fi
    apt-get -q -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 -o Dpkg::Options::=--force-confold \
        -o Dir::State::lists="$EPKIT_STATE/apt/lists" -o Dir::Cache="$EPKIT_STATE/apt/cache" \
        -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= "$@"
}

epkit_apt_install() {
    epkit_await_lock || return 1
    epkit_apt install -y --no-install-recommends --allow-downgrades "$@"
}

epkit_apt_mark() {
    apt-mark -o Dir::State::lists="$EPKIT_STATE/apt/lists" -o Dir::Cache="$EPKIT_STATE/apt/cache" "$@"
}

# A hold of a package that the recipe names is released for the step and restored afterwards; holds of other packages
# stay, and apt refuses what would break them. A killed run has left a record of it. epkit_hold WORD NAME...: WORD is
# hold or unhold; names that were not held are skipped.
epkit_hold() {
    if [ ! -s "$EPKIT_BEFORE/hold" ]; then return 0; fi
    word=$1 native=$(dpkg --print-architecture)
    shift
    for name in "$@"; do
        case $name in
        *.deb) name=$(dpkg-deb -f "$name" Package) ;;
        *) name=${name%%=*} ;;
        esac
        # A package of another architecture is another package, and has it in its name.
        name=${name%":$native"}
        if sed "s/:$native\$//" "$EPKIT_BEFORE/hold" | grep -qxF -e "$name" && dpkg-query -W "$name" >/dev/null 2>&1; then
            epkit_apt_mark "$word" "$name"
        fi
    done
}

# Prints "NAME VERSION" of installed and half-installed packages.
epkit_packages() {
    dpkg-query -W -f='${db:Status-Abbrev} ${binary:Package} ${Version}\n' |
        sed -n 's/^.[^cn][^ ]* *\([^ ]*\) \([^ ]*\)$/\1 \2/p' | sort
}

# Prints the names of packages that are removed but not purged: only their configuration files are left.
epkit_packages_residue() {
    dpkg-query -W -f='${db:Status-Abbrev} ${binary:Package}\n' | sed -n 's/^.c[^ ]* *\([^ ]*\)$/\1/p' | sort
}

# Files that packages change besides their own: accounts, and databases that apt and dpkg keep in their own order.
epkit_accounts='etc/passwd etc/group etc/shadow etc/gshadow'
epkit_books='etc/passwd- etc/group- etc/shadow- etc/gshadow- etc/subuid etc/subgid etc/subuid- etc/subgid-
    var/lib/dpkg/status-old var/lib/apt/extended_states var/cache/ldconfig/aux-cache'

# epkit_copy_files FOLDER FILE...
epkit_copy_files() {
    folder=$1
    shift
    rm -rf "$folder"
    mkdir -p "$folder"
    for file in "$@"; do
        if [ -e "/$file" ]; then cp -a "/$file" "$folder/$(printf '%s' "$file" | tr / :)"; fi
    done
}

epkit_packages_keep() {
    if [ -e "$EPKIT_BEFORE/packages" ]; then return 0; fi
    # shellcheck disable=SC2086 # lists of words
    epkit_copy_files "$EPKIT_BEFORE/books" $epkit_accounts $epkit_books
    epkit_apt_mark showauto | sort >"$EPKIT_BEFORE/auto"
    epkit_packages_residue >"$EPKIT_BEFORE/residue"
    epkit_apt_mark showhold | sort >"$EPKIT_BEFORE/hold"
    epkit_packages >"$EPKIT_BEFORE/packages.new"
    sync
    mv "$EPKIT_BEFORE/packages.new" "$EPKIT_BEFORE/packages"
}

epkit_packages_note() {
    # shellcheck disable=SC2086
    epkit_copy_files "$EPKIT_BEFORE/accounts" $epkit_accounts
    epkit_packages >"$EPKIT_BEFORE/after.new"
    sync
    mv "$EPKIT_BEFORE/after.new" "$EPKIT_BEFORE/after"
}

# Prints what dpkg has begun and not completed. apt waits for the lock by itself, as configured above.
epkit_configure() {
    epkit_dpkg --configure -a --force-confold
}

# Completes what an interrupted dpkg left. A package whose files were being unpacked has to be unpacked again; if its
# archive is not available any more, it is removed, and installed again in the version of the step.
epkit_packages_repair() {
    epkit_configure || true
    broken=$(dpkg-query -W -f='${db:Status-Eflag} ${binary:Package}\n' | sed -n 's/^reinstreq //p')
    if [ -n "$broken" ]; then
        echo "to be unpacked again:" "$broken"
        # shellcheck disable=SC2086 # a list of words
        if ! { epkit_apt update && epkit_apt install -y --reinstall --no-install-recommends $broken; }; then
            # shellcheck disable=SC2086
            epkit_dpkg --remove --force-remove-reinstreq --force-depends $broken
            if [ -d "$EPKIT_BEFORE" ]; then printf '%s\n' "$broken" >>"$EPKIT_BEFORE/removed"; fi
        fi
    fi
    epkit_apt install -y --fix-broken
    epkit_configure
}

epkit_packages_fetch() {
    epkit_packages_keep # first: dpkg rewrites its databases even when it has nothing to do
    epkit_configure || true # apt does nothing before this; what is left of it, apply repairs
    epkit_apt update
    epkit_apt_install --allow-change-held-packages --download-only "$@"
}

epkit_packages_apply() {
    epkit_packages_keep
    epkit_packages_repair
    epkit_hold unhold "$@"
    code=0
    epkit_apt_install "$@" || code=$?
    epkit_hold hold "$@"
    if [ "$code" -ne 0 ]; then return "$code"; fi
    epkit_packages_mark "$@"
    epkit_packages_note
}

# Marks packages that were installed as dependencies: apt writes that last, and after a kill before it all of them would
# count as requested. epkit_packages_mark WORD...: names with versions, or files.
epkit_packages_mark() {
    named=' '
    for word in "$@"; do
        case $word in
        *.deb) named="$named$(dpkg-deb -f "$word" Package) " ;;
        *) named="$named${word%%=*} " ;;
        esac
    done
    epkit_packages | cut -d' ' -f1 >"$EPKIT_STATE/now"
    for package in $(cut -d' ' -f1 "$EPKIT_BEFORE/packages" | comm -13 - "$EPKIT_STATE/now"); do
        case $named in
        *" ${package%%:*} "*) epkit_apt_mark manual "$package" >/dev/null ;;
        *) epkit_apt_mark auto "$package" >/dev/null ;;
        esac
    done
    rm -f "$EPKIT_STATE/now"
}

# Prints the arguments for apt-get that undo the step: "NAME-" for what it installed, "NAME=VERSION" for what it
# replaced. epkit_packages_changes NAME...: the packages of the step, for when the previous state is unknown.
epkit_packages_changes() {
    epkit_packages >"$EPKIT_STATE/now"
    if [ ! -e "$EPKIT_BEFORE/packages" ]; then
        echo 'what was installed before this step is not known: its own packages are removed alone' >&2
        for package in "$@"; do
            if grep -q "^${package}[: ]" "$EPKIT_STATE/now"; then echo "$package-"; fi
        done
        return 0
    fi
    if [ ! -e "$EPKIT_BEFORE/after" ]; then cp "$EPKIT_STATE/now" "$EPKIT_BEFORE/after"; fi
    # The part of the step's changes that is still unchanged.
    comm -12 "$EPKIT_STATE/now" "$EPKIT_BEFORE/after" | comm -23 - "$EPKIT_BEFORE/packages" |
        while read -r package _; do
            old=$(awk -v package="$package" '$1 == package { print $2 }' "$EPKIT_BEFORE/packages")
            if [ -n "$old" ]; then echo "$package=$old"; else echo "$package-"; fi
        done
}

# One transaction. If it would remove anything else (a package that was installed later depends on it), nothing is done.
epkit_packages_revert() {
    case " $* " in *=*) epkit_apt update ;; esac
    removed=$(epkit_apt_install --allow-change-held-packages -s "$@" | sed -n 's/^\(Remv\|Purg\) \([^ ]*\).*/\2/p')
    for package in $removed; do
        for mine in "$@"; do
            case $mine in "$package-" | "$package:"*-) continue 2 ;; esac
        done
        echo "not undone: $package was installed later and needs what this step installed; remove it first" >&2
        return 1
    done
    epkit_apt_install --allow-change-held-packages "$@"
}

# Purges what the step installed and undo has removed, also by an undo that was killed between the two. Packages that
# had been removed and not purged before the step keep their configuration files. epkit_packages_purge NAME...: the
# packages of the step, for when the previous state is unknown.
epkit_packages_purge() {
    if [ -e "$EPKIT_BEFORE/packages" ]; then
        cut -d' ' -f1 "$EPKIT_BEFORE/after" | cat - "$EPKIT_BEFORE/removed" 2>/dev/null | sort -u >"$EPKIT_STATE/mine"
        cut -d' ' -f1 "$EPKIT_BEFORE/packages" | cat - "$EPKIT_BEFORE/residue" 2>/dev/null | sort -u >"$EPKIT_STATE/theirs"
    else
        for package in "$@"; do printf '%s\n%s:%s\n' "$package" "$package" "$(dpkg --print-architecture)"; done |
            sort -u >"$EPKIT_STATE/mine"
        : >"$EPKIT_STATE/theirs"
    fi
    left=$(epkit_packages_residue | comm -12 - "$EPKIT_STATE/mine" | comm -23 - "$EPKIT_STATE/theirs")
    rm -f "$EPKIT_STATE/mine" "$EPKIT_STATE/theirs"
    # shellcheck disable=SC2086 # a list of words
    if [ -n "$left" ]; then epkit_apt purge -y $left; fi
}

epkit_packages_undo() {
    # The step was killed before it recorded the previous state: it has changed nothing. Without the folder an undo is
    # forced.
    if [ -d "$EPKIT_BEFORE" ] && [ ! -e "$EPKIT_BEFORE/packages" ]; then return 0; fi
    epkit_packages_repair
    changes=$(epkit_packages_changes "$@")
    # shellcheck disable=SC2086
    if [ -n "$changes" ]; then epkit_packages_revert $changes; fi
    epkit_packages_purge "$@"
    # Only of this step's packages: other holds may have been released since.
    epkit_hold hold "$@"
    for change in $changes; do
        change=${change%%=*}
        epkit_hold hold "${change%-}"
    done
    if [ -e "$EPKIT_BEFORE/packages" ]; then epkit_books_restore; fi
    rm -f "$EPKIT_STATE/now"
}

epkit_books_restore() {
    epkit_apt_mark showauto | sort >"$EPKIT_STATE/now"
    for package in $(comm -23 "$EPKIT_BEFORE/auto" "$EPKIT_STATE/now"); do
        if dpkg-query -W "$package" >/dev/null 2>&1; then epkit_apt_mark auto "$package" >/dev/null; fi
    done
    for file in $epkit_accounts; do
        old="$EPKIT_BEFORE/books/$(printf '%s' "$file" | tr / :)"
        new="$EPKIT_BEFORE/accounts/$(printf '%s' "$file" | tr / :)"
        if [ ! -e "$old" ]; then continue; fi
        if [ ! -e "$new" ] || cmp -s "/$file" "$new"; then
            cp -a "$old" "/$file.epkit-new"
            mv -f "/$file.epkit-new" "/$file"
        elif ! cmp -s "/$file" "$old"; then
            echo "note: /$file was changed since; accounts of the packages stay in it"
        fi
    done
    # The packages are the same as before, so the databases are restored, whatever their order is now.
    epkit_packages >"$EPKIT_STATE/now"
    if cmp -s "$EPKIT_STATE/now" "$EPKIT_BEFORE/packages"; then
        for file in $epkit_books; do
            old="$EPKIT_BEFORE/books/$(printf '%s' "$file" | tr / :)"
            if [ -e "$old" ]; then cp -a "$old" "/$file"; else rm -f "/$file"; fi
        done
    fi
}

# --- files ---

# In a root folder a link leads to where it would lead on that machine, or nothing is done: the step must not change
# this machine's disk. epkit_inside FOLDER...
epkit_inside() {
    if [ -z "$EPKIT_ROOT" ]; then return 0; fi
    for folder in "$@"; do
        case $(realpath -m -- "$folder")/ in
        "$(realpath -m -- "$EPKIT_ROOT")"/*) ;;
        *)
            echo "$folder leads out of $EPKIT_ROOT by a link: nothing is done there" >&2
            exit 1
            ;;
        esac
    done
}

# epkit_no_folder PATH: a file never replaces a folder.
epkit_no_folder() {
    if [ -d "$EPKIT_ROOT$1" ] && [ ! -L "$EPKIT_ROOT$1" ]; then
        echo "$EPKIT_ROOT$1 is a folder, but a file is expected: nothing is changed" >&2
        exit 1
    fi
}

# Saves what is at a path, and records which parent folders are missing. epkit_keep KEY PATH
epkit_keep() {
    kept="$EPKIT_BEFORE/$1" target="$EPKIT_ROOT$2"
    epkit_inside "${target%/*}"
    if [ -e "$kept.known" ]; then return 0; fi
    mkdir -p "$EPKIT_BEFORE"
    rm -rf "$kept.file" "$kept.folders"
    if [ -e "$target" ] || [ -L "$target" ]; then cp -a "$target" "$kept.file"; fi
    epkit_missing_folders "${target%/*}" >"$kept.folders"
    sync
    : >"$kept.known"
}

# Are these two the same file, or links with the same target, which need not exist? epkit_is_same FILE FILE
epkit_is_same() {
    if [ -L "$1" ] || [ -L "$2" ]; then
        [ -L "$1" ] && [ -L "$2" ] && [ "$(readlink -- "$1")" = "$(readlink -- "$2")" ]
    else
        cmp -s "$1" "$2"
    fi
}

# A file that was changed since it was written is not lost when it is written again or removed: it is saved next to it.
# epkit_keep_changes KEY PATH
epkit_keep_changes() {
    kept="$EPKIT_BEFORE/$1" target="$EPKIT_ROOT$2"
    if [ ! -e "$kept.written" ] || { [ ! -f "$target" ] && [ ! -L "$target" ]; }; then return 0; fi
    if [ -f "$target" ] && [ ! -L "$target" ] && grep -qxF -e "$(sha256sum <"$target")" "$kept.written"; then return 0; fi
    if epkit_is_same "$target" "$kept.file"; then return 0; fi
    for old in "$target.epkit-old" "$target.epkit-old".[0-9]*; do
        if epkit_is_same "$target" "$old"; then return 0; fi
    done
    cp -aT "$target" "$target.epkit-old.new"
    # Earlier changes stay: the first one is .epkit-old.1, the last one .epkit-old.
    if [ -e "$target.epkit-old" ] || [ -L "$target.epkit-old" ]; then
        n=1
        while [ -e "$target.epkit-old.$n" ] || [ -L "$target.epkit-old.$n" ]; do n=$((n + 1)); done
        mv -T "$target.epkit-old" "$target.epkit-old.$n"
    fi
    mv -fT "$target.epkit-old.new" "$target.epkit-old"
    echo "note: $target was changed since epkit wrote it: that is kept as $target.epkit-old"
}

# Restores it. What was not saved was not changed; without the folder an undo is forced. epkit_restore KEY PATH
epkit_restore() {
    kept="$EPKIT_BEFORE/$1" target="$EPKIT_ROOT$2"
    if [ -d "$EPKIT_BEFORE" ] && [ ! -e "$kept.known" ]; then return 0; fi
    epkit_inside "${target%/*}"
    rm -rf "$target.epkit-new" "$target.epkit-old.new"
    epkit_keep_changes "$1" "$2"
    if [ -e "$kept.file" ] || [ -L "$kept.file" ]; then
        cp -a "$kept.file" "$target.epkit-new"
        if [ -d "$target" ] && [ ! -L "$target" ]; then rm -rf "$target"; fi
        mv -fT "$target.epkit-new" "$target"
    else
        rm -rf "$target"
    fi
    epkit_remove_folders "$kept.folders"
}

# Prints the missing folders from FOLDER upwards, the deepest first.
epkit_missing_folders() {
    folder=$1
    while [ -n "$folder" ] && [ ! -d "$folder" ]; do
        printf '%s\n' "$folder"
        folder=${folder%/*}
    done
}

# Removes the empty folders of a list.
epkit_remove_folders() {
    if [ ! -e "$1" ]; then return 0; fi
    while read -r folder; do rmdir "$folder" 2>/dev/null || true; done <"$1"
}

# Writes standard input to a file whose previous content epkit_keep has saved. epkit_write KEY MODE PATH
epkit_write() {
    target="$EPKIT_ROOT$3"
    epkit_inside "${target%/*}"
    mkdir -p "${target%/*}"
    cat >"$target.epkit-new"
    chmod "$2" "$target.epkit-new"
    sync "$target.epkit-new"
    if cmp -s "$target" "$target.epkit-new"; then :; else epkit_keep_changes "$1" "$3"; fi
    sha256sum <"$target.epkit-new" >>"$EPKIT_BEFORE/$1.written"
    sync "$EPKIT_BEFORE/$1.written"
    mv -fT "$target.epkit-new" "$target"
}

# Records that a step was completed, with these arguments of the recipe. epkit_stamp TEXT...
epkit_stamp() {
    mkdir -p "$EPKIT_STATE/stamp"
    printf '%s\n' "$@" >"$EPKIT_STATE/stamp/$EPKIT_STEP.new"
    sync
    mv -f "$EPKIT_STATE/stamp/$EPKIT_STEP.new" "$EPKIT_STATE/stamp/$EPKIT_STEP"
}

# The module may be in the initramfs, with the options at the time when that was made.
epkit_initramfs() {
    if [ -z "$EPKIT_ROOT" ] && command -v update-initramfs >/dev/null; then update-initramfs -u; fi
}

# --- sets of copies ---

# epkit_copies_begin TO: makes an empty folder next to TO, and saves what is in TO.
epkit_copies_begin() {
    to="$EPKIT_ROOT$1" new="$EPKIT_ROOT$1/.epkit-$EPKIT_STEP" list="$EPKIT_STATE/copies/$EPKIT_STEP"
    epkit_inside "$to"
    if [ ! -e "$EPKIT_BEFORE/known" ]; then
        mkdir -p "$EPKIT_BEFORE/kept"
        epkit_missing_folders "$to" >"$EPKIT_BEFORE/folders"
        : >"$EPKIT_BEFORE/known"
    fi
    mkdir -p "$to" "$EPKIT_STATE/copies"
    rm -rf "$new"
    mkdir "$new"
    : >"$list.new"
}

# epkit_copy FILE...: copies into the new folder; a missing file fails the step, and nothing of the set is copied.
epkit_copy() {
    if [ ! -e "$1" ] && [ ! -L "$1" ]; then
        echo "$1 is not there: nothing of the set is copied" >&2
        exit 1
    fi
    epkit_inside "${1%/*}"
    for file in "$@"; do
        cp -a "$file" "$new/${file##*/}"
        printf '%s\n' "${file##*/}" >>"$list.new"
    done
}

# epkit_keep_name NAME: saves what is in the folder under a name of the set, once, before the set first replaces it,
# unless an earlier set put it there. Names in bin/ are saved separately, because bin itself belongs to no set.
epkit_keep_name() {
    if grep -qsxF -e "$1" "$EPKIT_BEFORE/examined" "$list"; then return 0; fi
    if [ -e "$to/$1" ] || [ -L "$to/$1" ]; then
        case $1 in
        bin/*) kept="$EPKIT_BEFORE/kept-bin" ;;
        *) kept="$EPKIT_BEFORE/kept" ;;
        esac
        rm -rf "$EPKIT_BEFORE/kept.new"
        mkdir -p "$kept"
        cp -a "$to/$1" "$EPKIT_BEFORE/kept.new"
        # From a run that ended before it could record the name: nothing was replaced since.
        rm -rf "${kept:?}/${1##*/}"
        mv -fT "$EPKIT_BEFORE/kept.new" "$kept/${1##*/}"
    fi
    printf '%s\n' "$1" >>"$EPKIT_BEFORE/examined"
}

# The set is complete: it is moved in, name by name. An existing name is replaced, never copied into. Names of an
# earlier set that this one does not have are removed.
epkit_copies_end() {
    sort -u "$list.new" -o "$list.new"
    while read -r name; do epkit_keep_name "$name"; done <"$list.new"
    sync
    while read -r name; do
        if [ -d "$to/$name" ] && [ ! -L "$to/$name" ]; then rm -rf "${to:?}/$name"; fi
        mv -fT "$new/$name" "$to/$name"
    done <"$list.new"
    rmdir "$new"
    if [ -e "$list" ]; then
        comm -23 "$list" "$list.new" | while read -r name; do rm -rf "${to:?}/$name"; done
    fi
    mv -f "$list.new" "$list"
}

# epkit_copies_undo TO
epkit_copies_undo() {
    to="$EPKIT_ROOT$1"
    epkit_inside "$to"
    rm -rf "$to/.epkit-$EPKIT_STEP" "$to.epkit-$EPKIT_STEP"
    for list in "$EPKIT_STATE/copies/$EPKIT_STEP" "$EPKIT_STATE/copies/$EPKIT_STEP.new"; do
        if [ ! -e "$list" ]; then continue; fi
        while read -r name; do
            # If the set was not moved in yet, only the names that were processed before: nothing else has been
            # replaced.
            case $list in
            *.new) if ! grep -qsxF -e "$name" "$EPKIT_BEFORE/examined"; then continue; fi ;;
            esac
            rm -rf "${to:?}/$name"
        done <"$list"
    done
    rm -rf "$EPKIT_BEFORE/kept/.new" # of a version that kept it there
    if [ -d "$EPKIT_BEFORE/kept" ]; then
        find "$EPKIT_BEFORE/kept" -mindepth 1 -maxdepth 1 -exec cp -a -t "$to" {} +
    fi
    if [ -d "$EPKIT_BEFORE/kept-bin" ]; then
        find "$EPKIT_BEFORE/kept-bin" -mindepth 1 -maxdepth 1 -exec cp -a -t "$to/bin" {} +
    fi
    if [ -d "$to/bin" ] && [ ! -e "$EPKIT_BEFORE/bin" ]; then rmdir "$to/bin" 2>/dev/null || true; fi
    epkit_remove_folders "$EPKIT_BEFORE/folders"
    rm -rf "$EPKIT_STATE/copies/$EPKIT_STEP" "$EPKIT_STATE/copies/$EPKIT_STEP.new" \
        "$EPKIT_STATE/stamp/$EPKIT_STEP" "$EPKIT_STATE/fetch/$EPKIT_STEP"
}

# --- Python packages ---

epkit_pip() {
    python3 -m pip --disable-pip-version-check --no-cache-dir "$@"
}

# epkit_pip_apply TARGET PACKAGE...: installs what was downloaded, first completely next to TARGET. Existing versions of
# these packages are saved and removed first: two versions of a package must never be installed together.
epkit_pip_apply() {
    to="$EPKIT_ROOT$1" new="$EPKIT_ROOT$1.epkit-$EPKIT_STEP" list="$EPKIT_STATE/copies/$EPKIT_STEP"
    shift
    if [ ! -e "$EPKIT_BEFORE/known" ]; then
        mkdir -p "$EPKIT_BEFORE"
        epkit_missing_folders "$to" >"$EPKIT_BEFORE/folders"
        if [ -e "$to/bin" ]; then : >"$EPKIT_BEFORE/bin"; fi
        : >"$EPKIT_BEFORE/known"
    fi
    rm -rf "$new"
    mkdir -p "$to" "$EPKIT_STATE/copies"
    epkit_pip install -q --no-index --no-compile --find-links "$EPKIT_STATE/fetch/$EPKIT_STEP" --target "$new" "$@"
    epkit_pip_names "$new" >"$list.new"
    {
        cat "$list.new"
        for name in "$new"/*.dist-info; do
            name=${name##*/}
            find "$to" -mindepth 1 -maxdepth 1 -name "${name%%-*}-*.dist-info" -printf '%f\n'
        done
    } >"$list.gone"
    while read -r name; do epkit_keep_name "$name"; done <"$list.gone"
    sync
    for old in "$list" "$list.gone"; do
        if [ -e "$old" ]; then while read -r name; do rm -rf "${to:?}/$name"; done <"$old"; fi
    done
    mv -f "$list.new" "$list"
    cp -a "$new/." "$to"
    sync
    rm -rf "$new" "$list.gone"
}

# epkit_pip_names FOLDER: prints the names in it, and in its bin.
epkit_pip_names() (
    cd "$1" || exit
    { find . -mindepth 1 -maxdepth 1 ! -name bin && find . -mindepth 2 -maxdepth 2 -path './bin/*'; } | cut -c3- | sort
)

# --- sources ---

# epkit_git_fetch URL REF COMMIT: an abbreviated commit is searched only in the history of what was fetched.
epkit_git_fetch() {
    source="$EPKIT_STATE/fetch/$EPKIT_STEP"
    mkdir -p "$EPKIT_STATE/fetch"
    if ! git -C "$source" rev-parse --git-dir >/dev/null 2>&1; then
        rm -rf "$source"
        git init -q "$source"
    fi
    rm -f "$source/.git/index.lock" "$source/.git/shallow.lock"
    echo "fetching $2 from $1"
    git -C "$source" fetch -q --force "$1" "$2"
    fetched=$(git -C "$source" rev-parse 'FETCH_HEAD^{commit}')
    commit=$(git -C "$source" rev-parse --verify --quiet "$3^{commit}") || commit=none
    if ! git -C "$source" merge-base --is-ancestor "$commit" "$fetched" 2>/dev/null; then
        echo "commit $3 is not in what was fetched from $2: the recipe does not fit the repository" >&2
        return 1
    fi
    git -C "$source" checkout -q --force --detach "$commit"
    git -C "$source" submodule -q update --init --recursive --force
}

# apt's own downloader: it uses the machine's proxies, and verifies the checksum of the recipe.
epkit_download() {
    mkdir -p "$EPKIT_STATE/fetch"
    echo "downloading $1"
    /usr/lib/apt/apt-helper download-file "$1" "$2" "SHA256:$3"
}

epkit_checksum() {
    printf '%s  %s\n' "$2" "$1" | sha256sum --check --quiet
}
