# SPDX-License-Identifier: Apache-2.0
"""NCCL is not used here."""


def get_nccl_comm_handle(group, force_new_comm=False):
    raise NotImplementedError("deep_ep on epkit makes no NCCL communicator: hand the process group to Buffer or "
                              "ElasticBuffer, or use epkit.Communicator")
