#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A file system whose server does not answer, as one of NFS that has gone away.

usage: hang.py FOLDER COMMAND...   runs COMMAND while FOLDER is one, and ends with its exit code; needs root
       hang.py --check             can there be one here?
"""
import ctypes
import os
import signal
import subprocess
import sys
import tempfile

MNT_DETACH = 2
libc = ctypes.CDLL(None, use_errno=True)


def mount(folder):
    """Mounts it; nobody reads the requests of the kernel."""
    server = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={server},rootmode=40755,user_id=0,group_id=0".encode()
    if libc.mount(b"hang", folder.encode(), b"fuse", 0, options) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def main():
    if sys.argv[1] == "--check":
        with tempfile.TemporaryDirectory() as folder:
            mount(folder)
            libc.umount2(folder.encode(), MNT_DETACH)
        return 0
    mount(sys.argv[1])
    try:
        with subprocess.Popen(sys.argv[2:]) as process:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, lambda taken, _: process.send_signal(taken))
            code = process.wait()
    finally:
        libc.umount2(sys.argv[1].encode(), MNT_DETACH)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OSError as error:
        sys.exit(f"no file system of FUSE here: {error}")
