/* SPDX-License-Identifier: Apache-2.0 */
/* xid.h - what an Xid of the NVIDIA driver asks for. */
#ifndef EP_DOCTOR_XID_H
#define EP_DOCTOR_XID_H

enum xid_action {
    XID_OF_PROGRAM, /* a program did it: start that again, and look at it */
    XID_NOTE,       /* it says nothing of the GPU's health */
    XID_RECOVERED,  /* the driver has dealt with it; what remains is said by NVML */
    XID_RESET,      /* reset the GPU */
    XID_RESTART,    /* restart the node: a reset does not reach the GPU */
    XID_LINK,       /* an NVLink: reset the GPUs at both ends, then look at the link */
    XID_OTHER       /* not in the table */
};

struct xid {
    int first, last; /* numbers */
    enum xid_action action;
    const char *text; /* a phrase */
};

/* The row of an Xid; for one that is not known a row that says so. */
const struct xid *xid_find(int number);

/* What to do, a sentence with what it costs. */
const char *xid_action_text(enum xid_action action);

#endif
