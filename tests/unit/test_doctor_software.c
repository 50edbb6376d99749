/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of the verbs libraries and of DeepEP: a healthy machine, changes to it, and the result of a check. */
#include "machine/doctor/checks.h"
#include "made.h"

#define CORE "/usr/lib/libibverbs.so.1"
#define MLX5 "/usr/lib/libmlx5.so.1"
#define PROVIDER "/usr/lib/libibverbs/libmlx5-rdmav57.so"
#define PACKAGE "/py/deep_ep"
#define EXTENSION "/py/deep_ep_cpp.so"
#define NVSHMEM "/opt/nvshmem/lib/libnvshmem_host.so.3"

struct test_case {
    const struct doctor_check *check;
    const char *name;
    void (*change)(struct made *made);
    enum doctor_outcome outcome;
    const char *text; /* part of the result's sentence or reason */
};

/* --- the healthy machine --- */

/* `facts` is JSON with ' instead of ". */
static void put_library(struct made *made, const char *path, const char *facts)
{
    char text[2048];
    json_t *entry;

    snprintf(text, sizeof(text), "%s", facts);
    for (char *at = text; (at = strchr(at, '\'')); at++)
        *at = '"';
    entry = json_loads(text, 0, NULL);
    assert_non_null(entry);
    json_object_set_new(made_kind(made, "elf"), path, entry);
    json_object_set_new(made_kind(made, "links"), path, json_string(path));
}

static struct lib_location at(const char *path, const char *found_by)
{
    return (struct lib_location){.state = SOURCE_OK, .path = path, .real = path, .found_by = found_by};
}

static struct lib_location nowhere(void)
{
    return (struct lib_location){.state = SOURCE_ABSENT, .path = "", .real = "", .found_by = ""};
}

static struct software_copy *copy(struct made *made, int i)
{
    return &made->software.deepep.copies[i];
}

static void healthy(struct made *made)
{
    struct software *software = &made->software;

    for (int i = 0; i < 4; i++)
        made->hardware.gpus[i].cc_major = 10;
    software->verbs = (struct software_verbs){.ibverbs = at(CORE, "default folder"),
                                              .mlx5 = at(MLX5, "default folder"),
                                              .private_version = 57,
                                              .provider_needs = 57,
                                              .provider = PROVIDER,
                                              .provider_folders = "/usr/lib/libibverbs"};
    put_library(made, CORE, "{'definitions': ['IBVERBS_PRIVATE_57']}");
    put_library(made, MLX5, "{'needs': [['libibverbs.so.1', 'IBVERBS_PRIVATE_57']]}");
    put_library(made, PROVIDER, "{'needs': [['libibverbs.so.1', 'IBVERBS_PRIVATE_57']]}");
    software->nccl.gib = software->nccl.bundled = software->nccl.plugin_name = "";
    software->nvshmem.host = at(NVSHMEM, "LD_PRELOAD");
    software->nvshmem.version = "3.5.19";
    software->nvshmem.home = "/opt/nvshmem";
    put_library(made, NVSHMEM, "{}");
    put_library(made, EXTENSION,
                "{'needed': ['libnvshmem_host.so.3'], 'runpath': '/opt/nvshmem/lib', 'archs': [90, 100]}");
    software->deepep.n = 1;
    software->deepep.imported = 0;
    *copy(made, 0) = (struct software_copy){.folder = PACKAGE,
                                            .version = "1.2.1+29d31c0",
                                            .extension = EXTENSION,
                                            .on_path = true,
                                            .buffer = SOURCE_OK,
                                            .defines_mapping = true,
                                            .calls_mapping = true,
                                            .hash = 1};
    software->cuda_home = "/usr/local/cuda";
    software->python_paths = "/py";
}

CHANGE(nothing, (void)made)

static void no_gpus(struct made *made)
{
    made->hardware.topo.n_gpus = 0;
    made_state(made, "folders", "/sys/bus/pci/devices", "absent");
}

static void no_nics(struct made *made)
{
    made->hardware.topo.n_nics = 0;
    made_state(made, "folders", "/sys/class/infiniband", "absent");
}

CHANGE(secret_environment, made_state(made, "files", "/proc/self/environ", "denied"))

/* --- verbs --- */

static void nics_of_others(struct made *made)
{
    for (int i = 0; i < 4; i++)
        made->hardware.pci[made->hardware.nics[i].pci].vendor = 0x1d0f;
}

CHANGE(no_core, made->software.verbs.ibverbs = nowhere())

static void no_core_for_nobody(struct made *made)
{
    no_core(made);
    made->software.deepep.n = 0;
    made->software.deepep.imported = -1;
}

CHANGE_OF(no_core_for_a_plugin, no_core_for_nobody, made_env(made, "NCCL_NET=gIB"))
CHANGE(no_mlx5_library, made->software.verbs.mlx5 = nowhere())
CHANGE(damaged_core, made_state(made, "elf", CORE, "failed"))
CHANGE(core_without_number, made->software.verbs.private_version = 0)
CHANGE(no_provider, made->software.verbs.provider = "")
CHANGE(other_set, made->software.verbs.provider_needs = 34)
CHANGE_OF(other_set_and_no_provider, other_set, no_provider(made))

/* The file was renamed: right name, but from another installation. */
CHANGE(renamed_provider, put_library(made, PROVIDER, "{'needs': [['libibverbs.so.1', 'IBVERBS_PRIVATE_34']]}"))

static void core_from_gib(struct made *made)
{
    made->software.nccl.gib = "/usr/local/gib";
    made->software.verbs.ibverbs = at("/usr/local/gib/lib64/libibverbs.so.1", "LD_LIBRARY_PATH");
    put_library(made, "/usr/local/gib/lib64/libibverbs.so.1", "{'definitions': ['IBVERBS_PRIVATE_57']}");
    made_stat(made, "/usr/lib", "folder", "r-x");
}

CHANGE_OF(core_from_gib_alone, core_from_gib, made_state(made, "elf", CORE, "absent"))
CHANGE(gib_behind, made->software.nccl.gib = "/usr/local/gib")

static void folder_as_drivers(struct made *made)
{
    made_env(made, "RDMAV_DRIVERS=/usr/lib/libibverbs");
    made_state(made, "stats", "/usr/lib/libibverbs-rdmav57.so", "absent");
    made_stat(made, "/usr/lib/libibverbs", "folder", "r-x");
    made_stat(made, PROVIDER, "file", "r--");
}

CHANGE_OF(folder_as_only_hint, folder_as_drivers, no_provider(made))

static void good_drivers(struct made *made)
{
    made_env(made, "RDMAV_DRIVERS=mlx5:/usr/lib/libibverbs/libmlx5");
    made_stat(made, PROVIDER, "file", "r--");
}

/* --- DeepEP --- */

CHANGE(not_imported, made->software.deepep.imported = -1)
CHANGE_OF(no_deepep, not_imported, made->software.deepep.n = 0)
CHANGE(never_called, copy(made, 0)->calls_mapping = false)
CHANGE(never_defined, copy(made, 0)->defines_mapping = false)
CHANGE(stolen, copy(made, 0)->decorator_stolen = true)
CHANGE_OF(no_mapping, never_called, never_defined(made))
CHANGE_OF(mapping_wanted, no_mapping, made_env(made, "DEEP_EP_DEVICE_TO_HCA_MAPPING=0:mlx5_0:1"))

static void another_copy(struct made *made)
{
    made->software.deepep.n = 2;
    *copy(made, 1) = *copy(made, 0);
    copy(made, 1)->folder = "/src/deep_ep";
    copy(made, 1)->is_source = true;
    copy(made, 1)->on_path = false;
    copy(made, 1)->version = "";
}

static void patched_source(struct made *made)
{
    another_copy(made);
    mapping_wanted(made);
    copy(made, 0)->hash = 2;
}

CHANGE_OF(edited_source, another_copy, copy(made, 1)->hash = 2)

static void two_versions(struct made *made)
{
    another_copy(made);
    copy(made, 1)->on_path = true;
    copy(made, 1)->version = "1.1.0";
}

static void one_version_two_texts(struct made *made)
{
    another_copy(made);
    copy(made, 1)->version = copy(made, 0)->version;
    copy(made, 1)->hash = 2;
}

static void unreadable_buffer(struct made *made)
{
    copy(made, 0)->buffer = SOURCE_DENIED;
    made_state(made, "files", PACKAGE "/buffer.py", "denied");
    no_mapping(made);
}

static void version_two(struct made *made)
{
    copy(made, 0)->buffer = SOURCE_ABSENT;
    copy(made, 0)->version = "2.0.0";
    no_mapping(made);
}

CHANGE_OF(version_two_mapping_wanted, version_two, made_env(made, "DEEP_EP_DEVICE_TO_HCA_MAPPING=0:mlx5_0:1"))

static void set_version(struct made *made, const char *version)
{
    copy(made, 0)->version = version;
}

CHANGE(version_1_1, set_version(made, "1.1.0+29d31c1"))
CHANGE(version_of_patch, set_version(made, "1.2.1+8a07e7eabc"))
CHANGE(version_bare, set_version(made, "1.2.1"))
CHANGE(version_other_commit, set_version(made, "1.2.1+0123abc"))
CHANGE(version_known_old, set_version(made, "1.2.1+309785a"))
CHANGE(version_unknown, set_version(made, ""))
CHANGE_OF(old_with_old_nvshmem, version_1_1, made->software.nvshmem.version = "3.4.5")
CHANGE(no_nvshmem, made->software.nvshmem.host = nowhere())

/* --- the extension --- */

CHANGE(no_extension, copy(made, 0)->extension = "")
CHANGE(built_without_nvshmem, put_library(made, EXTENSION, "{'needed': ['libc.so.6'], 'archs': [100]}"))

static void linked_with(struct made *made, const char *version)
{
    char header[256];

    put_library(made, EXTENSION, "{'needed': ['libnvshmem_host.so.3'], 'rpath': '/none:$ORIGIN/../built/lib'}");
    made_state(made, "elf", "/none/libnvshmem_host.so.3", "absent");
    put_library(made, "/py/../built/lib/libnvshmem_host.so.3", "{}");
    if (!*version) {
        made_state(made, "files", "/py/../built/include/non_abi/nvshmem_version.h", "absent");
        return;
    }
    snprintf(header, sizeof(header),
             "#define NVSHMEM_VENDOR_MAJOR_VERSION 3\n#define NVSHMEM_VENDOR_MINOR_VERSION %s\n"
             "#define NVSHMEM_VENDOR_PATCH_VERSION 19\n",
             version);
    made_file(made, "/py/../built/include/non_abi/nvshmem_version.h", header);
}

CHANGE(linked_with_older, linked_with(made, "3"))
CHANGE(linked_with_same, linked_with(made, "5"))
CHANGE(linked_with_unknown, linked_with(made, ""))

static void folder_missing(struct made *made)
{
    put_library(made, EXTENSION, "{'needed': ['libnvshmem_host.so.3'], 'runpath': '/gone'}");
    made_state(made, "elf", "/gone/libnvshmem_host.so.3", "absent");
}

CHANGE(damaged_extension, made_state(made, "elf", EXTENSION, "failed"))
CHANGE(archs_unknown, put_library(made, EXTENSION, "{'needed': [], 'archs': [90], 'archs_known': false}"))

static void capability_unknown(struct made *made)
{
    for (int i = 0; i < 4; i++)
        made->hardware.gpus[i].cc_major = 0;
    made->hardware.topo.nvml_why = "no libnvidia-ml.so.1";
}

CHANGE(nvshmem_for_another, put_library(made, NVSHMEM, "{'archs': [90]}"))

/* --- builds --- */

static void with_source(struct made *made)
{
    another_copy(made);
    made_file(made, "/usr/include/infiniband/mlx5dv.h", "struct mlx5dv_context;\n");
    put_library(made, "/usr/lib/libmlx5.so", "{}");
    made_stat(made, "/usr/lib", "folder", "r-x");
    made_stat(made, "/usr/local/cuda/include", "folder", "r-x");
    made_stat(made, "/usr/local/cuda/include/cuda/std/tuple", "file", "r--");
}

static void no_link(struct made *made)
{
    with_source(made);
    for (size_t i = 0; i < 8; i++) {
        static const char *const folders[] = {"/lib/x86_64-linux-gnu",
                                              "/usr/lib/x86_64-linux-gnu",
                                              "/lib/aarch64-linux-gnu",
                                              "/usr/lib/aarch64-linux-gnu",
                                              "/lib",
                                              "/lib64",
                                              "/usr/lib64",
                                              "/usr/local/lib"};

        made_state(made, "stats", folders[i], "absent");
    }
    made_state(made, "elf", "/usr/lib/libmlx5.so", "absent");
}

CHANGE_OF(no_header, with_source, made_state(made, "files", "/usr/include/infiniband/mlx5dv.h", "absent"))

static void cuda_13(struct made *made)
{
    with_source(made);
    made_state(made, "stats", "/usr/local/cuda/include/cuda/std/tuple", "absent");
    made_stat(made, "/usr/local/cuda/include/cccl/cuda/std/tuple", "file", "r--");
}

CHANGE_OF(cuda_13_with_path, cuda_13, made_env(made, "CPLUS_INCLUDE_PATH=/usr/local/cuda/include/cccl"))

static void nvshmem_source(struct made *made)
{
    with_source(made);
    made_stat(made, "/opt/nvshmem_src/CMakeLists.txt", "file", "r--");
    made_file(made, "/usr/include/infiniband/mlx5dv.h", "enum { MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT = 1 };\n");
    made_state(made, "stats", "/usr/include/gdrapi.h", "absent");
    made_state(made, "stats", "/usr/local/include/gdrapi.h", "absent");
    made_state(made, "files", "/opt/nvshmem_src/build/CMakeCache.txt", "absent");
}

CHANGE_OF(nvshmem_source_without_gdrcopy, nvshmem_source, made_env(made, "NVSHMEM_USE_GDRCOPY=0"))

static void nvshmem_configured_without_gdrcopy(struct made *made)
{
    nvshmem_source(made);
    made_file(made, "/opt/nvshmem_src/build/CMakeCache.txt", "# cache\nNVSHMEM_USE_GDRCOPY:BOOL=OFF\nX:BOOL=ON\n");
}

static void nvshmem_configured_with_gdrcopy(struct made *made)
{
    nvshmem_source(made);
    made_file(made, "/opt/nvshmem_src/build/CMakeCache.txt", "# cache\nNVSHMEM_USE_GDRCOPY:BOOL=ON\n");
}

static void nvshmem_source_old_header(struct made *made)
{
    nvshmem_source_without_gdrcopy(made);
    made_file(made, "/usr/include/infiniband/mlx5dv.h", "struct mlx5dv_context;\n");
}

static const struct test_case cases[] = {
    {&check_provider_missing, "healthy", nothing, DOCTOR_FINE, ""},
    {&check_provider_missing, "no NICs", no_nics, DOCTOR_NOT_APPLICABLE, "no RDMA NIC"},
    {&check_provider_missing, "NICs of others", nics_of_others, DOCTOR_NOT_APPLICABLE, "libibverbs.d"},
    {&check_provider_missing, "no libibverbs", no_core, DOCTOR_FOUND, "libibverbs.so.1 is not installed"},
    {&check_provider_missing, "no libibverbs for a plugin", no_core_for_a_plugin, DOCTOR_FOUND, "libibverbs.so.1 is"},
    {&check_provider_missing, "no libibverbs, nobody asks", no_core_for_nobody, DOCTOR_NOT_APPLICABLE, "not installed"},
    {&check_provider_missing, "no libmlx5", no_mlx5_library, DOCTOR_FOUND, "libmlx5.so.1 is not installed"},
    {&check_provider_missing, "damaged", damaged_core, DOCTOR_UNKNOWN, "made so"},
    {&check_provider_missing, "no number", core_without_number, DOCTOR_UNKNOWN, "IBVERBS_PRIVATE"},
    {&check_provider_missing, "environment", secret_environment, DOCTOR_UNKNOWN, "environment"},
    {&check_provider_missing, "no provider", no_provider, DOCTOR_FOUND, "libmlx5-rdmav57.so"},
    {&check_provider_missing, "another set", other_set_and_no_provider, DOCTOR_NOT_APPLICABLE,
     "different installations"},
    {&check_provider_missing, "RDMAV_DRIVERS", folder_as_only_hint, DOCTOR_NOT_APPLICABLE, "RDMAV_DRIVERS"},
    {&check_verbs_mixed, "healthy", nothing, DOCTOR_FINE, ""},
    {&check_verbs_mixed, "another set", other_set, DOCTOR_FOUND, "IBVERBS_PRIVATE_34"},
    {&check_verbs_mixed, "another set, no provider", other_set_and_no_provider, DOCTOR_FOUND, MLX5},
    {&check_verbs_mixed, "renamed provider", renamed_provider, DOCTOR_FOUND, PROVIDER},
    {&check_verbs_mixed, "gIB", core_from_gib, DOCTOR_NOT_APPLICABLE, "gIB"},
    {&check_rdmav_drivers, "not set", nothing, DOCTOR_NOT_APPLICABLE, "not set"},
    {&check_rdmav_drivers, "folder", folder_as_drivers, DOCTOR_FOUND, "/usr/lib/libibverbs-rdmav57.so"},
    {&check_rdmav_drivers, "right", good_drivers, DOCTOR_FINE, ""},
    {&check_verbs_from_gib, "no gIB", nothing, DOCTOR_NOT_APPLICABLE, "not installed"},
    {&check_verbs_from_gib, "gIB behind", gib_behind, DOCTOR_FINE, ""},
    {&check_verbs_from_gib, "gIB in front", core_from_gib, DOCTOR_FOUND, "/usr/local/gib/lib64/libibverbs.so.1"},
    {&check_verbs_from_gib, "gIB alone", core_from_gib_alone, DOCTOR_FINE, ""},

    {&check_mapping_inactive, "healthy", nothing, DOCTOR_FINE, ""},
    {&check_mapping_inactive, "no GPUs", no_gpus, DOCTOR_NOT_APPLICABLE, "no NVIDIA GPU"},
    {&check_mapping_inactive, "no NICs", no_nics, DOCTOR_NOT_APPLICABLE, "no RDMA NIC"},
    {&check_mapping_inactive, "no DeepEP", no_deepep, DOCTOR_NOT_APPLICABLE, "not installed where Python looks: /py"},
    {&check_mapping_inactive, "not on the path", not_imported, DOCTOR_NOT_APPLICABLE, "not on Python's path"},
    {&check_mapping_inactive, "environment", secret_environment, DOCTOR_UNKNOWN, "environment"},
    {&check_mapping_inactive, "never called", never_called, DOCTOR_FOUND, "never called"},
    {&check_mapping_inactive, "never defined", never_defined, DOCTOR_FOUND, "not defined"},
    {&check_mapping_inactive, "decorator", stolen, DOCTOR_FOUND, "decorator"},
    {&check_mapping_inactive, "no mapping", no_mapping, DOCTOR_FINE, ""},
    {&check_mapping_inactive, "ignored", mapping_wanted, DOCTOR_FOUND, "ignores it"},
    {&check_mapping_inactive, "patched elsewhere", patched_source, DOCTOR_FINE, ""},
    {&check_mapping_inactive, "unreadable", unreadable_buffer, DOCTOR_UNKNOWN, "buffer.py"},
    {&check_mapping_inactive, "version 2", version_two, DOCTOR_FINE, ""},
    {&check_mapping_inactive, "version 2, wanted", version_two_mapping_wanted, DOCTOR_FOUND, "ignores it"},
    {&check_stale_copy, "healthy", nothing, DOCTOR_FINE, ""},
    {&check_stale_copy, "a source", another_copy, DOCTOR_FINE, ""},
    {&check_stale_copy, "edited source", edited_source, DOCTOR_FINE, ""},
    {&check_stale_copy, "patched source", patched_source, DOCTOR_FOUND, "/src/deep_ep"},
    {&check_stale_copy, "two versions", two_versions, DOCTOR_FOUND, "differ"},
    {&check_stale_copy, "two texts", one_version_two_texts, DOCTOR_FOUND, "differ"},
    {&check_stale_copy, "no mapping anywhere", no_mapping, DOCTOR_FINE, ""},
    {&check_deepep_too_old, "healthy", nothing, DOCTOR_FINE, ""},
    {&check_deepep_too_old, "1.1", version_1_1, DOCTOR_FOUND, "1.1.0"},
    {&check_deepep_too_old, "patch 466", version_of_patch, DOCTOR_FINE, ""},
    {&check_deepep_too_old, "no commit", version_bare, DOCTOR_UNKNOWN, "29d31c0"},
    {&check_deepep_too_old, "another commit", version_other_commit, DOCTOR_UNKNOWN, "29d31c0"},
    {&check_deepep_too_old, "old commit", version_known_old, DOCTOR_FOUND, "309785a"},
    {&check_deepep_too_old, "no version", version_unknown, DOCTOR_UNKNOWN, PACKAGE},
    {&check_deepep_too_old, "version 2", version_two, DOCTOR_FINE, ""},
    {&check_deepep_too_old, "NVSHMEM 3.4", old_with_old_nvshmem, DOCTOR_FINE, ""},
    {&check_deepep_too_old, "no NVSHMEM", no_nvshmem, DOCTOR_NOT_APPLICABLE, "NVSHMEM"},

    {&check_other_nvshmem, "healthy", nothing, DOCTOR_FINE, ""},
    {&check_other_nvshmem, "no extension", no_extension, DOCTOR_NOT_APPLICABLE, "deep_ep_cpp"},
    {&check_other_nvshmem, "damaged", damaged_extension, DOCTOR_UNKNOWN, EXTENSION},
    {&check_other_nvshmem, "without NVSHMEM", built_without_nvshmem, DOCTOR_NOT_APPLICABLE, "without NVSHMEM"},
    {&check_other_nvshmem, "no NVSHMEM", no_nvshmem, DOCTOR_NOT_APPLICABLE, "not found"},
    {&check_other_nvshmem, "older", linked_with_older, DOCTOR_FOUND, "3.3.19"},
    {&check_other_nvshmem, "same version", linked_with_same, DOCTOR_FINE, ""},
    {&check_other_nvshmem, "unknown version", linked_with_unknown, DOCTOR_UNKNOWN, "have the same version"},
    {&check_other_nvshmem, "folder gone", folder_missing, DOCTOR_UNKNOWN, "built with"},
    {&check_gpu_arch, "healthy", nothing, DOCTOR_FINE, ""},
    {&check_gpu_arch, "not understood", archs_unknown, DOCTOR_UNKNOWN, EXTENSION},
    {&check_gpu_arch, "capability", capability_unknown, DOCTOR_UNKNOWN, "libnvidia-ml"},
    {&check_gpu_arch, "NVSHMEM", nvshmem_for_another, DOCTOR_FOUND, NVSHMEM},

    {&check_build_files, "no source", nothing, DOCTOR_NOT_APPLICABLE, "no source"},
    {&check_build_files, "all there", with_source, DOCTOR_FINE, ""},
    {&check_build_files, "no link", no_link, DOCTOR_FOUND, "libmlx5.so"},
    {&check_build_files, "no header", no_header, DOCTOR_FOUND, "mlx5dv.h"},
    {&check_build_files, "CUDA 13", cuda_13, DOCTOR_FOUND, "cuda/std/tuple"},
    {&check_build_files, "CUDA 13 with its path", cuda_13_with_path, DOCTOR_FINE, ""},
    {&check_build_files, "no GDRCopy", nvshmem_source, DOCTOR_FOUND, "gdrapi.h"},
    {&check_build_files, "GDRCopy off", nvshmem_source_without_gdrcopy, DOCTOR_FINE, ""},
    {&check_build_files, "configured without GDRCopy", nvshmem_configured_without_gdrcopy, DOCTOR_FINE, ""},
    {&check_build_files, "configured with GDRCopy", nvshmem_configured_with_gdrcopy, DOCTOR_FOUND, "gdrapi.h"},
    {&check_build_files, "old header", nvshmem_source_old_header, DOCTOR_FOUND, "MLX5DV_REG_DMABUF"},
};

TEST(outcomes)
{
    static const char *const names[] = {"fine", "found", "not here", "unknown"};
    int n_wrong = 0;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct test_case *row = &cases[i];
        struct made *made = calloc(1, sizeof(*made));
        struct doctor_result result;

        assert_non_null(made);
        made_init(made);
        healthy(made);
        row->change(made);
        made_open(made);
        doctor_run(&made->doctor, row->check, &result);
        if (result.outcome != row->outcome || !strstr(result.text, row->text)) {
            print_error("%s, %s: %s: '%s'\n", row->check->id, row->name, names[result.outcome], result.text);
            n_wrong++;
        }
        if (result.outcome == DOCTOR_FOUND) {
            assert_true(result.n_evidence > 0);
            assert_true(*result.fix || *result.advice);
        }
        made_done(made);
        free(made);
    }
    assert_int_equal(n_wrong, 0);
}

/* Which code runs on which GPU: the rules of the CUDA programming guide. */
TEST(architectures)
{
    static const struct {
        int arch, major, minor;
        bool runs;
    } rules[] = {
        {90, 9, 0, true},      {90, 10, 0, false},    {100, 9, 0, false},     {100, 10, 3, true},
        {103, 10, 0, false},   {80, 8, 9, true},      {89, 8, 6, false},      {-90, 9, 0, true},
        {-90, 12, 0, true},    {-100, 9, 0, false},   {10090, 9, 0, true},    {10090, 10, 0, false},
        {10100, 10, 3, false}, {-10090, 9, 0, true},  {-10090, 10, 0, false}, {20100, 10, 0, true},
        {20100, 10, 3, true},  {20103, 10, 0, false}, {20100, 12, 0, false},  {-20100, 10, 3, true},
    };

    for (size_t i = 0; i < sizeof(rules) / sizeof(rules[0]); i++) {
        struct made *made = calloc(1, sizeof(*made));
        struct doctor_result result;
        char facts[64];

        assert_non_null(made);
        made_init(made);
        healthy(made);
        snprintf(facts, sizeof(facts), "{'archs': [%d]}", rules[i].arch);
        put_library(made, EXTENSION, facts);
        for (int k = 0; k < 4; k++) {
            made->hardware.gpus[k].cc_major = rules[i].major;
            made->hardware.gpus[k].cc_minor = rules[i].minor;
        }
        made_open(made);
        doctor_run(&made->doctor, &check_gpu_arch, &result);
        if (result.outcome != (rules[i].runs ? DOCTOR_FINE : DOCTOR_FOUND))
            fail_msg("%d on %d.%d: %s", rules[i].arch, rules[i].major, rules[i].minor, result.text);
        made_done(made);
        free(made);
    }
}

/* A build variable is set only for the build command: if exported, it does nothing. */
TEST(build_without_gdrcopy)
{
    struct made *made = calloc(1, sizeof(*made));
    struct doctor_result result;

    assert_non_null(made);
    made_init(made);
    healthy(made);
    nvshmem_source(made);
    made_open(made);
    doctor_run(&made->doctor, &check_build_files, &result);
    assert_string_equal(result.fix, "NVSHMEM_USE_GDRCOPY=0 cmake -S /opt/nvshmem_src -B /opt/nvshmem_src/build");
    made_done(made);
    free(made);
}

/* File names are quoted in commands that users paste. */
TEST(commands)
{
    struct made *made = calloc(1, sizeof(*made));
    struct doctor_result result;

    assert_non_null(made);
    made_init(made);
    healthy(made);
    patched_source(made);
    copy(made, 1)->folder = "/src; rm -rf 'x'/deep_ep";
    made_open(made);
    doctor_run(&made->doctor, &check_stale_copy, &result);
    assert_int_equal(result.outcome, DOCTOR_FOUND);
    assert_string_equal(result.fix, "sudo cp '/src; rm -rf '\\''x'\\''/deep_ep'/*.py " PACKAGE "/");
    assert_false(result.fix_is_safe);
    made_done(made);
    free(made);
}
