#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Becomes a command with what daemons, CI runners, cron and containers leave behind: inherited.py STATE... -- COMMAND...

STATE: ignore=SIGNAL, block=SIGNAL|all, close=N, nofile=N, stack=KB, fsize=BYTES, alarm=S, umask=OCTAL, nonblock
"""
import fcntl
import os
import resource
import signal
import sys


def signals(name):
    return signal.valid_signals() if name == "all" else {getattr(signal, name)}


def apply(state):
    key, _, value = state.partition("=")
    limits = {"nofile": resource.RLIMIT_NOFILE, "stack": resource.RLIMIT_STACK, "fsize": resource.RLIMIT_FSIZE}
    if key == "ignore":
        for number in signals(value):
            signal.signal(number, signal.SIG_IGN)
    elif key == "block":
        signal.pthread_sigmask(signal.SIG_BLOCK, signals(value))
    elif key == "close":
        os.close(int(value))
    elif key in limits:
        limit = int(value) * (1024 if key == "stack" else 1)
        resource.setrlimit(limits[key], (limit, limit))
    elif key == "alarm":
        signal.setitimer(signal.ITIMER_REAL, float(value))
    elif key == "umask":
        os.umask(int(value, 8))
    elif key == "nonblock":
        fcntl.fcntl(1, fcntl.F_SETFL, os.O_NONBLOCK)
    else:
        sys.exit(f"unknown state {state}")


def main():
    at = sys.argv.index("--")
    # Set by Python, and by shells for background programs.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    for state in sys.argv[1:at]:
        apply(state)
    os.execv(sys.argv[at + 1], sys.argv[at + 1:])


main()
