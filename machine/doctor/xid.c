/* SPDX-License-Identifier: Apache-2.0 */
/*
 * xid.c - relevant Xids, and what to do about them.
 *
 * Source: NVIDIA, "Xid Errors" (docs.nvidia.com/deploy/xid-errors), the catalogue with its column "immediate action"
 * for Ampere to Blackwell, and "GPU Memory Error Management" for 48, 63, 64, 94 and 95. 144 to 150 are those of NVLink
 * 5 (Blackwell), which replace 74. Numbers that the catalogue calls unused are left out.
 */
#include "xid.h"

#include <stddef.h>

static const struct xid xids[] = {
    {8, 8, XID_OF_PROGRAM, "the GPU stopped processing"},
    {11, 11, XID_OF_PROGRAM, "invalid or corrupted push buffer stream"},
    {12, 12, XID_OF_PROGRAM, "exception of the driver for a program"},
    {13, 13, XID_OF_PROGRAM, "exception of the graphics engine"},
    {14, 14, XID_NOTE, "a test of the driver"},
    {25, 25, XID_OF_PROGRAM, "invalid push buffer stream"},
    {31, 31, XID_OF_PROGRAM, "page fault of a program"},
    {32, 32, XID_OF_PROGRAM, "invalid or corrupted push buffer stream"},
    {37, 38, XID_OF_PROGRAM, "exception of the driver for a program"},
    {39, 41, XID_OF_PROGRAM, "exception of a copy engine"},
    {43, 43, XID_OF_PROGRAM, "a program was stopped"},
    {44, 44, XID_OF_PROGRAM, "fault of a program during a context switch"},
    {45, 45, XID_OF_PROGRAM, "a program was cleaned up"},
    {46, 46, XID_RESET, "the GPU stopped processing"},
    {48, 48, XID_RESET, "double bit ECC error"},
    {54, 54, XID_OTHER, "auxiliary power is not connected to the board"},
    {60, 60, XID_OF_PROGRAM, "exception of a video engine"},
    {62, 62, XID_RESET, "internal micro-controller halt"},
    {63, 63, XID_RECOVERED, "a row of memory was remapped"},
    {64, 64, XID_RESET, "remapping a row of memory failed"},
    {66, 67, XID_OF_PROGRAM, "illegal access by the driver for a program"},
    {68, 68, XID_OF_PROGRAM, "exception of a video engine"},
    {69, 69, XID_OF_PROGRAM, "exception of the graphics engine class"},
    {70, 72, XID_OF_PROGRAM, "exception of a copy engine"},
    {74, 74, XID_LINK, "NVLink error"},
    {75, 77, XID_OF_PROGRAM, "exception of a copy engine"},
    {79, 79, XID_RESTART, "the GPU has fallen off the bus"},
    {80, 80, XID_OF_PROGRAM, "corrupted push buffer"},
    {82, 84, XID_OF_PROGRAM, "exception of a video engine"},
    {85, 85, XID_OF_PROGRAM, "exception of a copy engine"},
    {86, 86, XID_OF_PROGRAM, "exception of the optical flow engine"},
    {88, 89, XID_OF_PROGRAM, "exception of a video engine"},
    {92, 92, XID_RESET, "many single bit ECC errors"},
    {93, 93, XID_NOTE, "the InfoROM was written more often than planned"},
    {94, 94, XID_RECOVERED, "contained memory error"},
    {95, 95, XID_RESET, "uncontained memory error"},
    {96, 105, XID_OF_PROGRAM, "exception of a video engine"},
    {106, 107, XID_NOTE, "a test message of the management bus"},
    {108, 108, XID_OF_PROGRAM, "denied access of a program over NVLink"},
    {109, 109, XID_RESET, "a context switch timed out"},
    {110, 110, XID_RESET, "security fault"},
    {119, 120, XID_RESET, "the GPU's own processor (GSP) does not answer"},
    {121, 121, XID_NOTE, "corrected error of the link to the processor"},
    {126, 135, XID_OF_PROGRAM, "exception of a copy engine"},
    {136, 136, XID_RESET, "training of the link to the processor failed"},
    {137, 137, XID_OF_PROGRAM, "denied access of a program over NVLink"},
    {139, 139, XID_OF_PROGRAM, "exception of the optical flow engine"},
    {140, 140, XID_RESET, "unrecovered ECC error"},
    {141, 141, XID_OF_PROGRAM, "error of CUDA's fast path"},
    {143, 143, XID_RESET, "initialisation of the GPU failed"},
    {144, 144, XID_LINK, "NVLink error (SAW)"},
    {145, 145, XID_LINK, "NVLink error (RLW)"},
    {146, 146, XID_LINK, "NVLink error (TLW)"},
    {147, 147, XID_LINK, "NVLink error (TREX)"},
    {148, 148, XID_LINK, "NVLink error (NVLPW_CTRL)"},
    {149, 149, XID_LINK, "NVLink error (NETIR)"},
    {150, 150, XID_LINK, "NVLink error (MSE)"},
    {152, 153, XID_OF_PROGRAM, "error of the deep learning accelerator"},
    {154, 154, XID_RECOVERED, "the driver waits for a recovery of the GPU"},
    {155, 155, XID_LINK, "NVLink error (defined by software)"},
    {156, 156, XID_RESET, "a part of the GPU has to be retired"},
    {158, 158, XID_RESET, "fatal timeout of the GPU"},
    {160, 160, XID_NOTE, "a channel was retired"},
    {162, 164, XID_NOTE, "power smoothing"},
    {171, 172, XID_NOTE, "details of an uncorrectable error, which 48 reports"},
};

const struct xid *xid_find(int number)
{
    static const struct xid unknown = {0, 0, XID_OTHER, "see NVIDIA's Xid catalogue"};

    for (size_t i = 0; i < sizeof(xids) / sizeof(xids[0]); i++)
        if (number >= xids[i].first && number <= xids[i].last)
            return &xids[i];
    return &unknown;
}

const char *xid_action_text(enum xid_action action)
{
    switch (action) {
    case XID_RESTART:
        return "A reset is not sufficient for this GPU: drain the node and restart it, with a power cycle if "
               "possible; stop and start a virtual machine.";
    case XID_LINK:
        return "The fault is on an NVLink: stop the programs on the GPUs at both ends, reset them together, and check "
               "nvidia-smi nvlink --status and the switches' SXids if it comes back.";
    case XID_RESET:
    case XID_OTHER:
        return "A reset ends every program on the GPU and on those connected to it by NVLink.";
    case XID_OF_PROGRAM:
    case XID_NOTE:
    case XID_RECOVERED:
        break;
    }
    return "";
}
