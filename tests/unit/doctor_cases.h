/* SPDX-License-Identifier: Apache-2.0 */
/* doctor_cases.h - changes to a synthetic machine, and the result of a check. */
#ifndef EP_TESTS_DOCTOR_CASES_H
#define EP_TESTS_DOCTOR_CASES_H

#include "made.h"

struct doctor_case {
    const char *check, *name;
    void (*change)(struct made *made);
    enum doctor_outcome outcome;
    const char *text; /* part of the result's sentence or reason */
};

#define ABSENT DOCTOR_NOT_APPLICABLE
#define FOUND DOCTOR_FOUND
#define UNKNOWN DOCTOR_UNKNOWN
#define OK DOCTOR_FINE
#define CASE(check, change, outcome, text)                                                                             \
    {                                                                                                                  \
        check, #change, change, outcome, text                                                                          \
    }

/* By group; "topology" has the limits as well. */
const struct doctor_case *doctor_cases_driver(size_t *ret_n);
const struct doctor_case *doctor_cases_nic(size_t *ret_n);
const struct doctor_case *doctor_cases_topology(size_t *ret_n);

/* --- changes that several groups use --- */

static inline struct topo_gpu *gpu(struct made *made, int i)
{
    return &made->hardware.gpus[i];
}

static inline struct topo_nic *nic(struct made *made, int i)
{
    return &made->hardware.nics[i];
}

static inline struct topo_pci *gpu_pci(struct made *made, int i)
{
    return &made->hardware.pci[gpu(made, i)->pci];
}

static inline struct topo_pci *nic_pci(struct made *made, int i)
{
    return &made->hardware.pci[nic(made, i)->pci];
}

static inline void nothing(struct made *made)
{
    (void)made;
}

static inline void no_gpus(struct made *made)
{
    made_state(made, "folders", "/sys/bus/pci/devices", "absent");
    made->hardware.topo.n_gpus = 0;
    made->map.n = 0;
}

static inline void no_nics(struct made *made)
{
    made_state(made, "folders", "/sys/class/infiniband", "absent");
    made->hardware.topo.n_nics = 0;
    made->map.n = 0;
}

static inline void no_driver(struct made *made)
{
    made_state(made, "files", "/proc/driver/nvidia/version", "absent");
    made->software.driver.version = "";
}

static inline void rename_gpus(struct made *made, const char *name)
{
    for (int i = 0; i < 4; i++)
        gpu(made, i)->name = name;
}

static inline void grace(struct made *made)
{
    rename_gpus(made, "NVIDIA GB200");
    made_folder(made, "/dev/nvidia-caps-imex-channels", json_pack("[s]", "channel0"));
    made_stat(made, "/dev/nvidia-caps-imex-channels/channel0", "char", "rw-");
}

static inline void nvml_silent(struct made *made)
{
    made->hardware.topo.nvml = false;
    made->hardware.topo.nvml_why = "no answer within 3000 ms";
    for (int i = 0; i < 4; i++)
        gpu(made, i)->answered = false;
}

static inline void all_states_unreadable(struct made *made)
{
    for (int i = 0; i < 4; i++) {
        nic(made, i)->role = TOPO_ROLE_DOWN;
        nic(made, i)->ports[0].active = false;
        nic(made, i)->ports[0].state = "";
    }
    made->map.n = 0;
}

static inline void grace_fabric_starting(struct made *made)
{
    grace(made);
    gpu(made, 2)->fabric = TOPO_FABRIC_STARTING;
}

#endif
