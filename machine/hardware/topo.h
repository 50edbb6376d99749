/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topo.h - the hardware of a machine that matters for communication: PCI tree, GPUs, NICs, NUMA nodes.
 *
 * It is read once from a source (source.h) into plain arrays. Strings belong to the source and are never NULL; "" is
 * unknown, as is -1 unless stated otherwise. Counts are bounded by the constants below: a larger topology is truncated,
 * and `topo.cut` is set.
 */
#ifndef EP_TOPO_TOPO_H
#define EP_TOPO_TOPO_H

#include "machine/source/source.h"

#define TOPO_MAX_PCI 8192
#define TOPO_MAX_GPUS 64
#define TOPO_MAX_NICS 128
#define TOPO_MAX_PORTS 4  /* of a NIC */
#define TOPO_MAX_GIDS 256 /* of a port, those that are not empty */
#define TOPO_MAX_NUMA 64
#define TOPO_MAX_CPUS 8192
#define TOPO_MAX_NVLINKS 36 /* of a GPU */

#define PCI_VENDOR_MELLANOX 0x15b3 /* of NVIDIA's NICs */
#define PCI_VENDOR_NVIDIA 0x10de
#define PCI_VENDOR_AMAZON 0x1d0f

/*
 * The path between two devices, in the terms of `nvidia-smi topo -m`, ordered by distance.
 *     NV#   NVLink (GPUs only)
 *     PIX   through at most one PCIe switch ("a single PCIe bridge"; NVML_TOPOLOGY_SINGLE)
 *     PXB   through several PCIe switches, no host bridge
 *     PHB   through a PCIe host bridge
 *     NODE  between host bridges of one NUMA node
 *     SYS   between NUMA nodes
 */
enum topo_path { TOPO_SELF, TOPO_NVLINK, TOPO_PIX, TOPO_PXB, TOPO_PHB, TOPO_NODE, TOPO_SYS };

/* GPUs, network controllers, other devices with an RDMA device, and the bridges above them. */
struct topo_pci {
    char address[20];                    /* "0000:0f:00.0"; lower case */
    unsigned vendor, device, class_code; /* of 16, 16 and 24 bits */
    int parent;                          /* index of the bridge above it, -1 directly below a host bridge */
    int host_bridge;                /* 0, 1, ... in the order of their names (pci0000:00); -1 if it is not in sysfs */
    int numa_node;                  /* -1 unknown */
    int declared_switch;            /* number of the PCIe switch above it by topology_file; 0 none */
    const char *local_cpus;         /* as in sysfs: "0-55,112-167" */
    double link_gts, link_gts_max;  /* 10^9 transfers per second and lane: 32 is PCIe 5; 0 unknown */
    int link_width, link_width_max; /* lanes; 0 unknown */
    const char *driver;
};

struct topo_gpu {
    /*
     * The number of NVML, which numbers by PCI address, as does CUDA with CUDA_DEVICE_ORDER=PCI_BUS_ID and all GPUs
     * visible. CUDA's default, FASTEST_FIRST, gives the same order in practice if all GPUs are equal. GPUs that NVML
     * does not report, though this process has their device file, come last: they have fallen off the bus.
     */
    int index;
    int pci; /* index into topo.pci */
    const char *name;
    const char *uuid;                /* "GPU-..."; "" unless the driver answered */
    int minor;                       /* of /dev/nvidia<minor> */
    int cc_major, cc_minor;          /* compute capability; 0 unknown */
    bool answered;                   /* NVML reports it; the members below are known only then */
    int64_t ecc_uncorrected;         /* since the driver was loaded; -1 unknown */
    int remap_pending, remap_failed; /* of memory rows; 0, 1, -1 unknown */
    int mig;                         /* MIG mode is on; 0, 1, -1 unknown or no such mode */
    int64_t memory_bytes;            /* -1 not known */
    int slowdown;                    /* bits of enum topo_slowdown; -1 unknown */
    int nvlinks, nvlinks_up;         /* links of the board, and those that are up */
    int nvlinks_switch;              /* links up to an NVSwitch */
    int nvlinks_gpu[TOPO_MAX_GPUS];  /* links up to the GPU of this index */
    int fabric;                      /* enum topo_fabric */
    const char *cluster;             /* UUID of the NVLink domain that it has joined; "" none; NULL not known */
    int64_t clique;                  /* number of its part of the domain */
};

/* Why the clocks of a GPU are lowered, by the driver. */
enum topo_slowdown {
    TOPO_SLOW_HARDWARE = 1,    /* by half or more; set with one of the next two if the hardware reports the reason */
    TOPO_SLOW_HW_THERMAL = 2,  /* too hot for the hardware */
    TOPO_SLOW_POWER_BRAKE = 4, /* a signal from the power supply */
    TOPO_SLOW_SW_THERMAL = 8   /* too hot for the driver */
};

enum topo_fabric {
    TOPO_FABRIC_UNKNOWN = -1,
    TOPO_FABRIC_NONE,
    TOPO_FABRIC_STARTING,
    TOPO_FABRIC_READY,
    TOPO_FABRIC_FAILED
};

/* Confidential computing with several GPUs: each alone, or all by protected PCIe or encrypted NVLinks. */
enum topo_cc_mode { TOPO_CC_UNKNOWN = -1, TOPO_CC_NONE, TOPO_CC_PROTECTED_PCIE, TOPO_CC_NVLINK_ENCRYPTION };

enum topo_gid_type { TOPO_GID_IB, TOPO_GID_ROCE1, TOPO_GID_ROCE2, TOPO_GID_UNKNOWN };
enum topo_gid_kind { TOPO_GID_LINK_LOCAL, TOPO_GID_IPV4, TOPO_GID_OTHER };

struct topo_gid {
    int index;
    enum topo_gid_type type;
    enum topo_gid_kind kind;
};

enum topo_link_layer { TOPO_LINK_UNKNOWN, TOPO_LINK_INFINIBAND, TOPO_LINK_ETHERNET };

struct topo_port {
    int number; /* from 1 */
    /* In the words of the kernel (ib_port_state, phys_state_to_str() of Linux): "ACTIVE", "LinkUp"; "" if unknown. */
    const char *state, *phys_state;
    bool active;      /* ACTIVE and LinkUp */
    double rate_gbps; /* 0 not known */
    enum topo_link_layer link_layer;
    const char *netdev; /* of Ethernet ports */
    int n_gids;
    struct topo_gid *gids;        /* GIDs that are not empty and that this process may use, by index */
    int n_foreign_gids;           /* GIDs whose interface is in another network namespace: not in `gids` */
    enum source_state gids_state; /* whether they could be read */
};

/* The role of a NIC; roles.c has the rules. */
enum topo_role {
    TOPO_ROLE_DATA,       /* a rail: carries traffic of GPUs */
    TOPO_ROLE_UPLINK,     /* carries the default route, or belongs to NICs that do */
    TOPO_ROLE_STORAGE,    /* as fast as a rail, but by its location, make or link layer not one */
    TOPO_ROLE_MANAGEMENT, /* much slower than the rails, or a software device in addition to hardware */
    TOPO_ROLE_NO_ACCESS,  /* a rail that this process may not use, while it may use others */
    TOPO_ROLE_DOWN,       /* no active port */
    TOPO_ROLE_VIRTUAL     /* a virtual function whose physical function is present as well */
};

enum topo_access { TOPO_ACCESS_UNKNOWN, TOPO_ACCESS_YES, TOPO_ACCESS_NO };

struct topo_nic {
    const char *name; /* of the RDMA device: mlx5_0, rocep5s0f0 */
    int pci;          /* -1: none, a software device (rxe, siw) */
    const char *hca, *firmware;
    const char *uverbs; /* "/dev/infiniband/uverbs0" */
    bool is_iwarp;      /* RDMA over TCP: connects by addresses, not by GIDs */
    int n_ports;
    struct topo_port ports[TOPO_MAX_PORTS];
    enum topo_role role;
    const char *role_why; /* in words */
    bool is_uplink;       /* the default route uses it, whatever its role */
    /* May this process use it? Does its uverbs device exist, may it be opened, is its interface in this namespace? */
    enum topo_access access;
    const char *access_why; /* in words; "" */
};

struct topo_numa {
    int number;
    const char *cpus;
    int64_t memory_bytes; /* -1 not known */
};

struct topo {
    struct source *source;
    int n_pci, n_gpus, n_nics, n_numa, n_host_bridges;
    struct topo_pci *pci;               /* by address */
    struct topo_gpu *gpus;              /* by index */
    struct topo_nic *nics;              /* by PCI address, then by name */
    struct topo_numa *numa;             /* by number */
    const char *host_bridge_names[256]; /* "pci0000:00" */
    const char *driver;                 /* version of the NVIDIA driver */
    bool nvml;                          /* the driver answered */
    const char *nvml_why;               /* why it did not answer */
    int cc_feature, cc_ready;           /* confidential computing is on; GPUs accept work: 0, 1, -1 unknown */
    enum topo_cc_mode cc_mode;          /* of several GPUs */
    int n_hidden_gpus;              /* on the bus, but not available to this process (a container, a job of Slurm) */
    int n_denied_gpus;              /* of these, GPUs whose device file exists, but may not be opened */
    int hidden_gpus[TOPO_MAX_GPUS]; /* the first TOPO_MAX_GPUS of these: indices into `pci`, by address */
    const char *topology_file;      /* NCCL's topology file, with switches that the bus hides; "" none */
    bool cut;                       /* more devices than fit */
    const char *not_read;           /* lists of devices that could not be read, and why; "" */
    const char *why_empty;          /* without GPU and NIC: what was searched and found, for users */
};

/* Reads the topology, which lives as long as the source: a machine without devices has an empty one. */
struct topo *topo_read(struct source *source);

#define TOPO_ROUTES "/proc/net/route"

/* The names of the interfaces of default routes, a list, by TOPO_ROUTES or /proc/net/ipv6_route. */
struct source_answer topo_default_routes(struct source *source, const char *file);

/* The version of the loaded NVIDIA driver; "" if none is loaded. */
const char *topo_driver_version(struct source *source);

/* GPUs without those off the bus, which the driver does not report while it reports others, and which come last. */
int topo_usable_gpus(const struct topo *topo);

/* Does IBGDA support this NIC (mlx5)? One whose maker is not known counts as supported. */
bool topo_has_ibgda(const struct topo *topo, int nic);

/* Does the memory of the GPUs belong to a confidential guest? No NIC reaches it then. */
bool topo_is_confidential(const struct topo *topo);

/* Is the location of a PCI device (index) known? Without, its paths are a guess. */
bool topo_is_located(const struct topo *topo, int pci);

/*
 * The path between two PCI devices (indices). A device without a location (-1) is TOPO_SYS away from everything.
 * topo_bus_path() uses only the bus, as programs do that do not read NCCL's topology file.
 */
enum topo_path topo_path(const struct topo *topo, int a, int b);
enum topo_path topo_bus_path(const struct topo *topo, int a, int b);
enum topo_path topo_gpu_nic_path(const struct topo *topo, int gpu, int nic);

/* The path between two GPUs: TOPO_NVLINK with the number of links; with an NVSwitch, of the GPU with fewer. */
enum topo_path topo_gpu_path(const struct topo *topo, int a, int b, int *ret_links);

/* Are two PCI devices (indices) functions of one card? */
bool topo_is_same_card(const struct topo *topo, int a, int b);

/* "PIX"; TOPO_NVLINK is "NV". */
const char *topo_path_name(enum topo_path path);

/* Are two NICs on PCI buses of the same model? */
bool topo_is_same_model(const struct topo *topo, int a, int b);

/* The port of a NIC (index) with this number; NULL if there is none. */
const struct topo_port *topo_find_port(const struct topo *topo, int nic, int number);

/* Active ports of NICs with role DATA, in order (NULL: not wanted); returns their number. */
#define TOPO_MAX_DATA_PORTS (TOPO_MAX_NICS * TOPO_MAX_PORTS)
int topo_data_ports(const struct topo *topo, const struct topo_port *ret_ports[TOPO_MAX_DATA_PORTS]);

/* Index of the PCI device with this address ("0000:0f:00.0", or in the form of NVML "00000000:0F:00.0"), or -1. */
int topo_find_pci(const struct topo *topo, const char *address);

/* Index or -1. The name has no ":port". */
int topo_find_nic(const struct topo *topo, const char *name);
int topo_find_gpu_uuid(const struct topo *topo, const char *uuid); /* also by a prefix, as in CUDA_VISIBLE_DEVICES */

/* Parses ranges of sysfs ("0-3,8") into a mask of `bits` bits. False if invalid; larger numbers are ignored. */
bool topo_parse_cpus(const char *text, uint64_t *ret_mask, int bits);

#endif
