/* SPDX-License-Identifier: Apache-2.0 */
/*
 * software.h - the software of a machine: driver, verbs libraries, NVSHMEM, NCCL with gIB, DeepEP.
 *
 * What is installed and what the inspected process would load, read once from a source into plain structs. Strings
 * belong to the source and are never NULL; "" means absent or not known.
 */
#ifndef EP_SOFTWARE_STACK_H
#define EP_SOFTWARE_STACK_H

#include "libs.h"
#include "machine/hardware/topo.h"
#include "machine/source/source.h"
#include "os.h"
#include "stacks.h"

#define SOFTWARE_MAX_COPIES 32
#define SOFTWARE_MAX_SETTINGS 48

/* An option of the NVIDIA driver: configured in modprobe.d, and live in the loaded driver. */
struct software_option {
    const char *configured,
        *configured_in; /* value of the effective line, "" if it does not set it; the file of the line */
    const char *overruled, *overruled_in; /* an earlier line that the effective one replaces; "" if there is none */
    const char *live;                     /* "" not known */
};

#define SOFTWARE_FABRIC_LOG "/var/log/fabricmanager.log"

struct software_driver {
    const char *version;                          /* /proc/driver/nvidia/version; "" not loaded */
    bool is_open;                                 /* the open kernel modules */
    const char *module_version;                   /* /sys/module/nvidia/version */
    const char *installed_version;                /* of the module file or package for the running kernel */
    struct software_option peer_mapping_override; /* RegistryDwords: PeerMappingOverride */
    const char *dwords_with_override; /* RegistryDwords of the effective line, with PeerMappingOverride=1 added; "" if
                                         there is no line */
    enum source_state peermem;        /* nvidia_peermem or an equivalent: SOURCE_OK if loaded */
    enum source_state
        dmabuf; /* GPU memory can be exported as dma-buf (kernel, driver and GPU); SOURCE_ABSENT: cannot */
    const char *dmabuf_why;
    enum source_state gdrdrv;
    int gdrdrv_number, uvm_number;   /* of their devices; -1: the loaded module has none; 0: not known */
    const char *kernel;              /* release of the running kernel */
    const char *doca;                /* version of DOCA-OFED */
    const char *fabric_manager;      /* version of nvidia-fabricmanager; "" if not installed, or not known */
    const char *fabric_manager_from; /* the file that says so; SOFTWARE_FABRIC_LOG: the version that was started last */
};

struct software_verbs {
    struct lib_location ibverbs, mlx5; /* libibverbs.so.1 and libmlx5.so.1 as the process would find them */
    int private_version;          /* NN of IBVERBS_PRIVATE_NN that libibverbs defines; 0: not known. Its provider is
                                     libmlx5-rdmavNN.so */
    int provider_needs;           /* NN that libmlx5.so.1 needs */
    const char *provider;         /* path of libmlx5-rdmavNN.so where libibverbs looks for it; "" if it is not there */
    const char *provider_folders; /* the folders that were searched, separated by ", " */
};

struct software_nvshmem {
    struct lib_location host;    /* libnvshmem_host.so.3 as the process would find it, LD_PRELOAD first */
    const char *version;         /* "3.5.19" */
    const char *home;            /* installation folder: its lib/ contains the library */
    const char *transport_ibgda; /* path of nvshmem_transport_ibgda.so.* in the same folder; "" if there is none */
    const char *bundled;         /* the copy that PyTorch loads or brings; "" if there is none */
    const char *bundled_version;
    struct lib_location gdrapi;
};

/* A setting in gIB's script; not those with several values, or with a value with an expansion. */
struct software_setting {
    const char *name, *value; /* NULL: the script unsets it */
};

struct software_nccl {
    struct lib_location lib;
    const char *version;
    const char *bundled, *bundled_version;
    const char *gib;            /* folder of gIB: "/usr/local/gib"; "" */
    struct lib_location plugin; /* the libnccl-net*.so that NCCL_NET / NCCL_NET_PLUGIN select */
    const char *plugin_name;
    const char *tuner_config; /* existing file for this GPU in gIB's folder; "" if there is none */
    const char *script;       /* gIB's set_nccl_env.sh if it sets anything; "" otherwise */
    int n_settings;
    struct software_setting settings[SOFTWARE_MAX_SETTINGS];
};

/* A copy of the package deep_ep that Python may find, or in a folder of an install script. */
struct software_copy {
    const char *folder;    /* contains __init__.py */
    const char *version;   /* from its metadata: "1.2.1+29d31c0" */
    const char *extension; /* deep_ep_cpp*.so next to the package, or _C*.so in it; "" if there is none */
    bool on_path;          /* Python finds it by default or through PYTHONPATH; the first such copy is imported */
    bool is_source;        /* a source tree, not an installation */
    /* buffer.py: the mapping of GPUs to HCAs (pull request 466, commit 8a07e7e) */
    enum source_state buffer; /* could it be read? SOURCE_ABSENT: version 2, or damaged */
    bool defines_mapping, calls_mapping, decorator_stolen;
    uint64_t hash; /* of buffer.py's bytes, to compare copies */
};

struct software_deepep {
    int n;
    struct software_copy copies[SOFTWARE_MAX_COPIES]; /* in the order of Python's path, then the others */
    int imported;                                     /* index, -1 none */
    bool mapping_active; /* the imported copy defines and calls it, and no decorator is stolen */
};

struct software {
    struct source *source;
    struct os os;
    struct software_driver driver;
    struct software_verbs verbs;
    struct software_nvshmem nvshmem;
    struct software_nccl nccl;
    struct software_deepep deepep;
    const char *cuda_home;    /* existing folder of the toolkit or runtime: "/usr/local/cuda"; "" if there is none */
    const char *python_paths; /* searched folders, for messages */
    const char *torch,
        *torch_version; /* folder of the PyTorch that Python imports, "" if there is none: "2.9.0+cu129" */
    struct stacks_installed stacks;
};

/* Does this copy read DEEP_EP_DEVICE_TO_HCA_MAPPING? */
bool software_maps_devices(const struct software_copy *copy);

/*
 * Does this NVSHMEM, if the driver keeps GPUs from the doorbells and no handler is chosen, use the CPU with memory of
 * the host? Earlier than 3.4.5 it needs GDRCopy for that, or stops.
 */
bool software_has_cpu_assisted_ibgda(const struct software_nvshmem *nvshmem);

/* The path of lib<name>-rdmavNN.so by libibverbs' configuration, "" if it is not there; the folders searched. */
const char *software_find_provider(struct source *source, const struct software_verbs *verbs, const char *name,
                                   const char **ret_searched);

/* Is it one of NCCL's built-in networks, which need no plugin (NCCL user guide, NCCL_NET)? */
bool software_is_internal_net(const char *net);

/*
 * The value of a variable of NCCL in its configuration files, of which the first counts: NCCL_CONF_FILE or, without it,
 * ~/.nccl.conf; then /etc/nccl.conf. "" if none sets it. The environment precedes them.
 */
const char *software_nccl_conf(struct source *source, const char *name, const char **ret_file);

/* Version of the libnccl at `path`: from its file name or its wheel; "" if not known. */
const char *software_nccl_version(struct source *source, const char *path);

/* Version of the libnvshmem_host at `path`: by its file name, a header, or its wheel; "" if not known. */
const char *software_nvshmem_version(struct source *source, const char *path);

/* It lives as long as the source. */
struct software *software_read(struct source *source, const struct topo *topo);

#endif
