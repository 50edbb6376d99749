/* SPDX-License-Identifier: Apache-2.0 */
/* checks_nccl_library.c - NCCL's network plugin, the settings that gIB expects, and a single NCCL per process. */
#include "checks.h"

#define TORCH_SWITCH "TORCH_NCCL_USE_COMM_NONBLOCKING"

/* --- net-plugin --- */

/* Where the EFA installer puts the plugin, now and earlier, and where images have it. */
static const char *const efa_folders[] = {"/opt/amazon/ofi-nccl/lib", "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
                                          "/opt/amazon/aws-ofi-nccl/lib", "/opt/aws-ofi-nccl/lib"};

bool machine_has_only_efa(const struct doctor_machine *machine)
{
    const struct topo *topo = machine->topo;

    return !advice_has_mlx5(topo) &&
           ANY_OF(i, topo->n_nics,
                  machine_is_data_nic(topo, i) && topo->pci[topo->nics[i].pci].vendor == PCI_VENDOR_AMAZON);
}

static void report_no_plugin(const struct doctor_machine *machine, struct doctor_result *result, const char *name,
                             const char *variable)
{
    doctor_found(result, DOCTOR_ERROR,
                 *variable ? "NCCL's network plugin %s is not found"
                           : "NCCL uses sockets: EFA needs a network plugin, and %s is not found",
                 name);
    if (*variable)
        doctor_evidence_env(result, variable);
    doctor_evidence(result, name, "not found by the linker");
    for (size_t i = 0; i < COUNT(efa_folders) && !*result->fix; i++)
        if (source_stat(machine->source, "%s/%s", efa_folders[i], name).state == SOURCE_OK)
            doctor_fix(result, false, "%s", shell_prepend(machine->source, "LD_LIBRARY_PATH", efa_folders[i]));
    if (!*result->fix && *machine->software->nccl.gib)
        doctor_fix(result, false, "eval \"$(epkit env)\"");
    else if (!*result->fix && *variable)
        doctor_fix(result, false, "unset %s", variable);
    doctor_advise(result,
                  *variable ? "Add its folder to LD_LIBRARY_PATH (gIB's is /usr/local/gib/lib64), install it, or unset "
                              "%s."
                            : "The EFA installer brings it%s; in a container it belongs in the image.",
                  variable);
}

#define EFA "/opt/amazon/efa/"

/* Debian's or an own libfabric has neither Amazon's provider as NCCL needs it nor its memory of GPUs. */
static void find_other_libfabric(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct libs_env env = libs_env_of(machine->source);
    struct lib_location none = {.state = SOURCE_ABSENT, .path = ""},
                        loaded = libs_loaded_with(machine->source, env, machine->software->nccl.plugin.path,
                                                  "libfabric.so.1", none);
    const char *const *folder = TEXTS(EFA "lib", EFA "lib64");

    if (loaded.state != SOURCE_OK || text_begins(loaded.real, EFA))
        return;
    while (*folder && source_stat(machine->source, "%s/libfabric.so.1", *folder).state != SOURCE_OK)
        folder++;
    if (!*folder)
        return;
    doctor_found(result, DOCTOR_ERROR, "NCCL's network plugin for EFA loads another libfabric than Amazon's: %s",
                 loaded.path);
    doctor_evidence(result, loaded.path, "found by %s", loaded.found_by);
    doctor_fix(result, false, "%s", shell_prepend(machine->source, "LD_LIBRARY_PATH", *folder));
    doctor_advise(result, "The plugin then fails when it starts, or NCCL hangs. Remove the other one where nothing "
                          "needs it.");
}

void run_net_plugin(const struct doctor_machine *machine, struct doctor_result *result)
{
    const char *net = source_env(machine->source, "NCCL_NET"), *plugin = source_env(machine->source, "NCCL_NET_PLUGIN");
    const struct software_nccl *nccl = &machine->software->nccl;
    bool wants_net = net && *net && !software_is_internal_net(net), wants_plugin = plugin && *plugin;
    bool is_none = wants_plugin && strcmp(plugin, "none") == 0,
         /* NCCL reaches EFA's NICs by a plugin, and takes sockets without one. */
        needs_plugin = machine_has_only_efa(machine) && (*nccl->bundled || nccl->lib.state == SOURCE_OK);

    if (doctor_not_applicable_if(result, !wants_net && (wants_plugin ? is_none : (net && *net) || !needs_plugin),
                                 "the environment asks for no network plugin"))
        return;
    if (is_none) {
        doctor_found(result, DOCTOR_ERROR, "NCCL_NET=%s needs a plugin, and NCCL_NET_PLUGIN=none forbids it", net);
        doctor_evidence(result, "NCCL_NET", "%s", net);
        doctor_fix(result, false, "unset NCCL_NET_PLUGIN");
        return;
    }
    if (nccl->plugin.state == SOURCE_ABSENT) {
        report_no_plugin(machine, result, *nccl->plugin_name ? nccl->plugin_name : "libnccl-net.so",
                         wants_net      ? "NCCL_NET"
                         : wants_plugin ? "NCCL_NET_PLUGIN"
                                        : "");
        return;
    }
    if (doctor_unknown_if(result, nccl->plugin.state != SOURCE_OK, "%s: %s", nccl->plugin_name,
                          machine_reason(nccl->plugin.state, NULL)))
        return;
    machine_check_load(machine, result, "NCCL's network plugin", nccl->plugin.path,
                       "Install what is missing, or the plugin again for this system.");
    if (result->outcome != DOCTOR_FOUND && machine_has_only_efa(machine))
        find_other_libfabric(machine, result);
}

/* --- gib-settings --- */

/* Is this row of the advice one of gIB's settings, and does the environment differ from it? */
static bool setting_differs(const struct doctor_machine *machine, const struct advice_row *row, bool uses_gib)
{
    const char *value = source_env(machine->source, row->name);

    if (strncmp(row->name, "NCCL_", 5) != 0 || row->unset)
        return false;
    return value ? strcasecmp(value, row->value) != 0 : uses_gib;
}

void run_gib_settings(const struct doctor_machine *machine, struct doctor_result *result)
{
    const char *net = source_env(machine->source, "NCCL_NET"), *torch = source_env(machine->source, TORCH_SWITCH);
    const struct advice_row *wanted = advice_find(machine->advice, "NCCL_NET");
    const char *first = "", *script = machine->software->nccl.script;
    int n = torch != NULL;

    if (doctor_not_applicable_if(result, !*machine->software->nccl.gib || !wanted || wanted->unset,
                                 "gIB is not installed, or there are no NICs for it") ||
        doctor_not_applicable_if(result, wanted && net && strcasecmp(net, wanted->value) != 0,
                                 "NCCL_NET asks for another network than gIB"))
        return;
    if (torch)
        doctor_evidence(result, TORCH_SWITCH, "%s", torch);
    FOR_EACH (row, machine->advice->rows, machine->advice->n) {
        const char *value = source_env(machine->source, row->name);

        if (!setting_differs(machine, row, net != NULL))
            continue;
        first = *first ? first : row->name;
        n++;
        doctor_evidence(result, row->name, "%s; %s %s", value ? value : "not set",
                        *script ? source_printf(machine->source, "%s sets", script) : "gIB is known to expect",
                        row->value);
    }
    if (n == 0)
        return;
    if (torch)
        doctor_found(result, DOCTOR_WARNING, TORCH_SWITCH " is set, and gIB's shim requires it to be unset");
    else
        doctor_found(result, DOCTOR_WARNING, "%s%s not what gIB expects", first, n > 1 ? " and others are" : " is");
    doctor_fix(result, false, "eval \"$(epkit env)\"");
}

/* --- efa-version --- */

#define EFA_PACKAGES "/opt/amazon/efa_installed_packages"
#define EFA_FOR_NCCL_219 "1.29"
#define CUDA_SYNC "FI_EFA_SET_CUDA_SYNC_MEMOPS"

/* "# EFA installer version: 1.28.0" */
static json_t *read_efa_version(struct source_text file)
{
    const char *at = strstr(file.text, "EFA installer version:");

    at = at ? at + strlen("EFA installer version:") : "";
    at += strspn(at, " ");
    return json_stringn_nocheck(at, strspn(at, "0123456789."));
}

void run_efa_version(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_nccl *nccl = &machine->software->nccl;
    const char *version = source_fact_text(source_fact(machine->source, "version", read_efa_version, EFA_PACKAGES));
    const char *of_nccl = *nccl->bundled_version ? nccl->bundled_version : nccl->version;
    const char *sync = source_env(machine->source, CUDA_SYNC);

    if (doctor_not_applicable_if(result, !*version, "the EFA installer has installed nothing here") ||
        doctor_not_applicable_if(result, !*of_nccl, "the version of NCCL is not known") ||
        strverscmp(version, EFA_FOR_NCCL_219) >= 0 || strverscmp(of_nccl, "2.19") < 0 ||
        (sync && strcmp(sync, "0") == 0))
        return;
    doctor_found(result, DOCTOR_ERROR, "libfabric of the EFA installer %s does not work with NCCL %s", version,
                 of_nccl);
    doctor_evidence(result, EFA_PACKAGES, "%s", version);
    doctor_evidence(result, "NCCL", "%s", of_nccl);
    doctor_fix(result, false, "export " CUDA_SYNC "=0");
    doctor_advise_remedy(result);
}

/* --- two-nccl --- */

/* Does the first folder of LD_LIBRARY_PATH with an NCCL have another than PyTorch's? gIB's own is meant to. */
static bool find_other_on_path(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_nccl *nccl = &machine->software->nccl;
    const char *at = source_env(machine->source, "LD_LIBRARY_PATH"), *folder, *path = "", *version,
               *bundled = nccl->bundled_version;
    bool is_older;

    if (!*nccl->bundled || !*bundled)
        return false;
    while ((folder = machine_next_word(machine, &at, ":;"))) {
        path = *folder == '/' ? source_printf(machine->source, "%s/libnccl.so.2", folder) : "";
        if (*path && source_stat(machine->source, "%s", path).state == SOURCE_OK)
            break;
    }
    version = folder ? libs_file_version(source_resolve(machine->source, "%s", path).text) : "";
    if ((*nccl->gib && folder && text_begins(folder, nccl->gib)) || strlen(version) < 3 ||
        strcmp(path, nccl->bundled) == 0 || strverscmp(version, bundled) == 0)
        return false;
    /* "2.18" of "2.18.3": its later versions have the same functions */
    is_older = strverscmp(version, bundled) < 0 && strncmp(version, bundled, 2 + strcspn(version + 2, ".")) != 0;
    doctor_found(result, is_older ? DOCTOR_ERROR : DOCTOR_WARNING,
                 "LD_LIBRARY_PATH leads to NCCL %s before PyTorch's %s%s", version, bundled,
                 is_older ? ", and the import of PyTorch stops where it needs a function that is missing" : "");
    doctor_evidence(result, path, "%s", version);
    doctor_evidence(result, nccl->bundled, "%s", bundled);
    doctor_fix(result, false, "%s",
               shell_prepend(machine->source, "LD_LIBRARY_PATH", libs_folder_of(machine->source, nccl->bundled)));
    doctor_advise(result,
                  "Or take %s out of LD_LIBRARY_PATH where nothing else in it is needed, or start the program "
                  "with the NCCL that it should use in LD_PRELOAD.",
                  folder);
    return true;
}

void run_two_nccl(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source_names mapped = libs_mapped(machine->source, "libnccl.so");
    struct machine_preload preload = machine_preload(machine, "libnccl.so");

    if (machine_has_two(result, "libnccl.so", "NCCL")) {
        doctor_advise(result, "Start it with the one that PyTorch was built for in LD_PRELOAD.");
    } else if (*preload.path && !preload.is_there) {
        doctor_found(result, DOCTOR_ERROR, "LD_PRELOAD names an NCCL that is not there: %s", preload.path);
        doctor_evidence(result, "LD_PRELOAD", "%s", preload.path);
        doctor_fix(result, false, "%s", machine_preload_command(machine));
    } else if (!*preload.path && mapped.n == 0 && !find_other_on_path(machine, result)) {
        machine_is_overwritten(result, "nccl", machine->software->nccl.bundled);
    }
}
