/* SPDX-License-Identifier: Apache-2.0 */
/* checks_extension.c - DeepEP's compiled extension: the NVSHMEM that it was linked with, and its GPU architectures. */
#include "checks.h"
#include "machine/software/libs_search.h"
#include "queries.h"
#include "shell.h"

#include <stdlib.h>
#include <string.h>

#define HOST "libnvshmem_host.so.3"

/* --- other-nvshmem --- */

static bool needs_library(const struct elf_facts *facts, const char *name)
{
    for (size_t i = 0; i < facts->n_needed; i++)
        if (strcmp(facts->needed[i], name) == 0)
            return true;
    return false;
}

/* The NVSHMEM in the first folder of an RPATH or RUNPATH that contains one; "" if none does. */
static const char *linked_nvshmem(const struct doctor_machine *machine, const char *path, const char *folders)
{
    const char *origin = libs_folder_of(machine->source, path);

    while (*folders) {
        struct piece entry = text_take(&folders, ":");
        const char *folder = libs_expand(machine->source, entry.text, entry.n, origin);

        if (folder && *folder == '/' && source_elf(machine->source, "%s/" HOST, folder).state == SOURCE_OK)
            return source_printf(machine->source, "%s/" HOST, folder);
    }
    return "";
}

static void report_other_nvshmem(const struct doctor_machine *machine, struct doctor_result *result, const char *path,
                                 const char *linked, const char *version)
{
    const struct software_nvshmem *nvshmem = &machine->software->nvshmem;
    struct elf_facts facts = source_elf(machine->source, "%s", path);

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

void run_other_nvshmem(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_nvshmem *nvshmem = &machine->software->nvshmem;
    const char *path = machine_extension(machine, result), *linked, *version;
    struct elf_facts facts;

    if (!*path)
        return;
    facts = source_elf(machine->source, "%s", path);
    if (doctor_not_applicable_if(result, !needs_library(&facts, HOST), "%s was built without NVSHMEM", path) ||
        doctor_not_applicable_if(result, nvshmem->host.state != SOURCE_OK,
                                 HOST " is not found; nothing to compare with"))
        return;
    linked = linked_nvshmem(machine, path, *facts.runpath ? facts.runpath : facts.rpath);
    result->missing = DOCTOR_MISSING_RUN;
    /* No RPATH: it uses the NVSHMEM that is loaded already, which cannot be compared with the one of the build. */
    if (doctor_unknown_if(result, !*linked, "%s does not lead to the NVSHMEM that it was built with", path))
        return;
    if (strcmp(source_resolve(machine->source, "%s", linked).text, nvshmem->host.real) == 0)
        return;
    version = software_nvshmem_version(machine->source, linked);
    if (!doctor_unknown_if(result, !*version || !*nvshmem->version,
                           "whether %s and %s have the same version: they do not contain it", linked,
                           nvshmem->host.path) &&
        strverscmp(version, nvshmem->version) != 0)
        report_other_nvshmem(machine, result, path, linked, version);
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
    for (int i = 0; i < topo->n_gpus; i++) {
        bool runs = topo->gpus[i].cc_major == 0;

        for (size_t k = 0; k < facts->n_archs && !runs; k++)
            runs = runs_on(facts->archs[k], topo->gpus[i].cc_major, topo->gpus[i].cc_minor);
        if (!runs)
            return i;
    }
    return -1;
}

static void report_arch(const struct doctor_machine *machine, struct doctor_result *result, const char *path,
                        const struct elf_facts *facts, const struct topo_gpu *gpu)
{
    doctor_found(result, DOCTOR_ERROR, "%s has no code for %s (compute capability %d.%d)", path,
                 machine_gpu_name(machine, gpu->index), gpu->cc_major, gpu->cc_minor);
    doctor_evidence(result, path, "%s", arch_names(machine, facts));
    doctor_evidence(result, machine_gpu_name(machine, gpu->index), "%s, compute capability %d.%d",
                    *gpu->name ? gpu->name : "name not known", gpu->cc_major, gpu->cc_minor);
    doctor_fix(result, false, "TORCH_CUDA_ARCH_LIST=%d.%d NVSHMEM_DIR=%s python3 setup.py install", gpu->cc_major,
               gpu->cc_minor,
               *machine->software->nvshmem.home ? shell_word(machine->source, machine->software->nvshmem.home)
                                                : "/usr/local/nvshmem");
    doctor_advise(result,
                  "In the source tree of DeepEP. NVSHMEM takes the architecture from CMAKE_CUDA_ARCHITECTURES=%d%d.",
                  gpu->cc_major, gpu->cc_minor);
}

void run_gpu_arch(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct topo *topo = machine->topo;
    const struct software_nvshmem *nvshmem = &machine->software->nvshmem;
    const char *path = machine_extension(machine, result), *files[2] = {path, ""}, *not_understood = "";
    bool is_known = false;

    if (!*path)
        return;
    for (int i = 0; i < topo->n_gpus; i++)
        is_known = is_known || topo->gpus[i].cc_major > 0;
    if (!is_known) {
        doctor_unknown(result, "the compute capability of the GPUs is not known: %s", topo->nvml_why);
        result->missing = machine_missing_nvml(machine);
        return;
    }
    if (nvshmem->host.state == SOURCE_OK)
        files[1] = nvshmem->host.path;
    for (size_t i = 0; i < 2 && *files[i]; i++) {
        struct elf_facts facts = source_elf(machine->source, "%s", files[i]);
        int gpu = facts.n_archs ? left_out(topo, &facts) : -1;

        if (!facts.archs_known) {
            not_understood = files[i];
        } else if (gpu >= 0) {
            report_arch(machine, result, files[i], &facts, &topo->gpus[gpu]);
            return;
        }
    }
    if (*not_understood) {
        doctor_unknown(result, "for which GPUs there is code in %s", not_understood);
        result->missing = DOCTOR_MISSING_RUN;
    }
}
