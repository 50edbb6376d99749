/* SPDX-License-Identifier: Apache-2.0 */
/* help_text.h - the help text of `epkit launch`. */
#ifndef EP_LAUNCH_HELP_TEXT_H
#define EP_LAUNCH_HELP_TEXT_H

#define LAUNCH_DESCRIPTION                                                                                                               \
    "Runs a program on many nodes at once, with its output here and in a log for each node, and says which node "                        \
    "failed and why. Nothing waits for ever, and nothing is left running: not when a node is lost, not when epkit "                      \
    "is interrupted or killed.\n"                                                                                                        \
    "\n"                                                                                                                                 \
    "Jobs: hostname; epkit-test MATRIX; deepep-intranode, deepep-internode, deepep-lowlatency, deepep-v2 (DeepEP's own tests "           \
    "where they are installed, 2048 tokens, hidden 7168, 256 experts, top-8; 128 tokens for lowlatency); nccl "                          \
    "TEST (nccl-tests, -b 2M -e 16G -f 2 -n 1 -g 1 -w 10); nccl-init; ib-write-bw [DEVICE...] (-F, on RoCE -x 3, neighbours "            \
    "in pairs: the NICs that carry data, by 'epkit topo', or those named). "                                                             \
    "Anything else is a program. They begin with 'epkit doctor' on all nodes. To give options "                                          \
    "to the program, put -- in front of it.\n"                                                                                           \
    "\n"                                                                                                                                 \
    "Without --hosts and --hostfile the nodes come from the environment: JobSet (JOBSET_NAME, NNODES, "                                  \
    "JOB_COMPLETION_INDEX; REPLICATED_JOB_NAME and JOB_INDEX if not workload and 0), LeaderWorkerSet, pods of a "                        \
    "chart (HOSTNAME_PREFIX, DOMAIN_NAME), an Indexed Job with a headless service, Slurm, a hostfile of MPI or "                         \
    "PBS, or /etc/job-worker-services.txt. In pods and in tasks of srun every instance runs the command; the "                           \
    "first one does the work, the others wait for its exit code (pods) or end at once (tasks).\n"                                        \
    "\n"                                                                                                                                 \
    "All nodes are contacted at once by ssh with your configuration, without passwords. A node that does not answer "                    \
    "is reported with the layer that failed: DNS, TCP, banner, authentication, command, epkit, version, disk. Then "                     \
    "they are sorted by physical location; nodes without one come last. The first one is rank 0 and MASTER_ADDR, and "                   \
    "the first in the hostfiles.\n"                                                                                                      \
    "\n"                                                                                                                                 \
    "Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, NNODES, GPUS_PER_NODE, "                                  \
    "MASTER_ADDR, MASTER_PORT, the variables of -x and of the scripts of --source, and otherwise the environment of a "                  \
    "login by ssh. In pods NCCL_*, NVSHMEM_*, DEEP_EP_*, UCX_*, LD_LIBRARY_PATH, PYTHONPATH, PATH, "                                     \
    "VIRTUAL_ENV, CUDA_HOME and HF_TOKEN are passed on as well. A library that is preloaded here is preloaded into the program alone.\n" \
    "\n"                                                                                                                                 \
    "When a rank fails, all others are ended, and epkit returns its exit status. The folder of the run contains "                        \
    "testbed-logs/run.json, coordinator.log and a worker-HOST.log for each node. Without --out it is new and only its "                  \
    "owner's. Links of other users in the path of --out are refused, and so is a testbed-logs that is a link or in which "               \
    "every user may write."

#endif
