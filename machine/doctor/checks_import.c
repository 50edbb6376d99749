/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checks_import.c - would "import deep_ep" load its extension? Determined from ELF headers; nothing is loaded.
 *
 * deep_ep imports torch first, so the libraries of PyTorch and of its wheels are loaded before the extension. Faults of
 * libibverbs and libmlx5 are reported by the group verbs, those of libcuda by the group driver.
 */
#include "checks.h"
#include "common/text.h"
#include "machine/software/libs.h"
#include "machine/software/read_software.h"
#include "queries.h"

#include <stdlib.h>
#include <string.h>

#define NVSHMEM "libnvshmem_host.so"

/* --- shared --- */

/* The folder of the torch that Python imports: ".../python3.12/dist-packages/torch"; "" if there is none. */
static const char *torch_of(struct source *source)
{
    struct python *python = calloc(1, sizeof(*python));
    const char *folder = "";

    if (python) {
        software_read_python(source, python);
        folder = python_find(source, python, "torch/lib");
    }
    free(python);
    return *folder ? source_printf(source, "%.*s", (int)(strlen(folder) - strlen("/lib")), folder) : "";
}

/* NVIDIA's wheels from which PyTorch loads libraries: torch/__init__.py, _preload_cuda_deps(). */
static const char *const wheels[] = {"cuda_runtime", "cublas", "cudnn",   "cufft",     "curand", "cusolver",
                                     "cusparse",     "nccl",   "nvshmem", "nvjitlink", "nvtx",   "cuda_nvrtc",
                                     "cuda_cupti",   "cufile", "cu13",    "cusparselt"};

/* Does PyTorch or one of its wheels contain this library? */
static bool comes_with_torch(struct source *source, const char *torch, const char *name)
{
    if (!*torch || strchr(name, '/'))
        return false;
    if (source_stat(source, "%s/lib/%s", torch, name).state == SOURCE_OK)
        return true;
    for (size_t i = 0; i < COUNT(wheels); i++)
        if (source_stat(source, "%s/../nvidia/%s/lib/%s", torch, wheels[i], name).state == SOURCE_OK)
            return true;
    return false;
}

/* --- import-libraries --- */

/* Reported by other checks. */
static bool has_own_check(const char *name)
{
    return text_begins_any(name, TEXTS("libibverbs.so", "libmlx5.so", "libcuda.so", "libnvidia-ml.so"));
}

/* The extension or its NVSHMEM; the dependencies of PyTorch are not checked. */
static bool is_relevant(const struct libs_closure *closure, int user)
{
    return user == 0 || (user > 0 && text_begins(closure->libs[user].name, NVSHMEM));
}

static void report_missing(struct doctor_result *result, const struct lib *lib, const char *user, const char *torch)
{
    doctor_found(result, DOCTOR_ERROR, "deep_ep cannot be imported: %s needs %s, which is not found", user, lib->name);
    doctor_evidence(result, user, "NEEDED %s", lib->name);
    if (text_begins(lib->name, NVSHMEM))
        doctor_advise(result,
                      "The NVSHMEM that it was built with is no longer in the folder of its RUNPATH. Put the folder "
                      "with %s into LD_LIBRARY_PATH, or build DeepEP again with NVSHMEM_DIR.",
                      lib->name);
    else if (text_begins(lib->name, "libtorch") || text_begins(lib->name, "libc10"))
        doctor_advise(result, "%s",
                      *torch ? "The PyTorch that Python finds has no such library: the extension was built for another "
                               "one. Build it again in this environment."
                             : "Python finds no PyTorch here: activate the environment that has it.");
    else if (text_begins(lib->name, "libcudart"))
        doctor_advise(result,
                      "The extension was built with CUDA %.4s. Install that runtime (the wheel "
                      "nvidia-cuda-runtime-cu%.2s), or build it again with the CUDA of PyTorch.",
                      lib->name + strlen("libcudart.so."), lib->name + strlen("libcudart.so."));
    else
        doctor_advise(result, "Install the package with %s, or add its folder to LD_LIBRARY_PATH.", lib->name);
}

static bool find_missing(const struct doctor_machine *machine, struct doctor_result *result,
                         const struct libs_closure *closure, const char *torch)
{
    const char *unasked = "";

    for (int i = 1; i < closure->n; i++) {
        const struct lib *lib = &closure->libs[i];

        if (lib->location.state == SOURCE_OK || !is_relevant(closure, lib->needed_by) || has_own_check(lib->name) ||
            comes_with_torch(machine->source, torch, lib->name))
            continue;
        if (lib->location.state == SOURCE_NOT_RECORDED) {
            unasked = lib->name;
            continue;
        }
        if (lib->location.state == SOURCE_FAILED) {
            doctor_found(result, DOCTOR_ERROR, "deep_ep cannot be imported: %s is damaged", lib->location.path);
            doctor_evidence(result, lib->location.path, "not a readable library, found by %s", lib->location.found_by);
            doctor_advise(result, "Install it again.");
            return true;
        }
        report_missing(result, lib, closure->libs[lib->needed_by].location.path, torch);
        return true;
    }
    if (*unasked)
        doctor_unknown(result, "where %s is: the snapshot does not say", unasked);
    return *unasked;
}

/* Conda's Python loads its own libstdc++ before any module. */
static bool conda_defines(const struct doctor_machine *machine, const char *version)
{
    const char *prefix = source_env(machine->source, "CONDA_PREFIX");
    struct elf_facts facts;

    if (!prefix || *prefix != '/')
        return false;
    facts = source_elf(machine->source, "%s/lib/libstdc++.so.6", prefix);
    for (size_t i = 0; i < facts.n_definitions; i++)
        if (strcmp(facts.definitions[i].name, version) == 0)
            return true;
    return facts.state == SOURCE_OK && facts.n_definitions == 0;
}

static void find_gap(const struct doctor_machine *machine, struct doctor_result *result,
                     const struct libs_closure *closure)
{
    for (int i = 0; i < closure->n_gaps; i++) {
        const struct lib_version_gap *gap = &closure->gaps[i];
        const char *user = closure->libs[gap->user].location.path,
                   *provider = closure->libs[gap->provider].location.path;
        bool is_c = text_begins(gap->version, "GLIBC_");

        if (!is_relevant(closure, gap->user) ||
            !(is_c || text_begins(gap->version, "GLIBCXX_") || text_begins(gap->version, "CXXABI_")) ||
            (!is_c && conda_defines(machine, gap->version)))
            continue;
        doctor_found(result, DOCTOR_ERROR, "deep_ep cannot be imported: %s needs %s, which %s does not have", user,
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

static void run_import_libraries(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct libs_env env = libs_env_of(machine->source);
    const char *path = machine_extension(machine, result);
    struct libs_closure *closure;

    if (!*path)
        return;
    if (doctor_unknown_if(result, libs_load(machine->source, &env, path, &closure) != EP_OK,
                          "no memory for the list of libraries"))
        return;
    if (!find_missing(machine, result, closure, torch_of(machine->source)))
        find_gap(machine, result, closure);
    libs_closure_free(closure);
}

const struct doctor_check check_import_libraries = {
    DOCTOR_CHECK("import-libraries", "deepep", 53, NEEDS_GPUS | NEEDS_ENVIRONMENT, run_import_libraries),
    .title = "all libraries that DeepEP's extension needs are found, in suitable versions",
    .symptom = "\"ImportError: libnvshmem_host.so.3: cannot open shared object file\", \"version `GLIBCXX_3.4.32' not "
               "found\".",
    .cause = "The extension was built on another system or in another environment, or a library has been removed "
             "since.",
    .remedy = "Install what is missing, or build DeepEP again where it runs.",
    .links = TEXTS("LD_LIBRARY_PATH", "deep_ep_cpp*.so"),
};

/* --- import-python --- */

/* The Python version of a module: 312 of "deep_ep_cpp.cpython-312-x86_64-linux-gnu.so"; 0: any. */
static int tag_of(const char *path)
{
    const char *slash = strrchr(path, '/'), *tag = strstr(slash ? slash : path, ".cpython-");

    return tag ? atoi(tag + strlen(".cpython-")) : 0;
}

/* The Python version of PyTorch: 312 of ".../python3.12/dist-packages/torch"; 0: not known. */
static int python_of(const char *torch)
{
    const char *at = strstr(torch, "/python3.");
    int minor = at ? atoi(at + strlen("/python3.")) : 0;

    return minor > 0 && minor < 100 ? 300 + minor : 0;
}

static void run_import_python(const struct doctor_machine *machine, struct doctor_result *result)
{
    const char *path = machine_extension(machine, result), *torch;
    int tag, python;
    struct source_names names;
    const char *folder;

    if (!*path)
        return;
    torch = torch_of(machine->source);
    tag = tag_of(path);
    python = python_of(torch);
    if (doctor_not_applicable_if(result, tag == 0 || python == 0, "%s",
                                 tag == 0 ? "the extension is for any Python"
                                          : "it is not known which Python has PyTorch"))
        return;
    if (tag == python)
        return;
    /* There may be several, one for each Python. */
    folder = source_printf(machine->source, "%.*s", (int)(strrchr(path, '/') - path), path);
    names = source_list(machine->source, "%s", folder);
    for (size_t i = 0; i < names.n; i++)
        if (text_begins(names.names[i], "deep_ep_cpp.") && tag_of(names.names[i]) == python)
            return;
    doctor_found(result, DOCTOR_ERROR,
                 "deep_ep cannot be imported: its extension is for Python 3.%d, and PyTorch is in Python 3.%d",
                 tag - 300, python - 300);
    doctor_evidence(result, path, "for Python 3.%d", tag - 300);
    doctor_evidence(result, torch, "in Python 3.%d", python - 300);
    doctor_advise(result, "Start Python 3.%d if that is the intended one, or build DeepEP again with Python 3.%d.",
                  tag - 300, python - 300);
}

const struct doctor_check check_import_python = {
    DOCTOR_CHECK("import-python", "deepep", 53, NEEDS_GPUS | NEEDS_ENVIRONMENT, run_import_python),
    .title = "DeepEP's extension is for the Python that has PyTorch",
    .symptom = "\"ModuleNotFoundError: No module named 'deep_ep_cpp'\", although the file is there.",
    .cause = "A module for one version of Python is not seen by another: the version is in the file's name.",
    .remedy = "Build DeepEP with the Python that runs it.",
    .links = TEXTS("deep_ep_cpp*.so", "PYTHONPATH"),
};

/* --- cuda-major --- */

/* "CUDA Compatibility", table of minor version compatibility: the oldest driver for each CUDA. */
static const struct {
    int cuda, driver;
} oldest_drivers[] = {{11, 450}, {12, 525}, {13, 580}};

/* The major version of the libcudart that a library needs; 0 if none. */
static int cuda_of(const struct elf_facts *facts)
{
    static const char name[] = "libcudart.so.";

    for (size_t i = 0; i < facts->n_needed; i++)
        if (text_begins(facts->needed[i], name))
            return atoi(facts->needed[i] + sizeof(name) - 1);
    return 0;
}

/* Users of a CUDA runtime: DeepEP's extension first; PyTorch must match it. */
struct cuda_user {
    const char *what, *path;
    int cuda; /* 0: none, or it could not be read */
};

enum { USER_DEEPEP, USER_TORCH, USER_NVSHMEM, USERS };

/* The driver version that programs get: that of the loaded driver, or of a newer libcuda (package cuda-compat). */
static int driver_for_programs(const struct doctor_machine *machine)
{
    struct libs_env env = libs_env_of(machine->source);
    struct lib_location libcuda = libs_find(machine->source, &env, "libcuda.so.1");
    int loaded = atoi(machine->software->driver.version),
        found = libcuda.state == SOURCE_OK ? atoi(libs_file_version(libcuda.real)) : 0;

    return found > loaded ? found : loaded;
}

static void need_driver(const struct doctor_machine *machine, struct doctor_result *result,
                        const struct cuda_user *user)
{
    for (size_t i = 0; i < COUNT(oldest_drivers); i++) {
        if (oldest_drivers[i].cuda != user->cuda || driver_for_programs(machine) >= oldest_drivers[i].driver)
            continue;
        doctor_found(result, DOCTOR_ERROR,
                     "CUDA %d, for which %s was built, needs driver %d or later, and %s is loaded", user->cuda,
                     user->what, oldest_drivers[i].driver, machine->software->driver.version);
        doctor_evidence(result, user->path, "NEEDED libcudart.so.%d", user->cuda);
        doctor_evidence(result, "/proc/driver/nvidia/version", "%s", machine->software->driver.version);
        doctor_advise(result,
                      "Update the driver of the node; on data center GPUs the package cuda-compat-%d-<minor> and its "
                      "folder in LD_LIBRARY_PATH help as well. Or use what was built for CUDA %d.",
                      user->cuda, user->cuda - 1);
    }
}

static void run_cuda_major(const struct doctor_machine *machine, struct doctor_result *result)
{
    const char *torch = torch_of(machine->source);
    struct cuda_user users[USERS] = {
        [USER_DEEPEP] = {"DeepEP", machine_extension(machine, result), 0},
        [USER_TORCH] = {"PyTorch", *torch ? source_printf(machine->source, "%s/lib/libtorch_cuda.so", torch) : "", 0},
        [USER_NVSHMEM] = {"NVSHMEM", machine->software->nvshmem.host.path, 0}};
    bool any = false;

    if (result->outcome == DOCTOR_UNKNOWN)
        return;
    for (int i = 0; i < USERS; i++) {
        struct elf_facts facts = {.n_needed = 0};

        if (*users[i].path)
            facts = source_elf(machine->source, "%s", users[i].path);
        users[i].cuda = facts.state == SOURCE_OK ? cuda_of(&facts) : 0;
        any = any || users[i].cuda;
    }
    if (doctor_not_applicable_if(result, !any, "no DeepEP, PyTorch or NVSHMEM that needs a CUDA runtime of its own"))
        return;
    result->outcome = DOCTOR_FINE;
    if (users[USER_DEEPEP].cuda && users[USER_TORCH].cuda && users[USER_DEEPEP].cuda != users[USER_TORCH].cuda) {
        doctor_found(result, DOCTOR_ERROR, "DeepEP's extension is for CUDA %d, and PyTorch for CUDA %d",
                     users[USER_DEEPEP].cuda, users[USER_TORCH].cuda);
        for (int i = USER_DEEPEP; i <= USER_TORCH; i++)
            doctor_evidence(result, users[i].path, "NEEDED libcudart.so.%d", users[i].cuda);
        doctor_advise(result, "Build DeepEP again with the toolkit of CUDA %d.", users[USER_TORCH].cuda);
    }
    for (int i = 0; i < USERS && result->outcome != DOCTOR_FOUND; i++)
        need_driver(machine, result, &users[i]);
}

const struct doctor_check check_cuda_major = {
    DOCTOR_CHECK("cuda-major", "deepep", 54, NEEDS_DRIVER | NEEDS_ENVIRONMENT, run_cuda_major),
    .title = "DeepEP, PyTorch, NVSHMEM and the driver are for one CUDA",
    .symptom = "\"CUDA driver version is insufficient for CUDA runtime version\", or two CUDA runtimes in a process.",
    .cause = "The extension was built with another major version of CUDA than PyTorch, or another library with a "
             "version that the driver is too old for.",
    .remedy = "Build DeepEP with PyTorch's CUDA; update the driver.",
    .links = TEXTS("/proc/driver/nvidia/version", "deep_ep_cpp*.so"),
};
