/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checks_import.c - would "import deep_ep" load its extension, and those of other libraries for expert parallelism
 * theirs? Determined from ELF headers; nothing is loaded.
 *
 * These packages import torch first, so the libraries of PyTorch and of its wheels are loaded before the extension.
 * Faults of libibverbs and libmlx5 are reported by the group verbs, those of libcuda by the group driver.
 */
#include "checks.h"
#include "machine/software/read_software.h"

#define NVSHMEM "libnvshmem_host.so"

/* --- shared --- */

/* NVIDIA's wheels from which PyTorch loads libraries: torch/__init__.py, _preload_cuda_deps(). */
static const char *const wheels[] = {"cuda_runtime", "cublas", "cudnn",   "cufft",     "curand", "cusolver",
                                     "cusparse",     "nccl",   "nvshmem", "nvjitlink", "nvtx",   "cuda_nvrtc",
                                     "cuda_cupti",   "cufile", "cu13",    "cusparselt"};

/* Does PyTorch or one of its wheels contain this library? Not known: SOURCE_NOT_RECORDED. */
static enum source_state comes_with_torch(struct source *source, const char *torch, const char *name)
{
    enum source_state state;

    if (!*torch || strchr(name, '/'))
        return SOURCE_ABSENT;
    state = source_stat(source, "%s/lib/%s", torch, name).state;
    for (size_t i = 0; i < COUNT(wheels) && state == SOURCE_ABSENT; i++)
        state = source_stat(source, "%s/../nvidia/%s/lib/%s", torch, wheels[i], name).state;
    /* Conda's Python has this folder in its RPATH. */
    return state == SOURCE_ABSENT ? source_stat(source, "%s/../../../%s", torch, name).state : state;
}

/* --- import-libraries --- */

/* The file that is loaded, or its NVSHMEM. */
static bool is_relevant(const struct libs_closure *closure, int user)
{
    return user == 0 || (user > 0 && text_begins(closure->libs[user].name, NVSHMEM));
}

static bool is_of_torch(const char *name)
{
    return text_begins(name, "libtorch") || text_begins(name, "libc10");
}

static void report_missing(struct doctor_result *result, const char *package, const struct lib *lib, const char *user,
                           const char *torch)
{
    doctor_found(result, DOCTOR_ERROR, "%s cannot be imported: %s needs %s, which is not found", package, user,
                 lib->name);
    doctor_evidence(result, user, "NEEDED %s", lib->name);
    if (is_of_torch(text_base(user)))
        doctor_advise(result,
                      "PyTorch requires a wheel or a package with %s: install that again, or add its folder to "
                      "LD_LIBRARY_PATH.",
                      lib->name);
    else if (text_begins(lib->name, NVSHMEM))
        doctor_advise(result,
                      "The NVSHMEM that it was built with is no longer in the folder of its RUNPATH. Put the folder "
                      "with %s into LD_LIBRARY_PATH, or build DeepEP again with NVSHMEM_DIR.",
                      lib->name);
    else if (is_of_torch(lib->name))
        doctor_advise(result, "%s",
                      *torch ? "The PyTorch that Python finds has no such library: the extension was built for another "
                               "one. Build it again in this environment."
                             : "Python finds no PyTorch here: activate the environment that has it.");
    else if (text_begins(lib->name, "libcudart.so."))
        doctor_advise(result,
                      "The extension was built with CUDA %.2s. Install that runtime (the wheel nvidia-cuda-runtime, up "
                      "to CUDA 12 nvidia-cuda-runtime-cu12), or build it again with the CUDA of PyTorch.",
                      lib->name + strlen("libcudart.so."));
    else
        doctor_advise(result, "Install the package with %s, or add its folder to LD_LIBRARY_PATH.", lib->name);
}

static bool find_missing(struct doctor_result *result, const char *package, const struct libs_closure *closure)
{
    const char *torch = result->machine->software->torch;
    const char *unasked = "";

    for (int i = 1; i < closure->n; i++) {
        const struct lib *lib = &closure->libs[i];
        enum source_state in_torch;

        /* Of some, other checks report it. */
        if (lib->location.state == SOURCE_OK ||
            text_begins_any(lib->name, TEXTS("libibverbs.so", "libmlx5.so", "libcuda.so", "libnvidia-ml.so")) ||
            !(is_relevant(closure, lib->needed_by) || is_of_torch(closure->libs[lib->needed_by].name)))
            continue;
        in_torch = lib->location.state == SOURCE_FAILED ? SOURCE_ABSENT
                                                        : comes_with_torch(result->machine->source, torch, lib->name);
        if (in_torch == SOURCE_OK)
            continue;
        if (lib->location.state == SOURCE_NOT_RECORDED || in_torch == SOURCE_NOT_RECORDED) {
            unasked = lib->name;
            continue;
        }
        if (lib->location.state == SOURCE_FAILED) {
            doctor_found(result, DOCTOR_ERROR, "%s cannot be imported: %s is damaged", package, lib->location.path);
            doctor_evidence(result, lib->location.path, "not a readable library, found by %s", lib->location.found_by);
            doctor_advise(result, "Install it again.");
            return true;
        }
        report_missing(result, package, lib, closure->libs[lib->needed_by].location.path, torch);
        return true;
    }
    if (*unasked)
        doctor_unknown(result, "where %s is: the snapshot does not say", unasked);
    return *unasked;
}

/* Conda's Python loads its own libstdc++ before any module. */
static bool conda_defines(const struct doctor_machine *machine, const char *version)
{
    const char *prefix = machine_env(machine, "CONDA_PREFIX");
    struct elf_facts facts;

    if (*prefix != '/')
        return false;
    facts = source_elf(machine->source, "%s/lib/libstdc++.so.6", prefix);
    return (facts.state == SOURCE_OK && facts.n_definitions == 0) ||
           ANY_OF(i, facts.n_definitions, strcmp(facts.definitions[i].name, version) == 0);
}

static void find_gap(struct doctor_result *result, const char *package, const struct libs_closure *closure)
{
    FOR_EACH (gap, closure->gaps, closure->n_gaps) {
        const char *user = closure->libs[gap->user].location.path,
                   *provider = closure->libs[gap->provider].location.path;
        bool is_c = text_begins(gap->version, "GLIBC_");

        if (!is_relevant(closure, gap->user) ||
            !(is_c || text_begins(gap->version, "GLIBCXX_") || text_begins(gap->version, "CXXABI_")) ||
            (!is_c && conda_defines(result->machine, gap->version)))
            continue;
        doctor_found(result, DOCTOR_ERROR, "%s cannot be imported: %s needs %s, which %s does not have", package, user,
                     gap->version, provider);
        doctor_evidence(result, user, "needs %s", gap->version);
        doctor_evidence(result, provider, "does not define it");
        doctor_advise(
            result,
            is_c ? "It was built on a newer system: build DeepEP again on this one, or in the image that it runs in. "
                   "Do not replace the C library."
                 : "It was built with a newer compiler: build DeepEP again on this system, or put the folder of a "
                   "newer libstdc++ (conda has one) first in LD_LIBRARY_PATH.");
        return;
    }
}

/* The extension, if it is there and readable; otherwise "", and not known why if it should be. */
static const char *extension_of(const struct stack_installed *installed, struct doctor_result *result)
{
    struct elf_facts facts;

    if (!*installed->extension)
        return "";
    facts = source_elf(result->machine->source, "%s", installed->extension);
    return doctor_unknown_if(result, facts.state != SOURCE_OK, "%s: %s", installed->extension,
                             machine_reason(facts.state, facts.why))
               ? ""
               : installed->extension;
}

/* "import torch" comes first. */
static void find_missing_of_torch(const struct doctor_machine *machine, struct doctor_result *result)
{
    static const char *const names[] = {"libtorch_python.so", "libtorch_cuda.so"};
    struct libs_env env = libs_env_of(machine->source);

    for (size_t i = 0; *machine->software->torch && i < COUNT(names) && result->outcome == DOCTOR_FINE; i++) {
        const char *path = source_printf(machine->source, "%s/lib/%s", machine->software->torch, names[i]);

        if (source_elf(machine->source, "%s", path).state == SOURCE_OK)
            find_missing(result, "torch", libs_load(machine->source, &env, path));
    }
}

void stack_needs_libraries(const struct doctor_machine *machine, const struct stack_installed *installed,
                           struct doctor_result *result)
{
    struct libs_env env = libs_env_of(machine->source);
    const char *path, *package = installed->stack->package;
    struct libs_closure *closure;

    if (installed->stack->torch)
        find_missing_of_torch(machine, result);
    path = result->outcome == DOCTOR_FOUND ? "" : extension_of(installed, result);
    if (!*path)
        return;
    closure = libs_load(machine->source, &env, path);
    if (!find_missing(result, package, closure))
        find_gap(result, package, closure);
}

/* --- import-python --- */

/* The Python version of a module: 312 of "deep_ep_cpp.cpython-312-x86_64-linux-gnu.so"; 0: any. */
static int tag_of(const char *path)
{
    const char *tag = strstr(text_base(path), ".cpython-");

    return tag ? atoi(tag + strlen(".cpython-")) : 0;
}

/* The Python version of PyTorch: 312 of ".../python3.12/dist-packages/torch"; 0: not known. */
static int python_of(const char *torch)
{
    const char *at = strstr(torch, "/python3.");
    int minor = at ? atoi(at + strlen("/python3.")) : 0;

    return minor > 0 && minor < 100 ? 300 + minor : 0;
}

void stack_needs_python(const struct doctor_machine *machine, const struct stack_installed *installed,
                        struct doctor_result *result)
{
    const char *path = installed->extension, *torch = machine->software->torch, *base = text_base(path);
    int tag = tag_of(path), python = python_of(torch);
    struct source_names names;

    if (tag == 0 || python == 0 || tag == python)
        return;
    /* There may be several, one for each Python. */
    names = source_list(machine->source, "%s", libs_folder_of(machine->source, path));
    if (ANY_OF(i, names.n,
               strncmp(names.names[i], base, strcspn(base, ".") + 1) == 0 && tag_of(names.names[i]) == python))
        return;
    doctor_found(result, DOCTOR_ERROR,
                 "%s cannot be imported: its extension is for Python 3.%d, and PyTorch is in Python 3.%d",
                 installed->stack->package, tag - 300, python - 300);
    doctor_evidence(result, path, "for Python 3.%d", tag - 300);
    doctor_evidence(result, torch, "in Python 3.%d", python - 300);
    doctor_advise(result, "Start Python 3.%d if that is the intended one, or build it again with Python 3.%d.",
                  tag - 300, python - 300);
}

/* --- import-symbols --- */

/* What the names of symbols tell about who has them, and so about the build. */
static const struct {
    const char *const *beginnings;
    const char *how, *advice;
} families[] = {
    {TEXTS("nccl"), "for another version of NCCL",
     "Install the NCCL that it was built with, or a later one, and no other afterwards."},
    {TEXTS("nvshmem"), "for another version of NVSHMEM", "Build it again with the NVSHMEM that is loaded."},
    {TEXTS("__cudaRegisterLinkedBinary"), "without the link of its GPU code",
     "Build it again with NVSHMEM_DIR set: DeepEP's setup.py links GPU code (nvcc -dlink) only with NVSHMEM."},
    {TEXTS("_ZN7deep_ep"), "without a part of itself",
     "Build it again from a clean tree, with NVSHMEM_DIR set for what runs between nodes."},
    {TEXTS("cu"), "for another version of CUDA", "Build it again with the CUDA of PyTorch, or update the driver."},
    {TEXTS("_Z", "THP", "torch", "aoti_torch"), "for another version of PyTorch",
     "Build it again with this PyTorch, or install the one that it was built with. The option --no-build-isolation "
     "keeps pip from building it with another PyTorch."},
};

/* Where PyTorch's import has loaded libraries from, as a search path before the other ones. */
static const char *path_of_torch(const struct doctor_machine *machine, const char *path)
{
    const char *torch = machine->software->torch;

    path = source_printf(machine->source, "%s%s%s/lib", path, *path ? ":" : "", torch);
    for (size_t i = 0; i < COUNT(wheels); i++)
        if (source_is_folder(source_stat(machine->source, "%s/../nvidia/%s/lib", torch, wheels[i])))
            path = source_printf(machine->source, "%s:%s/../nvidia/%s/lib", path, torch, wheels[i]);
    return path;
}

void stack_needs_symbols(const struct doctor_machine *machine, const struct stack_installed *installed,
                         struct doctor_result *result)
{
    const char *path = extension_of(installed, result);
    struct libs_env env = libs_env_of(machine->source);
    const char *providers[LIBS_MAX];
    struct libs_closure *closure;
    struct source_names missing = {.n = 0};
    int family;

    if (!*path || !*machine->software->torch)
        return;
    env.library_path = path_of_torch(machine, env.library_path);
    closure = libs_load(machine->source, &env, path);
    for (int i = 0; i < closure->n; i++)
        providers[i] = closure->libs[i].location.state == SOURCE_OK ? closure->libs[i].location.path : "";
    /* What is not found is the subject of import-libraries, and may have the symbols. */
    if (closure->first_missing < 0 && !closure->cut)
        missing = source_missing_symbols(machine->source, path, providers, (size_t)closure->n);
    if (missing.n == 0)
        return;
    family = FIRST_OF(i, COUNT(families), text_begins_any(missing.names[0], families[i].beginnings));
    doctor_found(result, DOCTOR_ERROR, "%s cannot be imported: it was built %s: no library has %s",
                 installed->stack->package,
                 family < 0 ? "for another version of another library" : families[family].how, missing.names[0]);
    for (size_t i = 0; i < missing.n; i++)
        doctor_evidence(result, path, "undefined symbol: %s", missing.names[i]);
    doctor_advise(result, "%s",
                  family < 0 ? "Install or build it again for this environment." : families[family].advice);
}

/* --- cuda-major --- */

/* "CUDA Compatibility", table of minor version compatibility: the oldest driver for each CUDA. */
static const struct {
    int cuda, driver;
} oldest_drivers[] = {{11, 450}, {12, 525}, {13, 580}};

/* A user of a CUDA runtime. */
struct cuda_user {
    const char *what, *path;
    int cuda; /* the major version of the libcudart that it needs; 0: none, or it could not be read */
};

static struct cuda_user cuda_user(const struct doctor_machine *machine, const char *what, const char *path)
{
    static const char name[] = "libcudart.so.";
    struct cuda_user user = {.what = what, .path = path};
    struct elf_facts facts;
    int needed;

    if (!*path)
        return user;
    facts = source_elf(machine->source, "%s", path);
    needed = facts.state == SOURCE_OK ? FIRST_OF(i, facts.n_needed, text_begins(facts.needed[i], name)) : -1;
    user.cuda = needed < 0 ? 0 : atoi(facts.needed[needed] + sizeof(name) - 1);
    return user;
}

static struct cuda_user cuda_of_torch(const struct doctor_machine *machine)
{
    const char *torch = machine->software->torch;

    return cuda_user(machine, "PyTorch",
                     *torch ? source_printf(machine->source, "%s/lib/libtorch_cuda.so", torch) : "");
}

/* The size of a wheel's library, from "nvidia/nccl/lib/libnccl.so.2,sha256=...,438"; 0: not known. */
static json_t *read_library_bytes(struct source_text file)
{
    static const char *const names[] = {"nvidia/nccl/lib/libnccl.so.2,", "nvidia/nvshmem/lib/libnvshmem_host.so.3,"};
    long long bytes = 0;

    for (size_t i = 0; i < COUNT(names); i++) {
        const char *at = strstr(file.text, names[i]), *size = at ? strpbrk(at + strlen(names[i]), ",\n") : NULL;

        bytes = size && *size == ',' ? strtoll(size + 1, NULL, 10) : bytes;
    }
    return json_integer(bytes);
}

bool machine_is_overwritten(struct doctor_result *result, const char *name, const char *path)
{
    struct source *source = result->machine->source;
    const char *end = source_printf(source, "/nvidia/%s/lib/%s", name, text_base(path)),
               *site = software_without(source, path, end), *own, *due, *version;
    int cuda = cuda_of_torch(result->machine).cuda, other = cuda == 13 ? 12 : 13;
    json_int_t bytes;

    own = source_printf(source, "nvidia_%s_cu%d", name, cuda);
    due = *site ? python_version(source, site, own) : "";
    version = *due ? python_version(source, site, source_printf(source, "nvidia_%s_cu%d", name, other)) : "";
    if (!*version)
        return false;
    bytes = json_integer_value(
        source_fact(source, "library-bytes", read_library_bytes, "%s/%s-%s.dist-info/RECORD", site, own, due).value);
    if (bytes == 0 || bytes == source_stat(source, "%s", path).bytes)
        return false;
    doctor_found(result, DOCTOR_ERROR,
                 "PyTorch's library of nvidia-%s-cu%d %s is overwritten: nvidia-%s-cu%d %s has the same files", name,
                 cuda, due, name, other, version);
    doctor_evidence(result, path, "not of the size that %s-%s.dist-info/RECORD has", own, due);
    doctor_fix(result, false,
               "pip uninstall -y nvidia-%s-cu%d\npip install --force-reinstall --no-deps nvidia-%s-cu%d==%s", name,
               other, name, cuda, due);
    doctor_advise(result, "PyTorch is for CUDA %d. What asks for the other one belongs into an environment of its own.",
                  cuda);
    return true;
}

static void need_driver(const struct doctor_machine *machine, struct doctor_result *result,
                        const struct cuda_user *user)
{
    struct libs_env env = libs_env_of(machine->source);
    struct lib_location libcuda = libs_find(machine->source, &env, "libcuda.so.1");
    const char *loaded = machine->software->driver.version;
    /* A newer libcuda (package cuda-compat) counts as well as the loaded driver. */
    int found = libcuda.state == SOURCE_OK ? atoi(libs_file_version(libcuda.real)) : 0,
        i = FIRST_OF(k, COUNT(oldest_drivers), oldest_drivers[k].cuda == user->cuda);

    if (i < 0 || atoi(loaded) >= oldest_drivers[i].driver || found >= oldest_drivers[i].driver)
        return;
    doctor_found(result, DOCTOR_ERROR, "CUDA %d, for which %s was built, needs driver %d or later, and %s is loaded",
                 user->cuda, user->what, oldest_drivers[i].driver, loaded);
    doctor_evidence(result, user->path, "NEEDED libcudart.so.%d", user->cuda);
    doctor_evidence(result, "/proc/driver/nvidia/version", "%s", loaded);
    doctor_advise(result,
                  "Update the driver of the node; on data center GPUs the package cuda-compat-%d-<minor> and its "
                  "folder in LD_LIBRARY_PATH help as well. Or use what was built for CUDA %d.",
                  user->cuda, user->cuda - 1);
}

void stack_needs_cuda(const struct doctor_machine *machine, const struct stack_installed *installed,
                      struct doctor_result *result)
{
    struct cuda_user users[] = {cuda_user(machine, installed->stack->title, extension_of(installed, result)),
                                cuda_of_torch(machine)};

    for (size_t i = 0; result->outcome == DOCTOR_FINE && *machine->software->driver.version && i < COUNT(users); i++)
        need_driver(machine, result, &users[i]);
    if (result->outcome != DOCTOR_FINE || !users[0].cuda || !users[1].cuda || users[0].cuda == users[1].cuda)
        return;
    doctor_found(result, DOCTOR_ERROR, "%s's extension is for CUDA %d, and PyTorch for CUDA %d", users[0].what,
                 users[0].cuda, users[1].cuda);
    for (size_t i = 0; i < COUNT(users); i++)
        doctor_evidence(result, users[i].path, "NEEDED libcudart.so.%d", users[i].cuda);
    doctor_advise(result, "Build or install %s again for CUDA %d.", users[0].what, users[1].cuda);
}

void run_cuda_major(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct stacks_installed *all = &machine->software->stacks;
    struct cuda_user users[STACKS_MAX + 2];
    int n = 0;

    stacks_run(machine, result);
    if (result->outcome == DOCTOR_FOUND || result->outcome == DOCTOR_UNKNOWN)
        return;
    result->outcome = DOCTOR_FINE;
    for (int i = 0; i < all->n; i++)
        if (!(all->stacks[i].stack->needs & STACK_IS_PART))
            users[n++] = cuda_user(machine, all->stacks[i].stack->title, all->stacks[i].extension);
    users[n++] = cuda_of_torch(machine);
    users[n++] = cuda_user(machine, "NVSHMEM", machine->software->nvshmem.host.path);
    if (doctor_not_applicable_if(result, !ANY_OF(i, n, users[i].cuda),
                                 "no DeepEP, PyTorch or NVSHMEM that needs a CUDA runtime of its own"))
        return;
    for (int i = 0; i < n && result->outcome != DOCTOR_FOUND; i++)
        need_driver(machine, result, &users[i]);
}
