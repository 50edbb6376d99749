# The environment of NVSHMEM, DeepEP and NCCL for vm-flat, by 'epkit env'.
# Source it in sh, bash or zsh: '. ./FILE' or 'eval "$(epkit env)"'. It may be sourced again.
# Nothing has to be set here.
