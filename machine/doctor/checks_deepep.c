/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checks_deepep.c - the copies of DeepEP: the mapping of GPUs to NICs, versions, and how the extension was built.
 *
 * Which check reports what: an imported copy with a part of the mapping is mapping-inactive; one without any of it
 * while another copy has it is stale-copy. A second NVSHMEM in one process is two-nvshmem; other-nvshmem is about the
 * NVSHMEM that the extension was linked with.
 */
#include "checks.h"

#define MAPPING "DEEP_EP_DEVICE_TO_HCA_MAPPING"
#define METHOD "_setup_device_hca_mapping()"

/* The copy that Python imports; NULL ends the check, with the reason set. */
static const struct software_copy *imported_copy(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_deepep *deepep = &machine->software->deepep;

    if (deepep->imported < 0 && deepep->n)
        doctor_not_applicable(result, "%s is not on Python's path, and no other deep_ep is", deepep->copies[0].folder);
    else
        doctor_not_applicable_if(result, deepep->imported < 0, "DeepEP is not installed where Python looks: %s",
                                 *machine->software->python_paths ? machine->software->python_paths
                                                                  : "there is no Python");
    return machine_deepep(machine);
}

/* Its extension, if it is readable; "" ends the check, with the reason set. */
static const char *imported_extension(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_copy *copy = machine_deepep(machine);
    struct elf_facts facts;

    if (!copy)
        doctor_not_applicable(result, "no deep_ep is on Python's path");
    if (!copy ||
        doctor_not_applicable_if(result, !*copy->extension, "there is no deep_ep_cpp next to %s", copy->folder))
        return "";
    facts = source_elf(machine->source, "%s", copy->extension);
    return doctor_unreadable_if(result, facts.state != SOURCE_OK, copy->extension, facts.state, facts.why)
               ? ""
               : copy->extension;
}

static bool has_no_mapping(const struct software_copy *copy)
{
    return !copy->defines_mapping && !copy->calls_mapping;
}

/* Another copy with the complete mapping; NULL if there is none. */
static const struct software_copy *mapped_copy(const struct doctor_machine *machine)
{
    const struct software_deepep *deepep = &machine->software->deepep;
    int copy = FIRST_OF(i, deepep->n, i != deepep->imported && software_maps_devices(&deepep->copies[i]));

    return copy < 0 ? NULL : &deepep->copies[copy];
}

/* --- mapping-inactive --- */

/* What is wrong with the mapping in the copy; "" if nothing is. */
static const char *mapping_fault(const struct software_copy *copy)
{
    if (copy->decorator_stolen)
        return "is defined below a decorator that belongs to another method";
    if (copy->defines_mapping && !copy->calls_mapping)
        return "is defined and never called";
    if (copy->calls_mapping && !copy->defines_mapping)
        return "is called and not defined";
    return "";
}

void run_mapping_inactive(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_copy *copy = imported_copy(machine, result);
    const char *wanted = source_env(machine->source, MAPPING), *path, *fault;

    if (!copy || !machine_has_data_nics(machine, result))
        return;
    path = source_printf(machine->source, "%s/buffer.py", copy->folder);
    if (copy->buffer != SOURCE_OK && copy->buffer != SOURCE_ABSENT) {
        doctor_unknown(result, "%s: %s", path,
                       machine_reason(copy->buffer, source_read(machine->source, "%s", path).why));
        return;
    }
    fault = mapping_fault(copy);
    if (*fault) {
        doctor_found(result, DOCTOR_ERROR, "the mapping of GPUs to NICs does nothing: in %s " METHOD " %s", path,
                     fault);
    } else if (wanted && *wanted && has_no_mapping(copy) && !mapped_copy(machine)) {
        doctor_found(result, DOCTOR_ERROR, MAPPING " is set, and the DeepEP that is imported ignores it");
    } else {
        return;
    }
    doctor_evidence(result, path, "%s, %s%s",
                    copy->buffer == SOURCE_ABSENT ? "not there"
                    : copy->defines_mapping       ? "the method is defined"
                                                  : "the method is not defined",
                    copy->calls_mapping ? "called in __init__" : "not called in __init__",
                    copy->decorator_stolen ? ", a decorator without self above it" : "");
    if (*copy->version)
        doctor_evidence(result, copy->folder, "version %s", copy->version);
    if (wanted && *wanted)
        doctor_evidence(result, MAPPING, "%s", wanted);
}

/* --- stale-copy --- */

/* Does another copy suggest that the imported one is not the intended one? */
static bool differs(const struct software_copy *other, const struct software_copy *copy)
{
    if (other == copy || !*other->version || !*copy->version)
        return false;
    /* Two versions on the path of one Python, or one version with two contents of buffer.py. */
    return strcmp(other->version, copy->version) != 0
               ? other->on_path
               : other->buffer == SOURCE_OK && copy->buffer == SOURCE_OK && other->hash != copy->hash;
}

static void report_copy(struct doctor_result *result, const struct software_copy *copy, const char *what)
{
    doctor_evidence(result, copy->folder, "%s%s%s; buffer.py %016llx, %s the mapping", what,
                    *copy->version ? ", version " : "", copy->version, (unsigned long long)copy->hash,
                    software_maps_devices(copy) ? "has" : "does not have");
}

void run_stale_copy(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_deepep *deepep = &machine->software->deepep;
    const struct software_copy *copy = imported_copy(machine, result), *other = mapped_copy(machine);

    if (!copy)
        return;
    if (other && copy->buffer == SOURCE_OK && has_no_mapping(copy)) {
        doctor_found(result, DOCTOR_ERROR,
                     "the DeepEP that is imported, %s, lacks the mapping of GPUs to NICs that %s has", copy->folder,
                     other->folder);
    } else {
        int at = FIRST_OF(i, deepep->n, differs(&deepep->copies[i], copy));

        if (at < 0)
            return;
        other = &deepep->copies[at];
        doctor_found(result, DOCTOR_WARNING, "two copies of DeepEP differ: %s, which is imported, and %s", copy->folder,
                     other->folder);
    }
    report_copy(result, copy, "imported");
    report_copy(result, other, other->is_source ? "a source tree" : "another copy");
    if (other->is_source && software_maps_devices(other) && !copy->is_source)
        doctor_fix(result, false, "sudo cp %s/*.py %s/", shell_word(machine->source, other->folder),
                   shell_word(machine->source, copy->folder));
    doctor_advise_remedy(result);
}

/* --- deepep-too-old --- */

/* NVSHMEM 3.5 changed the order of its queue pairs (DeepEP pull request 564). */
#define NVSHMEM_NEW "3.5"
#define DEEPEP_ENOUGH "1.2.1"

/* Is `commit` (abbreviated to any length) one of these? Git shows at least 7 digits. */
static bool is_commit(const char *commit, const char *const *list)
{
    size_t n = strspn(commit, "0123456789abcdef");

    while (*list && strncmp(commit, *list, 7) != 0)
        list++;
    return n >= 7 && commit[n] == '\0' && *list;
}

void run_deepep_too_old(const struct doctor_machine *machine, struct doctor_result *result)
{
    /* 29d31c0 merged pull request 564; 8a07e7e of pull request 466 is based on it. 309785a: DeepEP issue 553. */
    static const char *const enough[] = {"29d31c0", "8a07e7e", NULL}, *const too_old[] = {"309785a", NULL};
    const struct software_copy *copy = imported_copy(machine, result);
    const struct software_nvshmem *nvshmem = &machine->software->nvshmem;
    const char *commit, *base;

    if (!copy ||
        doctor_not_applicable_if(result, nvshmem->host.state != SOURCE_OK, "no NVSHMEM is found that DeepEP would use"))
        return;
    result->missing = DOCTOR_MISSING_RUN;
    if (doctor_unknown_if(result, !*nvshmem->version, "%s does not tell its version", nvshmem->host.path))
        return;
    if (strverscmp(nvshmem->version, NVSHMEM_NEW) < 0 ||
        doctor_unknown_if(result, !*copy->version, "%s does not tell its version", copy->folder))
        return;
    commit = strchr(copy->version, '+');
    base = source_printf(machine->source, "%.*s", (int)strcspn(copy->version, "+"), copy->version);
    commit = commit ? commit + 1 : "";
    if (strverscmp(base, DEEPEP_ENOUGH) > 0 || is_commit(commit, enough))
        return;
    if (doctor_unknown_if(result, strverscmp(base, DEEPEP_ENOUGH) == 0 && !is_commit(commit, too_old),
                          "whether DeepEP %s comes after commit 29d31c0, which NVSHMEM %s needs", copy->version,
                          nvshmem->version))
        return;
    doctor_found(result, DOCTOR_ERROR, "DeepEP %s is too old for NVSHMEM %s", copy->version, nvshmem->version);
    doctor_evidence(result, copy->folder, "version %s", copy->version);
    doctor_evidence(result, nvshmem->host.path, "version %s", nvshmem->version);
}

/* --- build-files --- */

/* Reports something that is missing for a build of `source`, and how to install it; "" if that is not known. */
static void add_lack(struct doctor_result *result, const char *source, const char *file, const char *what,
                     const char *fix)
{
    doctor_found_first(result, DOCTOR_WARNING, "a build of %s would stop: %s is %s", source, file, what);
    doctor_evidence(result, file, "%s", what);
    if (*fix && !strstr(result->fix, fix))
        doctor_fix(result, false, "%s%s%s", result->fix, *result->fix ? "\n" : "", fix);
}

/* Installs the libcu++ package of this toolkit: /usr/local/cuda links to /usr/local/cuda-12.9. "" if not known. */
static const char *cccl_package(const struct doctor_machine *machine)
{
    struct source_text real = source_resolve(machine->source, "%s", machine->software->cuda_home);
    const char *version = real.state == SOURCE_OK ? strstr(real.text, "/cuda-") : NULL;
    size_t major = version ? strspn(version + 6, "0123456789") : 0;
    enum os_family family = machine->software->os.family;

    if (!major || version[6 + major] != '.' || (family != OS_DEBIAN && family != OS_RHEL))
        return "";
    return source_printf(machine->source, "sudo %s cuda-cccl-%.*s-%.*s",
                         family == OS_DEBIAN ? "apt-get install --reinstall" : "dnf reinstall", (int)major, version + 6,
                         (int)strspn(version + 7 + major, "0123456789"), version + 7 + major);
}

/* libcu++: CUDA 13 moved it to include/cccl, where only nvcc finds it by default. */
static void check_cccl(const struct doctor_machine *machine, struct doctor_result *result, const char *of)
{
    const char *cuda = machine->software->cuda_home,
               *file = source_printf(machine->source, "%s/include/cuda/std/tuple", cuda);

    if (!*cuda || !source_is_folder(source_stat(machine->source, "%s/include", cuda)) ||
        source_stat(machine->source, "%s", file).state != SOURCE_ABSENT)
        return;
    if (source_stat(machine->source, "%s/include/cccl/cuda/std/tuple", cuda).state != SOURCE_OK)
        add_lack(result, of, file, "not there", cccl_package(machine));
    else if (!strstr(machine_env(machine, "CPLUS_INCLUDE_PATH"), "/include/cccl"))
        add_lack(result, of, file, "not there, but in include/cccl, where the host's compiler does not look",
                 shell_prepend(machine->source, "CPLUS_INCLUDE_PATH",
                               source_printf(machine->source, "%s/include/cccl", cuda)));
}

/* Does CMake's cache say that NVSHMEM was configured without GDRCopy? */
static json_t *read_without_gdrcopy(struct source_text file)
{
    static const char *const off[] = {"0", "OFF", "NO", "FALSE"};
    const char *line = strstr(file.text, "\nNVSHMEM_USE_GDRCOPY:");
    const char *value = line ? line + 1 + strcspn(line + 1, "=\n") : "";

    for (size_t i = 0; *value == '=' && i < COUNT(off); i++) {
        size_t n = strlen(off[i]);

        if (strncmp(value + 1, off[i], n) == 0 && strchr("\r\n", value[1 + n]))
            return json_true();
    }
    return json_false();
}

/* Would the next build of the tree look for GDRCopy? CMake's cache contains the last configuration. */
static bool needs_gdrcopy(const struct doctor_machine *machine, const char *source)
{
    const char *const *names = TEXTS("NVSHMEM_USE_GDRCOPY", "USE_GDRCOPY");
    struct source_answer off =
        source_fact(machine->source, "without-gdrcopy", read_without_gdrcopy, "%s/build/CMakeCache.txt", source);

    for (; *names; names++)
        if (strcmp(machine_env(machine, *names), "0") == 0)
            return false;
    return off.state != SOURCE_DENIED && off.state != SOURCE_FAILED && !source_fact_bool(off);
}

READER_BOOL(read_dmabuf, memmem(file.text, file.bytes, "MLX5DV_REG_DMABUF", 17))

static void find_lacks(const struct doctor_machine *machine, struct doctor_result *result, const char *of,
                       const char *nvshmem)
{
    static const char header[] = "/usr/include/infiniband/mlx5dv.h";
    const char *install = os_install(machine->source, &machine->software->os, "libibverbs-dev", "rdma-core-devel");
    struct libs_env plain = {.library_path = "", .preload = ""};
    struct source_answer dmabuf = source_fact(machine->source, "dmabuf", read_dmabuf, header);

    if (dmabuf.state == SOURCE_ABSENT)
        add_lack(result, of, header, "not there", install);
    else if (*nvshmem && dmabuf.state == SOURCE_OK && !source_fact_bool(dmabuf))
        add_lack(result, of, header, "without MLX5DV_REG_DMABUF: its rdma-core is too old", install);
    /* The file that ld uses for -lmlx5: a link in the development package. */
    if (libs_find(machine->source, &plain, "libmlx5.so").state == SOURCE_ABSENT)
        add_lack(result, of, "libmlx5.so", "in no folder of the linker", install);
    check_cccl(machine, result, of);
    if (*nvshmem && needs_gdrcopy(machine, nvshmem) &&
        source_stat(machine->source, "/usr/include/gdrapi.h").state == SOURCE_ABSENT &&
        source_stat(machine->source, "/usr/local/include/gdrapi.h").state == SOURCE_ABSENT)
        /* Only for the build: if exported, the variable does nothing, which void-variables reports. */
        add_lack(result, of, "gdrapi.h", "neither in /usr/include nor in /usr/local/include",
                 source_printf(machine->source, "NVSHMEM_USE_GDRCOPY=0 cmake -S %s -B %s/build", nvshmem, nvshmem));
}

void run_build_files(const struct doctor_machine *machine, struct doctor_result *result)
{
    /* Where builds leave NVSHMEM's source tree. */
    static const char *const places[] = {"/opt/deepep/nvshmem_src", "/opt/nvshmem_src", "/tmp/nvshmem_build_src",
                                         "/workspace/nvshmem", "/opt/deepep/nvshmem-source"};
    const struct software_deepep *deepep = &machine->software->deepep;
    int copy = FIRST_OF(i, deepep->n, deepep->copies[i].is_source),
        place =
            FIRST_OF(i, COUNT(places), source_stat(machine->source, "%s/CMakeLists.txt", places[i]).state == SOURCE_OK);

    if (doctor_not_applicable_if(result, copy < 0 && place < 0, "there is no source of DeepEP or NVSHMEM to build"))
        return;
    find_lacks(machine, result,
               place >= 0 ? places[place] : libs_folder_of(machine->source, deepep->copies[copy].folder),
               place >= 0 ? places[place] : "");
    if (result->outcome == DOCTOR_FOUND)
        doctor_advise(result, "This affects only the next build, not programs that run already. The headers of "
                              "rdma-core are in the package libibverbs-dev (Debian, Ubuntu) or rdma-core-devel "
                              "(RHEL).");
}

#define HOST "libnvshmem_host.so.3"

/* --- other-nvshmem --- */

/* The NVSHMEM in the first folder of an RPATH or RUNPATH that contains one; "" if none does. */
static const char *linked_nvshmem(const struct doctor_machine *machine, const char *path, const char *folders)
{
    const char *origin = libs_folder_of(machine->source, path);

    FOR_PIECES (entry, folders, ":") {
        const char *folder = libs_expand(machine->source, entry.text, entry.n, origin);

        if (folder && *folder == '/' && source_elf(machine->source, "%s/" HOST, folder).state == SOURCE_OK)
            return source_printf(machine->source, "%s/" HOST, folder);
    }
    return "";
}

void run_other_nvshmem(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_nvshmem *nvshmem = &machine->software->nvshmem;
    const char *path = imported_extension(machine, result), *linked, *version;
    struct elf_facts facts;

    if (!*path)
        return;
    facts = source_elf(machine->source, "%s", path);
    if (doctor_not_applicable_if(result, !ANY_OF(i, facts.n_needed, strcmp(facts.needed[i], HOST) == 0),
                                 "%s was built without NVSHMEM", path) ||
        doctor_not_applicable_if(result, nvshmem->host.state != SOURCE_OK,
                                 HOST " is not found; nothing to compare with"))
        return;
    linked = linked_nvshmem(machine, path, *facts.runpath ? facts.runpath : facts.rpath);
    result->missing = DOCTOR_MISSING_RUN;
    /* No RPATH: it uses the NVSHMEM that is loaded already, which cannot be compared with the one of the build. */
    if (doctor_unknown_if(result, !*linked, "%s does not lead to the NVSHMEM that it was built with", path) ||
        strcmp(source_resolve(machine->source, "%s", linked).text, nvshmem->host.real) == 0)
        return;
    version = software_nvshmem_version(machine->source, linked);
    if (doctor_unknown_if(result, !*version || !*nvshmem->version,
                          "whether %s and %s have the same version: they do not contain it", linked,
                          nvshmem->host.path) ||
        strverscmp(version, nvshmem->version) == 0)
        return;
    doctor_found(result, DOCTOR_ERROR, "DeepEP's extension was built with NVSHMEM %s, and the one that is loaded is %s",
                 version, nvshmem->version);
    doctor_evidence(result, path, "%s %s", *facts.runpath ? "RUNPATH" : "RPATH",
                    *facts.runpath ? facts.runpath : facts.rpath);
    doctor_evidence(result, linked, "version %s", version);
    doctor_evidence(result, nvshmem->host.path, "version %s; found by %s", nvshmem->version, nvshmem->host.found_by);
    doctor_advise(result,
                  "Build DeepEP again with NVSHMEM_DIR=%s, or load the NVSHMEM that it was built with: LD_PRELOAD=%s "
                  "for the program.",
                  *nvshmem->home ? nvshmem->home : "<folder of that NVSHMEM>", linked);
}

/* --- gpu-arch --- */

/*
 * Does code for `arch` run on a GPU of this compute capability? According to the CUDA programming guide: machine code
 * runs on GPUs of the same major and the same or a higher minor number; family code (f) likewise within the family; PTX
 * is compiled for the same or newer GPUs; architecture-specific code (a), also PTX, runs only on that architecture.
 */
static bool runs_on(int arch, int major, int minor)
{
    bool is_ptx = arch < 0;
    int number = abs(arch), capability = major * 10 + minor;

    if (number >= ELF_ARCH_FAMILY)
        return (number - ELF_ARCH_FAMILY) / 10 == major && number - ELF_ARCH_FAMILY <= capability;
    if (number >= ELF_ARCH_EXACT)
        return number - ELF_ARCH_EXACT == capability;
    if (is_ptx)
        return number <= capability;
    return number / 10 == major && number <= capability;
}

static const char *arch_names(const struct doctor_machine *machine, const struct elf_facts *facts)
{
    const char *text = "";

    for (size_t i = 0; i < facts->n_archs; i++) {
        int number = abs(facts->archs[i]);
        const char *suffix = number >= ELF_ARCH_FAMILY ? "f" : number >= ELF_ARCH_EXACT ? "a" : "";

        text = source_printf(machine->source, "%s%s%s_%d%s", text, *text ? ", " : "",
                             facts->archs[i] < 0 ? "compute" : "sm", number % ELF_ARCH_EXACT, suffix);
    }
    return text;
}

/* The first GPU on which none of the code runs; -1 if there is none. */
static int left_out(const struct topo *topo, const struct elf_facts *facts)
{
    return FIRST_OF(
        i, topo->n_gpus,
        topo->gpus[i].cc_major != 0 &&
            !ANY_OF(k, facts->n_archs, runs_on(facts->archs[k], topo->gpus[i].cc_major, topo->gpus[i].cc_minor)));
}

void run_gpu_arch(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    const struct software_nvshmem *nvshmem = &machine->software->nvshmem;
    const char *path = imported_extension(machine, result), *files[2] = {path, ""}, *not_understood = "";

    if (!*path)
        return;
    if (doctor_unknown_if(result, !ANY_OF(i, topo->n_gpus, topo->gpus[i].cc_major > 0),
                          "the compute capability of the GPUs is not known: %s", topo->nvml_why)) {
        result->missing = machine_missing_nvml(machine);
        return;
    }
    if (nvshmem->host.state == SOURCE_OK)
        files[1] = nvshmem->host.path;
    result->missing = DOCTOR_MISSING_RUN;
    for (size_t i = 0; i < 2 && *files[i]; i++) {
        struct elf_facts facts = source_elf(machine->source, "%s", files[i]);
        int at = facts.archs_known && facts.n_archs ? left_out(topo, &facts) : -1;
        const struct topo_gpu *gpu;
        const char *name, *home = nvshmem->home;

        not_understood = facts.archs_known ? not_understood : files[i];
        if (at < 0)
            continue;
        gpu = &topo->gpus[at];
        name = machine_gpu_name(machine, at);
        doctor_found(result, DOCTOR_ERROR, "%s has no code for %s (compute capability %d.%d)", files[i], name,
                     gpu->cc_major, gpu->cc_minor);
        doctor_evidence(result, files[i], "%s", arch_names(machine, &facts));
        doctor_evidence(result, name, "%s, compute capability %d.%d", *gpu->name ? gpu->name : "name not known",
                        gpu->cc_major, gpu->cc_minor);
        doctor_fix(result, false, "TORCH_CUDA_ARCH_LIST=%d.%d NVSHMEM_DIR=%s python3 setup.py install", gpu->cc_major,
                   gpu->cc_minor, *home ? shell_word(machine->source, home) : "/usr/local/nvshmem");
        doctor_advise(
            result, "In the source tree of DeepEP. NVSHMEM takes the architecture from CMAKE_CUDA_ARCHITECTURES=%d%d.",
            gpu->cc_major, gpu->cc_minor);
        return;
    }
    doctor_unknown_if(result, *not_understood, "for which GPUs there is code in %s", not_understood);
}
