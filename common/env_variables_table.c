/* SPDX-License-Identifier: Apache-2.0 */
/*
 * env_variables_table.c - the table of environment variables: first those whose text is shown, then the others by
 * values.
 *
 * Sources: "Environment Variables" of the NVSHMEM 3.5 documentation and src/modules/transport/common/env_defs.h of
 * NVSHMEM 3.4 and 3.5 (types, undocumented variables); "Environment Variables" of the NCCL user guide for
 * 2.27 to 2.30; deep_ep/buffer.py of DeepEP 1.2.1 (what it sets itself); ibv_fork_init(3) and mlx5dv(7) of rdma-core;
 * ld.so(8). The variables of epkit are here as well; this is their only list. Where code and documentation differ, the
 * table follows the code: for example, NVSHMEM_HCA_LIST works without NVSHMEM_ENABLE_NIC_PE_MAPPING.
 *
 * Ranges are as wide as the code allows. If it sets no limit, they are generous and only catch mistakes.
 */
#include "env_variables.h"

/* Rows without an effect have the first one, VARIABLE_WORKS. */
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

/* clang-format off */
const struct variable variables[] = {
    {"CUDA_HOME", "path", "folder of the CUDA toolkit for builds and compilers at run time", VARIABLE_BUILD_ONLY},
    {"DEEPEP_HOME", "path", "folder of DeepEP for scripts", VARIABLE_BUILD_ONLY},
    {"EPKIT_ADDRESS", "text",
     "host and port of rank 0 for ranks that find each other over TCP, instead of MASTER_ADDR and MASTER_PORT"},
    {"EPKIT_BACKEND", "host|cuda", "backend of the library when --backend is not given: host or cuda"},
    {"EPKIT_COMMAND", "text", "set by 'epkit install' for the tests of a recipe: the epkit to ask"},
    {"EPKIT_EARLY_OUTPUTS", "int 0..2147483647",
     "deep_ep's ElasticBuffer on GPUs: results that may have memory for the worst case at a time (default: 2)"},
    {"EPKIT_HOST_ISA", "portable|avx2|avx512",
     "instruction set of the host backend's loops over rows: portable, avx2 or avx512"},
    {"EPKIT_JOB_ID", "text",
     "which job this is, for ranks that find each other over TCP: ranks of another one are strangers"},
    {"EPKIT_NETWORK", "emulated|tcp|verbs",
     "network between nodes where the program names none: tcp, verbs or emulated"},
    {"EPKIT_PRELOAD", "path",
     "set by the script of 'epkit env': the library that its function epkit_preload loads into a program"},
    {"EPKIT_SECRET", "text",
     "what ranks that find each other over TCP must know; 'epkit launch' draws one for its own test"},
    {"EPKIT_SSH", "text",
     "program that 'epkit doctor --hosts' and 'epkit launch' connect with, and its options; default: ssh"},
    {"EPKIT_SSH_PORT", "int 0..65535",
     "port of sshd for 'epkit launch' (default: 222) and 'epkit doctor --hosts' (default: that of ssh) where "
     "neither --port nor a node names one"},
    {"EPKIT_STRICT_SMS", "int 0..1",
     "1: a number of multiprocessors that a program sets also counts those that copy rows of ordinary memory"},
    {"EPKIT_TCP_INTERFACE", "list",
     "network interfaces for the connections between ranks: beginnings of names, '=eth0', '^docker', or an address"},
    {"EPKIT_TIMEOUT_MS", "int 1..2147483647", "deadline of the library's waits where the caller sets none"},
    {"EPKIT_VERBS_DEVICE", "list",
     "RDMA ports of the network verbs, for the ranks of a node in turn: 'mlx5_0,mlx5_1:2'"},
    {"EPKIT_VERBS_GID_INDEX", "int -1..255",
     "address of a RoCE port by its index, for the network verbs; default: RoCE v2, IPv4 first"},
    {"EPKIT_VERBS_GPU_MEMORY", "int 0..1",
     "0: NICs do not access GPU memory, 1: they do; default: those that are below one PCI bridge with the GPU do"},
    {"EPKIT_VERBS_SERVICE_LEVEL", "int 0..15", "service level of InfiniBand for the network verbs, 0..15"},
    {"EPKIT_VERBS_TRAFFIC_CLASS", "int 0..255", "traffic class of RoCE packets for the network verbs, 0..255"},
    {"GDRCOPY_HOME", "path", "folder of GDRCopy for builds", VARIABLE_BUILD_ONLY},
    {"MPI_HOME", "path", "folder of MPI for builds", VARIABLE_BUILD_ONLY},
    {"NCCL_CONF_FILE", "path", "file with values for these variables"},
    {"NCCL_GRAPH_FILE", "path", "file with the rings and trees"},
    {"NCCL_HOME", "path", "folder of NCCL for builds", VARIABLE_BUILD_ONLY},
    {"NCCL_IB_CUDA_SUPPORT", NULL, "removed in NCCL 2.4; NCCL_NET_GDR_LEVEL took its place", VARIABLE_VOID},
    {"NCCL_LL_THRESHOLD", NULL, "removed in NCCL 2.5", VARIABLE_VOID},
    {"NCCL_SINGLE_RING_THRESHOLD", NULL, "removed in NCCL 2.3", VARIABLE_VOID},
    {"NCCL_TOPO_FILE", "path", "file with the topology"},
    {"NCCL_TREE_THRESHOLD", NULL, "removed in NCCL 2.5", VARIABLE_VOID},
    {"NCCL_TUNER_CONFIG_PATH", "path", "file of a tuner plugin; gIB brings one for each machine type"},
    {"NO_COLOR", NULL, "if not empty, output is never coloured"},
    {"NVSHMEM_BUILD_BITCODE_LIBRARY", "bool", "builds NVSHMEM as LLVM bitcode", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_BUILD_DEB_PACKAGE", "bool", "builds a Debian package of NVSHMEM", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_BUILD_EXAMPLES", "bool", "builds the examples of NVSHMEM", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_BUILD_HYDRA_LAUNCHER", "bool", "builds a launcher of NVSHMEM", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_BUILD_PACKAGES", "bool", "builds packages of NVSHMEM", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_BUILD_PYTHON_LIB", "bool", "builds the Python package of NVSHMEM", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_BUILD_RPM_PACKAGE", "bool", "builds an RPM package of NVSHMEM", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_BUILD_TESTS", "bool", "builds the tests of NVSHMEM", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_BUILD_TXZ_PACKAGE", "bool", "builds an archive of NVSHMEM", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_CONF_FILE", "path", "file with values for these variables, which win over the environment"},
    {"NVSHMEM_CUDA_PATH", "path", "folder with libcuda.so when it is not in a default place"},
    {"NVSHMEM_DEFAULT_PMI2", "bool", "makes PMI-2 the default of a build of NVSHMEM", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_DEFAULT_PMIX", "bool", "makes PMIx the default of a build of NVSHMEM", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_DEFAULT_UCX", "bool", "makes ucx the default transport of a build of NVSHMEM", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_DEVEL", "bool", "a developer's build of NVSHMEM", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_DIR", "path", "folder of NVSHMEM for the build of DeepEP", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_DISABLED_GDRCOPY", "bool",
     "a name that deployment guides use; the variable is NVSHMEM_DISABLE_GDRCOPY", VARIABLE_VOID},
    {"NVSHMEM_DISABLE_COLL_POLL", "bool",
     "builds NVSHMEM without polling in collective operations", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_GDRCOPY_SUPPORT", "bool", "builds NVSHMEM with GDRCopy", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_GPUNETIO_SUPPORT", "bool", "builds NVSHMEM with GPUNetIO", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_GPU_COLL_USE_LDST", "bool",
     "builds NVSHMEM with loads and stores in collective operations", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_HOME", "path", "folder of NVSHMEM for builds and scripts", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_IBDEVX_SUPPORT", "bool", "builds NVSHMEM with the transport ibdevx", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_IBGDA_SUPPORT", "bool",
     "builds NVSHMEM with IBGDA; a program is told by NVSHMEM_IB_ENABLE_IBGDA", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_IBRC_SUPPORT", "bool", "builds NVSHMEM with the transport ibrc", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_LIBFABRIC_SUPPORT", "bool", "builds NVSHMEM with the transport libfabric", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_MPI_SUPPORT", "bool", "builds NVSHMEM with MPI", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_PMIX_SUPPORT", "bool", "builds NVSHMEM with PMIx", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_PREFIX", "path", "folder that a build of NVSHMEM installs into", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_ROOT", "path", "folder of NVSHMEM for builds", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_SHMEM_SUPPORT", "bool", "builds NVSHMEM with OpenSHMEM", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_TIMEOUT_DEVICE_POLLING", "bool",
     "builds NVSHMEM with a deadline for waits on the GPU", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_TRACE", "bool", "builds NVSHMEM with traces", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_UCX_SUPPORT", "bool", "builds NVSHMEM with the transport ucx", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_USE_DLMALLOC", "bool", "builds NVSHMEM with another allocator", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_USE_GDRCOPY", "bool",
     "builds NVSHMEM with GDRCopy; at run time NVSHMEM_IBGDA_NIC_HANDLER decides", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_USE_MLX5DV", "bool", "builds NVSHMEM with mlx5dv", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_USE_NCCL", "bool", "builds NVSHMEM with NCCL", VARIABLE_BUILD_ONLY},
    {"NVSHMEM_VERBOSE", "bool", "a talkative build of NVSHMEM", VARIABLE_BUILD_ONLY},
    {"USE_NVPEERMEM", "bool", "a setting of installation scripts", VARIABLE_BUILD_ONLY},

    {"CUDA_DEVICE_MAX_CONNECTIONS", "int 1..32"},
    {"CUDA_DEVICE_ORDER", "FASTEST_FIRST|PCI_BUS_ID"},
    {"CUDA_LAUNCH_BLOCKING EP_DISABLE_GIN EP_SUPPRESS_NCCL_CHECK MLX5_POST_SEND_PREFER_BF MLX5_SCATTER_TO_CQE "
     "MLX5_SHUT_UP_BF MLX5_SINGLE_THREADED MLX5_STALL_CQ_POLL NCCL_ALLOC_P2P_NET_LL_BUFFERS NCCL_CHECKS_DISABLE "
     "NCCL_CHECK_POINTERS NCCL_COLLNET_ENABLE NCCL_COMM_BLOCKING NCCL_COMM_SHRINK_SHARE_RESOURCES "
     "NCCL_COMM_SPLIT_SHARE_RESOURCES NCCL_DMABUF_ENABLE NCCL_GDRCOPY_ENABLE NCCL_GDRCOPY_FIFO_ENABLE "
     "NCCL_GDRCOPY_FLUSH_ENABLE NCCL_GDRCOPY_SYNC_ENABLE NCCL_GDR_FLUSH_DISABLE NCCL_GIN_ENABLE "
     "NCCL_GRAPH_HELPER_DISABLE NCCL_GRAPH_MIXING_SUPPORT NCCL_GRAPH_REGISTER NCCL_GRAPH_STREAM_ORDERING "
     "NCCL_IB_ADAPTIVE_ROUTING NCCL_IB_DISABLE NCCL_IB_ECE_ENABLE NCCL_IB_EVENT_BASED_LB NCCL_IB_MERGE_NICS "
     "NCCL_IB_OOO_RQ NCCL_IB_RETURN_ASYNC_EVENTS NCCL_IB_SPLIT_DATA_ON_QPS NCCL_IB_USE_INLINE "
     "NCCL_IB_WARN_RAIL_LOCAL NCCL_IGNORE_COLLNET_MISMATCH NCCL_IGNORE_CPU_AFFINITY NCCL_IGNORE_NET_MISMATCH "
     "NCCL_IPC_USE_ABSTRACT_SOCKET NCCL_LAUNCH_ORDER_IMPLICIT NCCL_LAUNCH_RACE_FATAL NCCL_LEGACY_CUDA_REGISTER "
     "NCCL_MEM_SYNC_DOMAIN NCCL_MNNVL_SCATTER_NETS_ENABLE NCCL_MULTI_RANK_GPU_ENABLE NCCL_NET_DISABLE_INTRA "
     "NCCL_NET_FORCE_FLUSH NCCL_NET_GDR_C2C NCCL_NET_GDR_READ NCCL_NET_SHARED_BUFFERS NCCL_NET_SHARED_COMMS "
     "NCCL_NVB_DISABLE NCCL_OOB_NET_ENABLE NCCL_P2P_DIRECT_DISABLE NCCL_P2P_DISABLE NCCL_P2P_USE_CUDA_MEMCPY "
     "NCCL_PXN_C2C NCCL_PXN_DISABLE NCCL_RAS_ENABLE NCCL_RMA_EAGER_INIT NCCL_RUNTIME_CONNECT NCCL_SET_STACK_SIZE "
     "NCCL_SET_THREAD_NAME NCCL_SHM_DISABLE NCCL_SHM_USE_CUDA_MEMCPY NCCL_SYM_GIN_KERNELS_ENABLE "
     "NCCL_UNPACK_DOUBLE_NCHANNELS NCCL_WIN_ENABLE", "int 0..1"},
    {"CUDA_MODULE_LOADING", "DEFAULT|EAGER|LAZY"},
    {"CUDA_VISIBLE_DEVICES DEEP_EP_DEVICE_TO_HCA_MAPPING IBV_DRIVERS LD_LIBRARY_PATH LD_PRELOAD NCCL_ALGO "
     "NCCL_DEBUG_LEVELS NCCL_DEBUG_NOWARN NCCL_DEBUG_SUBSYS NCCL_DEBUG_TIMESTAMP_LEVELS NCCL_GIN_PLUGIN "
     "NCCL_IB_HCA NCCL_NET_FORCE_MERGE NCCL_OOB_NET_IFNAME NCCL_PROTO NCCL_PROXY_CPUSET NCCL_RMA_PLUGIN "
     "NCCL_SOCKET_IFNAME NCCL_THREAD_THRESHOLDS NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME NVSHMEM_DEBUG_SUBSYS "
     "NVSHMEM_HCA_LIST NVSHMEM_HCA_PE_MAPPING NVSHMEM_NVTX PYTHONPATH RDMAV_DRIVERS UCX_NET_DEVICES UCX_TLS", "list"},
    {"EP_JIT_NVCC_COMPILER EP_NCCL_ROOT_DIR MLX5_DEBUG_FILE NCCL_COMM_ID NCCL_CTA_POLICY NCCL_DEBUG_FILE "
     "NCCL_ENV_PLUGIN NCCL_GRAPH_DUMP_FILE NCCL_HOSTID NCCL_IB_ADDR_RANGE NCCL_IB_RAIL_POLICY NCCL_NET "
     "NCCL_NETDEVS_POLICY NCCL_NET_PLUGIN NCCL_PROFILER_PLUGIN NCCL_PSK NCCL_RAS_ADDR NCCL_RAS_TIMEOUT_FACTOR "
     "NCCL_SOCKET_MAGIC NCCL_TOPO_DUMP_FILE NCCL_TUNER_PLUGIN NVSHMEM_BOOTSTRAP_MPI_PLUGIN "
     "NVSHMEM_BOOTSTRAP_PLUGIN NVSHMEM_BOOTSTRAP_PMI2_PLUGIN NVSHMEM_BOOTSTRAP_PMIX_PLUGIN "
     "NVSHMEM_BOOTSTRAP_PMI_PLUGIN NVSHMEM_BOOTSTRAP_SHMEM_PLUGIN NVSHMEM_BOOTSTRAP_UID_PLUGIN "
     "NVSHMEM_BOOTSTRAP_UID_SESSION_ID NVSHMEM_DEBUG_FILE NVSHMEM_HCA_PREFIX NVSHMEM_IB_ADDR_RANGE "
     "UCX_IB_GID_INDEX UCX_IB_SL UCX_IB_TRAFFIC_CLASS UCX_MEMTYPE_CACHE", "text"},
    {"IBV_FORK_SAFE MLX5_RELAXED_PACKET_ORDERING_ON NCCL_DEBUG_TIMESTAMP_FORMAT NVSHMEM_VERSION RDMAV_FORK_SAFE "
     "RDMAV_HUGEPAGES_SAFE", NULL},
    {"MLX5_CQE_SIZE", "64|128"},
    {"MLX5_DEBUG_MASK", "int 0..4294967295"},
    {"MLX5_NUM_LOW_LAT_UUARS", "int 0..4096"},
    {"MLX5_STALL_NUM_LOOP", "int 0..1000000"},
    {"MLX5_TOTAL_UUARS", "int 4..4096"},
    {"NCCL_BUFFSIZE NCCL_LL128_BUFFSIZE NCCL_LL_BUFFSIZE NCCL_NVLSTREE_MAX_CHUNKSIZE NCCL_NVLS_CHUNKSIZE "
     "NCCL_P2P_NET_CHUNKSIZE NCCL_P2P_NVL_CHUNKSIZE NCCL_P2P_PCI_CHUNKSIZE NCCL_UID_STAGGER_RATE "
     "NCCL_UID_STAGGER_THRESHOLD NCCL_WORK_ARGS_BYTES NCCL_WORK_FIFO_BYTES", "int 1..2147483647"},
    {"NCCL_CGA_CLUSTER_SIZE", "int 0..8"},
    {"NCCL_CHECK_MODE", "DEFAULT|DEBUG_LOCAL|DEBUG_GLOBAL"},
    {"NCCL_COLLNET_NODE_THRESHOLD NCCL_IB_AR_THRESHOLD NCCL_P2P_LL_THRESHOLD", "int 0..2147483647"},
    {"NCCL_CROSS_NIC NCCL_IB_PCI_RELAXED_ORDERING NCCL_IGNORE_DISABLED_P2P NCCL_LOCAL_REGISTER NCCL_MNNVL_ENABLE "
     "NCCL_NVLS_ENABLE NCCL_P2P_PXN_LEVEL NCCL_PAT_ENABLE", "int 0..2"},
    {"NCCL_CUMEM_ENABLE NCCL_P2P_READ_ENABLE", "int -2..1"},
    {"NCCL_CUMEM_HOST_ENABLE", "int -1..1"},
    {"NCCL_DEBUG", "NONE|VERSION|WARN|ATTN|INFO|ABORT|TRACE"},
    {"NCCL_GIN_TYPE", "int -1..16"},
    {"NCCL_IB_ADDR_FAMILY NCCL_SOCKET_FAMILY NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY NVSHMEM_IB_ADDR_FAMILY", "AF_INET|AF_INET6"},
    {"NCCL_IB_FIFO_TC NCCL_IB_TC NVSHMEM_IB_TRAFFIC_CLASS", "int 0..255"},
    {"NCCL_IB_GDR_LEVEL", "LOC|PIX|PXB|PHB|SYS|0|1|2|3|4|5"},
    {"NCCL_IB_GID_INDEX NVSHMEM_IB_GID_INDEX", "int -1..255"},
    {"NCCL_IB_PKEY", "int 0..65535"},
    {"NCCL_IB_PKEY_VALUE", "int -1..65535"},
    {"NCCL_IB_QPS_PER_CONNECTION NVSHMEM_LIBFABRIC_MAX_NIC_PER_PE", "int 1..128"},
    {"NCCL_IB_RETRY_CNT", "int 0..7"},
    {"NCCL_IB_ROCE_VERSION_NUM NVSHMEM_IB_ROCE_VERSION_NUM", "int 1..2"},
    {"NCCL_IB_SL NVSHMEM_IB_SL", "int 0..15"},
    {"NCCL_IB_TIMEOUT", "int 8..31"},
    {"NCCL_LAUNCH_MODE", "PARALLEL|GROUP"},
    {"NCCL_LSA_TEAM_SIZE NVSHMEM_IBGDA_NUM_RC_PER_PE", "int 0..1024"},
    {"NCCL_MAX_CTAS NCCL_MAX_NCHANNELS NCCL_MAX_NRINGS NCCL_MAX_P2P_NCHANNELS NCCL_MIN_CTAS NCCL_MIN_NCHANNELS "
     "NCCL_MIN_NRINGS NCCL_MIN_P2P_NCHANNELS NCCL_NUM_RMA_CTX NVSHMEM_BARRIER_DISSEM_KVAL "
     "NVSHMEM_BARRIER_TG_DISSEM_KVAL NVSHMEM_BCAST_TREE_KVAL NVSHMEM_FCOLLECT_NTHREADS "
     "NVSHMEM_IB_NUM_RC_PER_DEVICE NVSHMEM_RDX_NUM_TPB NVSHMEM_REDUCESCATTER_NTHREADS NVSHMEM_REDUCE_RECEXCH_KVAL", "int 1..1024"},
    {"NCCL_MNNVL_CLIQUE_ID", "int -1..4294967295"},
    {"NCCL_MNNVL_UUID NCCL_WIN_STRIDE", "int -1..9223372036854775807"},
    {"NCCL_NCHANNELS_PER_NET_PEER", "int -1..1024"},
    {"NCCL_NET_GDR_LEVEL", "LOC|PIX|PXB|PHB|NODE|SYS|0|1|2|3|4|5"},
    {"NCCL_NET_MERGE_LEVEL", "LOC|PORT|PIX|PXB|PHB|NODE|SYS"},
    {"NCCL_NET_MERGE_POLICY", "ALL|RAIL"},
    {"NCCL_NET_OVERHEAD", "int -2..2147483647"},
    {"NCCL_NSOCKS_PERTHREAD NCCL_NVLS_NCHANNELS UCX_MAX_RNDV_RAILS", "int 1..64"},
    {"NCCL_NTHREADS", "64|128|256|512"},
    {"NCCL_P2P_LEVEL", "LOC|NVL|PIX|PXB|PHB|NODE|SYS|0|1|2|3|4|5"},
    {"NCCL_PROGRESS_APPENDOP_FREQ NCCL_SOCKET_RETRY_CNT", "int 1..1000000"},
    {"NCCL_SOCKET_NTHREADS", "int 1..16"},
    {"NCCL_SOCKET_POLL_TIMEOUT_MSEC", "int 0..3600000"},
    {"NCCL_SOCKET_RETRY_SLEEP_MSEC", "int 1..3600000"},
    {"NVSHMEM_ASSERT_ATOMICS_SYNC NVSHMEM_BOOTSTRAP_TWO_STAGE NVSHMEM_BYPASS_ACCESSIBILITY_CHECK NVSHMEM_BYPASS_FLUSH "
     "NVSHMEM_DISABLE_CUDA_VMM NVSHMEM_DISABLE_DATA_DIRECT NVSHMEM_DISABLE_GDRCOPY NVSHMEM_DISABLE_IB_NATIVE_ATOMICS "
     "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY NVSHMEM_DISABLE_MNNVL NVSHMEM_DISABLE_NCCL NVSHMEM_DISABLE_NVLS "
     "NVSHMEM_DISABLE_NVLS_SHARING NVSHMEM_DISABLE_P2P NVSHMEM_ENABLE_ERROR_CHECKS NVSHMEM_ENABLE_NIC_PE_MAPPING "
     "NVSHMEM_ENABLE_RAIL_OPT NVSHMEM_GPUNETIO_ENABLE_GDAKI NVSHMEM_IBGDA_ENABLE_MULTI_PORT NVSHMEM_IB_DISABLE_DMABUF "
     "NVSHMEM_IB_ENABLE_IBGDA NVSHMEM_IB_ENABLE_RELAXED_ORDERING NVSHMEM_IGNORE_CUDA_MPS_ACTIVE_THREAD_PERCENTAGE "
     "NVSHMEM_INFO NVSHMEM_INFO_HIDDEN NVSHMEM_TEAM_SHARED_ONLY_SELF", "bool"},
    {"NVSHMEM_BCAST_ALGO NVSHMEM_FCOLLECT_ALGO NVSHMEM_REDUCESCATTER_ALGO NVSHMEM_REDUCE_ALGO", "int 0..16"},
    {"NVSHMEM_BOOTSTRAP", "PMI|MPI|SHMEM|UID|plugin"},
    {"NVSHMEM_BOOTSTRAP_PMI", "PMI|PMI-2|PMIX"},
    {"NVSHMEM_CUDA_LIMIT_STACK_SIZE NVSHMEM_CUMEM_GRANULARITY NVSHMEM_FCOLLECT_LL128_THRESHOLD "
     "NVSHMEM_FCOLLECT_LL_THRESHOLD NVSHMEM_FCOLLECT_NVLS_THRESHOLD NVSHMEM_MAX_MEMORY_PER_GPU "
     "NVSHMEM_REDUCESCATTER_NVLS_THRESHOLD NVSHMEM_REDUCE_NVLS_THRESHOLD NVSHMEM_REDUCE_SCRATCH_SIZE "
     "NVSHMEM_SYMMETRIC_SIZE", "size"},
    {"NVSHMEM_CUMEM_HANDLE_TYPE", "FILE_DESCRIPTOR|FABRIC"},
    {"NVSHMEM_DEBUG", "none|VERSION|WARN|INFO|ABORT|TRACE"},
    {"NVSHMEM_DEBUG_ATTACH_DELAY", "int 0..86400"},
    {"NVSHMEM_HEAP_KIND", "DEVICE|SYSMEM|VIDMEM"},
    {"NVSHMEM_IBGDA_DCI_MAP_BY", "cta|sm|warp|dct"},
    {"NVSHMEM_IBGDA_FORCE_NIC_BUF_MEMTYPE", "auto|gpumem|hostmem"},
    {"NVSHMEM_IBGDA_NIC_HANDLER", "auto|gpu|cpu|cpu_host_memory"},
    {"NVSHMEM_IBGDA_NUM_DCI", "int -1..4096"},
    {"NVSHMEM_IBGDA_NUM_DCT NVSHMEM_IBGDA_NUM_SHARED_DCI NVSHMEM_MAX_CTAS NVSHMEM_MAX_P2P_GPUS "
     "NVSHMEM_MAX_PEER_STREAMS", "int 1..4096"},
    {"NVSHMEM_IBGDA_NUM_FETCH_SLOTS_PER_DCI NVSHMEM_IBGDA_NUM_FETCH_SLOTS_PER_RC NVSHMEM_SRQ_DEPTH", "int 1..1048576"},
    {"NVSHMEM_IBGDA_NUM_REQUESTS_IN_BATCH", "int 1..32768"},
    {"NVSHMEM_IBGDA_RC_MAP_BY", "cta|sm|warp"},
    {"NVSHMEM_LIBFABRIC_PROVIDER", "cxi|efa|verbs"},
    {"NVSHMEM_MAX_TEAMS NVSHMEM_PROXY_REQUEST_BATCH_MAX", "int 1..65536"},
    {"NVSHMEM_QP_DEPTH", "power 128..32768"},
    {"NVSHMEM_REDMAXLOC_ALGO", "int 1..3"},
    {"NVSHMEM_REMOTE_TRANSPORT", "ibrc|ucx|ibdevx|libfabric|none"},
    {"TORCH_NCCL_USE_COMM_NONBLOCKING", "0|1"},
    {0},
};
/* clang-format on */
