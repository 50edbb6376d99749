#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_dist.sh FOLDER - check that the tree in FOLDER runs where only the C library is installed.
#
# Prints the version of glibc that it needs ("2.34"). If an ELF file needs anything else, it is printed on stderr, one
# line each, and the exit code is 1.
set -euo pipefail
export LC_ALL=C
root=$(realpath -- "$1")
bad=0
glibc=2.0

complain() {
    printf '%s: %s\n' "${file#"$root"/}" "$1" >&2
    bad=1
}

is_inside() {
    [[ "$(realpath -m -- "$1")/" == "$root"/* ]]
}

# Folders in the run path of $file. A RUNPATH overrides an RPATH (ld.so(8)), but an RPATH is suspicious anyway.
folders=()
read_run_path() {
    local entry entries
    folders=()
    mapfile -t -d : entries < <(sed -n 's/.*(R\(UN\)\?PATH) .*\[\(.*\)\]$/\2:/p' <<<"$facts" | tr -d '\n')
    for entry in "${entries[@]}"; do
        case "$entry" in
        "\$ORIGIN" | "\$ORIGIN"/*) entry="$(dirname "$file")${entry#"\$ORIGIN"}" ;;
        *)
            complain "its run path names '$entry', which is not below \$ORIGIN"
            continue
            ;;
        esac
        if is_inside "$entry"; then
            folders+=("$entry")
        else
            complain "its run path leads out of the tree, to $entry"
        fi
    done
}

# Whether the loader finds $1 in a folder of the run path.
is_found() {
    local folder
    for folder in "${folders[@]}"; do
        if [ -e "$folder/$1" ] && is_inside "$folder/$1"; then return; fi
    done
    return 1
}

check_needs() {
    local name
    while read -r name; do
        case "$name" in
        libc.so.6 | libm.so.6 | libdl.so.2 | libpthread.so.0 | librt.so.1 | ld-linux*.so.*) ;;
        *) is_found "$name" || complain "it needs $name, which its run path does not find in the tree" ;;
        esac
    done < <(sed -n 's/.*(NEEDED) .*\[\(.*\)\]$/\1/p' <<<"$facts")
}

check_loader() {
    local loader
    loader=$(sed -n 's/.*program interpreter: \(.*\)\]$/\1/p' <<<"$facts")
    case "$loader" in
    "" | /lib64/ld-linux-x86-64.so.2 | /lib/ld-linux-aarch64.so.1) ;;
    *) complain "its loader is $loader, which is not where other systems have it" ;;
    esac
}

# GLIBC_ABI_DT_RELR came with 2.36; GLIBC_PRIVATE matches only one build of glibc.
check_versions() {
    local version
    while read -r version; do
        [ "$version" != ABI_DT_RELR ] || version=2.36
        if [[ ! "$version" =~ ^[0-9.]+$ ]]; then
            complain "it needs GLIBC_$version, which says no version of glibc"
        elif [ "$(printf '%s\n' "$glibc" "$version" | sort -V | tail -n 1)" != "$glibc" ]; then
            glibc=$version
        fi
    done < <(sed -n '/^Version needs/,/^$/s/.*Name: GLIBC_\([^ ]*\) .*/\1/p' <<<"$facts" | sort -u)
}

n=0
while IFS= read -r -d '' file; do
    [ "$(head -c 4 -- "$file" | od -An -tx1)" = ' 7f 45 4c 46' ] || continue
    facts=$(readelf --wide --program-headers --dynamic --version-info -- "$file")
    read_run_path
    check_needs
    check_loader
    check_versions
    n=$((n + 1))
done < <(find "$root" -type f -print0)
if [ "$n" -eq 0 ]; then
    printf '%s: contains no program and no library\n' "$root" >&2
    exit 1
fi
[ "$bad" -eq 0 ] || exit 1
printf '%s\n' "$glibc"
