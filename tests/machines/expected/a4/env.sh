# The environment of NVSHMEM, DeepEP and NCCL for a4, by 'epkit env'.
# Source it in sh, bash or zsh: '. ./FILE' or 'eval "$(epkit env)"'. It may be sourced again.
_epkit_prepend() {
    _epkit_path=":$2:"
    case $_epkit_path in
    *":$1:"*) _epkit_path=${_epkit_path%%":$1:"*}:${_epkit_path#*":$1:"} ;;
    esac
    _epkit_path=${_epkit_path#:}
    _epkit_path=${_epkit_path%:}
    _epkit_path=$1${_epkit_path:+:$_epkit_path}
}

# The switch for IBGDA; its transport is /opt/deepep/nvshmem/lib/nvshmem_transport_ibgda.so.3.
export NVSHMEM_IB_ENABLE_IBGDA='1'

# GPUs ring the NICs' doorbells themselves; the CPU as handler needs GDRCopy, and dispatches have been seen to hang with
# it.
export NVSHMEM_IBGDA_NIC_HANDLER='gpu'

# It counts PEs per NVSHMEM job; DeepEP makes a job for each GPU of a node, so all of them would take the first NIC.
unset NVSHMEM_ENABLE_NIC_PE_MAPPING

# DeepEP in /opt/deepep/python/deep_ep makes NVSHMEM_HCA_LIST of it for each of its processes, also where a program
# starts its ranks itself.
export DEEP_EP_DEVICE_TO_HCA_MAPPING='0:mlx5_0:1,1:mlx5_1:1,2:mlx5_2:1,3:mlx5_3:1,4:mlx5_4:1,5:mlx5_5:1,6:mlx5_6:1,7:mlx5_7:1'

# The network plugin of Google Cloud, which is installed here.
export NCCL_NET='gIB'

# gIB expects it: the network is built in rails, one for each NIC.
export NCCL_CROSS_NIC='0'

# gIB expects it: a GPU uses the NICs on its own PCIe switch.
export NCCL_NET_GDR_LEVEL='PIX'

# gIB expects it: bytes of a message of send and receive.
export NCCL_P2P_NET_CHUNKSIZE='131072'

# gIB expects it: bytes of a piece of a reduction in the NVLink switch.
export NCCL_NVLS_CHUNKSIZE='524288'

# gIB expects it: packets may take several paths; off by default on RoCE.
export NCCL_IB_ADAPTIVE_ROUTING='1'

# gIB expects it: several queue pairs take several paths.
export NCCL_IB_QPS_PER_CONNECTION='4'

# gIB expects it: the traffic class of data.
export NCCL_IB_TC='52'

# gIB expects it: the traffic class of control messages.
export NCCL_IB_FIFO_TC='84'

# What gIB's tuner knows about this type of machine.
export NCCL_TUNER_CONFIG_PATH='/usr/local/gib/configs/tuner_config_a4.txtpb'

# gIB's shim wants it unset, with any value, and stops with a mismatch otherwise.
unset TORCH_NCCL_USE_COMM_NONBLOCKING

# /usr/lib/x86_64-linux-gnu: libibverbs and its provider from one set; /opt/deepep/nvshmem/lib: NVSHMEM with its
# transports; /usr/local/gib/lib64: gIB's plugin, which NCCL looks for by its name.
_epkit_prepend '/usr/lib/x86_64-linux-gnu:/opt/deepep/nvshmem/lib:/usr/local/gib/lib64' "${LD_LIBRARY_PATH-}"
export LD_LIBRARY_PATH="$_epkit_path"

# PyTorch brings NVSHMEM 3.4.5, which would be loaded first; DeepEP is made for 3.5.19.
# It is not exported: shells, launchers and ssh would load it too. 'epkit_preload PROGRAM' starts one program with it.
# EPKIT_PRELOAD tells child shells and 'epkit doctor' that this is arranged.
export EPKIT_PRELOAD='/opt/deepep/nvshmem/lib/libnvshmem_host.so.3'
epkit_preload() {
    case ${1##*/} in
    mpirun | mpiexec | orterun | prterun | srun | ssh | torchrun)
        echo "epkit_preload: ${1##*/} would load it too; put 'epkit env --' in front of the program that it starts" >&2
        "$@"
        ;;
    *) env LD_PRELOAD="$EPKIT_PRELOAD${LD_PRELOAD:+:$LD_PRELOAD}" "$@" ;;
    esac
}

# Python does not find this deep_ep without it.
_epkit_prepend '/opt/deepep/python' "${PYTHONPATH-}"
export PYTHONPATH="$_epkit_path"

# These differ from rank to rank, and a rank is known by the variables of its launcher: torchrun, Open MPI, Intel MPI,
# PMI, Slurm. Where this script is read before the ranks are started they stay as they are; start each rank with 'epkit
# env -- PROGRAM' instead, between the launcher and the program. A program that starts its ranks itself needs
# DEEP_EP_DEVICE_TO_HCA_MAPPING, where its DeepEP reads that, or has to set them before it initialises NVSHMEM.
_epkit_rank='' _epkit_size=''
if [ -n "${LOCAL_RANK-}" ]; then
    _epkit_rank=$LOCAL_RANK _epkit_size=${LOCAL_WORLD_SIZE-}
elif [ -n "${OMPI_COMM_WORLD_LOCAL_RANK-}" ]; then
    _epkit_rank=$OMPI_COMM_WORLD_LOCAL_RANK _epkit_size=${OMPI_COMM_WORLD_LOCAL_SIZE-}
elif [ -n "${MPI_LOCALRANKID-}" ]; then
    _epkit_rank=$MPI_LOCALRANKID _epkit_size=${MPI_LOCALNRANKS-}
elif [ -n "${PMI_LOCAL_RANK-}" ]; then
    _epkit_rank=$PMI_LOCAL_RANK _epkit_size=${PMI_LOCAL_SIZE-}
elif [ -n "${SLURM_LOCALID-}" ] && [ -n "${SLURM_STEP_TASKS_PER_NODE-}" ]; then
    _epkit_rank=$SLURM_LOCALID _epkit_size=${SLURM_STEP_TASKS_PER_NODE-}
fi
# A launcher that starts one process on a node starts a program that starts its ranks itself. They would
# inherit one NIC, so nothing is set then.
while [ -n "$_epkit_size" ]; do
    _epkit_part=${_epkit_size%%,*}
    [ "${_epkit_part%%"("*}" = 1 ] || break
    case $_epkit_size in
    *,*) _epkit_size=${_epkit_size#*,} ;;
    *) _epkit_size='' _epkit_rank='' ;;
    esac
done
_epkit_gpu=$_epkit_rank
case $_epkit_rank:${CUDA_VISIBLE_DEVICES-} in
: | :* | *[!0-9]*:*) _epkit_gpu='' ;;
*:) ;;
# By UUID, which 'epkit env -- PROGRAM' can translate.
*:*[!0-9,]*) _epkit_gpu='' ;;
*:*,*)
    _epkit_gpu=$CUDA_VISIBLE_DEVICES,
    while [ "$_epkit_rank" -gt 0 ] && [ -n "$_epkit_gpu" ]; do
        _epkit_gpu=${_epkit_gpu#*,}
        _epkit_rank=$((_epkit_rank - 1))
    done
    _epkit_gpu=${_epkit_gpu%%,*}
    ;;
*) _epkit_gpu=$CUDA_VISIBLE_DEVICES ;;
esac
# With a single candidate NVSHMEM has nothing to choose: each rank has the NIC nearest to its GPU for itself.
case $_epkit_gpu in
0) export NVSHMEM_HCA_LIST='mlx5_0:1' ;;
1) export NVSHMEM_HCA_LIST='mlx5_1:1' ;;
2) export NVSHMEM_HCA_LIST='mlx5_2:1' ;;
3) export NVSHMEM_HCA_LIST='mlx5_3:1' ;;
4) export NVSHMEM_HCA_LIST='mlx5_4:1' ;;
5) export NVSHMEM_HCA_LIST='mlx5_5:1' ;;
6) export NVSHMEM_HCA_LIST='mlx5_6:1' ;;
7) export NVSHMEM_HCA_LIST='mlx5_7:1' ;;
esac
unset _epkit_rank _epkit_size _epkit_part _epkit_gpu
unset _epkit_path
unset -f _epkit_prepend
