/* SPDX-License-Identifier: Apache-2.0 */
/*
 * module.h - what the command needs from libepkit-cuda.so in addition to the backend: device memory, a clock in the
 * stream, and baselines. The command loads the table on demand, so it does not link CUDA. Engines use CUDA's own calls
 * and epkit/cuda.h instead.
 *
 * Communicators are of the backend cuda; every call works on their device. Threads: as for calls on a communicator.
 */
#ifndef EP_CUDA_MODULE_H
#define EP_CUDA_MODULE_H

#include <epkit/comm.h>

/* An address in a rank's symmetric memory, in a form that can be sent to a peer. */
struct ep_cuda_address {
    unsigned char bytes[16];
};

#define EP_CUDA_GPUS 32 /* at most so many are reported: the ranks that a node of this backend can have */

/* The GPUs of a process. Rank r of a node takes GPU r modulo `visible`, unless its configuration names one. */
struct ep_cuda_gpus {
    int32_t visible;                /* GPUs visible to this process, up to EP_CUDA_GPUS */
    int32_t usable;                 /* of them, how many from the first on the kernels support */
    int32_t connected;              /* of those, how many from the first on have P2P with each other */
    char address[EP_CUDA_GPUS][20]; /* of all visible GPUs: "0000:1b:00.0", as in /sys/bus/pci/devices */
    char why[192];                  /* why `connected` is less than `visible`; "" if it is not */
};

struct ep_cuda_module {
    uint32_t abi; /* EP_CUDA_MODULE_ABI */
    /*
     * The GPUs for ranks of this process. EP_E_UNSUPPORTED if none is visible or CUDA does not work. Initialises CUDA
     * in this process, which must not fork ranks afterwards: a launcher calls this in a child.
     */
    ep_status (*query_gpus)(struct ep_cuda_gpus *ret_gpus);
    /* "NVIDIA H200". */
    ep_status (*device_name)(ep_comm *comm, char *ret_name, size_t bytes);

    /* Device memory. Every call is complete when it returns; copy works in any direction, host included. */
    ep_status (*alloc)(ep_comm *comm, size_t bytes, void **ret_memory);
    void (*free)(ep_comm *comm, void *memory);
    ep_status (*copy)(ep_comm *comm, void *to, const void *from, size_t bytes);
    ep_status (*fill)(ep_comm *comm, void *to, int byte, size_t bytes);

    /*
     * Timestamps in the default stream: start and stop return at once, read waits until the stream has reached both.
     * `queued`: start first fills more memory than the cache holds, so that what follows is queued before it runs, as
     * in a running model. Otherwise the device is idle, and the launch is part of the time.
     */
    ep_status (*clock_start)(ep_comm *comm, int queued);
    ep_status (*clock_stop)(ep_comm *comm);
    ep_status (*clock_read)(ep_comm *comm, uint64_t *ret_ns);

    /* Multiprocessors of an operation; 0 sets the default. They affect every measurement, so reports name them. */
    ep_status (*set_sms)(ep_comm *comm, int sms);
    ep_status (*get_sms)(ep_comm *comm, int low_latency, int *ret_sms);
    /*
     * Moves the rows of the last dispatch or combine (1) again, without plan and waits, on the buffers of that
     * operation, which are unchanged and, where peers access them, from ep_alloc(). This is the practical limit that a
     * whole operation is compared with. Queued in the stream of that call.
     */
    ep_status (*repeat_bare)(ep_comm *comm, int combine);

    /* Symmetric memory of a peer: its owner gets the address and sends it by an all-gather; the other rank maps it. */
    ep_status (*get_address)(ep_comm *comm, const void *memory, size_t bytes, struct ep_cuda_address *ret_address);
    ep_status (*map_address)(ep_comm *comm, int rank, const struct ep_cuda_address *address, void **ret_memory);
    /* A copy by the copy engine in a stream of its own (0..EP_CUDA_COPY_STREAMS-1), after the work in the default
     * stream. */
    ep_status (*engine_copy)(ep_comm *comm, int copy_stream, void *to, const void *from, size_t bytes);
    /* Makes the default stream wait for the copies in all copy streams. */
    ep_status (*engine_join)(ep_comm *comm);
};

#define EP_CUDA_MODULE_ABI 2u
#define EP_CUDA_COPY_STREAMS 8
#define EP_CUDA_MODULE_SYMBOL "ep_cuda_module" /* const struct ep_cuda_module */

#endif
