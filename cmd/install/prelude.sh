# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh disable=SC2154 # arg_KEY and file_*, written before each step (step_run.c)
# prelude.sh - functions that the scripts of steps call; every script begins with them. epkit_fetch_TYPE and
# epkit_apply_TYPE fetch and apply a step of a type, epkit_undo removes what any step has added.
#
# EPKIT_ROOT, EPKIT_STATE, EPKIT_STEP and EPKIT_BEFORE are explained in types.h. A script may be killed at any instant
# and run again: what a step adds or replaces is recorded before anything changes; files are written next to their
# target, synced and renamed.

# epkit_left TEXT: something that uninstall leaves; it is reported to the user.
epkit_left() {
    if ! grep -qsxF -e "$1" "$EPKIT_BEFORE/left"; then printf '%s\n' "$1" >>"$EPKIT_BEFORE/left"; fi
}

# --- packages ---

# epkit_dpkg ARGUMENT...: runs dpkg, which does not wait for its lock, as apt does. The last line of the log names the
# process that is waited for, also when the deadline of the step ends the wait.
epkit_dpkg() {
    waited=0
    while code=0 && { dpkg "$@" 2>"$EPKIT_STATE/dpkg.error" || code=$?; }; do
        cat "$EPKIT_STATE/dpkg.error" >&2
        if ! grep -q 'locked by another process' "$EPKIT_STATE/dpkg.error" || [ "$waited" -ge 300 ]; then break; fi
        sleep 1
        waited=$((waited + 1))
    done
    rm -f "$EPKIT_STATE/dpkg.error"
    return "$code"
}

# apt keeps its lists and downloads in the folder of the recipe's state: an update that runs on the machine does not
# block the step, and uninstall removes them.
epkit_apt() {
    mkdir -p "$EPKIT_STATE/apt/lists/partial" "$EPKIT_STATE/apt/cache/archives/partial"
    if id _apt >/dev/null 2>&1; then # apt's own user makes the downloads
        chown _apt "$EPKIT_STATE/apt/lists/partial" "$EPKIT_STATE/apt/cache/archives/partial"
    fi
    apt-get -qy -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 -o Dpkg::Options::=--force-confold \
        -o Dir::State::lists="$EPKIT_STATE/apt/lists" -o Dir::Cache="$EPKIT_STATE/apt/cache" "$@"
}

epkit_apt_install() {
    epkit_apt install --no-install-recommends --allow-downgrades "$@"
}

# Prints "NAME VERSION" of installed and half-installed packages; NAME:ARCHITECTURE for foreign architectures.
epkit_packages() {
    dpkg-query -W -f='${db:Status-Abbrev} ${binary:Package} ${Version}\n' |
        sed -n "s/:$(dpkg --print-architecture) / /; s/^.[^cn][^ ]* *\([^ ]*\) \([^ ]*\)\$/\1 \2/p" | sort
}

# Prints the names of packages that are removed but not purged: only their configuration files are left.
epkit_packages_residue() {
    dpkg-query -W -f='${db:Status-Abbrev} ${binary:Package} \n' |
        sed -n "s/:$(dpkg --print-architecture) / /; s/^.c[^ ]* *\([^ ]*\) \$/\1/p" | sort
}

# Records which packages there are before a run of the step, unless an earlier run has not ended.
epkit_packages_begin() {
    if [ -e "$EPKIT_BEFORE/packages" ]; then return 0; fi
    if [ ! -e "$EPKIT_BEFORE/residue" ]; then epkit_packages_residue >"$EPKIT_BEFORE/residue"; fi
    epkit_packages >"$EPKIT_BEFORE/packages.new"
    sync
    mv "$EPKIT_BEFORE/packages.new" "$EPKIT_BEFORE/packages"
}

# Records what the run has added (names), and replaced or removed (names with the version before).
epkit_packages_end() {
    if [ ! -e "$EPKIT_BEFORE/packages" ]; then return 0; fi
    touch "$EPKIT_BEFORE/added" "$EPKIT_BEFORE/replaced"
    epkit_packages >"$EPKIT_BEFORE/now"
    comm -23 "$EPKIT_BEFORE/packages" "$EPKIT_BEFORE/now" | sort -u -k1,1 "$EPKIT_BEFORE/replaced" - |
        sort -o "$EPKIT_BEFORE/replaced.new"
    cut -d' ' -f1 "$EPKIT_BEFORE/packages" >"$EPKIT_BEFORE/names"
    cut -d' ' -f1 "$EPKIT_BEFORE/now" | comm -13 "$EPKIT_BEFORE/names" - | sort -u "$EPKIT_BEFORE/added" - \
        -o "$EPKIT_BEFORE/added.new"
    sync
    mv "$EPKIT_BEFORE/replaced.new" "$EPKIT_BEFORE/replaced"
    mv "$EPKIT_BEFORE/added.new" "$EPKIT_BEFORE/added"
    rm "$EPKIT_BEFORE/packages"
}

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
        if ! { epkit_apt update && epkit_apt install --reinstall --no-install-recommends $broken; }; then
            # shellcheck disable=SC2086
            epkit_dpkg --remove --force-remove-reinstreq --force-depends $broken
        fi
    fi
    epkit_apt install --fix-broken
    epkit_configure
    # Between a configuration file and its record dpkg may have been killed: it would take the file for one of the site.
    # A package that the site has removed meanwhile keeps such a record and stays removed.
    unknown=$(dpkg-query -W -f='${db:Status-Status} ${binary:Package}=${Version}\n${Conffiles}\n' |
        awk '/^[^ ]/ { name = $1 == "installed" ? $2 : "" } / newconffile$/ && name { print name }' | uniq)
    # shellcheck disable=SC2086
    if [ -n "$unknown" ]; then epkit_apt install --reinstall --no-install-recommends $unknown || true; fi
}

# Prints the packages of the step as arguments of apt-get.
epkit_package_words() {
    printf '%s\n' "$arg_packages" | sed 's/=\*$//'
}

epkit_fetch_apt() {
    epkit_configure || true # apt does nothing before this; what is left of it, apply repairs
    epkit_apt update
    # shellcheck disable=SC2046 # a list of words
    epkit_apt_install --download-only $(epkit_package_words)
}

# epkit_packages_apply WORD...: names with versions, or files.
epkit_packages_apply() {
    epkit_packages_begin
    epkit_packages_repair
    epkit_apt_install "$@"
    epkit_packages_end
}

epkit_apply_apt() {
    # shellcheck disable=SC2046
    epkit_packages_apply $(epkit_package_words)
}

epkit_fetch_deb() {
    epkit_download "$arg_url" "$EPKIT_STATE/fetch/$EPKIT_STEP.deb" "$arg_sha256"
}

epkit_apply_deb() {
    epkit_checksum "$EPKIT_STATE/fetch/$EPKIT_STEP.deb" "$arg_sha256"
    epkit_packages_apply "$EPKIT_STATE/fetch/$EPKIT_STEP.deb"
}

# Removes what the step added, in one transaction. If that would remove anything else (a package that was installed
# later depends on it), nothing is done. Packages that had been removed and not purged before the step keep their
# configuration files.
epkit_packages_undo() {
    if [ -n "$EPKIT_ROOT" ]; then
        echo 'packages can only be removed by the programs of the machine itself' >&2
        return 1
    fi
    epkit_packages_end # of a run that was killed
    epkit_packages_repair
    installed=$(epkit_packages | cut -d' ' -f1 | comm -12 - "$EPKIT_BEFORE/added")
    if [ -n "$installed" ]; then
        # shellcheck disable=SC2086 # a list of words
        others=$(epkit_apt remove -s $installed | sed -n 's/^Remv \([^ ]*\).*/\1/p' | sort | comm -23 - "$EPKIT_BEFORE/added")
        if [ -n "$others" ]; then
            echo "not undone: $(echo "$others" | xargs) was installed later and needs what this step installed" >&2
            return 1
        fi
        # shellcheck disable=SC2086
        epkit_apt remove $installed
    fi
    rest=$(epkit_packages_residue | comm -12 - "$EPKIT_BEFORE/added" | comm -23 - "$EPKIT_BEFORE/residue")
    # shellcheck disable=SC2086
    if [ -n "$rest" ]; then epkit_apt purge $rest; fi
    epkit_packages >"$EPKIT_BEFORE/now"
    while read -r package old; do
        version=$(awk -v name="$package" '$1 == name { print $2 }' "$EPKIT_BEFORE/now")
        case $version in
        "$old") ;;
        '') epkit_left "package $package $old, which a step removed, is not installed again" ;;
        *) epkit_left "package $package stays at $version; it was $old before" ;;
        esac
    done <"$EPKIT_BEFORE/replaced"
}

# --- files ---

# Who may rename what is in a folder can put a link there after any look at it. So the folders and links on the way to
# FOLDER, from START down, are those of root or of the caller, and not everybody may rename what is in them: a folder
# where all may write is sticky, and what comes next is there already. epkit_owned START FOLDER
epkit_owned() (
    at=${1%/}/ rest=${2#"$1"} caller=$(id -u) said='%u owns it, its mode is %m'
    while other=$(find "$at" -maxdepth 0 \( ! -uid 0 ! -uid "$caller" -o ! -type l -perm -0002 ! -perm -1000 \) \
        -printf "$said") && [ -z "$other" ]; do
        if [ -L "$at" ]; then
            case $(readlink -- "$at") in
            /*) epkit_owned / "$(readlink -- "$at")" ;;
            *) epkit_owned "${at%/*}" "${at%/*}/$(readlink -- "$at")" ;;
            esac || exit
        fi
        while [ "$rest" != "${rest#/}" ]; do rest=${rest#/}; done
        if [ -z "$rest" ]; then exit 0; fi
        last=$at at=${at%/}/${rest%%/*} rest=${rest#"${rest%%/*}"}
        if [ -e "$at" ] || [ -L "$at" ]; then continue; fi
        other=$(find -H "$last" -maxdepth 0 -perm -0002 -printf "$said, which lets others make what is not there yet")
        if [ -z "$other" ]; then exit 0; fi
        at=$last
        break
    done
    echo "${at%/}/: user $other: another user could lead this step elsewhere by a link, so nothing is done there;" \
        "chown root and chmod o-w the folder, or let its owner install" >&2
    exit 1
)

# In a root folder a link leads to where it would lead on that machine, or nothing is done: the step must not change
# this machine's disk. epkit_inside FOLDER
epkit_inside() {
    if [ -z "$EPKIT_ROOT" ]; then return 0; fi
    case $(realpath -m -- "$1")/ in
    "$(realpath -m -- "$EPKIT_ROOT")"/*) ;;
    *)
        echo "$1 leads out of $EPKIT_ROOT by a link: nothing is done there" >&2
        exit 1
        ;;
    esac
    epkit_owned "$EPKIT_ROOT" "$1" || exit
}

# Records the missing folders from FOLDER upwards, which uninstall removes.
epkit_missing_folders() {
    folder=$1
    while [ -n "$folder" ] && [ ! -d "$folder" ]; do
        printf '%s\n' "$folder"
        folder=${folder%/*}
    done >>"$EPKIT_BEFORE/folders"
}

# Reads paths, one a line. Copies what is there before the step changes it for the first time, and records the paths.
epkit_keep() {
    touch "$EPKIT_BEFORE/paths"
    grep -vxF -f "$EPKIT_BEFORE/paths" >"$EPKIT_BEFORE/paths.new" || [ $? -eq 1 ]
    while read -r path; do
        target="$EPKIT_ROOT$path" old="$EPKIT_BEFORE/old$path"
        epkit_inside "${target%/*}"
        epkit_inside "${old%/*}"
        rm -rf "$old"
        mkdir -p "${old%/*}"
        if [ -e "$target" ] || [ -L "$target" ]; then cp -a "$target" "$old"; fi
        epkit_missing_folders "${target%/*}"
    done <"$EPKIT_BEFORE/paths.new"
    cat "$EPKIT_BEFORE/paths" "$EPKIT_BEFORE/paths.new" >"$EPKIT_BEFORE/paths.all"
    sync
    mv -f "$EPKIT_BEFORE/paths.all" "$EPKIT_BEFORE/paths"
    sync "$EPKIT_BEFORE"
}

# Nothing is read from pipes and devices. epkit_same FILE FILE
epkit_same() {
    [ -f "$1" ] && [ -f "$2" ] && cmp -s "$1" "$2"
}

# A file that was changed since the step wrote it is not lost when it is written again or removed: it is copied next to
# it. epkit_set_aside PATH
epkit_set_aside() {
    target="$EPKIT_ROOT$1"
    if [ ! -e "$EPKIT_BEFORE/written" ] || [ ! -f "$target" ] || [ -L "$target" ]; then return 0; fi
    if grep -qxF -e "$(sha256sum <"$target")" "$EPKIT_BEFORE/written"; then return 0; fi
    if epkit_same "$target" "$EPKIT_BEFORE/old$1"; then return 0; fi
    if [ -d "$target.epkit-old" ] && [ ! -L "$target.epkit-old" ]; then
        rm -rf "$target.epkit-new"
        echo "$target was changed since epkit wrote it, and cannot be saved as $target.epkit-old, which is a folder:" \
            "move that folder away and try again" >&2
        exit 1
    fi
    cp -aT --remove-destination "$target" "$target.epkit-old"
    epkit_left "$target.epkit-old: the file as it was changed since epkit wrote it"
}

# epkit_write MODE PATH TEXT: a file never replaces a folder.
epkit_write() {
    target="$EPKIT_ROOT$2"
    if [ -d "$target" ] && [ ! -L "$target" ]; then
        echo "$target is a folder, but a file is expected: nothing is changed" >&2
        exit 1
    fi
    printf '%s\n' "$2" | epkit_keep
    mkdir -p "${target%/*}"
    text="$EPKIT_BEFORE/text"
    rm -f "$text"
    (umask 077 && printf %s "$3" >"$text")
    chmod "$1" "$text"
    if epkit_same "$target" "$text"; then :; else epkit_set_aside "$2"; fi
    sha256sum <"$text" >>"$EPKIT_BEFORE/written"
    sync "$EPKIT_BEFORE/written"
    # Who owns the folder may put a link or a pipe there at any time, and a shell's noclobber opens pipes and devices: cp
    # makes a new file, or fails, and sets its mode through the descriptor.
    rm -rf "$target.epkit-new"
    cp -T --remove-destination --preserve=mode "$text" "$target.epkit-new"
    sync "$target.epkit-new"
    mv -fT "$target.epkit-new" "$target"
}

# Removes what the step added; what it replaced is put back.
epkit_files_undo() {
    touch "$EPKIT_BEFORE/paths" "$EPKIT_BEFORE/folders"
    while read -r path; do
        target="$EPKIT_ROOT$path" old="$EPKIT_BEFORE/old$path"
        epkit_inside "${target%/*}"
        epkit_inside "${old%/*}"
        epkit_set_aside "$path"
        rm -rf "$target.epkit-new"
        if [ -e "$old" ] || [ -L "$old" ]; then
            mkdir -p "${target%/*}"
            cp -aT --remove-destination "$old" "$target.epkit-new"
            if [ -d "$target" ] && [ ! -L "$target" ]; then rm -rf "$target"; fi
            mv -fT "$target.epkit-new" "$target"
        else
            rm -rf "$target"
        fi
    done <"$EPKIT_BEFORE/paths"
    # The deepest ones first; a folder in which something else was put stays.
    sort -ru "$EPKIT_BEFORE/folders" | while read -r folder; do rmdir "$folder" 2>/dev/null || true; done
}

epkit_apply_file() {
    epkit_write "$file_mode" "$file_path" "$file_content"
}

# The module may be in the initramfs, with the options at the time when that was made.
epkit_initramfs() {
    if [ -z "$EPKIT_ROOT" ] && command -v update-initramfs >/dev/null; then update-initramfs -u; fi
}

epkit_apply_modprobe() {
    epkit_apply_file
    : >"$EPKIT_BEFORE/initramfs"
    epkit_initramfs
}

# A module that cannot be loaded now (another version is in use) may be loaded after a reboot: the check decides.
epkit_apply_module() {
    epkit_apply_file
    if [ "$arg_dkms" = true ]; then
        if ! find "$EPKIT_ROOT/lib/modules/$kernel/updates/dkms" -name '*.ko*' 2>/dev/null | grep -q .; then
            echo "nothing is built by DKMS for kernel $kernel yet"
        fi
        dkms autoinstall -k "$kernel"
        depmod -a "$kernel"
    fi
    epkit_left "module $arg_module: it stays loaded until the next reboot"
    if modprobe "$arg_module"; then return 0; fi
    if [ "$EPKIT_MAY_REBOOT" = 0 ]; then return 1; fi
    echo 'it may be loaded after a reboot'
}

# --- sets of files ---

# epkit_names FOLDER: prints the names in it, and in its bin, which belongs to no set.
epkit_names() (
    cd "$1" || exit
    { find . -mindepth 1 -maxdepth 1 ! -name bin && find . -mindepth 2 -maxdepth 2 -path './bin/*'; } | cut -c3- | sort
)

# epkit_set_begin TO: records the folder TO and, next to it, the one in which the set is made ($new).
epkit_set_begin() {
    new="$EPKIT_ROOT$1.epkit-$EPKIT_STEP"
    printf '%s\n' "$1.epkit-$EPKIT_STEP" | epkit_keep
    epkit_inside "$EPKIT_ROOT$1"
    epkit_missing_folders "$EPKIT_ROOT$1"
    mkdir -p "$EPKIT_ROOT$1"
    rm -rf "$new"
    mkdir "$new" # with -p it might be a link
}

# epkit_set_end TO: the set is complete; it is moved into TO, name by name. An existing name is replaced, never copied
# into. Names of an earlier set that this one does not have are removed.
epkit_set_end() {
    names="$EPKIT_STATE/copies/$EPKIT_STEP"
    mkdir -p "$EPKIT_STATE/copies"
    epkit_names "$new" >"$names.new"
    sed "s,^,$1/," "$names.new" | epkit_keep
    while read -r name; do
        target="$EPKIT_ROOT$1/$name"
        mkdir -p "${target%/*}"
        if [ -d "$target" ] && [ ! -L "$target" ]; then rm -rf "$target"; fi
        mv -fT "$new/$name" "$target"
    done <"$names.new"
    rm -rf "$new"
    if [ -e "$names" ]; then
        comm -23 "$names" "$names.new" | while read -r name; do
            target="$EPKIT_ROOT$1/${name:?}"
            epkit_inside "${target%/*}"
            rm -rf "$target"
        done
    fi
    mv -f "$names.new" "$names"
    epkit_stamp
}

# A missing file fails the step, and nothing of the set is copied.
epkit_apply_copyset() {
    epkit_set_begin "$arg_to"
    printf '%s\n' "$arg_files" | while read -r pattern; do
        for file in "$EPKIT_ROOT"$pattern; do
            if [ ! -e "$file" ] && [ ! -L "$file" ]; then
                echo "$file is not there: nothing of the set is copied" >&2
                rm -rf "$new"
                exit 1
            fi
            epkit_inside "${file%/*}"
            cp -a "$file" "$new/${file##*/}"
        done
    done
    sync
    epkit_set_end "$arg_to"
}

epkit_pip() {
    python3 -m pip --disable-pip-version-check --no-cache-dir "$@"
}

epkit_pip_words() {
    printf '%s\n' "$arg_packages" | sed 's/=\*$//; s/=/==/'
}

# pip verifies the checksum that the index gives for each file.
epkit_fetch_pip() {
    mkdir -p "$EPKIT_STATE/fetch/$EPKIT_STEP"
    echo 'downloading Python packages'
    # shellcheck disable=SC2046 # a list of words
    epkit_pip download -q -d "$EPKIT_STATE/fetch/$EPKIT_STEP" ${arg_index:+--index-url "$arg_index"} $(epkit_pip_words)
}

# Existing versions of these packages are removed: two versions of a package must never be installed together.
epkit_apply_pip() {
    epkit_set_begin "$arg_target"
    # shellcheck disable=SC2046 # a list of words
    epkit_pip install -q --no-index --no-compile --find-links "$EPKIT_STATE/fetch/$EPKIT_STEP" --target "$new" \
        $(epkit_pip_words)
    for info in "$new"/*.dist-info; do
        info=${info##*/}
        find "$EPKIT_ROOT$arg_target" -mindepth 1 -maxdepth 1 -name "${info%%-*}-*.dist-info" -printf "$arg_target/%f\n"
    done >"$EPKIT_STATE/versions"
    epkit_keep <"$EPKIT_STATE/versions"
    while read -r path; do rm -rf "$EPKIT_ROOT${path:?}"; done <"$EPKIT_STATE/versions"
    epkit_set_end "$arg_target"
}

# --- sources ---

# An abbreviated commit is searched only in the history of what was fetched.
epkit_fetch_git() {
    source="$EPKIT_STATE/fetch/$EPKIT_STEP"
    mkdir -p "$EPKIT_STATE/fetch"
    if ! git -C "$source" rev-parse --git-dir >/dev/null 2>&1; then
        rm -rf "$source"
        git init -q "$source"
    fi
    rm -f "$source/.git/index.lock" "$source/.git/shallow.lock"
    echo "fetching $arg_ref from $arg_git"
    git -C "$source" fetch -q --force "$arg_git" "$arg_ref"
    fetched=$(git -C "$source" rev-parse 'FETCH_HEAD^{commit}')
    commit=$(git -C "$source" rev-parse --verify --quiet "$arg_commit^{commit}") || commit=none
    if ! git -C "$source" merge-base --is-ancestor "$commit" "$fetched" 2>/dev/null; then
        echo "commit $arg_commit is not in what was fetched from $arg_ref: the recipe does not fit the repository" >&2
        return 1
    fi
    git -C "$source" checkout -q --force --detach "$commit"
    git -C "$source" submodule -q update --init --recursive --force
}

# apt's own downloader: it uses the machine's proxies, and verifies the checksum of the recipe.
# epkit_download URL FILE SHA256
epkit_download() {
    mkdir -p "$EPKIT_STATE/fetch"
    echo "downloading $1"
    /usr/lib/apt/apt-helper download-file "$1" "$2" "SHA256:$3"
}

epkit_checksum() {
    printf '%s  %s\n' "$2" "$1" | sha256sum --check --quiet
}

epkit_fetch_build() {
    if [ -z "$arg_url" ]; then
        epkit_fetch_git
    else
        epkit_download "$arg_url" "$EPKIT_STATE/fetch/$EPKIT_STEP.tar" "$arg_sha256"
    fi
}

# Existing files belong to somebody else, or to an interrupted build: they are kept the first time.
epkit_apply_build() {
    source="$EPKIT_STATE/fetch/$EPKIT_STEP" build="$EPKIT_STATE/build/$EPKIT_STEP"
    rm -rf "$build"
    mkdir -p "$build"
    if [ -n "$arg_url" ]; then
        epkit_checksum "$source.tar" "$arg_sha256"
        # Root's tar would give others the rights that the archive names.
        tar -xf "$source.tar" -C "$build" --strip-components=1 --no-same-owner --no-same-permissions
    else
        cp -a "$source/." "$build"
    fi
    printf '%s\n' "$arg_owns" | epkit_keep
    printf '%s\n' "$arg_owns" | while read -r path; do rm -rf "$EPKIT_ROOT$path"; done
    cd "$build" || return 1
    epkit_script
    cd /
    printf '%s\n' "$arg_provides" | while read -r path; do
        if [ ! -e "$EPKIT_ROOT$path" ]; then
            echo "the build did not make $path" >&2
            exit 1
        fi
    done
    epkit_stamp
    rm -rf "$build"
}

epkit_apply_command() {
    epkit_script
}

# Records that the step was completed, with these arguments of the recipe.
epkit_stamp() {
    mkdir -p "$EPKIT_STATE/stamp"
    printf '%s\n%s\n' "$EPKIT_DIGEST" "${kernel-}" >"$EPKIT_STATE/stamp/$EPKIT_STEP.new"
    sync
    mv -f "$EPKIT_STATE/stamp/$EPKIT_STEP.new" "$EPKIT_STATE/stamp/$EPKIT_STEP"
}

# --- uninstall ---

epkit_undo() {
    rm -f "$EPKIT_STATE/stamp/$EPKIT_STEP"
    if [ -e "$EPKIT_BEFORE/packages" ] || [ -e "$EPKIT_BEFORE/added" ]; then epkit_packages_undo; fi
    if [ -e "$EPKIT_BEFORE/folders" ] || [ -e "$EPKIT_BEFORE/paths" ]; then epkit_files_undo; fi
    if [ -e "$EPKIT_BEFORE/initramfs" ]; then epkit_initramfs; fi
}
