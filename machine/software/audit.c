/* SPDX-License-Identifier: Apache-2.0 */
/*
 * audit.c - what is wrong with an environment.
 *
 * A variable has at most one row, for its most severe problem. The checks below run in order, and the first one that
 * reports something is the last one for that variable.
 */
#include "common/env_variables.h"
#include "common/memory.h"
#include "read_software.h"

#include "base/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define SHOWN_BYTES 256 /* of a value in a text */

/* Shorter names without a known prefix are other variables. */
#define MISTYPED_BYTES_MIN 12

/* Variables of NVSHMEM are known up to this version; those of a later version are not reported as unknown. */
#define NVSHMEM_NEXT "3.6"

struct audit_work {
    struct source *source;
    const struct topo *topo;
    const struct software *software;
    const struct advice *advice;
    struct audit *audit;
};

static const char *audit_clean(const struct audit_work *work, const char *text)
{
    char shown[SHOWN_BYTES];

    text_clean(text, shown, sizeof(shown));
    return source_printf(work->source, "%s", shown);
}

static bool __attribute__((format(printf, 4, 5)))
report(struct audit_work *work, enum audit_kind kind, const struct source_variable *variable, const char *format, ...)
{
    const struct advice_row *row = advice_find(work->advice, variable->name);
    char text[1024];

    if (work->audit->n == AUDIT_MAX)
        return true;
    WITH_ARGS(args, format, vsnprintf(text, sizeof(text), format, args));
    work->audit->rows[work->audit->n++] =
        (struct audit_row){.kind = kind,
                           .name = audit_clean(work, variable->name),
                           .value = audit_clean(work, variable->value),
                           .advised = row && !row->unset && row->scope != ADVICE_RANK ? row->value : "",
                           .text = source_printf(work->source, "%s", text)};
    return true;
}

/* Calls `check` for each entry of a list; returns true as soon as `check` does. */
static bool any_entry(struct audit_work *work, const struct source_variable *variable, const char *separators,
                      bool (*check)(struct audit_work *, const struct source_variable *, const char *entry))
{
    char entry[512];

    FOR_PIECES (piece, variable->value, separators) {
        snprintf(entry, sizeof(entry), "%.*s", (int)piece.n, piece.text);
        if (piece.n > 0 && piece.n < sizeof(entry) && check(work, variable, entry))
            return true;
    }
    return false;
}

/* --- checks of single variables --- */

static bool check_pe_mapping(struct audit_work *work, const struct source_variable *variable)
{
    const struct advice_row *row = advice_find(work->advice, variable->name);

    if (!row || !variable_is_true(variable->value) ||
        advice_is_single_nic(source_env(work->source, "NVSHMEM_HCA_LIST")) || work->topo->n_gpus < 2)
        return false;
    return report(work, AUDIT_HARMFUL, variable, "All GPUs take the first NIC. %s Unset it.", row->reason);
}

static bool check_handler(struct audit_work *work, const struct source_variable *variable)
{
    if (strcasecmp(variable->value, "cpu") == 0 && advice_find(work->advice, variable->name))
        return report(
            work, AUDIT_HARMFUL, variable,
            "The CPU rings the NICs' doorbells: that needs GDRCopy, and dispatches have been seen to hang. Set "
            "it to gpu.");
    if (strcasecmp(variable->value, "cpu_host_memory") == 0 && advice_find(work->advice, variable->name))
        return report(work, AUDIT_DIFFERS, variable, "The CPU rings the NICs' doorbells, which is slower than gpu.");
    /* auto has the same effect as gpu */
    return strcasecmp(variable->value, "auto") == 0;
}

/* "mlx5_0", "mlx5_0:1", in a mapping by PE "mlx5_0:1:2": the NIC and its port must exist. */
static bool check_hca(struct audit_work *work, const struct source_variable *variable, const char *entry)
{
    size_t n = strcspn(entry, ":");
    char name[64], *end;
    long port = 1;
    int nic;

    snprintf(name, sizeof(name), "%.*s", (int)n, entry);
    if (entry[strcspn(entry, "; |\t")])
        return report(work, AUDIT_HARMFUL, variable, "Entries are separated by ',', and '%s' is one entry.",
                      audit_clean(work, entry));
    nic = topo_find_nic(work->topo, name);
    if (nic < 0)
        return report(work, AUDIT_HARMFUL, variable, "It names %s, and no NIC here has that name.",
                      audit_clean(work, name));
    if (entry[n] == ':') {
        port = strtol(entry + n + 1, &end, 10);
        if (end == entry + n + 1 || (*end && *end != ':'))
            return report(work, AUDIT_HARMFUL, variable, "'%s' names no port by its number.", audit_clean(work, entry));
    }
    return !ANY_OF(p, work->topo->nics[nic].n_ports, work->topo->nics[nic].ports[p].number == port) &&
           report(work, AUDIT_HARMFUL, variable, "It names port %ld of %s, which has no such port.", port,
                  audit_clean(work, name));
}

/* "mlx5_0" means "mlx5_0:1". */
static bool is_same_hca(const char *a, const char *b)
{
    size_t n = strcspn(a, ":");

    if (n != strcspn(b, ":") || strncmp(a, b, n) != 0)
        return false;
    return strcmp(a[n] ? a + n : ":1", b[n] ? b + n : ":1") == 0;
}

static bool check_hca_list(struct audit_work *work, const struct source_variable *variable)
{
    const struct advice_row *row = advice_find(work->advice, variable->name);
    struct source_variable list = *variable;
    int gpu = advice_gpu_of(work->topo, advice_source_env, work->source);

    list.value += list.value[0] == '^';
    if (work->topo->n_nics > 0 && list.value == variable->value && any_entry(work, &list, ",", check_hca))
        return true;
    if (!row || gpu < 0 || gpu >= row->n_values || is_same_hca(variable->value, row->values[gpu]))
        return true;
    return report(work, AUDIT_DIFFERS, variable, "This rank uses GPU %d, whose NIC is %s.", gpu, row->values[gpu]);
}

/* The mapping by PE is read only if it is enabled, and is specific to one machine. */
static bool check_hca_pe_mapping(struct audit_work *work, const struct source_variable *variable)
{
    if (!variable_is_true(source_env(work->source, "NVSHMEM_ENABLE_NIC_PE_MAPPING")))
        return report(work, AUDIT_VOID, variable,
                      "It does nothing: NVSHMEM_ENABLE_NIC_PE_MAPPING is not on. Unset it.");
    return work->topo->n_nics > 0 && any_entry(work, variable, ",", check_hca);
}

static bool check_mapping(struct audit_work *work, const struct source_variable *variable)
{
    const struct advice_row *row = advice_find(work->advice, variable->name);
    struct map *map = NULL, *best = NULL;
    bool is_worse;

    if (work->topo->n_gpus == 0 || work->topo->n_nics == 0)
        return true;
    if (map_parse(work->topo, variable->value, &map) != EP_OK)
        return report(work, AUDIT_VALUE, variable, "It is not a valid mapping of the GPUs here: %s.", ep_last_error());
    if (work->software->deepep.imported >= 0 && !work->software->deepep.mapping_active) {
        map_free(map);
        return report(work, AUDIT_VOID, variable,
                      "It does nothing: the DeepEP that is imported does not read it. Set NVSHMEM_HCA_LIST for each "
                      "rank.");
    }
    is_worse = row && map_parse(work->topo, row->value, &best) == EP_OK &&
               (map->n_shared > best->n_shared || map->distance > best->distance);
    map_free(best);
    map_free(map);
    if (is_worse)
        return report(work, AUDIT_DIFFERS, variable, "GPUs share NICs, or have farther ones than they could have.");
    return true;
}

static bool check_vmm(struct audit_work *work, const struct source_variable *variable)
{
    if (!variable_is_true(variable->value) || advice_find(work->advice, variable->name) ||
        work->software->driver.dmabuf != SOURCE_OK || source_env(work->source, "NVSHMEM_SYMMETRIC_SIZE"))
        return false;
    return report(work, AUDIT_DIFFERS, variable,
                  "The heap is static then, of 1 GiB because NVSHMEM_SYMMETRIC_SIZE is not set. GPU memory is "
                  "registered by dma-buf here, which needs no static heap: unset it.");
}

/* An entry is NAME or NAME:PORT. */
static bool check_verbs_entry(struct audit_work *work, const struct source_variable *variable, const char *entry)
{
    size_t n = strcspn(entry, ":");

    return !ANY_OF(i, work->topo->n_nics,
                   strlen(work->topo->nics[i].name) == n && strncmp(work->topo->nics[i].name, entry, n) == 0) &&
           report(work, AUDIT_VALUE, variable,
                  "There is no RDMA device \"%.64s\" here: the network verbs does not start. Correct it, or unset it.",
                  audit_clean(work, entry));
}

/* The entries, each with its port; "NAME" means all ports of the device. Ranks use the ports in this order. */
static void list_ports(const struct topo *topo, const char *list, char *ret_text, size_t bytes)
{
    *ret_text = '\0';
    for (const char *at = list; *at; at += strcspn(at, ","), at += *at != '\0') {
        int n = (int)strcspn(at, ","), name = (int)strcspn(at, ":,"), nic;
        char device[64];

        snprintf(device, sizeof(device), "%.*s", name, at);
        nic = name < n ? -1 : topo_find_nic(topo, device);
        if (nic < 0 && n > 0)
            text_append(ret_text, bytes, "%.*s,", n, at);
        for (int p = 0; nic >= 0 && p < topo->nics[nic].n_ports; p++)
            text_append(ret_text, bytes, "%s:%d,", device, topo->nics[nic].ports[p].number);
    }
}

static bool check_verbs_device(struct audit_work *work, const struct source_variable *variable)
{
    const struct advice_row *row = advice_find(work->advice, variable->name);
    char given[2048], advised[2048];

    if (any_entry(work, variable, ",", check_verbs_entry))
        return true;
    if (!row || row->unset || row->scope != ADVICE_NODE)
        return false;
    list_ports(work->topo, variable->value, given, sizeof(given));
    list_ports(work->topo, row->value, advised, sizeof(advised));
    return strcmp(given, advised) == 0;
}

static bool check_preload_entry(struct audit_work *work, const struct source_variable *variable, const char *entry)
{
    if (*entry != '/' || strchr(entry, '$') || source_stat(work->source, "%s", entry).state != SOURCE_ABSENT)
        return false;
    return report(work, AUDIT_PATH, variable, "%s does not exist, and ld.so continues without it.",
                  audit_clean(work, entry));
}

static bool check_preload(struct audit_work *work, const struct source_variable *variable)
{
    return any_entry(work, variable, ": ", check_preload_entry);
}

/* Is `folder` among the entries of a search path? */
static bool path_has(const char *path, const char *folder)
{
    FOR_PIECES (entry, path, ":;") {
        while (entry.n > 1 && entry.text[entry.n - 1] == '/')
            entry.n--;
        if (piece_is(entry, folder))
            return true;
    }
    return false;
}

static bool check_path(struct audit_work *work, const struct source_variable *variable)
{
    const struct advice_row *row = advice_find(work->advice, variable->name);
    int i = 0;

    if (!row || row->scope != ADVICE_NODE)
        return true;
    FOR_PIECES (entry, row->value, ":") {
        const char *folder = piece_copy(work->source, entry);
        const char *why = row->folder_reasons ? row->folder_reasons[i++] : row->reason;

        if (!path_has(variable->value, folder))
            return report(work, AUDIT_DIFFERS, variable, "It lacks %s (%.*s). Put that in front.", folder,
                          (int)(row->folder_reasons ? strlen(why) : strcspn(why, ".")), why);
    }
    return true;
}

/*
 * A check returns true if it handled the variable, whether it reported something or not. NULL: a check of the doctor
 * compares it with the machine (checks[] in cmd/env/cmd_env.c).
 */
static const struct {
    const char *name;
    bool (*check)(struct audit_work *work, const struct source_variable *variable);
} checks[] = {
    {"NVSHMEM_ENABLE_NIC_PE_MAPPING", check_pe_mapping},
    {"NVSHMEM_IBGDA_NIC_HANDLER", check_handler},
    {"NVSHMEM_HCA_PREFIX", NULL},
    {"NVSHMEM_HCA_LIST", check_hca_list},
    {"NVSHMEM_HCA_PE_MAPPING", check_hca_pe_mapping},
    {"NVSHMEM_DISABLE_CUDA_VMM", check_vmm},
    {"DEEP_EP_DEVICE_TO_HCA_MAPPING", check_mapping},
    {"EPKIT_VERBS_DEVICE", check_verbs_device},
    {"LD_PRELOAD", check_preload},
    {"LD_LIBRARY_PATH", check_path},
    {"PYTHONPATH", check_path},
};

/* --- checks by the table --- */

static bool is_in_scope(const char *name)
{
    return variable_has_known_prefix(name) || variable_is_epkit(name);
}

/* A typing error may be in the prefix, as in NVHSMEM_DEBUG and DEEPEP_DEVICE_TO_HCA_MAPPING. */
static bool may_be_in_scope(const char *name)
{
    return strchr("ND", *name) && strlen(name) >= MISTYPED_BYTES_MIN;
}

static bool check_unknown(struct audit_work *work, const struct source_variable *variable)
{
    const char *version = work->software->nvshmem.version;
    bool in_scope = is_in_scope(variable->name), is_near;
    char near[VARIABLE_NAME_BYTES];

    if (!in_scope && !may_be_in_scope(variable->name))
        return false;
    is_near = variable_nearest(variable->name, near);
    if (!in_scope && !(is_near && variable_has_known_prefix(near)))
        return false;
    if (is_near)
        return report(work, AUDIT_UNKNOWN, variable, "Nothing is known to read it. Is %s meant?", near);
    /* Plugins of NCCL have variables of their own, and so have later versions of NVSHMEM. */
    if (strncmp(variable->name, "NVSHMEM_", 8) != 0 || (*version && strverscmp(version, NVSHMEM_NEXT) >= 0))
        return false;
    return report(work, AUDIT_UNKNOWN, variable, "NVSHMEM up to 3.5 has no variable of this name. Unset it.");
}

static bool check_file(struct audit_work *work, const struct variable *known, const struct source_variable *variable)
{
    /* "CUDA_HOME=$CUDA_HOME:/usr/local/cuda", where it was not set before */
    bool is_list = strncmp(variable->value, ":/", 2) == 0;

    if (!known->values || strcmp(known->values, "path") != 0 || (variable->value[0] != '/' && !is_list) ||
        (!is_list && source_stat(work->source, "%s", variable->value).state != SOURCE_ABSENT))
        return false;
    return report(work, AUDIT_PATH, variable, "It names a path that does not exist: %s.", known->text);
}

static bool check_by_table(struct audit_work *work, const struct variable *known,
                           const struct source_variable *variable)
{
    bool is_path = known->values && strcmp(known->values, "path") == 0;
    char why[256];

    if (known->effect == VARIABLE_VOID)
        return report(work, AUDIT_VOID, variable, "It does nothing: %s. Unset it.", known->text);
    /* A build reads these folders, so they only have to exist. */
    if (known->effect == VARIABLE_BUILD_ONLY && !is_path)
        return report(work, AUDIT_VOID, variable, "It does nothing in a running program: %s. Unset it.", known->text);
    if (!variable_accepts(known, variable->value, why, sizeof(why)) &&
        (is_in_scope(variable->name) || known->effect != VARIABLE_WORKS))
        return report(work, AUDIT_VALUE, variable, "Its value %s. Correct it, or unset it%s%s.", why,
                      known->text ? ": " : "", known->text ? known->text : "");
    if (!*variable->value && is_in_scope(variable->name) && known->values && strcmp(known->values, "bool") != 0)
        return report(work, AUDIT_VOID, variable, "It is empty, which has no effect. Unset it, or give it a value.");
    return check_file(work, known, variable);
}

static void check_by_advice(struct audit_work *work, const struct source_variable *variable)
{
    const struct advice_row *row = advice_find(work->advice, variable->name);
    const struct variable *known = variable_find(variable->name);

    if (!row || row->scope != ADVICE_NODE)
        return;
    if (row->unset) {
        /* A boolean that is off equals one that is not set. */
        if (!known || !known->values || strcmp(known->values, "bool") != 0 || variable_is_true(variable->value))
            report(work, AUDIT_HARMFUL, variable, "%s Unset it.", row->reason);
        return;
    }
    if (known && known->values && strcmp(known->values, "bool") == 0 &&
        variable_is_true(row->value) == variable_is_true(variable->value))
        return;
    if (strcasecmp(row->value, variable->value) != 0)
        report(work, AUDIT_DIFFERS, variable, "It should be %s. %s", row->value, row->reason);
}

static void check_variable(struct audit_work *work, const struct source_variable *variable)
{
    const struct variable *known = variable_find(variable->name);

    if (!known) {
        check_unknown(work, variable);
        return;
    }
    if (check_by_table(work, known, variable))
        return;
    for (size_t i = 0; i < COUNT(checks); i++)
        if (strcmp(checks[i].name, variable->name) == 0 && (!checks[i].check || checks[i].check(work, variable)))
            return;
    /* check_pe_mapping() has handled this one, together with the list of NICs. */
    if (strcmp(variable->name, "NVSHMEM_ENABLE_NIC_PE_MAPPING") != 0)
        check_by_advice(work, variable);
}

/* --- what is missing --- */

static void find_missing(struct audit_work *work)
{
    int gpu = advice_gpu_of(work->topo, advice_source_env, work->source);

    for (int i = 0; i < work->advice->n && work->audit->n < AUDIT_MAX; i++) {
        const struct advice_row *row = &work->advice->rows[i];
        const char *value =
            row->scope == ADVICE_RANK && gpu >= 0 && gpu < row->n_values ? row->values[gpu] : row->value;

        /* LD_PRELOAD is for one program, perhaps another one; epkit's commands choose their own values. */
        if (row->unset || variable_is_epkit(row->name) || row->scope == ADVICE_PROGRAM ||
            (row->scope == ADVICE_RANK && gpu < 0) || source_env(work->source, row->name))
            continue;
        work->audit->rows[work->audit->n++] = (struct audit_row){
            .kind = AUDIT_MISSING, .name = row->name, .value = "", .advised = value, .text = row->reason};
    }
}

static int compare_rows(const void *left, const void *right)
{
    const struct audit_row *a = left, *b = right;
    int order = (a->kind != AUDIT_HARMFUL) - (b->kind != AUDIT_HARMFUL);

    return order ? order : strcmp(a->name, b->name);
}

struct audit *audit_make(const struct topo *topo, const struct software *software, const struct advice *advice)
{
    struct source_environment environment = source_environment(software->source);
    struct audit *audit = source_alloc(software->source, sizeof(*audit));
    struct audit_work work = {software->source, topo, software, advice, audit};

    for (size_t i = 0; i < environment.n && audit->n < AUDIT_MAX; i++) {
        audit->uses_software = audit->uses_software || variable_has_known_prefix(environment.variables[i].name);
        check_variable(&work, &environment.variables[i]);
    }
    /* A DeepEP that Python finds reads variables and enables IBGDA even if no variable is set. */
    audit->uses_software = audit->uses_software || (software->deepep.imported >= 0 && advice_has_mlx5(topo));
    /* Nothing can be missing from an environment that could not be read. */
    if (environment.state == SOURCE_OK)
        find_missing(&work);
    qsort(audit->rows, (size_t)audit->n, sizeof(*audit->rows), compare_rows);
    return audit;
}
