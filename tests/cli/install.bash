# SPDX-License-Identifier: Apache-2.0
# What the tests of 'epkit install' share: a machine without systemd, and Python packages.

# In front of a command: it runs as on a machine without systemd, which the one that runs the tests may have.
# shellcheck disable=SC2034
WITHOUT_SYSTEMD=()
# shellcheck disable=SC2016
[ ! -d /run/systemd/system ] || WITHOUT_SYSTEMD=(unshare -m sh -c 'mount -t tmpfs none /run/systemd && exec "$@"' -)

# A wheel with one module: wheel NAME VERSION FOLDER
wheel() {
    python3 - "$@" <<'END'
import sys, zipfile
name, version, folder = sys.argv[1:]
info = f"{name}-{version}.dist-info"
with zipfile.ZipFile(f"{folder}/{name}-{version}-py3-none-any.whl", "w") as wheel:
    wheel.writestr(f"{name}.py", f"version = '{version}'\n")
    wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
END
}

# wheels INDEX NAME VERSION...: a package index of one package, as a folder
wheels() {
    local index=$1 name=$2 version
    shift 2
    mkdir -p "$index/$name"
    for version in "$@"; do wheel "$name" "$version" "$index/$name"; done
    (cd "$index/$name" && for file in *.whl; do echo "<a href=\"$file\">$file</a>"; done >index.html)
}
