/* SPDX-License-Identifier: Apache-2.0 */
/*
 * module.h - what the command wants of libepkit-cuda.so beside its backend: device memory for its data, a clock on the
 * stream, and baselines. The command finds the table on demand, so that it needs no CUDA itself. Engines use CUDA's
 * own calls and epkit/cuda.h instead.
 *
 * Communicators are of the backend cuda; everything happens on their device. Threads: as the calls on a communicator.
 */
#ifndef EP_CUDA_MODULE_H
#define EP_CUDA_MODULE_H

#include <epkit/comm.h>

/* A place in a rank's symmetric memory, as it travels to a peer. */
struct ep_cuda_address {
    unsigned char bytes[16];
};

#define EP_CUDA_GPUS 32 /* more are not told of; as many ranks as a group of this backend can have */

/* The GPUs of a process. Rank r of a node takes GPU r modulo `visible`, unless its configuration names one. */
struct ep_cuda_gpus {
    int32_t visible;   /* GPUs that CUDA shows to this process, up to EP_CUDA_GPUS */
    int32_t usable;    /* so many of them, from the first on, are of a kind that the kernels are made for */
    int32_t connected; /* so many of those, from the first on, reach each other (P2P) */
    char address[EP_CUDA_GPUS][20]; /* "0000:1b:00.0", as below /sys/bus/pci/devices; of all that are visible */
    char why[192];                  /* why `connected` is less than `visible`; "" where it is not */
};

struct ep_cuda_module {
    uint32_t abi; /* EP_CUDA_MODULE_ABI */
    /*
     * Which GPUs there are for ranks of this process. EP_E_UNSUPPORTED where none is visible, or CUDA does not work.
     * Starts CUDA in this process, which must not fork ranks afterwards: a launcher asks in a child.
     */
    ep_status (*query_gpus)(struct ep_cuda_gpus *ret_gpus);
    /* "NVIDIA H200". */
    ep_status (*device_name)(ep_comm *comm, char *ret_name, size_t bytes);

    /* Memory of the device. Every call is complete when it returns; copy goes in any direction, host included. */
    ep_status (*alloc)(ep_comm *comm, size_t bytes, void **ret_memory);
    void (*free)(ep_comm *comm, void *memory);
    ep_status (*copy)(ep_comm *comm, void *to, const void *from, size_t bytes);
    ep_status (*fill)(ep_comm *comm, void *to, int byte, size_t bytes);

    /*
     * Marks in CUDA's default stream: start and stop return at once, read waits until the stream is there.
     * `queued`: the first mark comes behind a fill of more memory than the cache holds, so that what follows is waiting
     * in the stream when its turn comes, as in a running model; else on an idle device, where the launch counts.
     */
    ep_status (*clock_start)(ep_comm *comm, int queued);
    ep_status (*clock_stop)(ep_comm *comm);
    ep_status (*clock_read)(ep_comm *comm, uint64_t *ret_ns);

    /* Multiprocessors of an operation: 0 sets the default. Never without effect on a measurement, so told beside it. */
    ep_status (*set_sms)(ep_comm *comm, int sms);
    ep_status (*get_sms)(ep_comm *comm, int low_latency, int *ret_sms);
    /* The rows of the last dispatch or combine once more, without plan and waits. Queued in the stream of the last
     * call. */
    ep_status (*repeat_bare)(ep_comm *comm, int combine);

    /* Symmetric memory of a peer: it offers a place, which reaches the other rank by an all-gather, and is mapped. */
    ep_status (*get_address)(ep_comm *comm, const void *memory, size_t bytes, struct ep_cuda_address *ret_address);
    ep_status (*map_address)(ep_comm *comm, int rank, const struct ep_cuda_address *address, void **ret_memory);
    /* A copy by the copy engine in stream `lane` (0..EP_CUDA_COPY_STREAMS-1), behind what the default stream holds. */
    ep_status (*engine_copy)(ep_comm *comm, int copy_stream, void *to, const void *from, size_t bytes);
    /* What the default stream gets next comes behind the copies of all lanes. */
    ep_status (*engine_join)(ep_comm *comm);
};

#define EP_CUDA_MODULE_ABI 2u
#define EP_CUDA_COPY_STREAMS 8
#define EP_CUDA_MODULE_SYMBOL "ep_cuda_module" /* const struct ep_cuda_module */

/*
 * For measurements: with 1, dispatch and combine move their rows without waiting for the peers and without telling
 * them, in any number of repetitions `repeat`, on the buffers of the last operation of the same kind, which must be
 * unchanged and, on all ranks, of ep_alloc() where peers reach them. The practical limit that a whole operation is
 * compared with. Returns when queued in the stream.
 */
EP_API ep_status ep_cuda_repeat_bare(ep_comm *comm, int combine, int repeat);

#endif
