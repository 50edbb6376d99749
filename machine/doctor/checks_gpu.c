/* SPDX-License-Identifier: Apache-2.0 */
/* checks_gpu.c - what GPUs report of themselves: errors, and their NVLinks. In the group of the driver, which tells. */
#include "doctor/checks.h"
#include "doctor/inventory.h"
#include "doctor/look.h"
#include "doctor/shell.h"
#include "doctor/xid.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* --- gpu-errors --- */

#define XID "NVRM: Xid"
#define MAX_KINDS 32

/* Xids of one number from one GPU. */
struct xids {
    char address[32]; /* "0000:0f:00" */
    int number, n;
    const char *first; /* the line from "NVRM:" on */
    const char *time;  /* of that line, with blank behind it; "" where the log does not say it */
};

#define XID_OFF_THE_BUS 79
#define RECOVERY_NONE 0 /* nvmlDeviceGpuRecoveryAction_t */
#define RECOVERY_NODE_REBOOT 2
#define XID_RECOVERY 154 /* "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)" */

/*
 * Errors that a program makes (an access out of bounds, a kill) are no business of the machine, and of recoveries that
 * worked NVML knows what remains, a reset that is due. 154 comes with another one, and says what the driver wants done.
 */
/* Parses "NVRM: Xid (PCI:0000:0f:00): 79, pid=..." at `at`. */
static bool parse_xid(const char *at, struct xids *ret_xid)
{
    size_t n;

    at += strlen(XID);
    at += strspn(at, " ");
    if (*at++ != '(')
        return false;
    if (strncmp(at, "PCI:", 4) == 0)
        at += 4;
    n = strcspn(at, ")\n");
    if (at[n] != ')' || at[n + 1] != ':' || n >= sizeof(ret_xid->address))
        return false;
    memcpy(ret_xid->address, at, n);
    ret_xid->address[n] = '\0';
    at += n + 2;
    at += strspn(at, " ");
    n = strspn(at, "0123456789");
    if (n == 0 || n > 4)
        return false;
    ret_xid->number = atoi(at);
    return true;
}

/* What the driver wants done by an Xid 154: what stands in the parentheses behind " to 0x1". NULL: no such line. */
static const char *recovery_action(const char *line, size_t *ret_length)
{
    size_t n = strcspn(line, "\n");
    const char *to = memmem(line, n, " to 0x", 6), *open, *close;

    open = to ? memchr(to, '(', n - (size_t)(to - line)) : NULL;
    close = open ? memchr(open, ')', n - (size_t)(open - line)) : NULL;
    if (!close)
        return NULL;
    *ret_length = (size_t)(close - open) - 1;
    return open + 1;
}

/* Its number, which is NVML's; -1: no such line. */
static int recovery_code(const char *line)
{
    size_t n = strcspn(line, "\n");
    const char *to = memmem(line, n, " to 0x", 6);

    return to ? (int)strtol(to + 6, NULL, 16) : -1;
}

static bool has_ended(const char *line)
{
    return recovery_code(line) == RECOVERY_NONE;
}

/* Forgets the Xids of a GPU that has recovered; returns how many kinds are left. */
static int forget_xids(struct xids *kinds, int n, const char *address)
{
    int left = 0;

    for (int k = 0; k < n; k++)
        if (strcmp(kinds[k].address, address) != 0)
            kinds[left++] = kinds[k];
    return left;
}

/* The time in front of a line: "[  12.345678]", RFC 3339, or "Nov 21 12:00:00"; the name of a host is behind it. */
static const char *line_time(struct root *root, const char *log, const char *at)
{
    const char *line = at;
    size_t n, length;

    while (line > log && line[-1] != '\n')
        line--;
    n = (size_t)(at - line);
    length = strcspn(line, " ");
    if (n > 2 && *line == '[' && memchr(line, ']', n))
        length = (size_t)((const char *)memchr(line, ']', n) - line) + 1;
    else if (n > 16 && line[3] == ' ' && line[9] == ':' && line[12] == ':' && line[15] == ' ')
        length = 15;
    else if (length < 19 || line[10] != 'T')
        length = 0;
    return length > 0 && length < n && length < 48 ? root_printf(root, "%.*s ", (int)length, line) : "";
}

/* Counts Xids by GPU and number; returns how many kinds there are. */
static int count_xids(const struct doctor_machine *machine, const char *log, struct xids *kinds)
{
    int n = 0;

    for (const char *at = strstr(log, XID); at; at = strstr(at + 1, XID)) {
        struct xids xid = {.n = 1};
        int k;

        if (!parse_xid(at, &xid) || xid_find(xid.number)->action == XID_OF_PROGRAM)
            continue;
        if (xid.number == XID_RECOVERY && has_ended(at)) {
            n = forget_xids(kinds, n, xid.address);
            continue;
        }
        for (k = 0; k < n; k++)
            if (kinds[k].number == xid.number && strcmp(kinds[k].address, xid.address) == 0)
                break;
        if (k < n) {
            kinds[k].n++;
        } else if (n < MAX_KINDS) {
            size_t length = strcspn(at, "\n");

            xid.first = root_printf(machine->root, "%.*s", (int)(length < 300 ? length : 300), at);
            xid.time = line_time(machine->root, log, at);
            kinds[n++] = xid;
        }
    }
    return n;
}

/* A log file holds several boots: the driver says hello in each. */
static const char *of_this_boot(const char *log)
{
    const char *hello = log, *last = log;

    while ((hello = strstr(hello, "NVRM: loading NVIDIA")))
        last = hello++;
    return last;
}

/* The lines of the driver in the kernel log of this boot, from the first place where they can be read. */
static struct root_text kernel_log(struct root *root, const char **ret_where)
{
    struct root_text text = root_lines(root, XID, "/dev/kmsg"), other;

    *ret_where = "/dev/kmsg";
    if (text.state == ROOT_OK)
        return text;
    other = root_lines(root, "NVRM: ", "/var/log/kern.log");
    if (other.state == ROOT_OK) {
        *ret_where = "/var/log/kern.log";
        other.text = of_this_boot(other.text);
        return other;
    }
    /* Debian's copy of the log at the end of the start: old, but better than nothing when it has an Xid. */
    other = root_lines(root, XID, "/var/log/dmesg");
    if (other.state == ROOT_OK && *other.text) {
        *ret_where = "/var/log/dmesg";
        return other;
    }
    return text;
}

static int gpu_at(const struct topo *topo, const char *address)
{
    for (int i = 0; i < topo->n_gpus; i++)
        if (topo->gpus[i].pci >= 0 && strncasecmp(topo->pci[topo->gpus[i].pci].address, address, strlen(address)) == 0)
            return i;
    return -1;
}

struct gpu_errors {
    int n, n_grave;       /* kinds of errors */
    int first_gpu;        /* of the first grave one, or of the first; -1: not among those of this process */
    const char *first_at; /* its PCI address, as far as the log says it */
    const char *first;
    bool in_log;  /* one of them is a line of the kernel log */
    bool reboot;  /* the driver says that a reset does not suffice, or the Xid is one that a reset does not cure */
    bool is_lost; /* the first grave one is a GPU off the bus */
    bool is_link; /* an NVLink is what is faulty */
};

static void note_error(struct gpu_errors *errors, bool is_grave, int gpu, const char *at, const char *what)
{
    if (errors->n == 0 || (is_grave && errors->n_grave == 0)) {
        errors->first_gpu = gpu;
        errors->first_at = at;
        errors->first = what;
    }
    errors->n++;
    errors->n_grave += is_grave;
}

static void look_at_nvml(const struct doctor_machine *machine, struct doctor_result *result, struct gpu_errors *errors)
{
    for (int i = 0; i < machine->topo->n_gpus; i++) {
        const struct topo_gpu *gpu = &machine->topo->gpus[i];
        const char *where = look_gpu_name(machine, i);

        if (!gpu->answered) {
            if (machine->topo->nvml) {
                note_error(errors, true, i, "", "it has a device file, and the driver does not answer for it");
                doctor_evidence(machine, result, where, "NVML does not list it, as of a GPU off the bus");
            }
            continue;
        }
        if (gpu->ecc_uncorrected > 0) {
            note_error(errors, true, i, "", "uncorrected ECC errors");
            doctor_evidence(machine, result, where, "%lld uncorrected ECC errors since the driver was loaded",
                            (long long)gpu->ecc_uncorrected);
        }
        if (gpu->remap_failed > 0) {
            note_error(errors, true, i, "", "remapping a row of memory failed");
            doctor_evidence(machine, result, where, "remapping a row of memory failed: the board is to be replaced");
        }
        if (gpu->remap_pending > 0) {
            note_error(errors, false, i, "", "a remapped row of memory waits for a reset");
            doctor_evidence(machine, result, where, "a remapped row of memory waits for a reset of the GPU");
        }
    }
}

static void look_at_log(const struct doctor_machine *machine, struct doctor_result *result, const char *where,
                        const char *log, struct gpu_errors *errors)
{
    struct xids kinds[MAX_KINDS];
    int n = count_xids(machine, log, kinds);

    for (int k = 0; k < n; k++) {
        int gpu = gpu_at(machine->topo, kinds[k].address);
        size_t length = 0;
        const char *action = kinds[k].number == XID_RECOVERY ? recovery_action(kinds[k].first, &length) : NULL;
        const struct xid *xid = xid_find(kinds[k].number);
        const char *text = action ? root_printf(machine->root, "%.*s", (int)length, action) : xid->text;

        errors->in_log = true;
        errors->reboot =
            errors->reboot || recovery_code(kinds[k].first) == RECOVERY_NODE_REBOOT || xid->action == XID_RESTART;
        errors->is_lost = errors->is_lost || kinds[k].number == XID_OFF_THE_BUS;
        errors->is_link = errors->is_link || xid->action == XID_LINK;
        note_error(errors, xid->action != XID_RECOVERED, gpu, root_printf(machine->root, "%s", kinds[k].address),
                   root_printf(machine->root, "Xid %d (%s)", kinds[k].number, text));
        doctor_evidence(machine, result, where, "%d x %s%s", kinds[k].n, kinds[k].time, kinds[k].first);
    }
}

/*
 * A reset goes by PCI address: numbers of NVML, of CUDA and of device files are three things once a GPU is missing. One
 * that has fallen off the bus cannot be reset by the driver, which has lost it.
 */
static void fix_errors(const struct doctor_machine *machine, struct doctor_result *result,
                       const struct gpu_errors *errors)
{
    const struct topo *topo = machine->topo;
    const struct topo_gpu *gpu = errors->first_gpu >= 0 ? &topo->gpus[errors->first_gpu] : NULL;
    bool is_lost = errors->is_lost || (gpu && topo->nvml && !gpu->answered);

    if (machine->stack->os.in_container)
        return;
    if (errors->reboot || is_lost) {
        doctor_fix(machine, result, false, "sudo reboot");
        doctor_cost(machine, result, DOCTOR_FIX_RESTART, "The machine starts anew, and every job on it ends.");
    } else if (gpu && gpu->pci >= 0) {
        doctor_fix(machine, result, false, "sudo %s --gpu-reset -i %s",
                   os_driver_program(machine->root, &machine->stack->os, "nvidia-smi"),
                   shell_word(machine->root, topo->pci[gpu->pci].address));
        doctor_cost(machine, result, DOCTOR_FIX_RESTART,
                    "Every program on this GPU ends, and on those that NVLink ties to it; none may be running when it "
                    "is reset.");
    }
}

static void run_gpu_errors(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct gpu_errors errors = {.first_gpu = -1};
    struct root_text log;
    const char *where, *gpu;

    if (!look_has_driver(machine, result))
        return;
    log = kernel_log(machine->root, &where);
    look_at_nvml(machine, result, &errors);
    if (log.state == ROOT_OK)
        look_at_log(machine, result, where, log.text, &errors);
    if (errors.n > 0) {
        gpu = errors.first_gpu >= 0 ? look_gpu_name(machine, errors.first_gpu)
                                    : root_printf(machine->root, "the GPU at %s", errors.first_at);
        doctor_found(machine, result, errors.n_grave ? DOCTOR_ERROR : DOCTOR_WARNING, "%s: %s%s", gpu, errors.first,
                     errors.n > 1 ? ", and more" : "");
        fix_errors(machine, result, &errors);
        doctor_advise(
            machine, result,
            "%s If the error comes back after it, take the node out of service and have the board replaced.%s",
            xid_action_text(errors.reboot || errors.is_lost ? XID_RESTART
                            : errors.is_link                ? XID_LINK
                                                            : XID_RESET),
            errors.in_log ? " Lines of the kernel log stay until the next start, and this finding with them: "
                            "after a reset look for newer ones (sudo dmesg --ctime | grep Xid)."
                          : "");
        return;
    }
    if (!machine->topo->nvml) {
        doctor_cannot_tell(machine, result, "ECC errors: NVML does not answer: %s", machine->topo->nvml_why);
        result->tells = look_nvml_tells(machine);
    } else if (log.state != ROOT_OK) {
        doctor_cannot_tell(machine, result, "the kernel log: /dev/kmsg: %s", look_why(log.state, log.why));
        result->tells = machine->stack->os.in_container ? DOCTOR_TELLS_NODE : DOCTOR_TELLS_ROOT;
    }
}

const struct doctor_check check_gpu_errors = {
    .id = "gpu-errors",
    .group = "driver",
    .mode = 34,
    .title = "GPUs report no errors of their own",
    .symptom = "Programs end with CUDA errors (ECC, illegal address, launch failure), hang, or lose a GPU.",
    .cause = "The GPU or its memory is failing: the driver writes an Xid to the kernel log, and counts uncorrected ECC "
             "errors. A remapped row of memory is in use only after a reset.",
    .remedy = "Reset the GPU; if errors come back, replace it.",
    .links = (const char *const[]){"/dev/kmsg", "nvidia-smi -q -d ECC,ROW_REMAPPER", NULL},
    .run = run_gpu_errors,
};

/* --- nvlink --- */

/*
 * Boards on which the NVLinks are soldered, so that all of them are to be up: SXM modules and the superchips of
 * Blackwell, and whatever has a fabric or a switch. On all others (PCIe cards, A40, workstations, a single GH200) they
 * lead to a bridge or a cable that may or may not be there.
 */
static bool is_soldered(const struct topo *topo, const struct topo_gpu *self)
{
    static const char *const cards[] = {"PCIe", " NVL", "RTX", "Quadro", "GH200", NULL};
    static const char *const boards[] = {"SXM", "HBM3", "H100", "H200", "H800", "H20", "B200", "B300", NULL};

    for (int i = 0; cards[i]; i++)
        if (strcasestr(self->name, cards[i]))
            return false;
    for (int i = 0; boards[i]; i++)
        if (strstr(self->name, boards[i]))
            return true;
    for (int i = 0; i < topo->n_gpus; i++)
        if (topo->gpus[i].answered && strcmp(topo->gpus[i].name, self->name) == 0 &&
            (topo->gpus[i].fabric > TOPO_FABRIC_NONE || topo->gpus[i].nvlinks_switch > 0))
            return true;
    return false;
}

/* Links that a GPU should have up: all of its own; where they need a bridge, those that a sister has. */
static int links_due(const struct topo *topo, int gpu)
{
    const struct topo_gpu *self = &topo->gpus[gpu];
    int due = 0;

    if (is_soldered(topo, self))
        return self->nvlinks;
    for (int i = 0; i < topo->n_gpus; i++)
        if (strcmp(topo->gpus[i].name, self->name) == 0 && topo->gpus[i].nvlinks_up > due)
            due = topo->gpus[i].nvlinks_up;
    return due;
}

/* Clouds lend single GPUs of a board, with the links to the others switched off. */
static bool is_lent_alone(const struct topo *topo)
{
    return topo->n_gpus == 1 && topo->gpus[0].nvlinks_up == 0 && topo->gpus[0].fabric != TOPO_FABRIC_FAILED;
}

struct nvlink_count {
    int n_answered, n_linked; /* GPUs that tell; that have links */
    int n_down, first_down;   /* GPUs with links down */
    int n_dead;               /* with all of them down */
    int n_due;                /* whose links are to be up */
    bool without_bridge;      /* those with links down have none up, and may have no bridge */
    int n_starting, n_failed; /* by state of their fabric */
    int first_fabric;
};

static struct nvlink_count count_nvlinks(const struct doctor_machine *machine)
{
    const struct topo *topo = machine->topo;
    struct nvlink_count count = {.first_down = -1, .first_fabric = -1, .without_bridge = true};

    for (int i = 0; i < topo->n_gpus; i++) {
        const struct topo_gpu *gpu = &topo->gpus[i];

        if (!gpu->answered)
            continue;
        count.n_answered++;
        count.n_linked += gpu->nvlinks > 0;
        count.n_due += links_due(topo, i) > 0;
        if (gpu->nvlinks_up < links_due(topo, i)) {
            count.n_down++;
            count.n_dead += gpu->nvlinks_up == 0;
            count.without_bridge = count.without_bridge && gpu->nvlinks_up == 0 && !is_soldered(topo, gpu);
            if (count.first_down < 0)
                count.first_down = i;
        }
        /* Where NVLinks lead to other nodes, the state of the fabric is the matter of imex. */
        if (look_has_multinode_nvlink(topo))
            continue;
        count.n_starting += gpu->fabric == TOPO_FABRIC_STARTING;
        count.n_failed += gpu->fabric == TOPO_FABRIC_FAILED;
        if (count.first_fabric < 0 && (gpu->fabric == TOPO_FABRIC_STARTING || gpu->fabric == TOPO_FABRIC_FAILED))
            count.first_fabric = i;
    }
    return count;
}

static void say_nvlinks(const struct doctor_machine *machine, struct doctor_result *result)
{
    for (int i = 0; i < machine->topo->n_gpus; i++) {
        const struct topo_gpu *gpu = &machine->topo->gpus[i];
        const char *fabric = gpu->fabric == TOPO_FABRIC_FAILED     ? ", fabric failed"
                             : gpu->fabric == TOPO_FABRIC_STARTING ? ", fabric not ready"
                                                                   : "";

        if (gpu->answered && (gpu->nvlinks_up < links_due(machine->topo, i) || *fabric))
            doctor_evidence(machine, result, look_gpu_name(machine, i), "%d of %d NVLinks up%s", gpu->nvlinks_up,
                            gpu->nvlinks, fabric);
    }
}

/*
 * The fabric manager reaches the NVSwitches of Blackwell's boards, which are not on the PCI bus, by management
 * datagrams of InfiniBand: its service does not start without the module ib_umad ("Fabric Manager User Guide").
 */
static bool misses_umad(const struct doctor_machine *machine)
{
    const struct topo *topo = machine->topo;

    return topo->n_gpus > 0 && topo->gpus[0].cc_major == 10 && !look_is_grace(topo) &&
           !machine->stack->os.in_container && look_virtual(machine->root) == LOOK_BARE &&
           inventory_nvswitches(machine) == 0 && root_stat(machine->root, "/sys/module/ib_umad").state == ROOT_ABSENT;
}

/* The fabric manager runs with the driver of its own version only: another one is not to be started again. */
static void fix_fabric(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct stack_driver *driver = &machine->stack->driver;
    const struct os *os = &machine->stack->os;
    const char *manager = driver->fabric_manager, *version = driver->version;
    int n_major = (int)strcspn(version, ".");

    if (*manager)
        doctor_evidence(machine, result, "nvidia-fabricmanager", "%s is %s, the driver is %s", manager,
                        strcmp(driver->fabric_manager_from, STACK_FABRIC_LOG) == 0 ? "what was started last"
                                                                                   : "installed",
                        version);
    if (misses_umad(machine)) {
        doctor_evidence(machine, result, "/sys/module/ib_umad", "not loaded");
        doctor_fix(machine, result, false, "sudo modprobe ib_umad\nsudo systemctl restart nvidia-fabricmanager");
    } else if (!os->in_container && strcmp(manager, version) == 0)
        doctor_fix(machine, result, false, "sudo systemctl restart nvidia-fabricmanager");
    else if (!os->in_container && *manager && *os_install(machine->root, os, "x", "x"))
        doctor_fix(machine, result, false, "%s\nsudo systemctl restart nvidia-fabricmanager",
                   os_install(machine->root, os,
                              root_printf(machine->root, "nvidia-fabricmanager-%.*s=%s-1", n_major, version, version),
                              root_printf(machine->root, "'nvidia-fabric*manager-%s-1'", version)));
    doctor_cost(machine, result, DOCTOR_FIX_RESTART, "Programs that use the GPUs of this machine end.");
    doctor_advise(
        machine, result,
        "nvidia-fabricmanager has to run, in the very version of the driver, %s (in a virtual machine: on the "
        "host; in a container: on the node). 'nv-fabricmanager --version' says its own, and its journal why "
        "it does not run.",
        *version ? version : "which is not known");
}

static void run_nvlink(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct nvlink_count count;

    if (!look_has_driver(machine, result))
        return;
    if (!machine->topo->nvml) {
        doctor_cannot_tell(machine, result, "NVML does not answer: %s", machine->topo->nvml_why);
        result->tells = look_nvml_tells(machine);
        return;
    }
    count = count_nvlinks(machine);
    if (count.n_linked == 0 || is_lent_alone(machine->topo)) {
        doctor_not_here(machine, result,
                        count.n_linked ? "a single GPU, lent without its NVLinks" : "GPUs without NVLink");
        return;
    }
    if (count.n_due == 0 && count.n_failed == 0 && count.n_starting == 0) {
        doctor_not_here(machine, result, "GPUs whose NVLinks need a bridge, and there is none");
        return;
    }
    if (count.n_down == 0 && count.n_failed == 0 && count.n_starting == 0)
        return;
    if (count.n_failed || count.n_starting || (count.n_dead == count.n_linked && count.n_dead > 1)) {
        doctor_found(machine, result, DOCTOR_ERROR, "the NVLink fabric is not up on %d of %d GPUs: %s",
                     count.n_failed + count.n_starting ? count.n_failed + count.n_starting : count.n_dead,
                     machine->topo->n_gpus,
                     count.n_failed     ? "it has failed"
                     : count.n_starting ? "it is not ready"
                                        : "no link is up");
        fix_fabric(machine, result);
    } else if (count.without_bridge) {
        doctor_found(machine, result, DOCTOR_WARNING, "no NVLink of %s is up%s, and other GPUs of its kind have them",
                     look_gpu_name(machine, count.first_down), count.n_down > 1 ? ", nor of more GPUs" : "");
        doctor_advise(machine, result,
                      "The NVLinks of these GPUs lead to a bridge: look whether it is plugged between %s and its "
                      "neighbor, on both. Where there is meant to be none, this is as it has to be.",
                      look_gpu_name(machine, count.first_down));
    } else {
        doctor_found(machine, result, DOCTOR_ERROR, "%d of %d NVLinks of %s are down%s",
                     links_due(machine->topo, count.first_down) - machine->topo->gpus[count.first_down].nvlinks_up,
                     links_due(machine->topo, count.first_down), look_gpu_name(machine, count.first_down),
                     count.n_down > 1 ? ", and of more GPUs" : "");
        doctor_advise(
            machine, result,
            "Look at the links (nvidia-smi nvlink --status -i %s) and at the kernel log for Xid 74; reset the "
            "GPU when nothing runs on the node. If the link stays down, take the node out of service.",
            machine->topo->pci[machine->topo->gpus[count.first_down].pci].address);
    }
    say_nvlinks(machine, result);
}

const struct doctor_check check_nvlink = {
    .id = "nvlink",
    .group = "driver",
    .mode = 35,
    .title = "all NVLinks are up and the fabric is ready",
    .symptom =
        "Dispatch within a node runs at a fraction of NVLink's bandwidth; \"system not yet initialized\" (CUDA 802).",
    .cause = "NVLinks are down, or the fabric manager has not set up the switches.",
    .remedy = "Start nvidia-fabricmanager in the version of the driver; repair links that stay down.",
    .links = (const char *const[]){"nvidia-smi nvlink --status", "nvidia-fabricmanager", NULL},
    .run = run_nvlink,
};
