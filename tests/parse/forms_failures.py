# SPDX-License-Identifier: Apache-2.0
"""What forms.py puts into logs: lines of failures, and lines that mean nothing. Each row says where the form was seen."""
import re
from dataclasses import dataclass

EP = frozenset(["python"])           # tests of DeepEP and its like
V1 = frozenset(["v1"])
LL = frozenset(["ll"])
V2 = frozenset(["v2"])
NCCL = frozenset(["nccl"])
PERF = frozenset(["perftest"])
ANY = frozenset(["python", "nccl", "mpi", "perftest"])
MPI = frozenset(["nccl", "mpi", "python"])


@dataclass
class Row:
    of: frozenset
    where: str       # failures: any line or the start; chatter: before, after, any
    lines: list
    headline: str    # regular expression; the line that has to be the first one said
    source: str


def fill(line, rng):
    """<n> a small number, <p> a process, <h> a host, <k> a rank of a node, <d> a device."""
    kinds = {"n": lambda: rng.randrange(12), "p": lambda: rng.randrange(1000, 99999), "h": lambda: rng.choice("0123"),
             "k": lambda: rng.randrange(8), "d": lambda: f"mlx5_{rng.randrange(8)}"}
    return re.sub(r"<([nphkd])>", lambda m: str(kinds[m.group(1)]()), line)


def spawn(*last):
    """torch.multiprocessing.spawn of a test whose process raised."""
    return ["W0509 10:11:12.101000 4090 torch/multiprocessing/spawn.py:169] Terminating process <p> via signal SIGTERM",
            "Traceback (most recent call last):",
            "  File \"/srv/tests/test.py\", line 640, in <module>",
            "    torch.multiprocessing.spawn(test_loop, args=(num_processes, args), nprocs=num_processes)",
            "torch.multiprocessing.spawn.ProcessRaisedException: ", "", "-- Process <k> terminated with the following error:",
            "Traceback (most recent call last):",
            "  File \"/usr/lib/python3.12/site-packages/torch/multiprocessing/spawn.py\", line 95, in _wrap",
            "    fn(i, *args)", "  File \"/srv/tests/test.py\", line 520, in test_loop", "    buffer.sync()", *last]


DEEPEP = "https://github.com/deepseek-ai/DeepEP/"
TESTS = "https://github.com/NVIDIA/nccl-tests/issues/"
PERFTEST = "https://github.com/linux-rdma/perftest/"

FAILURES = [
    Row(V1, "any", ["DeepEP dispatch NVL receiver timeout, channel: <n>, RDMA: 0, nvl: <k>, src RDMA: 1, src nvl: <k>, "
                    "start: 0, end: 0"] * 3, "dispatch NVL receiver timeout", DEEPEP + "pull/181"),
    Row(V1, "any", ["DeepEP dispatch forwarder timeout (RDMA meta), channel: <n>, RDMA: 0, nvl: <k>, src RDMA lane: 1, "
                    "dst NVL: <k>, meta: 0, 0, 0, 0"] * 4, "dispatch forwarder timeout", DEEPEP + "issues/137"),
    Row(V1 | LL, "any", ["DeepEP timeout check failed: rank = <k>, thread = <k>, value = 1024)"] * 3
        + spawn("RuntimeError: CUDA error: unspecified launch failure"), "DeepEP timeout check failed",
        DEEPEP + "blob/main/csrc/kernels/utils.cuh"),
    Row(V1, "any", spawn("RuntimeError: DeepEP error: timeout (dispatch CPU)"), r"DeepEP error: timeout \(dispatch CPU\)",
        DEEPEP + "blob/main/csrc/deep_ep.cpp"),
    Row(V1, "any", spawn("RuntimeError: DeepEP error: CPU recv timeout"), "DeepEP error: CPU recv timeout",
        "https://github.com/uccl-project/uccl/issues/893"),
    Row(EP, "any", spawn("RuntimeError: Failed: CUDA error /srv/DeepEP/csrc/deep_ep.cpp:83 'an illegal memory access was "
                         "encountered'"), "illegal memory access", DEEPEP + "issues/163"),
    Row(EP, "any", spawn("RuntimeError: Failed: CUDA error /srv/DeepEP/csrc/kernels/internode.cu:1029 'unspecified launch "
                         "failure'"), "unspecified launch failure", DEEPEP + "issues/290"),
    Row(EP, "any", spawn("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU <k> has a total capacity "
                         "of 79.11 GiB of which 1.02 GiB is free."), "CUDA out of memory",
        "https://pytorch.org/docs/stable/notes/cuda.html"),
    Row(EP, "start", ["Traceback (most recent call last):", "  File \"/srv/tests/test.py\", line 9, in <module>",
                      "    import deep_ep", "ModuleNotFoundError: No module named 'deep_ep'"],
        "No module named 'deep_ep'", DEEPEP + "issues/377"),
    Row(EP, "start", ["Traceback (most recent call last):", "  File \"/srv/tests/test.py\", line 9, in <module>",
                      "ImportError: /srv/deep_ep_cpp.cpython-310-x86_64-linux-gnu.so: undefined symbol: "
                      "_ZN3c104cuda9SetDeviceEab"], "undefined symbol", DEEPEP + "issues/289"),
    Row(EP, "start", ["[W socket.cpp:752] [c10d] The client socket has failed to connect to [gpu-<h>]:8361 (errno: 110 - "
                      "Connection timed out)."] * 2
        + spawn("torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to "
                "(10.0.0.1, 8361)."), "client socket has timed out", "https://github.com/pytorch/pytorch c10d TCPStore"),
    Row(EP, "start", spawn("torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients "
                           "joined."), "1/2 clients", "https://github.com/pytorch/pytorch c10d TCPStore"),
    Row(EP, "any", ["[rank<k>]:[E ProcessGroupNCCL.cpp:563] [Rank <k>] Watchdog caught collective operation timeout: "
                    "WorkNCCL(SeqNum=<n>, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800096 "
                    "milliseconds before timing out."], "Watchdog caught collective operation timeout",
        "https://github.com/ShinoharaHare/LLM-Training/issues/7"),
    Row(EP, "any", ["Traceback (most recent call last):",
                    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "=" * 60, "tests/test.py FAILED",
                    "-" * 60, "Failures:", "  <NO_OTHER_FAILURES>", "-" * 60, "Root Cause (first observed failure):", "[0]:",
                    "  time      : 2026-05-21_15:43:03", "  host      : gpu-<h>", "  rank      : 0 (local_rank: 0)",
                    "  exitcode  : -9 (pid: <p>)", "  error_file: <N/A>",
                    "  traceback : Signal 9 (SIGKILL) received by PID <p>", "=" * 60], "SIGKILL",
        "https://github.com/lzhxmu/CPPO/issues/6"),
    Row(V2, "start", spawn("RuntimeError: Assertion exception (csrc/kernels/backend/nccl.cu:87): (allow_hybrid_mode ? "
                           "props.railedGinType : props.ginType) != NCCL_GIN_TYPE_NONE"), "NCCL_GIN_TYPE_NONE",
        DEEPEP + "issues (case v2-gin-type-none)"),
    Row(V1 | LL, "start", ["WARN: init failed for remote transport: ibrc",
                           "/srv/nvshmem/src/host/transport/transport.cpp:nvshmemi_transport_init:275: init failed for "
                           "transport: IBGDA",
                           "/srv/nvshmem/src/host/init/init.cu:nvshmemi_check_state_and_init:1080: nvshmem initialization "
                           "failed, exiting "], "init failed|initialization failed", DEEPEP + "issues (case nvshmem-no-transport)"),
    Row(NCCL, "any", ["gpu-<h>:<p>:<p> [<k>] ibvwrap.c:262 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, "
                      "on dev <d>:1, curr state INIT, next state RTR, local GID index 3, local GID ::ffff:10.0.5.11, remote GID "
                      "::ffff:10.0.6.1",
                      "gpu-<h>: Test NCCL failure common.cu:1119 'unhandled system error (run with NCCL_DEBUG=INFO for "
                      "details) / '", " .. gpu-<h> pid <p>: Test failure common.cu:484"],
        r"ibv_modify_qp.*mlx5_\d.*::ffff:10\.0\.6\.1", TESTS + "252"),
    Row(NCCL, "any", ["gpu-<h>: Test NCCL failure common.cu:959 'internal error - please report this issue to the NCCL "
                      "developers / '", " .. gpu-<h> pid <p>: Test failure common.cu:844"], "internal error", TESTS + "219"),
    Row(NCCL, "start", ["gpu-<h>: Test CUDA failure common.cu:963 'invalid device ordinal'",
                        " .. gpu-<h> pid <p>: Test failure common.cu:925"], "invalid device ordinal", TESTS + "92"),
    Row(NCCL, "any", ["gpu-<h>:<p>:<p> [<k>] include/socket.h:385 NCCL WARN Net : Connection closed by remote peer",
                      "NCCL failure common.cu:921 'unhandled system error'"], "Connection closed by remote peer", TESTS + "15"),
    Row(NCCL, "any", ["gpu-<h>:<p>:<p> [<k>] transport/net_ib.cc:1890 NCCL WARN NET/IB: Got completion from peer 10.0.0.4<38426> "
                      "with status=12 opcode=0 len=0 vendor err 129 (Send) localGid ::ffff:10.0.5.11 remoteGids"
                      "::ffff:10.0.6.1 hca <d>",
                      "gpu-<h>: Test NCCL failure common.cu:303 'remote process exited or there was a network error / '"],
        "status=12", "https://github.com/NVIDIA/nccl net_ib.cc"),
    Row(NCCL, "start", ["./build/all_reduce_perf: error while loading shared libraries: libnccl.so.2: cannot open shared object "
                        "file: No such file or directory"], "libnccl.so.2", TESTS + "166"),
    Row(MPI, "start", ["Abort(3712399) on node 0 (rank 0 in comm 0): Fatal error in PMPI_Init: Other MPI error, error stack:",
                       "MPIR_Init_thread(159).......: "], "Fatal error in PMPI_Init", TESTS + "92"),
    Row(MPI, "any", ["PMPI_Alltoall(422).........................: MPI_Alltoall(sbuf=0x7f6, scount=512, MPI_CHAR, MPI_COMM_WORLD) failed",
                     "Abort(741942927) on node 19 (rank 19 in comm 0): Fatal error in PMPI_Alltoall: Other MPI error, error stack:"],
        "Fatal error in PMPI_Alltoall", "https://github.com/ofiwg/libfabric/issues/4525"),
    Row(NCCL, "any", ["gpu-<h>:<p>:<p> [<k>] ofi_process_cq:1033 NCCL WARN NET/OFI Request completed with error. RC: 21. Error: unknown error",
                      "gpu-<h>: Test NCCL failure common.cu:303 'remote process exited or there was a network error / '"],
        "NET/OFI Request completed with error. RC: 21", "https://github.com/aws/aws-ofi-nccl/issues/161"),
    Row(NCCL, "any", ["gpu-<h>:<p>:<p> [<k>] /srv/rccl/build/hipify/src/transport/p2p.cc:220 NCCL WARN hipIpcGetMemHandle failed : "
                      "invalid argument", "gpu-<h>: Test NCCL failure common.cu:1285 'internal error'", "-" * 74,
                      "Primary job  terminated normally, but 1 process returned", "a non-zero exit code."],
        "hipIpcGetMemHandle failed : invalid argument", "https://github.com/ROCm/rccl/issues/908"),
    Row(EP, "any", ["F0721 02:48:28.834262 1159892 util.h:139] Check failed: bind(*listen_fd, (struct sockaddr*)&serv_addr, "
                    "sizeof(serv_addr)) >= 0 ERROR: binding", "*** Check failure stack trace: ***",
                    "[gpu-<h>:<p>] *** Process received signal ***"], "Check failed: bind",
        "https://github.com/uccl-project/uccl/issues/172"),
    Row(V1 | LL, "start", ["/srv/nvshmem/src/host/mem/mem_heap.cpp:1509: non-zero status: 2 cuMemCreate failed ", "",
                           "/srv/nvshmem/src/host/mem/mem_heap.cpp:1590: non-zero status: 7 allocate_physical_memory_to_heap failed",
                           "[/srv/nvshmem/src/host/coll/barrier/barrier.cpp:21] cuda failed with an illegal memory access was "
                           "encountered "], "cuMemCreate failed", DEEPEP + "issues/157"),
    Row(MPI, "any", ["-" * 74, "mpirun noticed that process rank <k> with PID <p> on node gpu-<h> exited on signal 11 "
                     "(Segmentation fault).", "-" * 74], "exited on signal 11", "Open MPI 4, orterun help texts"),
    Row(MPI, "start", ["-" * 74, "There are not enough slots available in the system to satisfy the 16", "slots that were "
                       "requested by the application:", "", "  ./run.sh", "-" * 74], "not enough slots",
        "Open MPI 4, orterun help texts"),
    Row(ANY, "any", ["slurmstepd: error: *** STEP 25551887.0 ON gpu-<h> CANCELLED AT 2026-11-23T19:29:13 DUE TO TIME LIMIT ***"],
        "TIME LIMIT", "https://github.com/ufs-community/ufs-weather-model/pull/907"),
    Row(ANY, "any", ["slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0. Some of the step tasks have been OOM "
                     "Killed.", "srun: error: gpu-<h>: task <k>: Out Of Memory"], "oom_kill|Out Of Memory",
        "https://slurm.schedmd.com/sbatch.html"),
    Row(ANY, "any", ["salloc: error: Node failure on gpu-<h>", "srun: error: Node failure on gpu-<h>"], "Node failure",
        "https://github.com/uccl-project/uccl/issues/684"),
    Row(NCCL, "any", ["gpu-<h>:<p>:<p> [<k>] transport/net_ib.cc:818 NCCL WARN NET/IB : Got completion with error 4, opcode 8983, len 0, "
                      "vendor err 81", "gpu-<h>: Test NCCL failure common.cu:346 'unhandled system error'"], "with error 4, opcode 8983",
        "https://github.com/NVIDIA/nccl/issues/707"),
    Row(NCCL, "any", ["mlx5: gpu-<h>: got completion with error:", "00000000 00000000 00000000 00000000",
                      "00000000 02005104 09000ac5 0000bfd2", "", "gpu-<h>:<p>:<p> [<k>] transport/net_ib.cu:788 NCCL WARN NET/IB : Got "
                      "completion with error 4, opcode 1, len 0, vendor err 81"], "Got completion with error 4", TESTS + "24"),
    Row(EP, "start", ["gpu-<h>:<p>:<p> [<k>] NCCL WARN Cannot create device communicator: ncclDevCommRequirements_t argument must be "
                      "initialized via NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER",
                      "RuntimeError: Failed: NCCL error csrc/kernels/nccl_gin.cu:181 'invalid usage'"], "ncclDevCommRequirements_t",
        DEEPEP + "pull/521"),
    Row(V1 | LL, "start", ["/opt/nvshmem/src/modules/transport/ibgda/ibgda.cpp:1889: NULL value cannot allocate mlx5dv_devx_uar"] * 2
        + ["/opt/nvshmem/src/host/mem/mem_heap.cpp:1155: non-zero status: 801 cuMemCreate failed "], "mlx5dv_devx_uar",
        "https://github.com/sgl-project/sglang/issues/12533"),
    Row(EP, "any", ["[rank2]:[E602 11:18:53.865680143 ProcessGroupNCCL.cpp:684] [Rank 2] Some NCCL operations have failed or timed out. "
                    "Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data."],
        "Some NCCL operations have failed", "https://github.com/hiyouga/LlamaFactory/issues/8261"),
    Row(EP, "any", ["terminate called after throwing an instance of 'c10::DistBackendError'",
                    "  what():  [PG 1 Rank 1] Process group watchdog thread terminated with exception: [Rank 1] Watchdog caught collective "
                    "operation timeout: WorkNCCL(SeqNum=199, OpType=_REDUCE_SCATTER_BASE, Timeout(ms)=600000) ran for 600091 milliseconds "
                    "before timing out."], "SeqNum=199", "https://github.com/NVIDIA/Megatron-LM/issues/935"),
    Row(EP, "any", ["E0213 12:07:20.086000 870572 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 0 "
                    "(pid: <p>) of binary: /usr/bin/python3.11", "Traceback (most recent call last):",
                    "  File \"/usr/local/bin/torchrun\", line 8, in <module>", "    sys.exit(main())",
                    "torch.distributed.elastic.rendezvous.api.RendezvousClosedError"], "RendezvousClosedError",
        "https://github.com/pytorch/pytorch/issues/147064"),
    Row(MPI, "start", ["[1652739463.054681] [gpu-<h>:<p>:0]        ib_iface.c:1035 UCX  ERROR ibv_create_cq(cqe=4096) failed: Cannot allocate "
                       "memory", "[gpu-<h>:<p>] pml_ucx.c:309  Error: Failed to create UCP worker"], r"ibv_create_cq\(cqe=4096\)",
        "https://github.com/openucx/ucx/issues/8229"),
    Row(MPI, "start", ["pyxis: importing docker image ...",
                       "slurmstepd: error:  mpi/pmix_v3: pmixp_coll_ring_reset_if_to: gpu-<h> [0]: pmixp_coll_ring.c:742: 0x14ce0c02cb20: "
                       "collective timeout seq=0", "slurmstepd: error:  mpi/pmix_v3: pmixp_coll_log: gpu-<h> [0]: pmixp_coll.c:281: Dumping "
                       "collective state"], "collective timeout seq=0", "https://github.com/NVIDIA/deepops/issues/1179"),
    Row(MPI, "any", ["slurmstepd: error:  mpi/pmix_v4: _errhandler: gpu-<h> [24]: pmixp_client_v2.c:211: Error handler invoked: status = -61, "
                     "source = [slurm.pmix.50357.0:199]", "srun: error: gpu-<h>: tasks 192-198: Killed"], "status = -61",
        "https://github.com/NVIDIA/cuda-quantum/issues/2944"),
    Row(PERF, "start", ["rdma_bind_addr failed", " Unable to perform rdma_client function", " Unable to init the socket connection"],
        "rdma_bind_addr failed", PERFTEST + "issues/383"),
    Row(PERF, "start", [" Port number 1 state is Down", " Couldn't set the link layer", " Couldn't get context for the device"],
        "Port number 1 state is Down", "https://github.com/lsgunth/perftest/issues/1"),
    Row(PERF, "any", ["mlx5: gpu-<h>: got completion with error:", "00000000 00000000 00000000 00000000", " Completion with error at client",
                      " Failed status 4: wr_id 0 syndrom 0x51", "scnt=128, ccnt=0"], "Failed status 4", PERFTEST + "issues/140"),
    Row(EP, "any", ["ionic_comp_msn:1277: cqe with error 12 for 0x1 (msn), qpid 2048 cqid 2049",
                    "E20260623 13:11:17.726713  5676 worker_pool.cpp:294] Worker: Process failed for slice (opcode: 1, local_nic: rdma5, "
                    "retry_cnt: 0): transport retry counter exceeded"], "transport retry counter exceeded",
        "https://github.com/sgl-project/sglang/pull/27209"),
    Row(V1 | LL, "start", ["/srv/nvshmem/install/include/host/nvshmemx_api.h:63: non-zero status: 7: Connection timed out, exiting... ",
                           "aborting due to error in nvshmemi_init_thread "], "Connection timed out, exiting", DEEPEP + "issues/150"),
    Row(V1, "any", ["DeepEP dispatch NVL receiver timeout, channel: <n>, RDMA: 0, nvl: <k>, src NVL: 5, head: 315, tail: 315"] * 2
        + ["terminate called after throwing an instance of 'EPException'", "  what():  Failed: CUDA error deep_ep.cpp:83 'unspecified launch "
           "failure'"], "dispatch NVL receiver timeout", DEEPEP + "issues/274"),
    Row(EP, "any", ["W0911 19:30:43.860000 232900 site-packages/torch/multiprocessing/spawn.py:169] Terminating process <p> via signal SIGTERM"]
        * 2, "Terminating process", DEEPEP + "issues/402"),
    Row(MPI, "any", ["[gpu-<h>:66422:0:66422]       ud_ep.c:672  Assertion `uct_ib_unpack_uint24(ctl->conn_req.ep_addr.ep_id) == "
                     "ep->dest_ep_id' failed"], "ud_ep.c:672", "https://github.com/openucx/ucx/issues/5246"),
    Row(MPI, "start", ["srun: error: Task launch for StepId=13.0 failed on node gpu-<h>: Invalid job credential",
                       "srun: error: Application launch failed: Invalid job credential"], "Invalid job credential",
        "https://github.com/NVIDIA/deepops/issues/1179"),
    Row(MPI, "start", ["srun: fatal: SLURM_MEM_PER_CPU, SLURM_MEM_PER_GPU, and SLURM_MEM_PER_NODE are mutually exclusive."],
        "mutually exclusive", "https://github.com/mehta-lab/recOrder/issues/482"),
    Row(ANY, "any", ["Segmentation fault (core dumped)"], "Segmentation fault", "bash"),
    Row(ANY, "any", ["Bus error (core dumped)"], "Bus error", "bash"),
    Row(ANY, "any", ["Killed"], "Killed", "bash"),
    Row(ANY, "any", ["command terminated with exit code 137"], "exit code 137", "kubectl exec"),
    Row(PERF, "start", ["Couldn't connect to gpu-<h>:18515", "Unable to open file descriptor for socket connection"],
        "Couldn't connect to gpu", PERFTEST + "pull/228"),
    Row(PERF, "any", [" Completion with error at client", " Failed status 12: wr_id 0 syndrom 0x81", "scnt=128, ccnt=0",
                      " Failed to complete run_iter_bw function successfully"], "Failed status 12|Completion with error",
        PERFTEST + "issues/173"),
    Row(PERF, "any", ["pp_read_keys: Success", "Couldn't read remote address", " Unable to read to socket/rdam_cm"],
        "Couldn't read remote address", "https://github.com/nminoru/pib/issues/3"),
    Row(PERF, "start", ["Failed to modify QP 4711 to RTR", " Unable to Connect the HCA's through the link"],
        "Failed to modify QP", PERFTEST + "issues/132"),
    Row(V1 | LL, "start", ["/srv/nvshmem/src/host/topo/topo.cpp:477: non-zero status: -6 allgather of ipc handles failed", "",
                           "/srv/nvshmem/src/host/init/init.cu:998: non-zero status: 7 building transport map failed ", "",
                           "/srv/nvshmem/src/host/init/init.cu:nvshmemi_check_state_and_init:1080: nvshmem initialization failed, exiting ",
                           "", "/srv/nvshmem/src/modules/bootstrap/uid/ncclSocket/ncclsocket_socket.cpp:socketProgressOpt:39: "
                           "socketProgressOpt: Call to recv from 10.0.0.4<38229> failed : Broken pipe"],
        "allgather of ipc handles failed", DEEPEP + "issues/223"),
    Row(LL, "start", ["/srv/nvshmem/src/modules/transport/ibrc/ibrc.cpp:418: non-zero status: 110 ibv_modify_qp failed ", "",
                      "/srv/nvshmem/src/modules/transport/ibrc/ibrc.cpp:1433: non-zero status: 7 ep_connect failed "],
        "110 ibv_modify_qp failed", DEEPEP + "issues/289"),
    Row(MPI, "any", ["[gpu-<h>:<p>:0:<p>]    ud_iface.c:780  Fatal: transport error: Endpoint timeout", "==== backtrace ===="],
        "Fatal: transport error: Endpoint timeout", "https://github.com/openucx/ucx/issues/2789"),
    Row(EP, "any", ["WARNING:torch.distributed.elastic.multiprocessing.api:Sending process <p> closing signal SIGTERM"] * 2
        + ["ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 3 (pid: <p>) of binary: python3",
           "Traceback (most recent call last):", "  File \"/usr/bin/torchrun\", line 8, in <module>", "    sys.exit(main())"],
        r"failed \(exitcode: -9\) local_rank: 3", "https://github.com/hpcaitech/ColossalAI/issues/3514"),
    Row(EP, "any", ["torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "=" * 60, "tests/test.py FAILED",
                    "-" * 60, "Failures:", "[1]:", "  rank      : 3 (local_rank: 3)", "  exitcode  : -9 (pid: 12)",
                    "  traceback : Signal 9 (SIGKILL) received by PID 12", "-" * 60, "Root Cause (first observed failure):", "[0]:",
                    "  rank      : 0 (local_rank: 0)", "  exitcode  : 1 (pid: 11)", "  error_file: <N/A>", "  traceback : To enable "
                    "traceback see: https://pytorch.org/docs/stable/elastic/errors.html", "=" * 60], r"exitcode  : 1 \(pid: 11\)",
        "https://github.com/apple/ml-recurrent-drafter/issues/5"),
    Row(EP, "any", ["  File \"/srv/sglang/token_dispatcher.py\", line 603, in _dispatch_core", "    buffer.low_latency_dispatch(",
                    "TypeError: Buffer.low_latency_dispatch() got an unexpected keyword argument 'use_fp8'", "",
                    "[2026-05-09 15:00:25 DP7 TP7] Scheduler hit an exception: Traceback (most recent call last):"],
        "TypeError: Buffer.low_latency_dispatch", "https://github.com/sgl-project/sglang/issues/6017"),
    Row(EP, "any", ["CQE ERROR wr_id=12887842422 status=5(Work Request Flushed Error) opcode=4 byte_len=0 vendor_err=0xa qp_num=0x2e24"],
        "CQE ERROR wr_id=12887842422", "https://github.com/uccl-project/uccl/issues/617"),
    Row(MPI, "start", ["-" * 74, "prterun was unable to reliably start one or more daemons.", "This usually is caused by:", "",
                       "* not finding the required libraries and/or binaries on", "  one or more nodes."],
        "unable to reliably start|Connection refused", "https://github.com/openpmix/prrte/issues/1392"),
]

CHATTER = [
    Row(ANY, "before", ["Warning: Permanently added '[gpu-1]:222' (ED25519) to the list of known hosts."], "", "ssh"),
    Row(ANY, "before", ["ssh: connect to host gpu-1 port 222: Connection refused", "Waiting for gpu-1..."] * 2
        + ["Host gpu-1 is ready"], "", "case gke-waits-for-ssh-then-good"),
    Row(ANY, "before", ["Failed to add the host to the list of known hosts (/root/.ssh/known_hosts)."], "",
        "https://github.com/Azure/aks-rdma-infiniband/pull/150"),
    Row(ANY, "before", ["srun: Warning: can't honor --ntasks-per-node set to 40 which doesn't match the requested tasks 16 with "
                        "the number of requested nodes 2. Ignoring --ntasks-per-node."], "",
        "https://github.com/ufs-community/ufs-weather-model/pull/907"),
    Row(ANY, "before", ["pyxis: importing docker image ..."], "", "https://github.com/NVIDIA/deepops/issues/1179"),
    Row(ANY, "before", ["-" * 74, "WARNING: There was an error initializing an OpenFabrics device.", "",
                        "  Local host:   gpu-0", "  Local device: <d>", "-" * 74], "",
        "https://github.com/NVIDIA/nccl-tests/pull/318"),
    Row(ANY, "before", ["[gpu-0][[31817,1],0][btl_openib_component.c:1704:init_one_device] error obtaining device attributes for "
                        "<d> errno says No space left on device"], "", "https://github.com/NVIDIA/nccl-tests/pull/318"),
    Row(ANY, "before", ["[W socket.cpp:464] [c10d] The server socket cannot be initialized on [::]:8361 (errno: 97 - Address "
                        "family not supported by protocol)."], "", "PyTorch c10d, without IPv6"),
    Row(ANY, "before", ["rank <k> nvml_device_index <k>, NVSHMEM_HCA_LIST mlx5_bond_0:1"], "",
        "https://github.com/deepseek-ai/DeepEP/issues/183"),
    Row(ANY, "before", ["NCCL version 2.26.6+cuda12.8"], "", "https://github.com/NVIDIA/nccl-tests/pull/318"),
    Row(LL, "any", ["WARN: device <d> cannot allocate buffer on the specified memory type. Skipping...", "",
                    "/srv/nvshmem/src/host/transport/transport.cpp:nvshmemi_transport_init:282: init failed for transport: IBGDA"], "",
        DEEPEP + "issues/303"),
    Row(LL, "after", ["/srv/nvshmem/src/modules/transport/ibgda/ibgda.cpp:1411: non-zero status: 16 ibv_dealloc_pd failed "], "",
        "https://github.com/NVIDIA/nvshmem/issues/81"),
    Row(EP, "after", ["gpu-0:<p>:<p> [0] proxy.cc:1458 NCCL WARN [Service thread] Accept failed Resource temporarily unavailable",
                      "gpu-0:<p>:<p> [0] proxy.cc:1521 NCCL WARN [Proxy Service 0] Failed to execute operation Close from rank 0, retcode 3"],
        "", DEEPEP + "issues/41"),
    Row(ANY, "any", ["gpu-0:<p>:<p> [<k>] NCCL INFO misc/utils.cc:231 memory stack hunk malloc(65536)"], "",
        "https://github.com/NVIDIA/nccl"),
    Row(ANY, "any", ["gpu-0:<p>:<p> [<k>] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal net plugin."],
        "", "https://github.com/NVIDIA/nccl"),
    Row(ANY, "any", ["gpu-0:<p>:<p> [<k>] init.cc:2065 NCCL WARN MSCCL++: Cannot enable MSCCL++; environment is not MSCCL "
                     "compatible"], "", "https://github.com/ROCm/rccl-tests/issues/163"),
    Row(ANY, "any", [" coll_ucc_barrier.c:31 - mca_coll_ucc_barrier() running ucc barrier"], "",
        "https://github.com/openucx/ucc README"),
    Row(ANY, "any", ["/usr/lib/python3.12/site-packages/torch/cuda/__init__.py:61: FutureWarning: The pynvml package is "
                     "deprecated."], "", "PyTorch 2.9"),
    Row(ANY, "any", ["kernel: [ 1234.567890] IPv6: ADDRCONF(NETDEV_CHANGE): eth0: link becomes ready"], "", "Linux"),
    Row(ANY, "any", [""], "", "an empty line"),
    Row(ANY, "after", ["[rank0]:[W1120 10:00:00.123456789 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() "
                       "was not called before program exit, which can leak resources."], "", "PyTorch 2.4"),
    Row(ANY, "after", ["/usr/lib/python3.12/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear "
                       "to be 2 leaked semaphore objects to clean up at shutdown",
                       "  warnings.warn('resource_tracker: There appear to be %d '"], "", "case v2-hung-in-first-case"),
    Row(ANY, "after", ["Exception ignored in: <function Buffer.__del__ at 0x7f51c0>", "Traceback (most recent call last):",
                       "  File \"/srv/deep_ep/buffer.py\", line 88, in __del__", "AttributeError: 'NoneType' object has no "
                       "attribute 'destroy'"], "", "CPython, sys.unraisablehook"),
    Row(ANY, "after", ["real\t1m12.345s", "user\t3m2.001s", "sys\t0m9.123s"], "", "bash, time"),
]
