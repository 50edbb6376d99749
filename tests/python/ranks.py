# SPDX-License-Identifier: Apache-2.0
"""Ranks for tests: forked children of one process that has imported torch once, which costs more than most tests do."""
import faulthandler
import functools
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist

HANG = int(os.environ.get("EPKIT_TEST_HANG", "600"))  # seconds; ends what hangs, and judges nothing
CUDA = os.environ.get("EPKIT_TEST_DEVICE") == "cuda"
NODES = int(os.environ.get("EPKIT_TEST_NODES", "1"))  # into which groups are divided, if their number of ranks allows it


class Failed(Exception):
    """A rank did not end as it should have; what it said stands above."""


def _child(function, rank, size, store, args, group):
    code = 1
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests with it ignored
    faulthandler.dump_traceback_later(max(HANG - 5, 1))  # where it hangs, before join() ends it
    try:
        torch.set_num_threads(1)
        if CUDA:  # ranks share a device where there are more of them
            torch.cuda.set_device(rank % torch.cuda.device_count())
            torch.set_default_device("cuda")
        if group:
            dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=size)
        if NODES > 1 and size % NODES == 0:
            os.environ["EPKIT_RANKS_PER_NODE"] = str(size // NODES)
        function(rank, size, *args)
        code = 0
    except BaseException:  # noqa: BLE001 - a child of a fork must not run the parent's handlers
        print(f"# rank {rank} of {size}:", *traceback.format_exc().splitlines(), sep="\n# ", flush=True)
    sys.stdout.flush()
    os._exit(code)


def start(size, function, *args, group=True):
    """Forks the ranks: function(rank, size, *args). Returns their process numbers and the folder that they share."""
    folder = tempfile.mkdtemp(prefix="epkit-python-")
    sys.stdout.flush()
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            _child(function, rank, size, os.path.join(folder, "store"), args, group)
        pids.append(pid)
    return pids, folder


def join(pids, expect=None):
    """Waits for the ranks. `expect`: exit codes, negative for signals; None: all 0. Raises Failed."""
    codes, end = {}, time.monotonic() + HANG
    while len(codes) < len(pids):
        for rank, pid in enumerate(pids):
            if rank not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            hung = [rank for rank in range(len(pids)) if rank not in codes]
            for rank in hung:
                os.kill(pids[rank], signal.SIGKILL)
                os.waitpid(pids[rank], 0)
            raise Failed(f"ranks {hung} hang")
        time.sleep(0.01)
    expect = expect or [0] * len(pids)
    if [codes[rank] for rank in range(len(pids))] != list(expect):
        raise Failed(f"exit codes {[codes[rank] for rank in range(len(pids))]}, not {list(expect)}")


def run(size, function, *args, expect=None, group=True):
    """Runs function(rank, size, *args) on forked ranks, with a gloo group of all of them or without."""
    pids, folder = start(size, function, *args, group=group)
    try:
        join(pids, expect)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def on_ranks(size, **options):
    """The test that runs a function on ranks; options are those of run()."""
    def decorate(function):
        @functools.wraps(function)
        def test():
            run(size, function, **options)
        return test
    return decorate


def raises(kind, words, function, *args, **kwargs):
    """The call raises `kind`, and its text has all the words."""
    try:
        function(*args, **kwargs)
    except kind as error:
        missing = [word for word in words.split() if word not in str(error)]
        assert not missing, f"{error} does not say {missing}"
        return error
    raise AssertionError(f"{function} raised no {kind.__name__}")


def need_devices(count):
    """A test in which each rank has a GPU of its own."""
    if CUDA and torch.cuda.device_count() < count:
        from run import Skip

        raise Skip(f"{torch.cuda.device_count()} GPUs, and it needs {count}")


def need_operators():
    """A test of epkit.ops: torch before 2.4 cannot register what it has."""
    if not hasattr(torch.library, "register_fake"):
        from run import Skip

        raise Skip(f"torch {torch.__version__} has no torch.library.register_fake")
