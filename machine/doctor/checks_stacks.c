/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checks_stacks.c - what libraries for expert parallelism need, row by row of the table in machine/software/stacks.c,
 * compared with what the machine has. The first need that is not met is the one that its user sees first.
 */
#include "checks.h"
#include "machine/software/read_software.h"

/* --- shared --- */

/* The CUDA of PyTorch, for the names of packages; without PyTorch the current one. */
static int cuda_major(const struct doctor_machine *machine)
{
    const char *tag = strstr(machine->software->torch_version, "+cu");
    int version = tag ? atoi(tag + 3) : 0;

    return version >= 100 ? version / 10 : 13;
}

const char *stack_install(const struct doctor_machine *machine, const struct stack *stack)
{
    const char *cuda = strstr(stack->install, "-cu13");

    return cuda ? source_printf(machine->source, "%.*s-cu%d", (int)(cuda - stack->install), stack->install,
                                cuda_major(machine))
                : stack->install;
}

/* "pip install --force-reinstall --no-deps sgl-deep-ep==0.1.2" where the index has it, otherwise how it is built. */
static const char *reinstall(const struct doctor_machine *machine, const struct stack_installed *installed)
{
    const char *install = stack_install(machine, installed->stack), *name = strrchr(install, ' ') + 1;

    if (strchr(name, '/') || !*installed->version)
        return install;
    return source_printf(
        machine->source, "pip install --force-reinstall --no-deps %s",
        shell_word(machine->source, source_printf(machine->source, "%s==%s", name, installed->version)));
}

static void fix_nccl(const struct doctor_machine *machine, const struct stack *stack, struct doctor_result *result)
{
    doctor_fix(result, false, "pip install --no-deps 'nvidia-nccl-cu%d>=%s'", cuda_major(machine), stack->nccl);
}

/* The NCCL that is in the process before the library is imported: PyTorch's, unless LD_PRELOAD replaces it. */
static struct lib_location loaded_nccl(const struct doctor_machine *machine)
{
    const struct software_nccl *nccl = &machine->software->nccl;
    struct libs_env env = libs_env_of(machine->source);
    struct lib_location location = nccl->lib;
    const char *torch = source_printf(machine->source, "%s/lib/libtorch_cuda.so", machine->software->torch);

    if ((location.state == SOURCE_OK && strcmp(location.found_by, "LD_PRELOAD") == 0) || !*machine->software->torch)
        return location;
    if (location.state != SOURCE_OK && *nccl->bundled)
        location = (struct lib_location){
            .state = SOURCE_OK, .path = nccl->bundled, .real = nccl->bundled, .found_by = "PyTorch"};
    return libs_loaded_with(machine->source, env, torch, "libnccl.so.2", location);
}

/* --- the package --- */

static void needs_files(const struct doctor_machine *machine, const struct stack_installed *installed,
                        struct doctor_result *result)
{
    const struct stack *stack = installed->stack;

    if (installed->is_gone) {
        doctor_found(result, DOCTOR_ERROR, "%s %s is registered, and its package %s is not there", stack->title,
                     installed->version, stack->package);
        doctor_evidence(result, installed->folder, "%s-%s, and no %s", stack->dist, installed->version, stack->package);
        doctor_advise(result, "Another distribution with the same package was removed, and its files with it.");
    } else if (*installed->other_torch) {
        doctor_found(result, DOCTOR_ERROR, "%s has extensions for PyTorch %s, and none for %s", stack->title,
                     installed->other_torch, machine->software->torch_version);
        doctor_evidence(result, installed->folder, "extensions for PyTorch %s", installed->other_torch);
        doctor_evidence(result, machine->software->torch, "version %s", machine->software->torch_version);
        doctor_fix(result, false, "pip install --upgrade %s", stack->dist);
        doctor_advise(result, "Or use a PyTorch that it was built for.");
        return;
    } else if (stack->module && *installed->folder && !*installed->extension) {
        if (doctor_unknown_if(result, installed->listed != SOURCE_OK && installed->listed != SOURCE_ABSENT,
                              "whether %s has its extension %s*.so: %s", stack->title, stack->module,
                              machine_reason(installed->listed, "")))
            return;
        doctor_found(result, DOCTOR_ERROR, "%s is installed in part: there is no %s*.so", stack->title, stack->module);
        doctor_evidence(result, installed->folder, "no %s*.so", stack->module);
    } else {
        return;
    }
    doctor_fix(result, false, "%s", reinstall(machine, installed));
}

static void needs_one_owner(const struct doctor_machine *machine, const struct stack_installed *installed,
                            struct doctor_result *result)
{
    const char *names = "", *title = "";
    struct doctor_result cuda = *result;

    if (installed->n_owners < 2)
        return;
    /* The wheels of a part come for each CUDA, and the last one stays: it may be the right one. */
    if (installed->stack->needs & STACK_IS_PART)
        stack_needs_cuda(machine, installed, &cuda);
    if (installed->stack->needs & STACK_IS_PART && cuda.outcome != DOCTOR_FOUND)
        return;
    for (int i = 0; i < installed->n_owners; i++) {
        const char *owner = installed->owners[i];

        title = source_printf(machine->source, "%s%s%s", title, *title ? " and " : "", owner);
        names = source_printf(machine->source, "%s %.*s", names, (int)strcspn(owner, "-"), owner);
    }
    doctor_found(result, DOCTOR_ERROR, "%d distributions contain the package %s: %s", installed->n_owners,
                 installed->stack->package, title);
    for (int i = 0; i < installed->n_owners; i++)
        doctor_evidence(result,
                        source_printf(machine->source, "%s/%s.dist-info", installed->folder, installed->owners[i]),
                        "%s/__init__.py in its RECORD", installed->stack->package);
    doctor_fix(result, false, "pip uninstall -y%s\n%s", names, reinstall(machine, installed));
    doctor_advise(result, "Uninstall all of them, since each removes files of the others; then install one.");
}

static void needs_companions(const struct doctor_machine *machine, const struct stack_installed *installed,
                             struct doctor_result *result)
{
    const struct stack *stack = installed->stack;
    size_t n = strcspn(installed->version, "+");

    for (size_t i = 0; stack->companions && stack->companions[i]; i++) {
        const char *companion = stack->companions[i],
                   *version = python_version(machine->source, installed->folder, companion);

        if (!*version || !n || (strcspn(version, "+") == n && strncmp(version, installed->version, n) == 0))
            continue;
        doctor_found(result, DOCTOR_ERROR, "%s cannot be imported: %s is %s, and %s is %s", stack->dist, companion,
                     version, stack->dist, installed->version);
        doctor_evidence(result, installed->folder, "%s-%s, %s-%s", companion, version, stack->dist, installed->version);
        doctor_fix(result, false, "pip uninstall -y %s", companion);
        doctor_advise(result, "It is a cache, and not necessary. Or install it in version %.*s.", (int)n,
                      installed->version);
        return;
    }
}

/* --- PyTorch, NCCL --- */

static void needs_torch(const struct doctor_machine *machine, const struct stack_installed *installed,
                        struct doctor_result *result)
{
    const struct stack *stack = installed->stack;
    const struct software *software = machine->software;

    if (!stack->torch ||
        doctor_unknown_if(result, *software->torch && *stack->torch && !*software->torch_version,
                          "the version of PyTorch, of which %s needs %s or later: %s has no metadata", stack->title,
                          stack->torch, software->torch) ||
        (*software->torch && strverscmp(software->torch_version, stack->torch) >= 0))
        return;
    if (*software->torch) {
        doctor_found(result, DOCTOR_ERROR, "%s needs PyTorch %s or later, and %s is installed", stack->title,
                     stack->torch, software->torch_version);
        doctor_evidence(result, software->torch, "version %s", software->torch_version);
    } else {
        doctor_found(result, DOCTOR_ERROR, "%s needs PyTorch, and Python finds none", stack->title);
        doctor_evidence(result, "Python's path", "%s", software->python_paths);
    }
    doctor_fix(result, false, *stack->torch ? "pip install 'torch>=%s'" : "pip install torch", stack->torch);
    doctor_advise(result, "Or activate the environment that has it.");
}

static void needs_nccl(const struct doctor_machine *machine, const struct stack_installed *installed,
                       struct doctor_result *result)
{
    const struct stack *stack = installed->stack;
    struct lib_location nccl;
    const char *version;

    if (!stack->nccl)
        return;
    nccl = loaded_nccl(machine);
    version = nccl.state == SOURCE_OK ? software_nccl_version(machine->source, nccl.path) : "";
    if (nccl.state == SOURCE_ABSENT) {
        doctor_found(result, DOCTOR_ERROR, "%s needs NCCL %s or later, and there is none", stack->title, stack->nccl);
        doctor_evidence(result, "libnccl.so.2", "not found by the linker, nor in Python's path");
    } else if (!doctor_unknown_if(result, !*version, "the version of NCCL, of which %s needs %s or later: %s: %s",
                                  stack->title, stack->nccl, *nccl.path ? nccl.path : "libnccl.so.2",
                                  nccl.state == SOURCE_OK ? "no metadata" : machine_reason(nccl.state, "")) &&
               strverscmp(version, stack->nccl) < 0) {
        doctor_found(result, DOCTOR_ERROR, "%s needs NCCL %s or later, and %s is loaded", stack->title, stack->nccl,
                     version);
        doctor_evidence(result, nccl.path, "version %s, found by %s", version, nccl.found_by);
        doctor_advise(result, "PyTorch asks for one version of NCCL exactly, so each installation of PyTorch or vLLM "
                              "replaces it: repeat the command afterwards.");
    } else {
        return;
    }
    fix_nccl(machine, stack, result);
}

/* Its import asks Python's metadata for NCCL, and compares that file with the one that is loaded. */
static void needs_one_nccl(const struct doctor_machine *machine, const struct stack_installed *installed,
                           struct doctor_result *result)
{
    const char *root = source_env(machine->source, "EP_NCCL_ROOT_DIR"),
               *quiet = source_env(machine->source, "EP_SUPPRESS_NCCL_CHECK"), *path, *missing = "";
    struct lib_location nccl;
    int64_t bytes;

    if (!(installed->stack->needs & STACK_NCCL_WHEEL))
        return;
    root = root ? root : source_env(machine->source, "NCCL_DIR");
    path = root ? source_printf(machine->source, "%s/lib/libnccl.so.2", root) : machine->software->nccl.bundled;
    if (!*path || source_stat(machine->source, "%s", path).state == SOURCE_ABSENT)
        missing = "not there";
    else if (!root && !*machine->software->nccl.bundled_version)
        missing = "of no distribution: there is no nvidia_nccl_cu*.dist-info";
    if (*missing) {
        doctor_found(result, DOCTOR_ERROR, "%s finds no NCCL for its import: neither the package nor EP_NCCL_ROOT_DIR",
                     installed->stack->title);
        doctor_evidence_env(result, "EP_NCCL_ROOT_DIR");
        doctor_evidence(result, *path ? path : "nvidia/nccl/lib/libnccl.so.2", "%s", missing);
        fix_nccl(machine, installed->stack, result);
        return;
    }
    nccl = loaded_nccl(machine);
    /* The one in LD_LIBRARY_PATH is a finding of two-nccl. */
    if (nccl.state != SOURCE_OK || (quiet && strcmp(quiet, "0") != 0) || strcmp(nccl.path, path) == 0 ||
        strcmp(nccl.found_by, "LD_LIBRARY_PATH") == 0)
        return;
    bytes = source_stat(machine->source, "%s", nccl.path).bytes;
    if (bytes == source_stat(machine->source, "%s", path).bytes)
        return;
    doctor_found(result, DOCTOR_ERROR, "%s was to use %s, and another NCCL is loaded: its import stops",
                 installed->stack->title, path);
    doctor_evidence(result, nccl.path, "found by %s", nccl.found_by);
    if (root)
        doctor_fix(result, false, "unset %s",
                   source_env(machine->source, "EP_NCCL_ROOT_DIR") ? "EP_NCCL_ROOT_DIR" : "NCCL_DIR");
    doctor_advise(result,
                  "Its kernels are compiled with the headers of one NCCL and run with the other. Use one for both: %s.",
                  path);
}

static void needs_nccl_ep(const struct doctor_machine *machine, const struct stack_installed *installed,
                          struct doctor_result *result)
{
    const struct stack *needed = stack_find("nccl-ep");
    const struct stacks_installed *all = &machine->software->stacks;

    if (!(installed->stack->needs & STACK_NCCL_EP) || ANY_OF(i, all->n, all->stacks[i].stack == needed))
        return;
    doctor_found(result, DOCTOR_ERROR, "%s needs %s", installed->stack->title, needed->title);
    doctor_evidence(result, installed->folder, "no %s", needed->package);
    doctor_fix(result, false, "%s", stack_install(machine, needed));
}

/* --- nvcc --- */

static const char *find_nvcc(const struct doctor_machine *machine)
{
    const char *own = source_env(machine->source, "EP_JIT_NVCC_COMPILER"), *path = source_env(machine->source, "PATH"),
               *folder;
    const char *homes[] = {source_env(machine->source, "CUDA_HOME"), source_env(machine->source, "CUDA_PATH")};

    if (own && *own == '/')
        return own;
    for (size_t i = 0; i < COUNT(homes); i++)
        /* One that does not exist is a finding of home. */
        if (homes[i] && *homes[i] == '/' && source_is_folder(source_stat(machine->source, "%s", homes[i])))
            return source_printf(machine->source, "%s/bin/nvcc", homes[i]);
    while ((folder = machine_next_word(machine, &path, ":"))) {
        const char *file = source_printf(machine->source, "%s/nvcc", folder);

        if (*file == '/' && source_stat(machine->source, "%s", file).state == SOURCE_OK)
            return file;
    }
    return "/usr/local/cuda/bin/nvcc";
}

/* "12.9.1" in {"cuda_nvcc": {"name": "CUDA NVCC", "version": "12.9.86"}}, or that of the whole toolkit. */
static json_t *read_toolkit(struct source_text file)
{
    const char *at = strstr(file.text, "\"cuda_nvcc\""), *version;

    at = at ? at : strstr(file.text, "\"cuda\"");
    version = at ? strstr(at, "\"version\"") : NULL;
    version = version ? strpbrk(version + strlen("\"version\""), "0123456789") : NULL;
    return version ? json_stringn(version, strspn(version, "0123456789.")) : json_string("");
}

/* Of its toolkit, by a file beside it or by the name of the folder, /usr/local/cuda-13.1; "" not known. */
static const char *nvcc_version(const struct doctor_machine *machine, const char *nvcc)
{
    const char *home = software_without(machine->source, nvcc, "/bin/nvcc"),
               *version = *home ? source_fact_text(
                                      source_fact(machine->source, "version", read_toolkit, "%s/version.json", home))
                                : "";

    if (*version)
        return version;
    version = strstr(source_resolve(machine->source, "%s", nvcc).text, "/cuda-");
    version = version ? version + strlen("/cuda-") : "";
    return source_printf(machine->source, "%.*s", (int)strspn(version, "0123456789."), version);
}

static void needs_nvcc(const struct doctor_machine *machine, const struct stack_installed *installed,
                       struct doctor_result *result)
{
    const struct stack *stack = installed->stack;
    const char *nvcc, *version, *home = source_env(machine->source, "CUDA_HOME"), *major;
    enum source_state state;
    bool is_cached = stack->companions != NULL;

    for (size_t i = 0; is_cached && stack->companions[i]; i++)
        is_cached = *installed->folder && *python_version(machine->source, installed->folder, stack->companions[i]);
    if (!stack->nvcc || is_cached)
        return;
    nvcc = find_nvcc(machine);
    major = *stack->nvcc ? "13-1" : cuda_major(machine) == 12 ? "12-9" : "13-1";
    state = source_stat(machine->source, "%s", nvcc).state;
    if (doctor_unknown_if(result, state != SOURCE_OK && state != SOURCE_ABSENT, "whether there is an nvcc: %s: %s",
                          nvcc, machine_reason(state, "")))
        return;
    if (state == SOURCE_ABSENT) {
        doctor_found(result, DOCTOR_ERROR, "%s compiles its kernels when it runs, and there is no nvcc: %s",
                     stack->title, nvcc);
        doctor_evidence(result, nvcc, "not there");
        doctor_evidence_env(result, "CUDA_HOME");
        if (home && source_stat(machine->source, "/usr/local/cuda/bin/nvcc").state == SOURCE_OK) {
            doctor_fix(result, false, "export CUDA_HOME=/usr/local/cuda");
            return;
        }
    } else {
        version = nvcc_version(machine, nvcc);
        if (doctor_unknown_if(result, *stack->nvcc && !*version,
                              "the version of nvcc, of which %s needs %s or later: there is no version.json beside %s",
                              stack->title, stack->nvcc, nvcc) ||
            strverscmp(version, stack->nvcc) >= 0)
            return;
        doctor_found(result, DOCTOR_ERROR, "%s needs nvcc %s or later, and %s is %s", stack->title, stack->nvcc, nvcc,
                     version);
        doctor_evidence(result, nvcc, "version %s", version);
    }
    doctor_fix(result, false, "%s",
               os_install(machine->source, &machine->software->os,
                          source_printf(machine->source, "cuda-nvcc-%s", major),
                          source_printf(machine->source, "cuda-nvcc-%s", major)));
    doctor_advise(result, "In a container take an image with the toolkit (\"-devel\"), and let CUDA_HOME name it.");
}

/* Of DeepEP 2 and HybridEP it is the class Buffer that waits between nodes: others of theirs do without NVSHMEM. */
static void needs_nvshmem(const struct doctor_machine *machine, const struct stack_installed *installed,
                          struct doctor_result *result)
{
    const struct stack *stack = installed->stack;
    const struct software_nvshmem *nvshmem = &machine->software->nvshmem;
    bool is_part = stack->needs & STACK_IS_PART;
    const char *version = is_part ? nvshmem->bundled_version : nvshmem->version;

    if (!stack->nvshmem_before || !*installed->folder || strverscmp(version, stack->nvshmem_before) < 0 ||
        (stack->fixed && strverscmp(installed->version, stack->fixed) >= 0) ||
        (!is_part &&
         (!machine_has_deepep(machine) || !(machine_has_other_nodes(machine) || machine_sets_nvshmem(machine)))))
        return;
    doctor_found(result, is_part ? DOCTOR_ERROR : DOCTOR_WARNING, "%s %s does not work with NVSHMEM %s%s", stack->title,
                 installed->version, version, is_part ? "" : ": its class Buffer hangs between nodes");
    doctor_evidence(result, is_part ? nvshmem->bundled : nvshmem->host.path, "version %s", version);
    if (stack->fixed)
        doctor_fix(result, false, "pip install '%s>=%s'", stack->dist, stack->fixed);
    doctor_advise(result, "Use an NVSHMEM before %s%s.", stack->nvshmem_before,
                  is_part ? "" : ", with which it has to be built, or the newer class (ElasticBuffer, HybridEPBuffer)");
}

/* --- between GPUs and nodes --- */

static void needs_gin(const struct doctor_machine *machine, const struct stack_installed *installed,
                      struct doctor_result *result)
{
    const char *off = source_env(machine->source, "EP_DISABLE_GIN");
    bool is_off = off && strcmp(off, "0") != 0, has_none = machine_n_data_nics(machine->topo) == 0;

    if (!(installed->stack->needs & STACK_GIN) || machine->topo->n_gpus < 2)
        return;
    if (!is_off && (has_none || !(advice_has_mlx5(machine->topo) || machine_has_only_efa(machine)))) {
        /* deepseek-ai/DeepEP#646, #759: for others NCCL has the CPU start them, with queues that DeepEP does not take
         */
        doctor_found(result, DOCTOR_WARNING, "%s starts transfers on RDMA NICs from the GPUs (GIN), and %s",
                     installed->stack->title, has_none ? "there is none" : "these NICs are not NVIDIA's");
        doctor_evidence_env(result, "EP_DISABLE_GIN");
        if (!machine_has_other_nodes(machine))
            doctor_fix(result, false, "export EP_DISABLE_GIN=1");
        doctor_advise(result, "With EP_DISABLE_GIN=1 one node works over NVLink. Without it, the first buffer stops "
                              "with \"... != NCCL_GIN_TYPE_NONE\" or \"GIN_IB_PROXY does not support ...\".");
    } else if (!is_off && machine_has_only_efa(machine) && *machine_lacks_gdrcopy(machine)) {
        /* doc/gin-getting-started.md of aws-ofi-nccl; awslabs/awsome-distributed-ai#1241 */
        doctor_found(result, DOCTOR_ERROR, "%s on EFA needs GDRCopy (GIN), and %s", installed->stack->title,
                     machine_lacks_gdrcopy(machine));
        doctor_advise(result, "Load gdrdrv on the node, and give containers /dev/gdrdrv (NVIDIA_GDRCOPY=enabled). On "
                              "one node EP_DISABLE_GIN=1 helps as well.");
    } else if (is_off && machine_job_nodes(machine) > 1) {
        doctor_found(result, DOCTOR_WARNING, "EP_DISABLE_GIN=%s, and %s needs GIN between the %ld nodes of the job",
                     off, installed->stack->title, machine_job_nodes(machine));
        doctor_evidence_env(result, "EP_DISABLE_GIN");
        doctor_fix(result, false, "unset EP_DISABLE_GIN");
    }
}

/* What a variable of UCX has to leave: a name for all, and names of single ones; NAME:PORT is an RDMA device. */
static const struct {
    const char *variable, *what;
    bool is_nvlink;
    const char *const *names;
} ucx_lists[] = {
    {"UCX_TLS", "the NVLinks of the rack", true, TEXTS("cuda_ipc", "cuda", "all")},
    {"UCX_TLS", "the RDMA NICs", false,
     TEXTS("ib", "all", "rc", "rc_x", "rc_v", "rc_mlx5", "rc_verbs", "dc", "dc_x", "dc_mlx5", "ud", "ud_x", "ud_v",
           "ud_mlx5", "ud_verbs", "gga_mlx5", "srd")},
    {"UCX_NET_DEVICES", "the RDMA NICs", false, TEXTS("all")},
};

static bool ucx_leaves(const struct doctor_machine *machine, const char *list, const char *const *names)
{
    bool excludes = *list == '^';
    const char *name;

    list += excludes;
    while ((name = machine_next_word(machine, &list, ",")))
        if (excludes ? strcmp(name, *names) == 0 : strchr(name, ':') || text_is_any(name, names))
            return !excludes;
    return excludes;
}

/* UCX opens every active port, and stops at one for other purposes that has no GIDs (smg-project/smg#2520). */
static void find_port_without_gid(const struct doctor_machine *machine, const struct stack_installed *installed,
                                  struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    const char *without = "", *others = "";

    for (int nic = 0; nic < topo->n_nics; nic++)
        for (int i = 0; i < topo->nics[nic].n_ports; i++) {
            const struct topo_port *port = &topo->nics[nic].ports[i];
            const char *name = machine_port_name(machine, nic, i);

            if (!port->active || topo->nics[nic].access == TOPO_ACCESS_NO)
                continue;
            if (port->link_layer == TOPO_LINK_ETHERNET && port->gids_state == SOURCE_OK && port->n_gids == 0)
                without = *without ? without : name;
            else if (machine_is_data_nic(topo, nic))
                others = source_printf(machine->source, "%s%s%s", others, *others ? "," : "", name);
        }
    if (!*without || !*others || result->outcome == DOCTOR_FOUND)
        return;
    doctor_found(result, DOCTOR_ERROR, "%s stops at %s, which has no GID: UCX opens all ports that it may",
                 installed->stack->title, without);
    doctor_evidence(result, without, "active, and no GIDs");
    doctor_fix(result, false, "export UCX_NET_DEVICES=%s", others);
}

/* UCX takes TCP then, and says nothing. On one node it needs no NICs. */
static void needs_ucx_lists(const struct doctor_machine *machine, const struct stack_installed *installed,
                            struct doctor_result *result)
{
    bool is_rack = machine_has_multinode_nvlink(machine->topo),
         needs_nics = machine_n_data_nics(machine->topo) > 0 &&
                      (!source_env(machine->source, "WORLD_SIZE") || machine_has_other_nodes(machine));

    for (size_t i = 0; installed->stack->needs & STACK_UCX_DEVICE && i < COUNT(ucx_lists); i++) {
        const char *name = ucx_lists[i].variable, *list = source_env(machine->source, name);

        if (!list || !*list || !(ucx_lists[i].is_nvlink ? is_rack : needs_nics) || strstr(result->fix, name) ||
            ucx_leaves(machine, list, ucx_lists[i].names))
            continue;
        doctor_found_first(result, DOCTOR_ERROR, "%s keeps %s from %s", name, installed->stack->title,
                           ucx_lists[i].what);
        doctor_found_value(result, name);
        doctor_advise(result, "UCX takes the best of all where it is told none. NCCL reads neither of its variables.");
    }
    if (installed->stack->needs & STACK_UCX_DEVICE && needs_nics && !source_env(machine->source, "UCX_NET_DEVICES"))
        find_port_without_gid(machine, installed, result);
}

static void needs_ucx_device(const struct doctor_machine *machine, const struct stack_installed *installed,
                             struct doctor_result *result)
{
    struct libs_env env = libs_env_of(machine->source);
    const char *ucp = "", *folder;
    struct libs_closure *closure;

    if (!(installed->stack->needs & STACK_UCX_DEVICE) || !*installed->extension ||
        machine_n_data_nics(machine->topo) == 0)
        return;
    closure = libs_load(machine->source, &env, installed->extension);
    for (int i = 0; i < closure->n && !*ucp; i++)
        if (closure->libs[i].location.state == SOURCE_OK && text_begins(closure->libs[i].name, "libucp"))
            ucp = closure->libs[i].location.path;
    folder = source_printf(machine->source, "%s/ucx", libs_folder_of(machine->source, ucp));
    if (!*ucp || *software_first_with(machine->source, folder, "libuct_ib_mlx5_gda", ""))
        return;
    doctor_found(result, DOCTOR_WARNING, "%s needs a UCX with operations from GPUs, and %s has no libuct_ib_mlx5_gda",
                 installed->stack->title, folder);
    doctor_evidence(result, ucp, "the UCX that it loads");
    doctor_fix(result, false, "%s", stack_install(machine, installed->stack));
    doctor_advise(result, "The wheel brings such a UCX. Between nodes nothing works without it.");
}

static void needs_nvlink(const struct doctor_machine *machine, const struct stack_installed *installed,
                         struct doctor_result *result)
{
    const struct topo *topo = machine->topo;

    if (!(installed->stack->needs & STACK_NVLINK) || topo->n_gpus < 2 ||
        ANY_OF(i, topo->n_gpus, !topo->gpus[i].answered || topo->gpus[i].nvlinks > 0))
        return;
    doctor_found(result, DOCTOR_WARNING, "%s needs NVLinks between the GPUs, and these have none",
                 installed->stack->title);
    doctor_evidence(result, "NVML", "%d GPUs without NVLink", topo->n_gpus);
    doctor_advise(result, "Use another library on this machine; DeepEP's low-latency mode does without.");
}

/*
 * The first serious finding of any check, with which nothing runs as it should, or else what leaves the verdict open.
 * Of the group deepep these are what others find in the deep_ep that is imported: the rest of it reports the needs
 * above, of all stacks.
 */
static void needs_no_finding(const struct doctor_machine *machine, const struct stack_installed *installed,
                             struct doctor_result *result)
{
    const char *const *of_deepep =
        TEXTS("mapping-inactive", "stale-copy", "deepep-too-old", "other-nvshmem", "gpu-arch");
    bool is_deepep = *installed->folder && strcmp(installed->stack->package, "deep_ep") == 0;

    for (size_t i = 0; doctor_checks[i] && result->outcome != DOCTOR_FOUND; i++) {
        struct doctor_result one;

        if (strcmp(doctor_checks[i]->group, "deepep") == 0 &&
            !(is_deepep && text_is_any(doctor_checks[i]->id, of_deepep)))
            continue;
        doctor_run(machine, doctor_checks[i], &one);
        if ((one.outcome == DOCTOR_FOUND && one.severity == DOCTOR_ERROR) ||
            (doctor_is_inconclusive(&one) && result->outcome == DOCTOR_FINE))
            *result = one;
    }
}

static void needs_gpu(const struct doctor_machine *machine, const struct stack_installed *installed,
                      struct doctor_result *result)
{
    if (machine->topo->n_gpus > 0 || strcmp(installed->stack->name, "epkit") == 0)
        return;
    doctor_found(result, DOCTOR_ERROR, "%s needs an NVIDIA GPU, and this process sees none", installed->stack->title);
    doctor_advise(result, "Run the command where the GPUs are.");
}

/* --- evaluation --- */

/* In the order in which they show, and the check that reports each; "": another check finds it by itself. */
static const struct {
    stack_need *compare;
    const char *check;
    bool stops_whole; /* where a part lacks it, the package that it comes with stops, too */
} needs[] = {
    {.compare = needs_files, .check = "stack-needs"},
    {.compare = needs_one_owner, .check = "stack-owners", .stops_whole = true},
    {.compare = needs_companions, .check = "stack-needs", .stops_whole = true},
    {.compare = stack_needs_python, .check = "import-python"},
    {.compare = stack_needs_cuda, .check = "cuda-major"},
    {.compare = needs_torch, .check = "stack-needs"},
    {.compare = needs_nccl, .check = "stack-needs"},
    {.compare = needs_one_nccl, .check = "stack-needs"},
    {.compare = stack_needs_libraries, .check = "import-libraries"},
    {.compare = stack_needs_symbols, .check = "import-symbols"},
    {.compare = needs_nvcc, .check = "stack-needs"},
    {.compare = needs_nvshmem, .check = "stack-needs"},
    {.compare = needs_gin, .check = "stack-needs"},
    {.compare = needs_nccl_ep, .check = "stack-needs"},
    {.compare = needs_ucx_lists, .check = "stack-needs", .stops_whole = true},
    {.compare = needs_ucx_device, .check = "stack-needs"},
    {.compare = needs_nvlink, .check = "stack-needs"},
    {.compare = needs_no_finding, .check = ""},
    {.compare = needs_gpu, .check = ""},
};

static bool is_fault(const struct stack *stack, int need)
{
    return need >= 0 && (!(stack->needs & STACK_IS_PART) || needs[need].stops_whole);
}

const struct stack_result *stack_evaluate(const struct doctor_machine *machine, const struct stack *stack)
{
    const struct stacks_installed *all = &machine->software->stacks;
    struct stack_installed installed = {
        .stack = stack, .folder = "", .version = "", .extension = "", .other_torch = ""};
    struct stack_result *first = &machine->stacks[stack - stacks], one = {.is_known = true, .need = -1, .own_need = -1};

    if (first->is_known)
        return first;
    for (int i = 0; i < all->n; i++)
        if (all->stacks[i].stack == stack)
            one.installed = &all->stacks[i];
    installed = one.installed ? *one.installed : installed;
    doctor_result_init(machine, NULL, &one.result);
    one.own = one.result;
    *first = one;
    for (one.need = 0; one.need < (int)COUNT(needs) && first->result.outcome != DOCTOR_FOUND; one.need++) {
        doctor_result_init(machine, NULL, &one.result);
        needs[one.need].compare(machine, &installed, &one.result);
        if (one.result.outcome != DOCTOR_FOUND && (one.result.outcome != DOCTOR_UNKNOWN || first->need >= 0))
            continue;
        first->need = one.need;
        first->result = one.result;
        if (*needs[one.need].check) {
            first->own_need = one.need;
            first->own = one.result;
        }
    }
    return first;
}

void stacks_run(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct stacks_installed *all = &machine->software->stacks;
    const struct doctor_check *check = result->check;
    int n = 0;

    for (int i = 0; i < all->n; i++) {
        /* Of parts too: what is read for it belongs into a snapshot. */
        const struct stack_result *first = stack_evaluate(machine, all->stacks[i].stack);

        n += !(all->stacks[i].stack->needs & STACK_IS_PART);
        if (!is_fault(all->stacks[i].stack, first->own_need) || strcmp(needs[first->own_need].check, check->id) != 0)
            continue;
        *result = first->own;
        result->check = check;
        return;
    }
    doctor_not_applicable_if(result, n == 0, "no library for expert parallelism with known needs is on Python's path");
}
