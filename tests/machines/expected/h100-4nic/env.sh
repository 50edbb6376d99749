# The environment of NVSHMEM, DeepEP and NCCL for h100-4nic, by 'epkit env'.
# Source it in sh, bash or zsh: '. ./FILE' or 'eval "$(epkit env)"'. It may be sourced again.

# NCCL would use all NICs, also those for management and storage, which are not in this list.
export NCCL_IB_HCA='=mlx5_0:1,mlx5_1:1,mlx5_4:1,mlx5_5:1'
