/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stack.h - the software between the hardware and an engine: driver, verbs libraries, NVSHMEM, NCCL with gIB, DeepEP.
 *
 * What is installed and what the process that is looked at would take, read once from a root into plain structs.
 * Strings belong to the root and are never NULL; "" is "not there" or "not known".
 */
#ifndef EP_STACK_STACK_H
#define EP_STACK_STACK_H

#include "hardware/topo.h"
#include "software/libs.h"
#include "software/os.h"
#include "source/root.h"

#define STACK_MAX_COPIES 32
#define STACK_MAX_SETTINGS 48

/* A setting of the NVIDIA driver: what modprobe.d asks for against what the loaded driver says. */
struct stack_option {
    const char *configured, *configured_in; /* what the line that wins says, "" if it does not say it; its file */
    const char *overruled, *overruled_in;   /* an earlier line that the winning one replaces; "" none */
    const char *live;                       /* "" not known */
};

#define STACK_FABRIC_LOG "/var/log/fabricmanager.log"

struct stack_driver {
    const char *version;                       /* /proc/driver/nvidia/version; "" not loaded */
    bool is_open;                              /* the open kernel modules */
    const char *module_version;                /* /sys/module/nvidia/version */
    const char *installed_version;             /* of the module file or package for the running kernel */
    struct stack_option peer_mapping_override; /* RegistryDwords: PeerMappingOverride */
    const char *dwords_with_override; /* RegistryDwords of the line that wins, with PeerMappingOverride=1; "" no line */
    enum root_state peermem;          /* nvidia_peermem or its like: ROOT_OK loaded */
    enum root_state dmabuf;           /* GPU memory as dma-buf: kernel, driver and GPU can; ROOT_ABSENT: cannot */
    const char *dmabuf_why;
    enum root_state gdrdrv;
    const char *kernel;              /* release of the running one */
    const char *doca;                /* version of DOCA-OFED */
    const char *fabric_manager;      /* version of nvidia-fabricmanager; "" not installed, or not known */
    const char *fabric_manager_from; /* the file that says so; STACK_FABRIC_LOG: of the one that was started last */
};

struct stack_verbs {
    struct lib_place ibverbs, mlx5; /* libibverbs.so.1, libmlx5.so.1 as the process would find them */
    int private_version;            /* NN of IBVERBS_PRIVATE_NN that libibverbs defines; 0 not known: its provider is
                                       libmlx5-rdmavNN.so */
    int provider_wants;             /* NN that libmlx5.so.1 needs */
    const char *provider;           /* path of libmlx5-rdmavNN.so where libibverbs looks for it; "" not there */
    const char *provider_folders;   /* where it was looked for, ", " between */
};

struct stack_nvshmem {
    struct lib_place host;       /* libnvshmem_host.so.3 as the process would find it, LD_PRELOAD first */
    const char *version;         /* "3.5.19" */
    const char *home;            /* folder whose lib/ holds it */
    const char *transport_ibgda; /* path of nvshmem_transport_ibgda.so.* beside it; "" */
    const char *bundled;         /* the copy that PyTorch brings along; "" */
    const char *bundled_version;
    struct lib_place gdrapi;
};

/* A line of gIB's script. Unclear: set to several values, or to one that is not plain. */
struct stack_setting {
    const char *name, *value; /* NULL: the script unsets it */
    bool is_unclear;
};

struct stack_nccl {
    struct lib_place lib;
    const char *version;
    const char *bundled, *bundled_version;
    const char *gib;         /* folder of gIB: "/usr/local/gib"; "" */
    struct lib_place plugin; /* libnccl-net*.so that NCCL_NET / NCCL_NET_PLUGIN lead to */
    const char *plugin_name;
    const char *tuner_config; /* file for this GPU below gIB that exists; "" */
    const char *script;       /* gIB's set_nccl_env.sh, where it sets anything; "" */
    int n_settings;
    struct stack_setting settings[STACK_MAX_SETTINGS];
};

/* A copy of the package deep_ep that Python may find, or that lies where installers put it. */
struct stack_copy {
    const char *folder;    /* that holds __init__.py */
    const char *version;   /* of its metadata: "1.2.1+29d31c0" */
    const char *extension; /* deep_ep_cpp*.so beside the package; "" */
    bool on_path;          /* Python finds it by itself or through PYTHONPATH; the first such one is what is imported */
    bool is_source;        /* a source tree, not an installation */
    /* buffer.py: the mapping of GPUs to HCAs (pull request 466, commit 8a07e7e) */
    enum root_state buffer; /* could it be read? ROOT_ABSENT: version 2, or damaged */
    bool defines_mapping, calls_mapping, decorator_stolen;
    uint64_t hash; /* of buffer.py's bytes, to compare copies */
};

struct stack_deepep {
    int n;
    struct stack_copy copies[STACK_MAX_COPIES]; /* in the order in which Python looks, then the others */
    int imported;                               /* index, -1 none */
    bool mapping_active;                        /* the imported copy defines and calls it, and no decorator is stolen */
};

struct stack {
    struct root *root;
    struct os os;
    struct stack_driver driver;
    struct stack_verbs verbs;
    struct stack_nvshmem nvshmem;
    struct stack_nccl nccl;
    struct stack_deepep deepep;
    const char *cuda_home;    /* folder of the toolkit or runtime that exists: "/usr/local/cuda"; "" */
    const char *python_paths; /* folders that were searched, for people */
};

/* Is it one of NCCL's own networks, which take no plugin (NCCL user guide, NCCL_NET)? */
bool stack_is_internal_net(const char *net);

/* Version of the libnvshmem_host at `path`: by its file name, the header beside it, or its wheel; "" not known. */
const char *stack_nvshmem_version(struct root *root, const char *path);

ep_status stack_read(struct root *root, const struct topo *topo, struct stack **ret_stack);
void stack_free(struct stack *stack);

#endif
