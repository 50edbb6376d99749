# SPDX-License-Identifier: Apache-2.0
"""Misuse: an exception that names it; no crash, no hang; and the right call works afterwards."""
import contextlib
import functools
import gc
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref

import deep_ep
import epkit
import torch
import torch.distributed as dist
from ranks import CUDA, on_ranks, raises, run

H = 128
NOT_ON_CUDA = {"test_a_fork_while_another_thread_frees": "torch refuses CUDA in forked children by itself",
               "test_two_threads_in_one_communicator": "there a barrier is queued, and nobody waits in it",
               "test_ctrl_c_again_and_again": "there a barrier is queued, and nobody waits in it",
               "test_ctrl_c_ends_a_wait": "there a barrier is queued, and nobody waits in it",
               "test_creation_that_fails": "its flag is one of the CPU's"}


def complete(comm, call, *args):
    """The call, and on GPUs what it has queued."""
    result = call(*args)
    comm.synchronize()
    return result


def setting(size):
    topk_idx = torch.arange(12).view(6, 2) % (2 * size)
    return topk_idx, torch.ones(6, H, dtype=torch.bfloat16), torch.rand(6, 2)


@on_ranks(2)
def test_wrong_tensors(rank, size):
    comm = epkit.Communicator()
    topk_idx, x, weights = setting(size)
    bad = epkit.ArgumentError
    raises(bad, "plan topk_idx float32 int32 int64", comm.plan, topk_idx.float(), 2 * size)
    raises(bad, "plan topk_idx shape", comm.plan, topk_idx.view(-1), 2 * size)
    raises(bad, "plan topk_idx contiguous", comm.plan, topk_idx.t().contiguous().t(), 2 * size)
    raises(TypeError, "plan topk_idx list", comm._native.plan, [1], None, None, 2 * size, 0, 1, 0, 0, None)
    raises(bad, "EP_E_ROUTING", comm.plan, topk_idx + 100, 2 * size)
    strict = epkit.Communicator(check_distinct=True)
    raises(bad, "EP_E_ROUTING token 0 expert 0 twice", strict.plan, torch.zeros(2, 2, dtype=torch.int64), 2 * size)
    strict.free()
    raises(bad, "Communicator.plan: num_experts", comm.plan, topk_idx, 2 * size + 1)
    raises(bad, "Communicator.plan: alignment", comm.plan, topk_idx, 2 * size, alignment=-1)
    raises(bad, "max_recv", comm.plan, topk_idx, 2 * size, max_recv_tokens=-5)
    raises(TypeError, "num_experts str integer", comm.plan, topk_idx, "eight")
    plan = comm.plan(topk_idx, 2 * size)
    raises(bad, "dispatch x float32 bfloat16", plan.dispatch, x.float())
    for wrong, kind in ((None, "NoneType"), ([1], "list"), ((None, None), "NoneType")):
        raises(TypeError, f"dispatch x {kind} tensor", plan.dispatch, wrong)
    raises(bad, "dispatch x shape 5 6", plan.dispatch, x[:5])
    raises(bad, "dispatch x shape", plan.dispatch, x.view(6, H // 2, 2))
    raises(bad, "dispatch x contiguous", plan.dispatch, x.t().contiguous().t())
    gone = x.clone()
    gone.untyped_storage().resize_(0)
    raises(bad, "dispatch x memory", plan.dispatch, gone)
    raises(bad, "dispatch topk_weights float64", plan.dispatch, x, weights.double())
    raises(bad, "dispatch topk_weights shape", plan.dispatch, x, weights[:, :1].contiguous())
    raises(bad, "dispatch out shape", plan.dispatch, x, out=torch.empty(0, H, dtype=torch.bfloat16))
    raises((bad, TypeError), "dispatch x", plan.dispatch, x.to("meta"))
    raises((bad, TypeError), "dispatch x", plan.dispatch, x.to_sparse())
    raises(bad, "scales", plan.dispatch, (x.to(torch.float8_e4m3fn), torch.ones(6, 1, dtype=torch.float16)))
    raises(bad, "scales shape", plan.dispatch, (x.to(torch.float8_e4m3fn), torch.ones(5, 1)))
    raises(bad, "EP_E_ALIGN", plan.dispatch, torch.ones(6, 3, dtype=torch.bfloat16))
    rows = plan.dispatch(x, weights)
    raises(bad, "combine x shape", plan.combine, rows.x[1:])
    raises(bad, "combine x shape", plan.combine, torch.cat((rows.x, rows.x)))
    raises(bad, "combine x float16", plan.combine, rows.x.half())
    raises(bad, "combine bias[0]", plan.combine, rows.x, bias=x[:2])
    raises(bad, "combine 3", plan.combine, rows.x, bias=(x, x, x))
    raises(bad, "out bias", plan.combine, rows.x, bias=x, out=x)
    raises(bad, "combine bias[1] gradients detach()", plan.combine, rows.x, bias=(x, x.clone().requires_grad_()))
    with torch.no_grad():
        plan.combine(rows.x, bias=x.clone().requires_grad_())
    raises(bad, "combine topk_weights", plan.combine, rows.x, rows.topk_weights[:1])
    out, _ = plan.combine(rows.x, rows.topk_weights)  # nothing of it has harmed the group
    assert torch.equal(out.float(), x.float() * comm.layout(topk_idx, 2 * size)[2].sum(1, keepdim=True))


@on_ranks(2)
def test_wrong_low_latency_calls(rank, size):
    comm = epkit.Communicator()
    topk_idx, x, weights = setting(size)
    bad = epkit.ArgumentError
    raises(bad, "hidden 100", comm.low_latency, 8, 100, 2 * size, 2)
    raises(bad, "max_tokens", comm.low_latency, -1, H, 2 * size, 2)
    calls = comm.low_latency(8, H, 2 * size, 2)
    raises(bad, "x 9 8", calls.dispatch, torch.ones(9, H, dtype=torch.bfloat16), torch.zeros(9, 2, dtype=torch.int64))
    raises(bad, "max_tokens 20", calls.dispatch, x, topk_idx, max_tokens=20)
    raises(bad, "topk_idx shape", calls.dispatch, x, topk_idx[:3])
    raises(bad, "topk_idx 4 columns 1 to 2", calls.dispatch, x, topk_idx.repeat(1, 2))
    raises(bad, "topk_idx 0 columns", calls.dispatch, x, topk_idx[:, :0].contiguous())
    raises(bad, "x float32", calls.dispatch, x.float(), topk_idx)
    raises(bad, "recv_stats int64", calls.dispatch, x, topk_idx, recv_stats=torch.zeros(2, dtype=torch.int64))
    raises(bad, "512", calls.dispatch, x, topk_idx, fp8=True, ue8m0=True)
    rows = calls.dispatch(x, topk_idx, hook=True)
    rows.finish()
    raises(bad, "received already", rows.finish)
    raises(bad, "topk_weights shape", calls.combine, rows.x, topk_idx, weights[:3], call=rows.call)
    raises(bad, "x shape", calls.combine, rows.x[:, :1], topk_idx, weights, call=rows.call)
    raises(bad, "topk is 1 had 2", calls.combine, rows.x, topk_idx[:, :1].contiguous(), weights[:, :1].contiguous(),
           call=rows.call)
    raises(bad, "topk_idx 4 columns 1 to 2", calls.combine, rows.x, topk_idx.repeat(1, 2), weights.repeat(1, 2), call=rows.call)
    raises(bad, "EP_E_STATE", calls.combine, rows.x, topk_idx, weights, call=rows.call + 7)
    out, _ = calls.combine(rows.x, topk_idx, torch.ones_like(weights), call=rows.call)
    assert torch.equal(out, x * 2)
    raises(bad, "mask", calls.set_mask, 0)
    calls.free()
    raises(bad, "low_latency_dispatch freed", calls.dispatch, x, topk_idx)
    raises(bad, "freed", calls.combine_buffer)


@on_ranks(2)
def test_freed_and_foreign_handles(rank, size):
    """Freed objects, and handles of another group."""
    group = dist.new_group(list(range(size)))
    one, two = (deep_ep.Buffer(group, explicitly_destroy=True) for _ in range(2))
    topk_idx, x, weights = setting(size)
    layout = one.get_dispatch_layout(topk_idx, 2 * size)
    args = {"num_tokens_per_rank": layout[0], "is_token_in_rank": layout[3], "num_tokens_per_expert": layout[2],
            "topk_idx": topk_idx, "topk_weights": weights}
    recv, _, _, _, handle, _ = one.dispatch(x, **args)
    other = deep_ep.Buffer(dist.new_group(list(range(size))))
    raises(epkit.ArgumentError, "combine handle another group", other.combine, recv, handle)
    raises(epkit.ArgumentError, "dispatch handle another group", other.dispatch, x, handle)
    assert torch.equal(two.combine(recv, handle)[0], one.combine(recv, handle)[0])  # of the same group
    raises(TypeError, "combine handle tuple", one.combine, recv, (1, 2, 3))
    raises(TypeError, "combine handle tuple", one.combine, recv, tuple(part.clone() for part in handle))
    raises(TypeError, "previous_event str", functools.partial(one.dispatch, x, previous_event="x", **args))
    raises(TypeError, "config tuple Config", functools.partial(one.dispatch, x, config=(20, 6), **args))
    raises(TypeError, "dispatch x NoneType", functools.partial(one.dispatch, None, **args))
    raises(TypeError, "dispatch x tuple", functools.partial(one.dispatch, (x,), **args))
    raises(AssertionError, "topk_weights topk_idx", functools.partial(one.dispatch, x, **{**args, "topk_idx": None}))
    ll_handle = one.low_latency_dispatch(x, topk_idx, 8, 2 * size)[2]
    raises(epkit.ArgumentError, "low_latency_combine another", two.low_latency_combine, recv, topk_idx, weights, ll_handle)
    raises(AssertionError, "enable_shrink", one.low_latency_clean_mask_buffer)
    shrinks = deep_ep.Buffer(group, enable_shrink=True)
    raises(epkit.ArgumentError, "mask_status int64", shrinks.low_latency_query_mask_buffer, torch.zeros(size, dtype=torch.int64))
    raises(epkit.ArgumentError, "mask_status shape", shrinks.low_latency_query_mask_buffer, torch.zeros(size + 1, dtype=torch.int32))
    raises(TypeError, "low_latency_combine tuple", one.low_latency_combine, recv, topk_idx, weights, tuple(handle))
    raises(epkit.ArgumentError, "global_scale float64 float32", one.low_latency_dispatch, x, topk_idx, 8, 2 * size, use_nvfp4=True,
           x_global_scale=torch.ones(1, dtype=torch.float64))
    if not one._comm.is_cuda:
        raises(NotImplementedError, "MemPool empty", one._comm.mem_pool)
    raises(epkit.ArgumentError, "sms -1", one._comm.set_num_sms, -1)
    raises(TypeError, "sms float integer", one._comm.set_num_sms, 0.0)
    raises(AssertionError, "even", deep_ep.Buffer.set_num_sms, 7)
    raises(TypeError, "str", deep_ep.Buffer.set_num_sms, "8")
    handle.plan.free()
    handle.plan.free()
    raises(epkit.ArgumentError, "combine plan freed", one.combine, recv, handle)
    hook = one.low_latency_dispatch(x, topk_idx, 8, 2 * size, use_fp8=False, return_recv_hook=True)[4]
    one.destroy()
    one.destroy()
    raises(epkit.ArgumentError, "plan communicator freed", one.dispatch, x, **args)
    raises(epkit.ArgumentError, "freed", hook)
    raises(epkit.ArgumentError, "freed", one.low_latency_dispatch, x, topk_idx, 8, 2 * size)
    raises(epkit.ArgumentError, "freed", one.low_latency_combine, recv, topk_idx, weights, ll_handle)
    raises(epkit.ArgumentError, "freed", one.get_next_low_latency_combine_buffer, ll_handle)
    del hook  # which kept what the handle is of
    gc.collect()
    raises(epkit.ArgumentError, "freed", one.low_latency_combine, recv, topk_idx, weights, ll_handle)
    raises(epkit.ArgumentError, "freed", one.get_next_low_latency_combine_buffer, ll_handle)
    for call in (one._comm.barrier, one._comm.check, one._comm.abort, one._comm.info, one._comm.failed_ranks, one._comm.synchronize):
        raises(epkit.ArgumentError, "communicator freed", call)
    handle = two.dispatch(x, **args)[4]
    two._comm.free()
    two._comm.free()
    raises(epkit.ArgumentError, "freed", two.combine, recv, handle)
    raises(AssertionError, "explicitly_destroy", deep_ep.Buffer(group).destroy)


@on_ranks(2)
def test_two_threads_in_one_communicator(rank, size):
    """Two threads in one communicator: the second one is told; waits let other threads run."""
    comm = epkit.Communicator()
    ran, told = [], []
    if rank == 0:
        waiting = threading.Thread(target=comm.barrier)
        waiting.start()
        while not told:
            try:
                comm.allgather_bytes(b"")
                time.sleep(0.01)
            except epkit.ArgumentError as error:
                told.append(str(error))
            ran.append(1)
        assert "another thread" in told[0]
        dist.barrier()
        waiting.join()
    else:
        dist.barrier()
        comm.barrier()


def interrupted(rank, size, call):
    """Ctrl-C in a wait: KeyboardInterrupt, a group that is aborted, and a peer that learns it at once."""
    topk_idx, x, _ = setting(size)
    buffer, late = deep_ep.Buffer(dist.group.WORLD), deep_ep.Buffer(dist.group.WORLD)
    comm = buffer._comm
    calls = {"plan": lambda: comm.plan(topk_idx, 2 * size), "barrier": comm.barrier, "gather": lambda: comm.allgather_bytes(b"")}
    store = dist.distributed_c10d._get_default_store()

    def while_interrupted(wait):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        wait()

    for number in range(3):  # within calls that end the group stays usable
        if rank == 0:
            with contextlib.suppress(KeyboardInterrupt):
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
                calls[call]()
                time.sleep(10)  # where the call has ended before
        else:
            time.sleep(0.2)
            calls[call]()
        store.set(f"{call} {number} {rank}", "")
        store.wait([f"{call} {number} {1 - rank}"])
        comm.barrier()
    if rank == 0:
        begin = time.monotonic()
        raises(KeyboardInterrupt, "", while_interrupted, calls[call])
        assert time.monotonic() - begin < 50  # the deadline is 100 s
        raises(epkit.GroupError, "rank 0 Communicator.abort", comm.check)
        # A handler of the program's own is not taken for the end of the wait.
        handled = []
        signal.signal(signal.SIGINT, lambda *_: handled.append(1))
        threading.Timer(0.1, lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(1), store.set("handled", ""))).start()
        late._comm.barrier()
        assert handled
        dist.barrier()
    else:
        while True:
            try:
                comm.check()
            except epkit.GroupError as error:
                assert "rank 0" in str(error)
                break
            time.sleep(0.01)
        store.wait(["handled"])
        late._comm.barrier()
        dist.barrier()


@on_ranks(2)
def test_ctrl_c_again_and_again(rank, size):
    """It ends the wait as soon as once does: the later ones put nothing off."""
    comm = epkit.Communicator(timeout=100)

    def interrupt():
        for _ in range(300):
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)

    if rank == 0:
        begin = time.monotonic()
        try:
            threading.Thread(target=interrupt, daemon=True).start()
            comm.barrier()
        except KeyboardInterrupt:
            os._exit(0 if time.monotonic() - begin < 40 else 3)
        os._exit(4)
    while True:
        try:
            comm.check()
        except epkit.GroupError:
            break
        time.sleep(0.01)


def test_ctrl_c_ends_a_wait():
    for call in ("plan", "barrier", "gather"):
        run(2, interrupted, call)


@on_ranks(2)
def test_ctrl_c_while_a_communicator_is_made(rank, size):
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        def interrupted_communicator():
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            epkit.Communicator()

        raises(KeyboardInterrupt, "", interrupted_communicator)
        store.set("interrupted", "1")
    store.wait(["interrupted"])


@on_ranks(1)
def test_a_call_while_another_thread_frees(rank, size):
    """Code that runs while an object is freed lets another thread come, whose call waits until that is over."""
    comm = epkit.Communicator()
    ll = comm.low_latency(4, 128, 4, 2)
    idx, weights = torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
    idx[:, 1] = 1
    x = torch.ones(4, 128, dtype=torch.bfloat16)
    said = []

    def other():
        for call in (lambda: comm.allgather_bytes(b"1"), lambda: ll.mask(), lambda: comm.plan(idx, 4).free()):
            try:
                said.append(call())
            except epkit.Error as error:
                said.append(str(error))

    def meanwhile():
        thread.start()
        thread.join(0.5)  # what waits for this thread is still there afterwards; what is refused has ended

    thread = threading.Thread(target=other)
    weakref.finalize(x, meanwhile)
    ll.dispatch(x, idx, hook=True)
    del x
    ll.free()
    thread.join()
    assert said[0] == b"1" and "has been freed" in said[1] and said[2] is None, said
    comm.free()


@on_ranks(1)
def test_a_fork_while_another_thread_frees(rank, size):
    """A child forked while another thread frees has no such thread: its calls are refused, and wait for nobody."""
    comm = epkit.Communicator(timeout=600)
    ll = comm.low_latency(4, 128, 4, 2)
    idx, x = torch.arange(8).view(4, 2) % 4, torch.ones(4, 128, dtype=torch.bfloat16)
    codes = []

    def child():
        code = 1
        signal.alarm(60)  # ends one that waits
        try:
            raises(epkit.Error, "EP_E_STATE", comm.barrier)
            comm.free()
            code = 0
        finally:
            os._exit(code)

    def meanwhile():
        thread.start()
        thread.join()

    def fork():
        pid = os.fork()
        codes.append(child() if pid == 0 else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    thread = threading.Thread(target=fork)
    weakref.finalize(x, meanwhile)
    ll.dispatch(x, idx, hook=True)
    del x
    ll.free()
    assert codes == [0], codes


@on_ranks(2)
def test_creation_that_fails(rank, size):
    """Ranks that disagree, and an all-gather that fails: everybody is told, with the reason."""
    error = raises(epkit.GroupError, "EP_E_MISMATCH flags", epkit.Communicator, check_values=rank == 0)
    assert error.status == 401 and error.name == "EP_E_MISMATCH" and error.hint
    raises(ValueError, "backend rocm", epkit.Communicator, backend="rocm")
    if epkit.cuda_version is None:
        raises(epkit.UnsupportedError, "built without CUDA EPKIT_CUDA=ON", epkit.Communicator, device="cuda:0")

    class Broken:
        def Get_rank(self):
            return 0

        def Get_size(self):
            return 2

        def allgather(self, data):
            raise KeyError("no such store")

    error = raises(epkit.Error, "EP_E_SYSTEM no such store", epkit.Communicator, Broken())
    assert isinstance(error.__cause__, KeyError)
    comm = epkit.Communicator()
    comm.barrier()


@on_ranks(2, expect=(0, 5))
def test_a_rank_ends_before_its_communicator_exists(rank, size):
    dist.barrier()  # gloo itself has connected everywhere
    if rank == 1:
        os._exit(5)
    error = raises(epkit.PeerError, "EP_E_PEER_DEAD", epkit.Communicator)
    assert error.status == 302


def stays_away(rank, size, marker):
    if rank == 0:
        raises(epkit.PeerError, "EP_E_TIMEOUT", epkit.Communicator, timeout=1)
        open(marker, "w", encoding="ascii").close()
    while not os.path.exists(marker):
        time.sleep(0.01)


def test_a_rank_makes_no_communicator():
    with tempfile.TemporaryDirectory() as folder:
        run(2, stays_away, os.path.join(folder, "marker"))


@on_ranks(1, group=False)
def test_no_process_group(rank, size):
    raises(RuntimeError, "init_process_group", epkit.Communicator)


def dies(rank, size, how):
    comm = epkit.Communicator(timeout=60)
    topk_idx, x, _ = setting(size)
    plan = comm.plan(topk_idx, 2 * size)
    rows = complete(comm, plan.dispatch, x).x
    dist.barrier()  # a rank that is still in its dispatch would find the end of rank 1 there
    if rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "end":  # what the end of an interpreter does, also behind an exception
            epkit.communicator._free_all()
        os._exit(3)
    error = raises(epkit.PeerError, "rank 1 check log", complete, comm, plan.combine, rows)
    assert "alive" not in str(error), error
    raises(epkit.PeerError, "rank 1", complete, comm, plan.dispatch, x)
    plan.free()
    comm.free()


def test_a_rank_is_killed():
    run(2, dies, "kill", expect=(0, -signal.SIGKILL))


@on_ranks(2, expect=(0, -signal.SIGKILL))
def test_a_rank_is_killed_in_decode(rank, size):
    """Between the halves of a low-latency call, of which the other rank waits for the second."""
    buffer = deep_ep.Buffer(dist.group.WORLD)
    topk_idx, x, weights = setting(size)
    recv, _, handle, _, hook = buffer.low_latency_dispatch(x, topk_idx, 8, 2 * size, use_fp8=False, return_recv_hook=True)
    complete(buffer._comm, hook)
    dist.barrier()  # as in dies()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def combine():  # between nodes the first half waits for the weights of the other nodes
        buffer.low_latency_combine(recv, topk_idx, weights, handle, return_recv_hook=True)[2]()

    raises(epkit.PeerError, "rank 1", complete, buffer._comm, combine)
    raises(epkit.PeerError, "rank 1", complete, buffer._comm, buffer.low_latency_dispatch, x, topk_idx, 8, 2 * size)


def test_a_rank_exits():
    run(3, dies, "exit", expect=(0, 3, 0))


def test_the_program_of_a_rank_ends():
    run(3, dies, "end", expect=(0, 3, 0))


def late(rank, size):
    dist.barrier()  # the other one comes to the creation in time, however slow the machine is
    comm = epkit.Communicator(timeout=4)
    if rank == 0:
        raises(epkit.PeerError, "EP_E_TIMEOUT rank 1", complete, comm, comm.barrier)
    dist.barrier()


def test_a_late_rank_is_named():
    run(2, late)


@on_ranks(2)
def test_inputs_are_refused_on_one_rank(rank, size):
    """Inputs that are refused on one rank: no other rank has gone on without it, so the right call works there, too."""
    os.environ.pop("EPKIT_TIMEOUT_MS", None)
    buffer, elastic = deep_ep.Buffer(dist.group.WORLD), deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=8)
    comm, experts = epkit.Communicator(), 2 * size
    topk_idx, x, weights = setting(size)
    fp8 = x.to(torch.float8_e4m3fn)
    _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, experts)
    masked = functools.partial(buffer.dispatch, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)
    calls = [functools.partial(masked, topk_idx=topk_idx), functools.partial(masked, topk_idx=topk_idx, num_worst_tokens=64)]
    for sync, expand in ((True, False), (True, True), (False, True)):
        calls.append(functools.partial(elastic.dispatch, topk_idx=topk_idx, num_experts=experts, do_cpu_sync=sync, do_expand=expand))
    wrong = [(x[:5], weights, "x shape 5 6"), (x.t().contiguous().t(), weights, "x contiguous"), (x.to("meta"), weights, "x device"),
             (None, weights, "x NoneType"), (x, weights.double(), "topk_weights float64"), (x, weights[:, :1], "topk_weights shape"),
             ((fp8, torch.ones(5, 1)), weights, "scales shape"), ((fp8, torch.ones(6, 1).double()), weights, "scales float64")]
    for call in calls:
        for bad, its_weights, words in wrong:
            if rank == size - 1:
                raises((epkit.ArgumentError, TypeError), "dispatch " + words, call, bad, topk_weights=its_weights)
        assert torch.equal(call(x, topk_weights=weights)[0][:1].float(), torch.ones(1, H))
    if rank == size - 1:
        raises(epkit.ArgumentError, "x shape 5 6", masked, x[:5])
    handle = masked(x)[4]
    assert len(buffer.dispatch(x, handle)[0]) == len(handle[3])
    layer = functools.partial(epkit.moe, comm, topk_idx=topk_idx, num_experts=experts, experts=lambda rows, counts: rows)
    for bad, its_weights, words in wrong[:6]:
        if rank == size - 1:
            raises((epkit.ArgumentError, TypeError), words, layer, x=bad, topk_weights=its_weights)
    assert layer(x=x, topk_weights=weights).shape == x.shape


def refused_alone(rank, size, how):
    """Routing that is refused on one rank has sent nothing: it may be mended. A rank that goes instead is named at once."""
    os.environ.pop("EPKIT_TIMEOUT_MS", None)  # 100 s, and what is raised is no timeout
    os.environ["EPKIT_EARLY_OUTPUTS"] = "0"  # GPUs that send early have begun: case_gpu
    buffer = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True)
    topk_idx, x, weights = setting(size)
    layout = buffer.get_dispatch_layout(topk_idx, 2 * size)
    dist.barrier()  # no rank leaves before all have their layout
    args = {"num_tokens_per_rank": layout[0], "is_token_in_rank": layout[3], "num_tokens_per_expert": layout[2],
            "topk_weights": weights}
    if rank == size - 1:
        words = "EP_E_ROUTING expert dispatch() deadline repeat free Buffer"
        raises(epkit.ArgumentError, words, functools.partial(buffer.dispatch, x, topk_idx=topk_idx + 100, **args))
        if not CUDA:  # there a kernel finds it, which fails the group
            raises(epkit.ArgumentError, words, buffer.get_dispatch_layout, topk_idx + 100, 2 * size)
        if how == "destroy":
            buffer.destroy()
        elif how == "abort":
            buffer._comm.abort()
        elif how == "end":
            os._exit(0)
        if how != "mend":
            return dist.barrier()
    elif how != "mend":
        error = raises((epkit.PeerError, epkit.GroupError), f"rank {size - 1}", buffer.dispatch, x, topk_idx=topk_idx, **args)
        assert error.name in {"destroy": ("EP_E_PEER_LEFT",), "abort": ("EP_E_ABORTED",),
                              "end": ("EP_E_PEER_DEAD", "EP_E_PEER_LEFT")}[how], error
        return None if how == "end" else dist.barrier()
    recv, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=topk_idx, **args)
    assert torch.equal(buffer.combine(recv, handle)[0].float(), x.float() * layout[3].sum(1, keepdim=True))
    return None


def test_routing_is_refused_on_one_rank():
    for how in ("mend", "destroy", "abort", "end"):
        run(3, refused_alone, how)


@on_ranks(2)
def test_abort_wakes_a_wait(rank, size):
    comm = epkit.Communicator()
    if rank == 0:
        threading.Timer(0.2, comm.abort).start()
        raises(epkit.GroupError, "EP_E_ABORTED", complete, comm, comm.barrier)
    dist.barrier()


@on_ranks(2)
def test_a_forked_child(rank, size):
    buffer = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True)
    comm, (topk_idx, x, _) = buffer._comm, setting(size)
    plan = comm.plan(topk_idx, 2 * size)
    hook = buffer.low_latency_dispatch(x, topk_idx, 8, 2 * size, return_recv_hook=True)[4]
    told = (RuntimeError, "") if CUDA else (epkit.Error, "EP_E_STATE")  # torch refuses CUDA there by itself
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            raises(*told, comm.barrier)
            raises(*told, plan.dispatch, x)
            raises(*told, hook)
            raises(*told, buffer.low_latency_dispatch, x, topk_idx, 8, 2 * size)
            raises(*told, buffer.low_latency_dispatch, x, topk_idx, 16, 2 * size)
            plan.free()
            buffer.destroy()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    hook()
    comm.barrier()


@on_ranks(2)
def test_a_signal_in_a_wait(rank, size):
    """A signal in a wait: its handler runs when the wait ends, at the deadline at the latest."""
    comm, ran = epkit.Communicator(timeout=3), []
    if rank == 1:
        dist.barrier()
        return
    signal.signal(signal.SIGUSR1, lambda number, frame: ran.append(number))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.2, lambda: (os.kill(os.getpid(), signal.SIGUSR1), os.kill(os.getpid(), signal.SIGINT))).start()
    try:
        try:
            complete(comm, comm.barrier)
            raise AssertionError("no signal and no deadline")
        except epkit.PeerError:
            pass
        time.sleep(0.01)
        raise AssertionError("no KeyboardInterrupt")
    except KeyboardInterrupt:
        time.sleep(0.01)  # handlers run in the order of their numbers, and the first one raised
        assert ran == [signal.SIGUSR1]
    dist.barrier()
    raises(epkit.PeerError, "rank 1", comm.check)
    comm.free()


class Nosy:
    """A tensor of somebody else's whose attributes do what they should not while a call reads them."""

    def __init__(self, tensor, act):
        self._tensor, self._act, self.said = tensor, act, []
        self.dtype, self.shape, self.device = tensor.dtype, tuple(tensor.shape), tensor.device

    def data_ptr(self):
        for act in self._act:
            try:
                act()
                self.said.append("")
            except epkit.ArgumentError as error:
                self.said.append(str(error))
        return self._tensor.data_ptr()

    def stride(self):
        gc.collect()
        return self._tensor.stride()


@on_ranks(2)
def test_calls_from_within_a_call(rank, size):
    comm = epkit.Communicator()
    topk_idx, x, _ = setting(size)
    plan, calls = comm.plan(topk_idx, 2 * size), comm.low_latency(8, H, 2 * size, 2)
    out = torch.empty(plan.out_rows, H, dtype=torch.bfloat16)
    late = [comm.plan(topk_idx, 2 * size)]
    late[0].me = late[0]
    nosy = Nosy(x, (plan.free, comm.free, lambda: plan.dispatch(x), calls.free, late.clear))
    plan._native.dispatch(nosy, None, None, out, False, False, None, False, None, 0, 0, None)
    assert all("another thread" in text for text in nosy.said[:4]) and not plan.closed and not comm.closed
    assert torch.equal(out, plan.dispatch(x).x)
    raises(TypeError, "x", plan._native.dispatch, Nosy(x, (lambda: 1 // 0,)), None, None, out, False, False, None, False,
           None, 0, 0, None)
    assert torch.equal(plan.dispatch(x).x, out)  # the failed call has given the communicator back
    plan.free()
    raises(epkit.ArgumentError, "dispatch plan freed", plan._native.dispatch, nosy, None, None, out, False, False, None, False, None, 0, 0,
           None)
    comm.barrier()


SUBINTERPRETER = """
import importlib.util, sys
import epkit
try:
    import _interpreters as sub
except ImportError:
    import _xxsubinterpreters as sub
code = f'''
import importlib.util
spec = importlib.util.spec_from_file_location("epkit._C", {epkit._native._C.__file__!r})
try:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    said = "loaded"
except ImportError as error:
    said = str(error)
if "ubinterpreter" not in said:
    raise SystemError(said)
'''
found = sub.run_string(sub.create("legacy") if sys.version_info >= (3, 13) else sub.create(isolated=False), code)
assert not found, found
again = importlib.util.module_from_spec(epkit._native._C.__spec__)
epkit._native._C.__spec__.loader.exec_module(again)
assert again.Error is epkit.Error and again.Comm is epkit._native._C.Comm
"""


def test_subinterpreters_are_refused():
    run(1, lambda rank, size: exec(SUBINTERPRETER, {}), group=False)


ENDINGS = [
    "",
    "b = calls.combine_buffer(); del calls, plan, comm",
    "comm.me = comm; plan.me = [plan, comm]; del comm, plan, calls",
    "h = calls.dispatch(torch.ones(1, 128, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64), hook=True)",
    "sys.modules['zz'] = plan; torch.zz = (calls, comm)",
    "threading.Thread(target=lambda p: time.sleep(0.2), args=(plan,)).start(); del plan",
]
MORE_ENDINGS = ["del plan; del comm", "del comm; del plan", "comm.free()", "raise SystemExit(0)", "sys.exit(0)"]

PROGRAM = """
import gc, os, sys, threading, time, torch
import torch.distributed as dist
import epkit
for ending in {endings!r}:
    pid = os.fork()
    if pid:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status: print(ending, "ended with", status); os._exit(1)
        continue
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_default_device({device!r})
    comm = epkit.Communicator()
    plan = comm.plan(torch.zeros(1, 1, dtype=torch.int64), 2)
    calls = comm.low_latency(4, 128, 2, 1)
    kept = comm.empty(4, 4)
    exec(ending)
    break
"""


def test_interpreter_ends_in_any_order():
    """Each ending in an interpreter of its own, whose real shutdown follows: exit code 0 and nothing said."""
    program = PROGRAM.format(endings=ENDINGS + (MORE_ENDINGS if os.environ.get("EPKIT_TEST_LONG") else []),
                             device="cuda" if CUDA else "cpu")
    # Out of C++, which neither libepkit nor the extension has: a thread of torch's gloo that wants the GIL of an interpreter
    # that ends (once in some hundred endings).
    for _ in range(3):
        done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", program], capture_output=True, text=True, timeout=600)
        if "terminate called without an active exception" not in done.stderr:
            break
    said = [line for line in done.stdout.splitlines() if line and not line.startswith("[Gloo]")]  # torch 2.8 says what it connects
    assert done.returncode == 0 and not said, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line and "Warning" not in line and "warn" not in line]
    assert not lines, done.stderr


WAITING = """
import os, sys, threading, time, torch
import torch.distributed as dist
import epkit
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + folder + "/store", rank=rank, world_size=2)
comm = epkit.Communicator(timeout=600)
# Or a thread of torch's gloo may want the GIL of an interpreter that ends, which ends the thread, which ends the process:
# "terminate called without an active exception" out of ProcessGroupGloo::runLoop().
dist.destroy_process_group()
if rank:
    while not os.path.exists(folder + "/ended"):
        time.sleep(0.01)
    os._exit(0)
threading.Thread(target=lambda: (comm.barrier(), comm.synchronize()), daemon=True).start()
while True:  # until that thread waits in the library
    try:
        comm.set_num_sms(0)
        time.sleep(0.001)
    except epkit.ArgumentError:
        break
"""


def test_interpreter_ends_while_a_thread_waits():
    """A daemon thread in a wait that nobody will end: the interpreter ends all the same, with nothing said."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [subprocess.Popen([sys.executable, "-X", "faulthandler", "-W", "ignore", "-c", WAITING, str(rank), folder],
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(2)]
        try:
            said = ranks[0].communicate(timeout=300)[0]
            assert ranks[0].returncode == 0, (ranks[0].returncode, said)
        finally:
            open(os.path.join(folder, "ended"), "w", encoding="ascii").close()
            ranks[0].kill()
            assert ranks[1].wait(timeout=300) == 0


def any_tensor(draw, bare):
    """A tensor that hardly any argument takes: types, shapes, strides, and what has no memory to read.

    bare: also one whose storage is gone, which torch's own operations read all the same.
    """
    dtype = draw.choice((torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool,
                         torch.complex64, torch.float8_e4m3fn, torch.float16))
    dims = draw.choice((0, 1, 2, 2, 2, 3, 5))
    shape = [draw.choice((0, 1, 2, 6, 8, 128 if dims < 4 else 3)) for _ in range(dims)]
    tensor = torch.zeros(shape).to(dtype)
    kind = draw.randrange(12)
    if kind == 0 and len(shape) > 1:
        tensor = tensor.transpose(0, 1)
    elif kind == 1:
        tensor = torch.zeros([1] * len(shape)).to(dtype).expand(shape)
    elif kind == 2:
        tensor = tensor.to("meta")
    elif kind == 3 and dtype is not torch.float8_e4m3fn:
        tensor = tensor.to_sparse()
    elif kind == 4 and bare and tensor.numel() != 1:  # torch reads that one, to make a number of it
        tensor.untyped_storage().resize_(0)  # as sharded parameters are between two uses
    elif kind == 5 and dtype.is_floating_point:
        tensor.requires_grad_()
    elif kind == 6:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            tensor = torch.zeros(shape).to(dtype)
    elif kind == 7:
        tensor = torch.zeros(tensor.numel() + 1).to(dtype)[1:].view(shape)
    elif kind == 8:
        tensor = torch.nn.Parameter(tensor, requires_grad=False)
    return tensor


def said(value):
    """What a tensor is; torch itself ends the process where it prints one without memory."""
    if isinstance(value, (tuple, list)) and not hasattr(value, "plan"):
        return [said(one) for one in value]
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__ + (
        f" {value}" if isinstance(value, (int, float, str)) else "")


def any_argument(draw, things, bare):
    kind = draw.randrange(8)
    if kind < 4:
        return any_tensor(draw, bare)
    if kind == 4:
        return draw.choice((-1, 0, 1, 2, 7, 128, 2**31, -2**31 - 1, 2**63, -2**70, 10**30, 1.5, float("nan"), True))
    if kind == 5:
        return draw.choice((None, "x", b"x", [], (), {}, object(), [1], (1, 2), torch.bfloat16, torch.Tensor))
    if kind == 6:
        return (any_tensor(draw, bare), any_tensor(draw, bare))
    return draw.choice(things)


def arguments_of_any_kind(rank, size, calls):
    """Whatever a call is given: it works or raises, and the same call with right arguments works afterwards."""
    import random

    os.environ["EPKIT_TIMEOUT_MS"] = "60000"
    draw = random.Random(7)
    comm, v1 = epkit.Communicator(), deep_ep.Buffer(dist.group.WORLD, 1 << 12, 1 << 12, enable_shrink=True)
    v2 = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=8)
    topk_idx, x, weights = setting(2)
    plan, calls_ = comm.plan(topk_idx, 4), comm.low_latency(8, H, 4, 2)
    wide = comm.plan(topk_idx, 4, expanded=True, max_recv_tokens=64, max_tokens=8)
    layout = v1.get_dispatch_layout(topk_idx, 4)
    args = {"num_tokens_per_rank": layout[0], "is_token_in_rank": layout[3], "num_tokens_per_expert": layout[2]}
    recv, _, _, _, handle, _ = v1.dispatch(x, topk_idx=topk_idx, topk_weights=weights, **args)
    ep_handle = v2.dispatch(x, topk_idx, weights, num_experts=4)[3]
    ll_handle = v1.low_latency_dispatch(x, topk_idx, 8, 4)[2]
    things = [handle, tuple(handle), ep_handle, ll_handle, tuple(ll_handle), plan, comm, dist.group.WORLD, topk_idx, x, weights,
              deep_ep.EventOverlap(), deep_ep.Config(), v1, v2]
    good = {"x": x, "topk_idx": topk_idx, "topk_weights": weights, "num_experts": 4, "handle": handle}
    targets = [comm.plan, comm.low_latency, comm.layout, comm.allgather_bytes, comm.barrier, plan.dispatch, plan.combine, plan.update,
               plan.metadata, wide.dispatch, wide.combine, wide.update, wide.metadata, calls_.dispatch, calls_.combine,
               calls_.combine_buffer, calls_.mask, calls_.set_mask, v1.dispatch, v1.combine, v1.get_dispatch_layout,
               v1.low_latency_dispatch, v1.low_latency_combine, v1.get_next_low_latency_combine_buffer,
               v1.get_local_buffer_tensor, v1.low_latency_query_mask_buffer, v1.low_latency_update_mask_buffer, v2.dispatch,
               v2.combine, v2.barrier, plan._native.dispatch, plan._native.combine, plan._native.update, plan._native.metadata,
               calls_._native.dispatch, calls_._native.combine, calls_._native.finish, calls_._native.combine_buffer,
               calls_._native.set_mask, calls_._native.query_mask, comm._native.plan, comm._native.low_latency,
               comm._native.allgather, comm._native.set_sms, epkit.dispatch, epkit.combine]
    raised = 0
    for number in range(calls):
        target = draw.choice(targets)
        bare = getattr(target, "__self__", None) in (plan, wide, calls_, plan._native, wide._native, calls_._native)
        bare = bare and target.__name__ in ("dispatch", "combine", "update", "metadata", "query_mask")
        try:
            names = list(inspect.signature(target).parameters)
            given = {name: good[name] if name in good and draw.random() < 0.6 else any_argument(draw, things, bare)
                     for name in names if draw.random() < 0.7 and name not in ("args", "kwargs", "stream")}
            call = functools.partial(target, **given)
        except ValueError:  # of C: places alone
            call = functools.partial(target, *(any_argument(draw, things, bare) for _ in range(draw.choice((0, 1, 1, 5, 7, 8, 9, 12)))))
        if os.environ.get("EPKIT_TEST_VERBOSE"):
            print("#", number, target, [said(one) for one in call.args], {name: said(one) for name, one in call.keywords.items()}, flush=True)
        try:
            call()
        except (Exception, AssertionError):  # noqa: BLE001 - of Python, whatever it is
            raised += 1
    assert raised > calls // 2, raised
    rows = plan.dispatch(x, weights)
    assert torch.equal(plan.combine(rows.x, rows.topk_weights)[0].float(), x.float())
    got = calls_.dispatch(x, topk_idx)
    assert torch.equal(calls_.combine(got.x, topk_idx, torch.ones_like(weights), call=got.call)[0], x * 2)
    comm.check()


def test_arguments_of_any_kind():
    run(1, arguments_of_any_kind, 30000 if os.environ.get("EPKIT_TEST_LONG") else 1500)


def memory_of(pid="self"):
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Rss:"))


def many_steps(rank, size, steps):
    buffer = deep_ep.Buffer(dist.group.WORLD)
    topk_idx, x, weights = setting(size)
    layout = buffer.get_dispatch_layout(topk_idx, 2 * size)
    marks = []
    for step in range(steps):
        recv, _, w, _, handle, _ = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights,
                                                   num_tokens_per_rank=layout[0], is_token_in_rank=layout[3],
                                                   num_tokens_per_expert=layout[2])
        buffer.combine(recv, handle, w)
        got, _, ll_handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 8, 2 * size, use_fp8=False)
        buffer.get_next_low_latency_combine_buffer(ll_handle)
        buffer.low_latency_combine(got, topk_idx, weights, ll_handle)
        if step in (steps // 2, steps - 1):
            gc.collect()
            marks.append((memory_of(), len(os.listdir("/proc/self/fd"))))
    assert marks[1][1] <= marks[0][1], f"descriptors: {marks}"
    assert marks[1][0] - marks[0][0] < 1024, f"KiB: {marks}"


def test_memory_of_many_steps_is_flat():
    run(2, many_steps, 10000 if os.environ.get("EPKIT_TEST_LONG") else 400)
