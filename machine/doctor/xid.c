/* SPDX-License-Identifier: Apache-2.0 */
/*
 * xid.c - the Xids that matter, and what to do about them.
 *
 * Source: NVIDIA, "Xid Errors" (docs.nvidia.com/deploy/xid-errors), the catalogue with its column "immediate action"
 * for Ampere to Blackwell, and "GPU Memory Error Management" for 48, 63, 64, 94 and 95. 144 to 150 are those of
 * NVLink 5 (Blackwell), which take the place of 74.
 */
#include "doctor/xid.h"

#include <stddef.h>

static const struct xid xids[] = {
    {8, XID_OF_PROGRAM, "the GPU stopped processing"},
    {11, XID_OF_PROGRAM, "invalid or corrupted push buffer stream"},
    {12, XID_OF_PROGRAM, "exception of the driver for a program"},
    {13, XID_OF_PROGRAM, "exception of the graphics engine"},
    {31, XID_OF_PROGRAM, "page fault of a program"},
    {32, XID_OF_PROGRAM, "invalid or corrupted push buffer stream"},
    {37, XID_OF_PROGRAM, "exception of the driver for a program"},
    {43, XID_OF_PROGRAM, "a program was stopped"},
    {45, XID_OF_PROGRAM, "a program was cleaned up"},
    {48, XID_RESET, "double bit ECC error"},
    {62, XID_RESET, "internal micro-controller halt"},
    {63, XID_RECOVERED, "a row of memory was remapped"},
    {64, XID_RESET, "remapping a row of memory failed"},
    {66, XID_OF_PROGRAM, "illegal access by the driver for a program"},
    {69, XID_OF_PROGRAM, "exception of the graphics engine class"},
    {74, XID_LINK, "NVLink error"},
    {79, XID_RESTART, "the GPU has fallen off the bus"},
    {92, XID_RESET, "many single bit ECC errors"},
    {94, XID_RECOVERED, "contained memory error"},
    {95, XID_RESET, "uncontained memory error"},
    {109, XID_RESET, "a context switch timed out"},
    {110, XID_RESTART, "security fault"},
    {119, XID_RESET, "the GPU's own processor (GSP) does not answer"},
    {120, XID_RESET, "the GPU's own processor (GSP) does not answer"},
    {136, XID_RESET, "training of the link to the processor failed"},
    {140, XID_RESET, "unrecovered ECC error"},
    {143, XID_RESET, "initialisation of the GPU failed"},
    {144, XID_LINK, "NVLink error (SAW)"},
    {145, XID_LINK, "NVLink error (RLW)"},
    {146, XID_LINK, "NVLink error (TLW)"},
    {147, XID_LINK, "NVLink error (TREX)"},
    {148, XID_LINK, "NVLink error (NVLPW_CTRL)"},
    {149, XID_LINK, "NVLink error (NETIR)"},
    {150, XID_LINK, "NVLink error (MSE)"},
    {154, XID_RECOVERED, "the driver waits for a recovery of the GPU"},
};

const struct xid *xid_find(int number)
{
    static const struct xid unknown = {0, XID_OTHER, "see NVIDIA's Xid catalogue"};

    for (size_t i = 0; i < sizeof(xids) / sizeof(xids[0]); i++)
        if (xids[i].number == number)
            return &xids[i];
    return &unknown;
}

const char *xid_action_text(enum xid_action action)
{
    switch (action) {
    case XID_RESTART:
        return "A reset does not reach this GPU: drain the node and restart it, with its power off for a moment where "
               "that is possible; a virtual machine is to be stopped and started.";
    case XID_LINK:
        return "The fault is on an NVLink: stop the programs on the GPUs at both ends, reset them together, and look "
               "at nvidia-smi nvlink --status and at the switches' SXids if it comes back.";
    case XID_RESET:
    case XID_OTHER:
        return "A reset ends every program on the GPU and on those that NVLink ties to it.";
    case XID_OF_PROGRAM:
    case XID_RECOVERED:
        break;
    }
    return "";
}
