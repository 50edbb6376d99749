/* SPDX-License-Identifier: Apache-2.0 */
/* Where ld.so would find libraries: its rules one by one on made up machines, and itself as the oracle on this one. */
#include "machine/software/libs.h"
#include "world.h"

#include <link.h>

#define MACHINE "'machine': 62"
#define PLAIN "{" MACHINE "}"

static const struct libs_env nothing = {"", ""};

static void assert_found(struct lib_location location, const char *path, const char *found_by)
{
    assert_int_equal(location.state, SOURCE_OK);
    assert_string_equal(location.path, path);
    assert_string_equal(location.found_by, found_by);
}

/* --- order of folders --- */

TEST(order)
{
    struct world world;
    struct libs_env setting = {.library_path = "/first:/empty::relative;/second/", .preload = ""};
    struct source *source;

    world_init(&world);
    tree_put(&world.tree, "/etc/ld.so.conf", "/conf\n");
    tree_folder(&world.tree, "/empty");
    world_library(&world, "/first/liba.so", PLAIN);
    world_library(&world, "/second/liba.so", PLAIN);
    world_library(&world, "/second/libb.so", PLAIN);
    world_library(&world, "/conf/libb.so", PLAIN);
    world_library(&world, "/conf/libc.so", PLAIN);
    world_library(&world, "/usr/lib/libc.so", PLAIN);
    world_library(&world, "/usr/lib/libd.so", PLAIN);
    source = world_open(&world);
    assert_found(libs_find(source, &setting, "liba.so"), "/first/liba.so", "LD_LIBRARY_PATH");
    assert_found(libs_find(source, &setting, "libb.so"), "/second/libb.so", "LD_LIBRARY_PATH");
    assert_found(libs_find(source, &setting, "libc.so"), "/conf/libc.so", "/etc/ld.so.conf");
    assert_found(libs_find(source, &setting, "libd.so"), "/usr/lib/libd.so", "default folder");
    assert_found(libs_find(source, &nothing, "libb.so"), "/conf/libb.so", "/etc/ld.so.conf");
    assert_int_equal(libs_find(source, &nothing, "liba.so").state, SOURCE_ABSENT);
    assert_found(libs_find(source, &nothing, "/second/liba.so"), "/second/liba.so", "its path");
    world_done(&world);
}

TEST(configuration)
{
    struct world world;
    struct source *source;

    world_init(&world);
    /* An include that leads back to itself, one that is relative, one with a pattern, and lines that are none. */
    tree_put(&world.tree, "/etc/ld.so.conf",
             "include ld.so.conf.d/*.conf  # comment\ninclude /etc/ld.so.conf\n"
             "hwcap 1 nosegneg\nincluded\n  /last \t# behind the files\n");
    tree_put(&world.tree, "/etc/ld.so.conf.d/b.conf", "/from-b\ninclude more/x.conf\n");
    tree_put(&world.tree, "/etc/ld.so.conf.d/a.conf", "# /commented\n/from-a\n");
    tree_put(&world.tree, "/etc/ld.so.conf.d/readme", "/from-readme\n");
    tree_put(&world.tree, "/etc/ld.so.conf.d/more/x.conf", "/from-x\ninclude ../b.conf\n");
    world_library(&world, "/from-a/libx.so", PLAIN);
    world_library(&world, "/from-b/libx.so", PLAIN);
    world_library(&world, "/from-b/liby.so", PLAIN);
    world_library(&world, "/from-x/libz.so", PLAIN);
    world_library(&world, "/last/libz.so", PLAIN);
    world_library(&world, "/last/libl.so", PLAIN);
    world_library(&world, "/from-readme/libr.so", PLAIN);
    world_library(&world, "/commented/libr.so", PLAIN);
    source = world_open(&world);
    assert_found(libs_find(source, &nothing, "libx.so"), "/from-a/libx.so", "/etc/ld.so.conf");
    assert_found(libs_find(source, &nothing, "liby.so"), "/from-b/liby.so", "/etc/ld.so.conf");
    assert_found(libs_find(source, &nothing, "libz.so"), "/from-x/libz.so", "/etc/ld.so.conf");
    assert_found(libs_find(source, &nothing, "libl.so"), "/last/libl.so", "/etc/ld.so.conf");
    assert_int_equal(libs_find(source, &nothing, "libr.so").state, SOURCE_ABSENT);
    world_done(&world);
}

/* --- which file counts --- */

TEST(passed_over)
{
    struct world world;
    struct libs_env setting = {.library_path = "/lib32:/damaged:/good", .preload = ""};
    struct source *source;
    struct libs_closure *closure;

    world_init(&world);
    world_library(&world, "/lib32/liba.so", "{'state': 'failed', 'why': '" ELF_FOREIGN ": 32 bits'}");
    world_library(&world, "/lib32/libb.so", "{'state': 'denied', 'why': 'Permission denied'}");
    world_library(&world, "/lib32/libc.so", "{'machine': 183}");
    world_library(&world, "/damaged/libd.so", "{'state': 'failed', 'why': 'damaged'}");
    for (const char *name = "abcd"; *name; name++) {
        char path[] = "/good/lib?.so";

        path[9] = *name;
        world_library(&world, path, PLAIN);
    }
    world_library(&world, "/app", "{" MACHINE ", 'needed': ['libc.so']}");
    source = world_open(&world);
    assert_found(libs_find(source, &setting, "liba.so"), "/good/liba.so", "LD_LIBRARY_PATH");
    assert_found(libs_find(source, &setting, "libb.so"), "/good/libb.so", "LD_LIBRARY_PATH");
    /* A damaged file of the right kind ends ld.so's search with an error. */
    assert_int_equal(libs_find(source, &setting, "libd.so").state, SOURCE_FAILED);
    assert_string_equal(libs_find(source, &setting, "libd.so").path, "/damaged/libd.so");
    /* For another processor: told only by the file that needs it. */
    closure = libs_load(source, &setting, "/app");
    assert_string_equal(closure->libs[1].location.path, "/good/libc.so");
    world_done(&world);
}

TEST(links)
{
    struct world world;
    struct source *source;

    world_init(&world);
    world_library(&world, "/usr/lib/libx.so.1.5", PLAIN);
    world_library(&world, "/usr/lib64/placeholder", PLAIN);
    tree_link(&world.tree, "/usr/lib/libx.so.1", "libx.so.1.5");
    json_object_set(world.elf, "/usr/lib/libx.so.1", json_object_get(world.elf, "/usr/lib/libx.so.1.5"));
    source = world_open(&world);
    assert_found(libs_find(source, &nothing, "libx.so.1"), "/usr/lib/libx.so.1", "default folder");
    assert_string_equal(libs_find(source, &nothing, "libx.so.1").real, "/usr/lib/libx.so.1.5");
    world_done(&world);
}

TEST(preload)
{
    struct world world;
    struct libs_env setting = {.library_path = "/path", .preload = "/not/there.so /own/libx.so.1.5:liby.so"};
    struct libs_closure *closure;
    struct source *source;

    world_init(&world);
    world_library(&world, "/own/libx.so.1.5", "{" MACHINE ", 'soname': 'libx.so.1'}");
    world_library(&world, "/path/libx.so.1", "{" MACHINE ", 'soname': 'libx.so.1'}");
    world_library(&world, "/path/liby.so", PLAIN);
    world_library(&world, "/app", "{" MACHINE ", 'needed': ['libx.so.1', 'liby.so']}");
    source = world_open(&world);
    assert_found(libs_find(source, &setting, "libx.so.1"), "/own/libx.so.1.5", "LD_PRELOAD");
    assert_found(libs_find(source, &setting, "liby.so"), "/path/liby.so", "LD_PRELOAD");
    closure = libs_load(source, &setting, "/app");
    assert_int_equal(closure->n, 3);
    assert_string_equal(closure->libs[1].location.path, "/own/libx.so.1.5");
    assert_int_equal(closure->libs[1].needed_by, -1);
    assert_int_equal(closure->first_missing, -1);
    world_done(&world);
}

/* --- closures --- */

static const char *place_of(const struct libs_closure *closure, const char *name)
{
    int i = libs_closure_find(closure, name);

    return i < 0 ? "" : closure->libs[i].location.path;
}

TEST(rpath_and_runpath)
{
    struct world world;
    struct libs_env setting = {.library_path = "/env", .preload = ""};
    struct libs_closure *closure;
    struct source *source;

    world_init(&world);
    /* RPATH goes before the environment and is inherited; RUNPATH goes behind it and is not. */
    world_library(&world, "/bin/rpath", "{" MACHINE ", 'rpath': '/r', 'needed': ['liba.so', 'libmid.so']}");
    world_library(&world, "/bin/runpath", "{" MACHINE ", 'runpath': '/r', 'needed': ['liba.so', 'libmid.so']}");
    world_library(&world, "/bin/both", "{" MACHINE ", 'rpath': '/r', 'runpath': '/q', 'needed': ['liba.so']}");
    world_library(&world, "/r/liba.so", PLAIN);
    world_library(&world, "/env/liba.so", PLAIN);
    world_library(&world, "/r/libmid.so", "{" MACHINE ", 'needed': ['libdeep.so']}");
    world_library(&world, "/r/libdeep.so", PLAIN);
    world_library(&world, "/q/libq.so", PLAIN);
    source = world_open(&world);
    closure = libs_load(source, &setting, "/bin/rpath");
    assert_string_equal(place_of(closure, "liba.so"), "/r/liba.so");
    assert_string_equal(place_of(closure, "libdeep.so"), "/r/libdeep.so");
    assert_string_equal(closure->libs[libs_closure_find(closure, "libdeep.so")].location.found_by,
                        "RPATH of /bin/rpath");
    closure = libs_load(source, &setting, "/bin/runpath");
    assert_string_equal(place_of(closure, "liba.so"), "/env/liba.so");
    assert_string_equal(place_of(closure, "libmid.so"), "/r/libmid.so");
    assert_int_equal(closure->libs[closure->first_missing].location.state, SOURCE_ABSENT);
    assert_string_equal(closure->libs[closure->first_missing].name, "libdeep.so");
    closure = libs_load(source, &nothing, "/bin/both");
    assert_int_equal(closure->first_missing, 1);
    world_done(&world);
}

/* A RUNPATH puts out of use the RPATH of its own file, and for what that file needs everybody's. */
TEST(runpath_against_rpath)
{
    struct world world;
    struct libs_closure *closure;

    world_init(&world);
    world_library(&world, "/bin/both", "{" MACHINE ", 'rpath': '/r', 'runpath': '/q', 'needed': ['libplain.so']}");
    world_library(&world, "/bin/rpath", "{" MACHINE ", 'rpath': '/r', 'needed': ['libown.so']}");
    world_library(&world, "/q/libplain.so", "{" MACHINE ", 'needed': ['libdeep.so']}");
    world_library(&world, "/r/libown.so", "{" MACHINE ", 'runpath': '/q', 'needed': ['libdeep.so']}");
    world_library(&world, "/r/libdeep.so", PLAIN);
    world_open(&world);
    closure = libs_load(world.source, &nothing, "/bin/both");
    assert_string_equal(place_of(closure, "libplain.so"), "/q/libplain.so");
    assert_string_equal(closure->libs[closure->first_missing].name, "libdeep.so");
    closure = libs_load(world.source, &nothing, "/bin/rpath");
    assert_string_equal(place_of(closure, "libown.so"), "/r/libown.so");
    assert_string_equal(closure->libs[closure->first_missing].name, "libdeep.so");
    world_done(&world);
}

TEST(origin)
{
    struct world world;
    struct libs_closure *closure;

    world_init(&world);
    world_library(&world, "/opt/x/bin/app",
                  "{" MACHINE ", 'runpath': '$ORIGIN/../lib:${ORIGIN}/own:$UNKNOWN/y:/opt/x/own',"
                  " 'needed': ['liba.so', 'libb.so', 'libc.so', '$ORIGIN/libd.so']}");
    world_library(&world, "/opt/x/lib/liba.so", PLAIN);
    /* Entries are found by the path that is asked for. */
    json_object_set(world.elf, "/opt/x/bin/../lib/liba.so", json_object_get(world.elf, "/opt/x/lib/liba.so"));
    world_library(&world, "/opt/x/bin/own/libb.so", PLAIN);
    world_library(&world, "/opt/x/own/libc.so", PLAIN);
    world_library(&world, "/opt/x/bin/libd.so", PLAIN);
    world_open(&world);
    closure = libs_load(world.source, &nothing, "/opt/x/bin/app");
    assert_int_equal(closure->first_missing, -1);
    assert_string_equal(place_of(closure, "liba.so"), "/opt/x/bin/../lib/liba.so");
    assert_string_equal(closure->libs[1].location.real, "/opt/x/lib/liba.so");
    assert_string_equal(place_of(closure, "libb.so"), "/opt/x/bin/own/libb.so");
    assert_string_equal(place_of(closure, "libc.so"), "/opt/x/own/libc.so");
    assert_string_equal(place_of(closure, "libd.so"), "/opt/x/bin/libd.so");
    world_done(&world);
}

TEST(loops_and_versions)
{
    struct world world;
    struct libs_closure *closure;

    world_init(&world);
    world_library(&world, "/usr/lib/liba.so",
                  "{" MACHINE ", 'soname': 'liba.so.1', 'needed': ['libb.so', 'libv.so'],"
                  " 'needs': [['libv.so', 'V_1'], ['libv.so', 'V_2'], ['libb.so', 'B']]}");
    world_library(&world, "/usr/lib/libb.so", "{" MACHINE ", 'needed': ['liba.so.1', 'libb.so', 'liba.so']}");
    world_library(&world, "/usr/lib/libv.so", "{" MACHINE ", 'definitions': ['V_1', 'V_3']}");
    world_open(&world);
    closure = libs_load(world.source, &nothing, "/usr/lib/liba.so");
    assert_int_equal(closure->n, 3);
    assert_int_equal(closure->first_missing, -1);
    /* libb.so has no versions at all, which ld.so lets pass. */
    assert_int_equal(closure->n_gaps, 1);
    assert_string_equal(closure->gaps[0].version, "V_2");
    assert_int_equal(closure->gaps[0].user, 0);
    assert_int_equal(closure->gaps[0].provider, libs_closure_find(closure, "libv.so"));
    world_done(&world);
}

/* More libraries than there is room for, each needing the next and all of the ones before. */
TEST(endless)
{
    struct world world;
    struct libs_closure *closure;

    world_init(&world);
    for (int i = 0; i < 600; i++) {
        char path[64], facts[256];

        snprintf(path, sizeof(path), "/usr/lib/lib%d.so", i);
        snprintf(facts, sizeof(facts), "{" MACHINE ", 'needed': ['lib%d.so', 'lib%d.so', 'lib0.so']}", i + 1, i / 2);
        world_library(&world, path, facts);
    }
    world_open(&world);
    closure = libs_load(world.source, &nothing, "/usr/lib/lib0.so");
    assert_true(closure->cut);
    assert_int_equal(closure->n, 512);
    world_done(&world);
}

/* What a snapshot does not hold is not "not there". */
TEST(unasked)
{
    struct tree tree;
    struct source *source;
    struct libs_closure *closure;
    char path[PATH_MAX];

    tree_init(&tree);
    tree_put(&tree, "/snapshot.json", "{\"epkit_snapshot\": 1}");
    tree_path(&tree, "/snapshot.json", path);
    assert_int_equal(source_open(path, &source), EP_OK);
    assert_int_equal(libs_find(source, &nothing, "liba.so").state, SOURCE_NOT_RECORDED);
    closure = libs_load(source, &nothing, "/usr/lib/liba.so");
    assert_int_equal(closure->libs[0].location.state, SOURCE_NOT_RECORDED);
    assert_int_equal(closure->first_missing, 0);
    source_free(source);
    tree_done(&tree);
}

TEST(mapped)
{
    struct world world;
    struct source_names names;

    world_init(&world);
    tree_put(&world.tree, "/proc/self/maps",
             "7f0000000000-7f0000001000 r-xp 00000000 08:01 1 /usr/lib/libnccl.so.2.27.5\n"
             "7f0000001000-7f0000002000 r--p 00001000 08:01 1 /usr/lib/libnccl.so.2.27.5\n"
             "7f0000002000-7f0000003000 r-xp 00000000 08:01 2 /opt/libnccl stuff/libother.so\n"
             "7f0000003000-7f0000004000 r-xp 00000000 08:01 3 /old/libnccl.so.2 (deleted)\n"
             "7ffe00000000-7ffe00001000 rw-p 00000000 00:00 0 [stack]\n");
    names = libs_mapped(world_open(&world), "libnccl");
    assert_int_equal(names.state, SOURCE_OK);
    assert_int_equal(names.n, 2);
    assert_string_equal(names.names[0], "/usr/lib/libnccl.so.2.27.5");
    assert_string_equal(names.names[1], "/old/libnccl.so.2");
    world_done(&world);
}

/* --- this machine --- */

struct oracle {
    struct source *source;
    const struct libs_closure *closure;
    int n;
};

static int check_loaded(struct dl_phdr_info *info, size_t size, void *argument)
{
    struct oracle *oracle = argument;
    char real[PATH_MAX];

    (void)size;
    if (info->dlpi_name[0] != '/' || !realpath(info->dlpi_name, real))
        return 0; /* the program itself, the kernel's vdso */
    for (int i = 0; i < oracle->closure->n; i++) {
        if (strcmp(oracle->closure->libs[i].location.real, real) == 0) {
            oracle->n++;
            return 0;
        }
    }
    fail_msg("ld.so has loaded %s", real);
    return 0;
}

TEST(ld_so)
{
    struct oracle oracle = {0};
    struct libs_env setting;
    struct libs_closure *closure;
    char self[PATH_MAX] = "";

    assert_true(readlink("/proc/self/exe", self, sizeof(self) - 1) > 0);
    assert_int_equal(source_open(NULL, &oracle.source), EP_OK);
    setting = libs_env_of(oracle.source);
    closure = libs_load(oracle.source, &setting, self);
    oracle.closure = closure;
    assert_int_equal(closure->first_missing, -1);
    assert_int_equal(closure->n_gaps, 0);
    dl_iterate_phdr(check_loaded, &oracle);
    assert_true(oracle.n >= 3); /* libc, libcmocka, libjansson at least */
    source_free(oracle.source);
}
