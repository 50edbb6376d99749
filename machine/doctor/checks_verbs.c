/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checks_verbs.c - libibverbs and its provider.
 *
 * Which check reports what: a libibverbs from gIB's folder is verbs-from-gib; otherwise a core library and a provider
 * of different installations are verbs-mixed; otherwise a missing provider file is provider-missing, unless
 * RDMAV_DRIVERS names the folder that contains it, which is rdmav-drivers.
 */
#include "checks.h"

#include <ctype.h>

/* Providers by the PCI vendor of the NIC (rdma-core, providers/). */
static const struct {
    unsigned vendor;
    const char *name;
    int abi; /* of the kernel's driver that rdma-core's provider supports; 0: several, or not known */
} providers[] = {
    {0x14e4, "bnxt_re", 1}, {0x1d0f, "efa", 1},  {0x8086, "irdma", 0}, {0x1dd8, "ionic", 1}, {0x1ded, "erdma", 1},
    {0x1425, "cxgb4", 0},   {0x1077, "qedr", 0}, {0x19e5, "hns", 0},   {0x1414, "mana", 1},  {0x15b3, "mlx5", 1},
};

/* The row of the NIC's maker; -1: none. */
static int provider_of(const struct topo *topo, int nic)
{
    return FIRST_OF(i, COUNT(providers), topo->pci[topo->nics[nic].pci].vendor == providers[i].vendor);
}

/* Was libibverbs found, and does it say which providers it accepts? If not, ends the check. */
static bool has_libibverbs(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_verbs *verbs = &machine->software->verbs;
    struct elf_facts facts;

    /* Without the environment, the search path of the process is not known. */
    if (!machine_has_environment(machine, result) ||
        doctor_not_applicable_if(result, verbs->ibverbs.state == SOURCE_ABSENT,
                                 "libibverbs.so.1 is not installed where ld.so looks") ||
        doctor_unreadable_if(result, verbs->ibverbs.state == SOURCE_NOT_RECORDED, "libibverbs.so.1",
                             SOURCE_NOT_RECORDED, NULL))
        return false;
    facts = source_elf(machine->source, "%s", verbs->ibverbs.path);
    if (doctor_unknown_if(result, facts.state != SOURCE_OK, "%s: %s", verbs->ibverbs.path,
                          machine_reason(facts.state, facts.why)) ||
        doctor_unknown_if(result, !verbs->private_version, "%s defines no IBVERBS_PRIVATE_<number>",
                          verbs->ibverbs.path))
        return false;
    return true;
}

static bool has_core(const struct doctor_machine *machine, struct doctor_result *result)
{
    return machine_has_mlx5(machine, result) && has_libibverbs(machine, result);
}

/* The libibverbs that a process loads without LD_LIBRARY_PATH. */
static struct lib_location system_core(const struct doctor_machine *machine)
{
    struct libs_env plain = {.library_path = "", .preload = ""};

    return libs_find(machine->source, &plain, "libibverbs.so.1");
}

/* Does libibverbs come from gIB although the system has its own? */
static bool is_from_gib(const struct doctor_machine *machine)
{
    const char *gib = machine->software->nccl.gib, *path = machine->software->verbs.ibverbs.path;
    size_t n = strlen(gib);

    return n && machine->software->verbs.ibverbs.state == SOURCE_OK && strncmp(path, gib, n) == 0 && path[n] == '/' &&
           system_core(machine).state == SOURCE_OK;
}

/* --- RDMAV_DRIVERS --- */

/* The variable that libibverbs reads; NULL if none is set. */
static const char *drivers_variable(const struct doctor_machine *machine)
{
    static const char *const names[] = {"RDMAV_DRIVERS", "IBV_DRIVERS"};
    int set = FIRST_OF(i, COUNT(names), *machine_env(machine, names[i]));

    return set < 0 ? NULL : names[set];
}

/* The first entry that is a path and does not exist with the suffix that libibverbs appends; NULL if there is none. */
static const char *wrong_entry(const struct doctor_machine *machine, const char *variable)
{
    const char *list = variable ? machine_env(machine, variable) : "", *entry;

    while ((entry = machine_next_word(machine, &list, ":;")))
        if (*entry == '/' && strlen(entry) < 4000 &&
            source_stat(machine->source, "%s-rdmav%d.so", entry, machine->software->verbs.private_version).state ==
                SOURCE_ABSENT)
            return entry;
    return NULL;
}

/* If the entry is a folder that contains the provider, the path of the provider, otherwise "". */
static const char *provider_within(const struct doctor_machine *machine, const char *entry)
{
    const char *path =
        source_printf(machine->source, "%s/libmlx5-rdmav%d.so", entry, machine->software->verbs.private_version);

    return source_stat(machine->source, "%s", path).state == SOURCE_OK ? path : "";
}

void run_rdmav_drivers(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_verbs *verbs = &machine->software->verbs;
    const char *variable = drivers_variable(machine), *entry;

    if (!has_core(machine, result) || doctor_not_applicable_if(result, !variable, "RDMAV_DRIVERS is not set"))
        return;
    entry = wrong_entry(machine, variable);
    if (!entry)
        return;
    doctor_found(result, *verbs->provider ? DOCTOR_WARNING : DOCTOR_ERROR,
                 "%s has no effect: there is no %s-rdmav%d.so", variable, entry, verbs->private_version);
    doctor_evidence_env(result, variable);
    if (source_is_folder(source_stat(machine->source, "%s", entry)))
        doctor_evidence(result, entry, "is a folder");
    doctor_evidence(result, verbs->ibverbs.path, "IBVERBS_PRIVATE_%d", verbs->private_version);
    if (*provider_within(machine, entry))
        doctor_fix(result, false, "export %s=%s", variable,
                   shell_word(machine->source, source_printf(machine->source, "%s/libmlx5", entry)));
    else
        doctor_fix(result, false, "unset %s", variable);
    doctor_advise(result,
                  "libibverbs appends \"-rdmav%d.so\" to each entry: it has to end in /libmlx5, not in a folder. If "
                  "the provider is in the usual folder, the variable is not needed.",
                  verbs->private_version);
}

/* --- provider-missing --- */

/* The searched provider folder that is next to libibverbs; "" if there is none. */
static const char *own_provider_folder(const struct doctor_machine *machine)
{
    const struct software_verbs *verbs = &machine->software->verbs;
    const char *own =
        source_printf(machine->source, "%s/libibverbs", libs_folder_of(machine->source, verbs->ibverbs.real));
    const char *at = strstr(verbs->provider_folders, own);

    return at && (at[strlen(own)] == ',' || at[strlen(own)] == '\0') ? own : "";
}

/* A command that installs the provider, if the libmlx5.so.1 of the same installation is known. */
static void fix_provider(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_verbs *verbs = &machine->software->verbs;
    const char *folder = own_provider_folder(machine);

    /*
     * The same number is not sufficient: an installation in another folder has its own provider folder, and a link from
     * one to the other mixes them.
     */
    if (*folder && verbs->mlx5.state == SOURCE_OK && verbs->provider_needs == verbs->private_version &&
        strcmp(libs_folder_of(machine->source, verbs->mlx5.real),
               libs_folder_of(machine->source, verbs->ibverbs.real)) == 0) {
        folder = shell_word(machine->source, folder);
        doctor_fix(result, false, "sudo mkdir -p %s\nsudo ln -s %s %s/libmlx5-rdmav%d.so", folder,
                   shell_word(machine->source, verbs->mlx5.real), folder, verbs->private_version);
        doctor_advise(result,
                      "%s is from the same installation as %s. It is better to reinstall both from one package "
                      "(ibverbs-providers, on RHEL libibverbs, or those of DOCA-OFED).",
                      verbs->mlx5.path, verbs->ibverbs.path);
        return;
    }
    doctor_advise(result,
                  "Install the provider of the same installation as %s (package ibverbs-providers, on RHEL libibverbs, "
                  "or that of DOCA-OFED).%s",
                  verbs->ibverbs.path,
                  strcmp(system_core(machine).real, verbs->ibverbs.real) == 0
                      ? ""
                      : source_printf(machine->source,
                                      " Or take the libibverbs of the system: leave %s out of LD_LIBRARY_PATH.",
                                      libs_folder_of(machine->source, verbs->ibverbs.path)));
}

static bool is_mixed(const struct software_verbs *verbs)
{
    return verbs->mlx5.state == SOURCE_OK && verbs->private_version && verbs->provider_needs &&
           verbs->provider_needs != verbs->private_version;
}

/* "libibverbs.so.1" or "libmlx5.so.1", if it is needed and not found; otherwise "". */
static const char *missing_library(const struct doctor_machine *machine)
{
    const struct software_verbs *verbs = &machine->software->verbs;
    const char *net = machine_env(machine, "NCCL_NET");
    bool has_net = source_env(machine->source, "NCCL_NET"),
         by_sockets = strcasecmp(net, "Socket") == 0 || atoi(machine_env(machine, "NCCL_IB_DISABLE")) != 0,
         needs_plugin = (has_net && strcasecmp(net, "Socket") != 0) || source_env(machine->source, "NCCL_NET_PLUGIN"),
         uses_ibgda;
    struct doctor_result unused = {.machine = machine};

    if (!machine_has_mlx5(machine, &unused))
        return "";
    uses_ibgda = machine_uses_ibgda(machine, &unused);
    /* NCCL has a network of its own over libibverbs, and takes sockets without it. */
    needs_plugin = needs_plugin || (*machine->software->nccl.bundled && !by_sockets && machine_uses_rdma(machine));
    if (verbs->ibverbs.state == SOURCE_ABSENT && (uses_ibgda || needs_plugin))
        return "libibverbs.so.1";
    return verbs->mlx5.state == SOURCE_ABSENT && uses_ibgda ? "libmlx5.so.1" : "";
}

/* A NIC of another maker. Containers often have none of it, and use sockets. */
static void find_other_provider(const struct doctor_machine *machine, struct doctor_result *result, const char *name,
                                int nic)
{
    const struct software_verbs *verbs = &machine->software->verbs;
    const char *searched, *path;

    if (!has_libibverbs(machine, result) ||
        doctor_not_applicable_if(result, source_list(machine->source, "/etc/libibverbs.d").state != SOURCE_OK,
                                 "there is no /etc/libibverbs.d that would name providers"))
        return;
    path = software_find_provider(machine->source, verbs, name, &searched);
    if (*path)
        return;
    doctor_found(result, DOCTOR_ERROR, "libibverbs does not find lib%s-rdmav%d.so, the provider of %s", name,
                 verbs->private_version, machine->topo->nics[nic].name);
    doctor_evidence(result, verbs->ibverbs.path, "IBVERBS_PRIVATE_%d; found by %s", verbs->private_version,
                    verbs->ibverbs.found_by);
    doctor_evidence(result, "looked for in", "%s", searched);
    doctor_advise(
        result,
        "Install the provider %s of the same installation as %s: package ibverbs-providers, on RHEL libibverbs; or the maker's own that fits the kernel's driver, in a container in the image.",
        name, verbs->ibverbs.path);
}

void run_provider_missing(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_verbs *verbs = &machine->software->verbs;
    const char *entry, *lacking = missing_library(machine), *path = machine_env(machine, "LD_LIBRARY_PATH");
    const struct topo *topo = machine->topo;
    int other = FIRST_OF(i, topo->n_nics, machine_is_data_nic(topo, i) && provider_of(topo, i) >= 0);

    if (other >= 0 && !advice_has_mlx5(topo)) {
        find_other_provider(machine, result, providers[provider_of(topo, other)].name, other);
        return;
    }
    if (*lacking && machine_has_environment(machine, result)) {
        doctor_found(result, DOCTOR_ERROR, "%s is not installed where ld.so looks", lacking);
        doctor_evidence(result, lacking, "not found by the linker");
        doctor_evidence(result, "LD_LIBRARY_PATH", "%s", *path ? path : "not set");
        doctor_advise(result, "Install libibverbs, libmlx5 and the provider from one package source: libibverbs1 and "
                              "ibverbs-providers, or libibverbs of rdma-core, or those of DOCA-OFED. In a container "
                              "they belong in the image.");
        return;
    }
    if (!has_core(machine, result) || *verbs->provider ||
        doctor_not_applicable_if(result, is_from_gib(machine) || is_mixed(verbs),
                                 "the libraries are from different installations; another check reports that"))
        return;
    entry = wrong_entry(machine, drivers_variable(machine));
    if (doctor_not_applicable_if(result, entry && *provider_within(machine, entry),
                                 "RDMAV_DRIVERS names it wrongly; another check reports that"))
        return;
    doctor_found(result, DOCTOR_ERROR, "libibverbs does not find its provider libmlx5-rdmav%d.so",
                 verbs->private_version);
    doctor_evidence(result, verbs->ibverbs.path, "IBVERBS_PRIVATE_%d; found by %s", verbs->private_version,
                    verbs->ibverbs.found_by);
    doctor_evidence(result, "looked for in", "%s", verbs->provider_folders);
    if (verbs->mlx5.state == SOURCE_OK)
        doctor_evidence(result, verbs->mlx5.path, "needs IBVERBS_PRIVATE_%d", verbs->provider_needs);
    fix_provider(machine, result);
}

/* --- verbs-abi --- */

/*
 * A maker's own kernel driver has another interface than the one of the kernel, and comes with its own provider, which
 * is elsewhere than that of the distribution: the latter is next to libibverbs.
 */
void run_verbs_abi(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    const char *own, *path, *searched;

    if (!has_libibverbs(machine, result))
        return;
    own = own_provider_folder(machine);
    for (int i = 0; i < topo->n_nics && result->outcome != DOCTOR_FOUND; i++) {
        int k = machine_is_data_nic(topo, i) ? provider_of(topo, i) : -1;
        const char *number = topo->nics[i].uverbs ? strrchr(topo->nics[i].uverbs, '/') : NULL;
        int64_t abi;

        if (k < 0 || !providers[k].abi || !number ||
            source_number(machine->source, &abi, "/sys/class/infiniband_verbs%s/abi_version", number) != SOURCE_OK ||
            abi < 0 || abi == providers[k].abi)
            continue;
        path = software_find_provider(machine->source, &machine->software->verbs, providers[k].name, &searched);
        if (!*path || !*own || strncmp(path, own, strlen(own)) != 0)
            continue;
        doctor_found(result, DOCTOR_ERROR,
                     "the provider %s supports version %d of the kernel's interface, and %s has version %lld",
                     providers[k].name, providers[k].abi, topo->nics[i].name, (long long)abi);
        doctor_evidence(result, path, "of rdma-core");
        doctor_evidence(result, topo->nics[i].uverbs, "abi_version %lld", (long long)abi);
    }
}

/* --- verbs-mixed --- */

/* The folders that 'epkit env' advises to put first; if none, that of the system's installation. */
static void fix_order(const struct doctor_machine *machine, struct doctor_result *result,
                      const struct lib_location *system)
{
    const struct advice_row *advised = advice_find(machine->advice, "LD_LIBRARY_PATH");
    const char *folder = libs_folder_of(machine->source, system->real);
    bool is_in_it = advised && strstr(source_printf(machine->source, ":%s:", advised->value),
                                      source_printf(machine->source, ":%s:", folder));

    doctor_fix(result, false, "%s",
               shell_prepend(machine->source, "LD_LIBRARY_PATH", is_in_it ? advised->value : folder));
}

static int private_number(const char *digits)
{
    int number = 0;

    for (; isdigit((unsigned char)*digits) && number < 100000; digits++)
        number = number * 10 + (*digits - '0');
    return number;
}

void run_verbs_mixed(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_verbs *verbs = &machine->software->verbs;
    struct lib_location system;
    const char *path = verbs->mlx5.path, *by = verbs->mlx5.found_by;
    int number = verbs->provider_needs, needed;
    struct elf_facts facts;

    if (!has_core(machine, result) ||
        doctor_not_applicable_if(result, is_from_gib(machine),
                                 "libibverbs comes from gIB; another check reports that") ||
        doctor_unreadable_if(result, verbs->mlx5.state != SOURCE_OK && verbs->mlx5.state != SOURCE_ABSENT,
                             "libmlx5.so.1", verbs->mlx5.state, NULL))
        return;
    if (!is_mixed(verbs)) {
        path = verbs->provider;
        by = "its name";
        facts = source_elf(machine->source, "%s", path);
        needed = *path && facts.state == SOURCE_OK
                     ? FIRST_OF(i, facts.n_needs, text_begins(facts.needs[i].name, "IBVERBS_PRIVATE_"))
                     : -1;
        number = needed < 0 ? 0 : private_number(facts.needs[needed].name + strlen("IBVERBS_PRIVATE_"));
        if (!number || number == verbs->private_version)
            return;
    }
    doctor_found(result, DOCTOR_ERROR,
                 "libibverbs.so.1 and libmlx5 are from different installations: %s needs IBVERBS_PRIVATE_%d, and %s "
                 "defines IBVERBS_PRIVATE_%d",
                 path, number, verbs->ibverbs.path, verbs->private_version);
    doctor_evidence(result, verbs->ibverbs.path, "defines IBVERBS_PRIVATE_%d; found by %s", verbs->private_version,
                    verbs->ibverbs.found_by);
    doctor_evidence(result, path, "needs IBVERBS_PRIVATE_%d; found by %s", number, by);
    if (*libs_env_of(machine->source).library_path)
        doctor_evidence(result, "LD_LIBRARY_PATH", "%s", libs_env_of(machine->source).library_path);
    system = system_core(machine);
    if (system.state == SOURCE_OK && strcmp(system.real, verbs->ibverbs.real) != 0)
        fix_order(machine, result, &system);
    doctor_advise_remedy(result);
}

/* --- verbs-from-gib --- */

void run_verbs_from_gib(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_verbs *verbs = &machine->software->verbs;
    struct lib_location system;

    if (!machine_has_mlx5(machine, result) || !machine_has_environment(machine, result) ||
        doctor_not_applicable_if(result, !*machine->software->nccl.gib, "gIB is not installed") ||
        doctor_unreadable_if(result, verbs->ibverbs.state == SOURCE_NOT_RECORDED, "libibverbs.so.1",
                             SOURCE_NOT_RECORDED, NULL) ||
        !is_from_gib(machine))
        return;
    system = system_core(machine);
    doctor_found(result, DOCTOR_ERROR, "libibverbs.so.1 comes from gIB: %s, before the system's %s",
                 verbs->ibverbs.path, system.path);
    doctor_evidence(result, verbs->ibverbs.path, "found by %s", verbs->ibverbs.found_by);
    doctor_evidence(result, "LD_LIBRARY_PATH", "%s", libs_env_of(machine->source).library_path);
    fix_order(machine, result, &system);
    doctor_advise(result, "gIB's folder has to stay in LD_LIBRARY_PATH for NCCL to find its plugin, but after the "
                          "system's.");
}
