/* SPDX-License-Identifier: Apache-2.0 */
/* xid.h - what to do about an Xid of the NVIDIA driver. */
#ifndef EP_DOCTOR_XID_H
#define EP_DOCTOR_XID_H

enum xid_action {
    XID_OF_PROGRAM, /* caused by a program, or a note: says nothing about the GPU's health */
    XID_RECOVERED,  /* the driver has recovered; NVML reports what remains to be done */
    XID_RESET,      /* reset the GPU */
    XID_RESTART,    /* restart the node: a reset of the GPU is not sufficient */
    XID_LINK,       /* an NVLink: reset the GPUs at both ends, then inspect the link */
    XID_OTHER       /* not in the table */
};

struct xid {
    int first, last; /* numbers */
    enum xid_action action;
    const char *text; /* a phrase */
};

/* The row of an Xid; for an unknown number, a row that says so. */
const struct xid *xid_find(int number);

/* What to do, a sentence that includes its side effects. */
const char *xid_action_text(enum xid_action action);

#endif
