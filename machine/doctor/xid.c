/* SPDX-License-Identifier: Apache-2.0 */
/*
 * xid.c - relevant Xids, and what to do about them.
 *
 * Source: NVIDIA, "Xid Errors" (docs.nvidia.com/deploy/xid-errors), the catalogue with its column "immediate action"
 * for Ampere to Blackwell, and "GPU Memory Error Management" for 48, 63, 64, 94 and 95. 144 to 150 are those of NVLink
 * 5 (Blackwell), which replace 74. Numbers that the catalogue calls unused are left out.
 */
#include "xid.h"
#include "common/text.h"

#include <stddef.h>

/* Caused by a program, or without a meaning for the GPU's health. */
static const short ignored[][2] = {
    {8, 8},     {11, 14},   {25, 25},   {31, 32},   {37, 41},   {43, 45},   {60, 60},   {66, 72},
    {75, 77},   {80, 80},   {82, 86},   {88, 89},   {93, 93},   {96, 108},  {121, 121}, {126, 135},
    {137, 137}, {139, 139}, {141, 141}, {152, 153}, {160, 160}, {162, 164}, {171, 172},
};

static const struct xid xids[] = {
    {46, 46, XID_RESET, "the GPU stopped processing"},
    {48, 48, XID_RESET, "double bit ECC error"},
    {54, 54, XID_OTHER, "auxiliary power is not connected to the board"},
    {62, 62, XID_RESET, "internal micro-controller halt"},
    {63, 63, XID_RECOVERED, "a row of memory was remapped"},
    {64, 64, XID_RESET, "remapping a row of memory failed"},
    {74, 74, XID_LINK, "NVLink error"},
    {79, 79, XID_RESTART, "the GPU has fallen off the bus"},
    {92, 92, XID_RESET, "many single bit ECC errors"},
    {94, 94, XID_RECOVERED, "contained memory error"},
    {95, 95, XID_RESET, "uncontained memory error"},
    {109, 109, XID_RESET, "a context switch timed out"},
    {110, 110, XID_RESET, "security fault"},
    {119, 120, XID_RESET, "the GPU's own processor (GSP) does not answer"},
    {136, 136, XID_RESET, "training of the link to the processor failed"},
    {140, 140, XID_RESET, "unrecovered ECC error"},
    {143, 143, XID_RESET, "initialisation of the GPU failed"},
    {144, 144, XID_LINK, "NVLink error (SAW)"},
    {145, 145, XID_LINK, "NVLink error (RLW)"},
    {146, 146, XID_LINK, "NVLink error (TLW)"},
    {147, 147, XID_LINK, "NVLink error (TREX)"},
    {148, 148, XID_LINK, "NVLink error (NVLPW_CTRL)"},
    {149, 149, XID_LINK, "NVLink error (NETIR)"},
    {150, 150, XID_LINK, "NVLink error (MSE)"},
    {154, 154, XID_RECOVERED, "the driver waits for a recovery of the GPU"},
    {155, 155, XID_LINK, "NVLink error (defined by software)"},
    {156, 156, XID_RESET, "a part of the GPU has to be retired"},
    {158, 158, XID_RESET, "fatal timeout of the GPU"},
};

const struct xid *xid_find(int number)
{
    static const struct xid unknown = {0, 0, XID_OTHER, "see NVIDIA's Xid catalogue"};
    static const struct xid of_program = {0, 0, XID_OF_PROGRAM, "not a fault of the GPU"};

    for (size_t i = 0; i < COUNT(xids); i++)
        if (number >= xids[i].first && number <= xids[i].last)
            return &xids[i];
    for (size_t i = 0; i < COUNT(ignored); i++)
        if (number >= ignored[i][0] && number <= ignored[i][1])
            return &of_program;
    return &unknown;
}

const char *xid_action_text(enum xid_action action)
{
    switch (action) {
    case XID_RESTART:
        return "A reset is not sufficient for this GPU: drain the node and restart it, with a power cycle if possible; "
               "stop and start a virtual machine.";
    case XID_LINK:
        return "The fault is on an NVLink: stop the programs on the GPUs at both ends, reset them together, and check "
               "nvidia-smi nvlink --status and the switches' SXids if it comes back.";
    case XID_RESET:
    case XID_OTHER:
        return "A reset ends every program on the GPU and on those connected to it by NVLink.";
    case XID_OF_PROGRAM:
    case XID_RECOVERED:
        break;
    }
    return "";
}
