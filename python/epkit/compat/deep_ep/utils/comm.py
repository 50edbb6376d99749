# SPDX-License-Identifier: Apache-2.0
"""NCCL is not used here."""
from typing import Any, NoReturn


def get_nccl_comm_handle(group: Any, force_new_comm: bool = False) -> NoReturn:
    raise NotImplementedError("deep_ep on epkit makes no NCCL communicator: hand the process group to Buffer or "
                              "ElasticBuffer, or use epkit.Communicator")
