/* SPDX-License-Identifier: Apache-2.0 */
/* checks_gpu.c - the set of GPUs: number, errors, MIG, clocks. In the group of the driver, which reports them. */
#include "checks.h"
#include "kernel_log.h"

/* --- inventory --- */

#define CLASS_DISPLAY 0x03

#define CLASS_SWITCH 0x0680 /* PCI Code and ID Assignment Specification: other bridge, the class of NVSwitches */

/* Product names (SMBIOS, type 1) that imply the number of GPUs: DGX systems; "EC2 Instance Types". */
static const struct {
    const char *product;
    int gpus;
} boards[] = {
    {"DGX-2", 16},        {"DGXA100", 8},          {"DGX A100", 8},      {"DGXH100", 8},     {"DGX H100", 8},
    {"DGXH200", 8},       {"DGX H200", 8},         {"DGXB200", 8},       {"DGX B200", 8},    {"DGXB300", 8},
    {"DGX B300", 8},      {"p4d.24xlarge", 8},     {"p4de.24xlarge", 8}, {"p5.48xlarge", 8}, {"p5e.48xlarge", 8},
    {"p5en.48xlarge", 8}, {"p6-b200.48xlarge", 8},
};

int inventory_nvswitches(const struct doctor_machine *machine)
{
    static const char path[] = "/sys/bus/pci/devices";
    struct source_names names = source_list(machine->source, path);
    int64_t vendor, class;

    return COUNT_OF(i, names.n,
                    source_number(machine->source, &vendor, "%s/%s/vendor", path, names.names[i]) == SOURCE_OK &&
                        vendor == PCI_VENDOR_NVIDIA &&
                        source_number(machine->source, &class, "%s/%s/class", path, names.names[i]) == SOURCE_OK &&
                        class >> 8 == CLASS_SWITCH);
}

/*
 * GPUs with NVLinks to switches are modules of a board with 4, 8 or 16 of them (data sheets of HGX and of GB200 NVL72,
 * whose trays have 2 or 4). An odd number means that one is missing. 0: not known.
 */
static int modules_due(const struct topo *topo)
{
    static const int sizes[] = {4, 8, 16};
    int n = 0;

    if (ANY_OF(i, topo->n_gpus, topo->gpus[i].nvlinks_switch == 0 || topo->gpus[i].pci < 0))
        return 0;
    /* Includes GPUs of other jobs and of virtual machines; several functions of one GPU count once. */
    for (int p = 0; p < topo->n_pci; p++)
        n += topo->pci[p].vendor == PCI_VENDOR_NVIDIA && topo->pci[p].device == topo->pci[topo->gpus[0].pci].device &&
             (p == 0 || !topo_is_same_card(topo, p - 1, p));
    for (size_t i = 0; n > 2 && i < COUNT(sizes); i++)
        if (n <= sizes[i])
            return sizes[i];
    return 0;
}

/* The number of GPUs of this machine type, and its name for messages; 0 if the type is not known. */
static int inventory_of_board(const struct doctor_machine *machine, const char **ret_board)
{
    struct source_text product = source_line(machine->source, "/sys/class/dmi/id/product_name");
    int board = product.state == SOURCE_OK ? FIRST_OF(i, COUNT(boards), strstr(product.text, boards[i].product)) : -1,
        n_switches;

    if (board >= 0) {
        *ret_board = source_printf(machine->source, "a %s", boards[board].product);
        return boards[board].gpus;
    }
    /* A hypervisor may pass any number to a guest. */
    if (machine_virtual(machine->source) != MACHINE_BARE_METAL)
        return 0;
    n_switches = inventory_nvswitches(machine);
    /* HGX A100 has six NVSwitches for 8 GPUs, HGX H100 and H200 four, boards with 4 GPUs none (data sheets). */
    if (n_switches != 4 && n_switches != 6) {
        *ret_board = "a board of modules with NVSwitches";
        return modules_due(machine->topo);
    }
    *ret_board = source_printf(machine->source, "an HGX board with %d NVSwitches", n_switches);
    return 8;
}

void run_inventory(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    const char *board = "";
    int due = topo->n_gpus ? inventory_of_board(machine, &board) : 0,
        /* Including those of other containers and jobs. */
        n = COUNT_OF(i, topo->n_pci,
                     topo->pci[i].vendor == PCI_VENDOR_NVIDIA && topo->pci[i].class_code >> 16 == CLASS_DISPLAY);

    n = n > topo->n_gpus ? n : topo->n_gpus;
    if (doctor_not_applicable_if(result, due == 0, "how many GPUs this machine should have is not known") || n >= due)
        return;
    doctor_found(result, DOCTOR_ERROR, "%d of %d GPUs are on the PCI bus of %s", n, due, board);
    for (int i = 0; i < topo->n_gpus; i++)
        doctor_evidence(result, topo->pci[topo->gpus[i].pci].address, "GPU %d", i);
}

/* --- gpu-errors --- */

#define XID_OFF_THE_BUS 79

static int gpu_at(const struct topo *topo, const char *address)
{
    return FIRST_OF(i, topo->n_gpus,
                    topo->gpus[i].pci >= 0 &&
                        strncasecmp(topo->pci[topo->gpus[i].pci].address, address, strlen(address)) == 0);
}

struct gpu_errors {
    int n, n_severe;      /* number of different errors; of severe ones */
    int first_gpu;        /* of the first severe error, otherwise of the first error; -1: not a GPU of this process */
    const char *first_at; /* its PCI address, as far as the log contains it */
    const char *first;
    bool in_log;        /* one of them is from the kernel log */
    bool reboot;        /* the driver says that a reset is not sufficient, or the Xid requires a reboot */
    bool is_lost;       /* the first severe error is a GPU that has fallen off the bus */
    bool is_link;       /* the fault is an NVLink */
    const char *advice; /* on the cause of that; "" none */
    bool no_init;       /* the driver could not initialise a GPU */
    bool no_window;     /* a GPU has no addresses: machine_lacks_window() */
};

static void record_error(struct gpu_errors *errors, bool is_severe, int gpu, const char *at, const char *what)
{
    if (errors->n == 0 || (is_severe && errors->n_severe == 0)) {
        errors->first_gpu = gpu;
        errors->first_at = at;
        errors->first = what;
    }
    errors->n++;
    errors->n_severe += is_severe;
}

/* GPUs that the driver could not initialise; one that answers now has been initialised since. */
static void check_inits(const struct doctor_machine *machine, struct doctor_result *result, struct gpu_errors *errors)
{
    const char *where;
    const struct init_cause *cause;
    const json_t *devices = json_object_get(kernel_log_inits(machine->source, &where, &cause), "devices");

    for (size_t k = 0; k < json_array_size(devices); k++) {
        const json_t *device = json_array_get(devices, k);
        const char *address = json_is_string(device) ? json_string_value(device) : "";
        int gpu = gpu_at(machine->topo, address), pci = topo_find_pci(machine->topo, address);

        if (ANY_OF(i, k, json_equal(json_array_get(devices, (size_t)i), device)) || pci < 0 ||
            machine_is_unsupported_gpu(machine, pci) ||
            (gpu >= 0 && machine->topo->nvml && machine->topo->gpus[gpu].answered))
            continue;
        errors->no_init = errors->in_log = true;
        errors->reboot = errors->reboot || cause->reboot;
        errors->advice = cause->advice;
        record_error(errors, true, gpu, address,
                     source_printf(machine->source, "the driver could not initialise it%s", cause->text));
        doctor_evidence(result, where, "NVRM: GPU %s: RmInitAdapter failed", address);
    }
}

static void check_nvml(const struct doctor_machine *machine, struct doctor_result *result, struct gpu_errors *errors)
{
    FOR_EACH (gpu, machine->topo->gpus, machine->topo->n_gpus) {
        const char *where = machine_gpu_name(machine, gpu->index);

        if (!gpu->answered) {
            if (machine->topo->nvml && !(errors->no_init && errors->first_gpu == gpu->index) &&
                !machine_is_unsupported_gpu(machine, gpu->pci)) {
                errors->no_window = machine_lacks_window(machine, gpu->pci);
                record_error(errors, true, gpu->index, "",
                             errors->no_window
                                 ? "it got no addresses for its memory (BAR1), so the driver cannot open it"
                                 : "it has a device file, and the driver does not answer for it");
                doctor_evidence(result, where, "NVML does not list it, as of a GPU off the bus");
            }
            continue;
        }
        if (gpu->ecc_uncorrected > 0) {
            record_error(errors, true, gpu->index, "", "uncorrected ECC errors");
            doctor_evidence(result, where, "%lld uncorrected ECC errors since the driver was loaded",
                            (long long)gpu->ecc_uncorrected);
        }
        if (gpu->remap_failed > 0) {
            record_error(errors, true, gpu->index, "", "remapping a row of memory failed");
            doctor_evidence(result, where, "remapping a row of memory failed: the board has to be replaced");
        }
        if (gpu->remap_pending > 0) {
            record_error(errors, false, gpu->index, "", "a remapped row of memory waits for a reset");
            doctor_evidence(result, where, "a remapped row of memory waits for a reset of the GPU");
        }
    }
}

/*
 * Errors caused by a program (an access out of bounds, a kill) are not faults of the machine, and after a successful
 * recovery NVML reports what remains, such as a pending reset. Xid 154 accompanies another one and contains the
 * recovery action.
 */
static void check_log(const struct doctor_machine *machine, struct doctor_result *result, const struct kernel_log *log,
                      struct gpu_errors *errors)
{
    FOR_JSON (error, log->errors) {
        int number = json_int(error, "number"), recovery = json_int(error, "recovery");
        const char *action = kernel_recovery_name(recovery), *time = json_text(error, "time"),
                   *device = json_text(error, "device");
        const struct xid *xid = xid_find(number);

        errors->in_log = true;
        errors->reboot = errors->reboot || recovery == KERNEL_RECOVERY_REBOOT || xid->action == XID_RESTART;
        errors->is_lost = errors->is_lost || number == XID_OFF_THE_BUS;
        errors->is_link = errors->is_link || xid->action == XID_LINK;
        record_error(errors, xid->action != XID_RECOVERED, gpu_at(machine->topo, device), device,
                     source_printf(machine->source, "Xid %d (%s)", number, *action ? action : xid->text));
        doctor_evidence(result, log->where, "%d x %s%s%s", json_int(error, "n"), time, *time ? " " : "",
                        kernel_error_line(machine->source, "NVRM: Xid", error));
    }
}

/* By PCI address: the numbers of NVML, CUDA and device files differ when a GPU is missing. */
static void fix_errors(const struct doctor_machine *machine, struct doctor_result *result,
                       const struct gpu_errors *errors)
{
    const struct topo *topo = machine->topo;
    const struct topo_gpu *gpu = errors->first_gpu >= 0 ? &topo->gpus[errors->first_gpu] : NULL;
    bool is_lost = errors->is_lost || (gpu && topo->nvml && !gpu->answered);

    if (machine->software->os.in_container || errors->no_window)
        return;
    if (errors->reboot || is_lost) {
        doctor_fix(result, false, "sudo reboot");
    } else if (gpu && gpu->pci >= 0) {
        doctor_fix(result, false, "sudo %s --gpu-reset -i %s",
                   os_driver_program(machine->source, &machine->software->os, "nvidia-smi"),
                   shell_word(machine->source, topo->pci[gpu->pci].address));
        doctor_cost(result, DOCTOR_FIX_RESTART,
                    "Every program on this GPU ends, and on those connected to it by NVLink; none may be running when "
                    "it is reset.");
    }
}

void run_gpu_errors(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct gpu_errors errors = {.first_gpu = -1, .advice = ""};
    struct kernel_log log = kernel_log_xids(machine->source);
    const char *gpu;

    check_inits(machine, result, &errors);
    check_nvml(machine, result, &errors);
    if (log.state == SOURCE_OK)
        check_log(machine, result, &log, &errors);
    if (errors.n > 0) {
        gpu = errors.first_gpu >= 0 ? machine_gpu_name(machine, errors.first_gpu)
                                    : source_printf(machine->source, "the GPU at %s", errors.first_at);
        doctor_found(result, errors.n_severe ? DOCTOR_ERROR : DOCTOR_WARNING, "%s: %s%s", gpu, errors.first,
                     errors.n > 1 ? ", and more" : "");
        if (!*errors.advice)
            fix_errors(machine, result, &errors);
        if (errors.no_window || *errors.advice)
            doctor_advise(result, "%s", errors.no_window ? machine_window_advice(machine) : errors.advice);
        else
            doctor_advise(
                result,
                "%s If the error comes back after it, take the node out of service and have the board replaced.%s",
                xid_action_text(errors.reboot || errors.is_lost ? XID_RESTART
                                : errors.is_link                ? XID_LINK
                                                                : XID_RESET),
                errors.in_log
                    ? " Lines of the kernel log, and so this finding, stay until the next reboot: after a reset look for "
                      "newer ones (sudo dmesg --ctime | grep Xid)."
                    : "");
        return;
    }
    if (!machine->topo->nvml) {
        doctor_unknown(result, "ECC errors: NVML does not answer: %s", machine->topo->nvml_why);
        result->missing = machine_missing_nvml(machine);
    } else if (log.state != SOURCE_OK) {
        doctor_unknown(result, "the kernel log: /dev/kmsg: %s", machine_reason(log.state, log.why));
        result->missing = machine->software->os.in_container ? DOCTOR_MISSING_NODE : DOCTOR_MISSING_ROOT;
    }
}

/* --- mig --- */

/* "NVIDIA H100XM-1-10C" is one slice with 10 GB, an instance of a GPU of the host; "H100XM-80C" a whole GPU. */
static bool is_virtual_instance(const struct topo_gpu *gpu)
{
    const char *last = strrchr(gpu->name, '-'), *at = last;
    size_t n = last ? 1 + strspn(last + 1, "0123456789") : 0;

    while (at && at > gpu->name && strchr("0123456789", at[-1]))
        at--;
    return n > 1 && strchr("ABCQ", last[n]) && last[n] && at < last && at > gpu->name && at[-1] == '-';
}

void run_mig(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    int n_virtual = COUNT_OF(i, topo->n_gpus, is_virtual_instance(&topo->gpus[i])),
        n = COUNT_OF(i, topo->n_gpus, topo->gpus[i].mig == 1),
        first = FIRST_OF(i, topo->n_gpus, topo->gpus[i].mig == 1);

    if (n + n_virtual == 0 ||
        doctor_not_applicable_if(result, !machine_has_ranks(machine), "one GPU, and nothing needs several ranks"))
        return;
    if (n_virtual > 0) {
        doctor_found(result, DOCTOR_ERROR,
                     "%d of %d GPUs are virtual ones of a part of a GPU, which have neither NVLink nor access to "
                     "others",
                     n_virtual, topo->n_gpus);
        for (int i = 0; i < topo->n_gpus; i++)
            if (is_virtual_instance(&topo->gpus[i]))
                doctor_evidence(result, machine_gpu_name(machine, i), "%s", topo->gpus[i].name);
        doctor_advise(result, "Ask the operator of the host for whole GPUs: passed through, or with a profile of the "
                              "whole memory, which has a single number in its name.");
        return;
    }
    doctor_found(result, DOCTOR_ERROR,
                 "MIG is on for %d of %d GPUs, and instances have neither NVLink nor access to other GPUs", n,
                 topo->n_gpus);
    for (int i = 0; i < topo->n_gpus; i++)
        if (topo->gpus[i].mig == 1)
            doctor_evidence(result, topo->pci[topo->gpus[i].pci].address, "GPU %d: MIG mode is on", i);
    doctor_advise(result,
                  "On the node, with nothing running on GPU %d: sudo %s -i %s -mig 0. It removes the instances and "
                  "resets the GPU, which ends every program on it.%s",
                  first, os_driver_program(machine->source, &machine->software->os, "nvidia-smi"),
                  shell_word(machine->source, topo->pci[topo->gpus[first].pci].address),
                  machine->software->os.in_container ? " In Kubernetes the MIG manager does it, by the label "
                                                       "nvidia.com/mig.config=all-disabled."
                                                     : "");
}

/* --- clocks --- */

static const char *slowdown_text(int slowdown)
{
    if (slowdown & TOPO_SLOW_HW_THERMAL)
        return "the hardware lowers the clocks to half or less because it is too hot";
    if (slowdown & TOPO_SLOW_POWER_BRAKE)
        return "the power supply makes the hardware lower the clocks to half or less (power brake)";
    if (slowdown & TOPO_SLOW_HARDWARE)
        return "the hardware lowers the clocks to half or less";
    return "the driver lowers the clocks because it is too hot";
}

/* Clocks that are lowered by a power cap, as under any full load, or by a setting are not a fault of the machine. */
void run_clocks(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    int n = COUNT_OF(i, topo->n_gpus, topo->gpus[i].slowdown > 0), all = 0,
        first =
            FIRST_OF(i, topo->n_gpus, topo->gpus[i].slowdown > 0 && (topo->gpus[i].slowdown & ~TOPO_SLOW_SW_THERMAL));
    bool is_hardware = first >= 0;

    if (doctor_not_applicable_if(result, !ANY_OF(i, topo->n_gpus, topo->gpus[i].slowdown >= 0),
                                 "the driver does not report why clocks are lowered") ||
        n == 0)
        return;
    first = is_hardware ? first : FIRST_OF(i, topo->n_gpus, topo->gpus[i].slowdown > 0);
    for (int i = 0; i < topo->n_gpus; i++)
        all |= topo->gpus[i].slowdown > 0 ? topo->gpus[i].slowdown : 0;
    doctor_found(result, is_hardware ? DOCTOR_ERROR : DOCTOR_WARNING, "%s: %s%s", machine_gpu_name(machine, first),
                 slowdown_text(topo->gpus[first].slowdown), n > 1 ? ", and other GPUs are slowed down, too" : "");
    for (int i = 0; i < topo->n_gpus; i++)
        if (topo->gpus[i].slowdown > 0)
            doctor_evidence(result, machine_gpu_name(machine, i), "%s", slowdown_text(topo->gpus[i].slowdown));
    doctor_advise(result,
                  "Check the current state: %s -q -d PERFORMANCE,TEMPERATURE,POWER. %s Under sustained load, one slow "
                  "GPU delays all ranks.",
                  os_driver_program(machine->source, &machine->software->os, "nvidia-smi"),
                  all & (TOPO_SLOW_HW_THERMAL | TOPO_SLOW_SW_THERMAL)
                      ? "Check the fans, the flow of air or water and its inlet temperature."
                      : "Check the node's power supplies, their cables and the power limit of the rack.");
}
