/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Snapshots: recorded queries give the same answers, and a damaged snapshot is refused with the location of the error.
 */
#include "load_snapshot.h"
#include "log_lines.h"
#include "tree.h"
#include "unit.h"

#include <sys/wait.h>

#define PCI "/sys/bus/pci/devices/0000:0f:00.0/"

/* --- the same answers --- */

static void make_machine(const struct tree *tree)
{
    char *log = malloc(SOURCE_FILE_MAX + 2);
    char place[PATH_MAX];

    tree_put(tree, PCI "class", "0x030200\n");
    tree_put(tree, PCI "numa_node", "-1\n");
    tree_put_bytes(tree, PCI "config", (const char[64]){"\xde\x10\xff\xfe"}, 64);
    tree_put(tree, "/sys/class/net/eth0/mtu", "9000\n");
    tree_put_bytes(tree, "/proc/self/environ", "NCCL_NET=gIB\0NCCL_DEBUG=x\0", 26);
    tree_put(tree, "/proc/self/limits", "Max locked memory unlimited\n");
    tree_put(tree, "/proc/cpuinfo", "flags\t\t: hypervisor\n");
    tree_link(tree, "/usr/lib/libx.so", "libx.so.1");
    tree_put(tree, "/usr/lib/libx.so.1", "no ELF file");
    tree_link(tree, "/sys/round", "round");
    tree_path(tree, "/sys/class/net/fifo", place);
    assert_int_equal(mkfifo(place, 0644), 0);
    memset(log, 'x', SOURCE_FILE_MAX + 2);
    tree_put_bytes(tree, "/proc/modules", log, SOURCE_FILE_MAX + 1);
    free(log);
    tree_put(tree, "/" SOURCE_OVERLAY,
             "{\"epkit_snapshot\": 1,"
             " \"files\": {\"/proc/meminfo\": \"MemTotal: 1 kB\\n\","
             "  \"/proc/cmdline\": {\"state\": \"denied\", \"why\": \"made up\"}},"
             " \"answers\": {\"nvml\": {\"value\": {\"gpus\": [{\"name\": \"made up\"}]}}}}");
}

static void note_text(FILE *notes, const char *what, struct source_text text)
{
    fprintf(notes, "%s: %d \"%s\" %zu ", what, text.state, text.why, text.bytes);
    /* Without NULs, because notes are compared as strings. */
    for (size_t i = 0; i < text.bytes; i++)
        fprintf(notes, text.text[i] ? "%c" : "\\0", text.text[i]);
    fputc('\n', notes);
}

static void note_names(FILE *notes, const char *what, struct source_names names)
{
    fprintf(notes, "%s: %d \"%s\"", what, names.state, names.why);
    for (size_t i = 0; i < names.n; i++)
        fprintf(notes, " %s", names.names[i]);
    fputc('\n', notes);
}

static void note_stat(FILE *notes, const char *what, struct source_stat stat)
{
    fprintf(notes, "%s: %d \"%s\" %d %lld %d%d%d\n", what, stat.state, stat.why, stat.kind, (long long)stat.bytes,
            stat.may_read, stat.may_write, stat.may_execute);
}

/* Every kind of query, with every kind of answer. For free(). */
static char *ask_everything(struct source *source)
{
    static const char *const files[] = {PCI "class",     PCI "device",    "/proc/modules", "/proc/self/limits",
                                        "/proc/meminfo", "/proc/cmdline", "/sys/round"};
    static const char *const others[] = {
        "/sys/class/net", "/sys/class/net/eth0", "/usr/lib/libx.so", "/usr/lib/libnvshmem.so",
        "/sys/round",     "/sys/class/net/fifo", "/usr/lib",         "/"};
    struct source_answer answer;
    struct source_environment environment = source_environment(source);
    struct elf_facts elf = source_elf(source, "/usr/lib/libx.so");
    char *text, *json;
    size_t bytes;
    FILE *notes = open_memstream(&text, &bytes);
    int64_t value;
    uint64_t now;

    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        note_text(notes, files[i], source_read(source, "%s", files[i]));
        note_text(notes, files[i], source_line(source, "%s", files[i]));
        value = now = 0;
        fprintf(notes, "%d ", source_number(source, &value, "%s", files[i]));
        fprintf(notes, "%d ", source_number_uncached(source, &now, "%s", files[i]));
        fprintf(notes, "%lld %llu\n", (long long)value, (unsigned long long)now);
    }
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        /* Of a folder without a row only names of common software are saved. */
        if (others[i][1])
            note_names(notes, others[i], source_list(source, "%s", others[i]));
        note_stat(notes, others[i], source_stat(source, "%s", others[i]));
        note_text(notes, others[i], source_resolve(source, "%s", others[i]));
    }
    for (size_t i = 0; i < environment.n; i++)
        fprintf(notes, "%s=%s\n", environment.variables[i].name, environment.variables[i].value);
    fprintf(notes, "elf: %d %s\n", elf.state, elf.why);
    answer = source_query(source, "nvml", NULL, NULL, 0);
    json = json_dumps(answer.value, JSON_ENCODE_ANY | JSON_SORT_KEYS);
    fprintf(notes, "answer: %d %s\n", answer.state, json);
    free(json);
    fclose(notes);
    return text;
}

/* Reports the first line that differs. */
static void assert_same(const char *first, const char *second)
{
    size_t n = 0, line = 0;

    for (; first[n] && first[n] == second[n]; n++)
        line = first[n] == '\n' ? n + 1 : line;
    if (first[n] != second[n])
        fail_msg("\"%.*s\" is not \"%.*s\"", (int)strcspn(first + line, "\n"), first + line,
                 (int)strcspn(second + line, "\n"), second + line);
}

static struct source *load(const char *text, size_t bytes)
{
    struct source *source = NULL;

    if (load_snapshot("test", text, bytes, &source) != EP_OK)
        fail_msg("%s", ep_last_error());
    return source;
}

TEST(a_snapshot_answers_as_the_machine_did)
{
    char *first, *second, *third, *text, *again;
    struct source *source, *saved, *file;
    struct tree tree;
    char place[PATH_MAX];

    tree_init(&tree);
    make_machine(&tree);
    assert_int_equal(source_open(tree.place, &source), EP_OK);
    first = ask_everything(source);
    text = snapshot_text(source);
    saved = load(text, strlen(text));
    second = ask_everything(saved);
    assert_same(first, second);

    /* A snapshot of a snapshot is the same document. */
    again = snapshot_text(saved);
    assert_same(text, again);

    tree_path(&tree, "/snapshot.json", place);
    assert_int_equal(source_save(source, place), EP_OK);
    assert_int_equal(source_open(place, &file), EP_OK);
    assert_string_equal(source_name(file), place);
    assert_false(source_is_live(file));
    third = ask_everything(file);
    assert_same(first, third);
    assert_int_equal(source_set_process(file, 1), EP_E_ARG);
    source_free(file);
    source_free(saved);
    source_free(source);
    free(first);
    free(second);
    free(third);
    free(text);
    free(again);
    tree_done(&tree);
}

/* What is not UTF-8 cannot be in JSON. */
TEST(other_bytes_are_question_marks)
{
    struct source *source, *saved;
    struct tree tree;
    char *text;

    tree_init(&tree);
    tree_put(&tree, "/usr/lib/nvshmem_\xe4.so", "x");
    assert_int_equal(source_open(tree.place, &source), EP_OK);
    assert_int_equal(source_list(source, "/usr/lib").n, 1);
    assert_int_equal(source_stat(source, "/usr/lib/nvshmem_\xe4.so").state, SOURCE_OK);
    text = snapshot_text(source);
    saved = load(text, strlen(text));
    assert_string_equal(source_list(saved, "/usr/lib").names[0], "nvshmem_?.so");
    assert_int_equal(source_stat(saved, "/usr/lib/nvshmem_?.so").state, SOURCE_OK);
    source_free(saved);
    source_free(source);
    free(text);
    tree_done(&tree);
}

TEST(other_bytes_of_older_snapshots_are_read)
{
    static const char text[] =
        "{\"epkit_snapshot\": 1, \"files\": {\"/a\": {\"hex\": \"de10\"}, \"hex:2f61e4\": \"x\"}, "
        "\"folders\": {\"/usr/lib\": [\"a.so\", {\"hex\": \"6ee4\"}]}}";
    struct source *source = load(text, sizeof(text) - 1);

    assert_int_equal(source_list(source, "/usr/lib").n, 2);
    assert_string_equal(source_list(source, "/usr/lib").names[1], "n\xe4");
    source_free(source);
}

TEST(what_was_not_asked_is_not_known)
{
    static const char text[] = "{\"epkit_snapshot\": 1}";
    struct source *source = load(text, sizeof(text) - 1);
    int64_t value;
    uint64_t now;

    assert_int_equal(source_read(source, "/a").state, SOURCE_NOT_RECORDED);
    assert_string_equal(source_read(source, "/a").why, "the snapshot does not say");
    assert_string_equal(source_read(source, "/a").text, "");
    assert_int_equal(source_line(source, "/a").state, SOURCE_NOT_RECORDED);
    assert_int_equal(source_number(source, &value, "/a"), SOURCE_NOT_RECORDED);
    assert_int_equal(source_number_uncached(source, &now, "/a"), SOURCE_NOT_RECORDED);
    assert_int_equal(log_lines(source, "x", "/a").state, SOURCE_NOT_RECORDED);
    assert_int_equal(source_list(source, "/a").state, SOURCE_NOT_RECORDED);
    assert_int_equal(source_resolve(source, "/a").state, SOURCE_NOT_RECORDED);
    assert_int_equal(source_stat(source, "/a").state, SOURCE_NOT_RECORDED);
    assert_int_equal(source_elf(source, "/a").state, SOURCE_NOT_RECORDED);
    assert_int_equal(source_environment(source).state, SOURCE_NOT_RECORDED);
    assert_int_equal(source_query(source, "nvml", NULL, NULL, 0).state, SOURCE_NOT_RECORDED);
    assert_null(source_env(source, "PATH"));
    source_free(source);
}

/* A query that failed because the cache was full fails in the snapshot as well. */
TEST(a_full_root_stays_one)
{
    static const char text[] = "{\"epkit_snapshot\": 1, \"full\": true, \"files\": {\"/proc/devices\": \"x\"}}";
    struct source *source = load(text, sizeof(text) - 1), *again;
    char *saved;

    assert_int_equal(source_read(source, "/proc/devices").state, SOURCE_OK);
    assert_int_equal(source_read(source, "/b").state, SOURCE_FAILED);
    saved = snapshot_text(source);
    again = load(saved, strlen(saved));
    assert_int_equal(source_read(again, "/b").state, SOURCE_FAILED);
    free(saved);
    source_free(source);
    source_free(again);
}

/* --- overlays --- */

TEST(an_overlay_comes_before_the_files)
{
    struct tree tree;
    struct source *source;
    uint64_t now;

    tree_init(&tree);
    tree_put(&tree, "/a", "1\n");
    tree_put(&tree, "/b", "2\n");
    tree_put(&tree, "/" SOURCE_OVERLAY,
             "{\"epkit_snapshot\": 1, \"files\": {\"/a\": \"3\\n\"}, \"folders\": {\"/b\": [\"x10\", \"x9\"]},"
             " \"lines\": {\"/dev/kmsg\\tXid\": \"Xid\\n\"},"
             " \"stats\": {\"/dev/gdrdrv\": {\"kind\": \"char\", \"bytes\": 0, \"access\": \"rw-\"}},"
             " \"links\": {\"/c\": \"/a\"}}");
    assert_int_equal(source_open(tree.place, &source), EP_OK);
    assert_string_equal(source_line(source, "/a").text, "3");
    assert_string_equal(source_line(source, "/b").text, "2");
    assert_int_equal(source_number_uncached(source, &now, "/a"), SOURCE_OK);
    assert_int_equal(now, 3);
    tree_put(&tree, "/b", "4\n");
    assert_int_equal(source_number_uncached(source, &now, "/b"), SOURCE_OK);
    assert_int_equal(now, 4);
    assert_int_equal(source_list(source, "/b").n, 2);
    assert_string_equal(source_list(source, "/b").names[0], "x9");
    assert_string_equal(log_lines(source, "Xid", "/dev/kmsg").text, "Xid\n");
    assert_int_equal(source_stat(source, "/dev/gdrdrv").kind, SOURCE_CHAR_DEVICE);
    assert_true(source_stat(source, "/dev/gdrdrv").may_write);
    assert_false(source_stat(source, "/dev/gdrdrv").may_execute);
    assert_string_equal(source_resolve(source, "/c").text, "/a");
    source_free(source);

    tree_put(&tree, "/" SOURCE_OVERLAY, "{\"epkit_snapshot\": 1,\n \"files\": 7}");
    assert_fails(source_open(tree.place, &source), EP_E_ARG, SOURCE_OVERLAY ": \"files\" is not an object");
    tree_done(&tree);
}

/* --- damaged snapshots --- */

#define FILES(entries) "{\"epkit_snapshot\": 1, \"files\": {" entries "}}"
#define KIND(kind, entries) "{\"epkit_snapshot\": 1, \"" kind "\": {" entries "}}"

TEST(damaged_snapshots_are_refused)
{
    static const struct {
        const char *text, *says;
    } cases[] = {
        {"", "line 1, column 0"},
        {"{\"epkit_snapshot\": 1,\n  \"files\": {\"/a\" 1}}", "line 2, column"},
        {"{\"epkit_snapshot\": 1", "line 1"},
        {"[1]", "not a JSON object"},
        {"7", "line 1"},
        {"{}", "has no \"epkit_snapshot\""},
        {"{\"epkit_snapshot\": \"1\"}", "has no \"epkit_snapshot\""},
        {"{\"epkit_snapshot\": 2}", "this epkit reads format 1"},
        {"{\"epkit_snapshot\": 1, \"fils\": {}}", "unknown key \"fils\""},
        {"{\"epkit_snapshot\": 1, \"full\": 1}", "\"full\" is neither true nor false"},
        {"{\"epkit_snapshot\": 1, \"files\": []}", "\"files\" is not an object"},
        {"{\"epkit_snapshot\": 1, \"files\": {}, \"files\": {}}", "duplicate object key"},
        {FILES("\"/a\": \"x\", \"/a\": \"y\""), "duplicate object key"},
        {FILES("\"a\": \"x\""), "\"files\": \"a\": is not an absolute path in its plain form"},
        {FILES("\"/a/\": \"x\""), "plain form"},
        {FILES("\"/a//b\": \"x\""), "plain form"},
        {FILES("\"\": \"x\""), "plain form"},
        {FILES("\"/a\": 1"), "\"/a\": is neither a text nor an object with \"state\""},
        {FILES("\"/a\": null"), "is neither a text"},
        {FILES("\"/a\": {}"), "is neither a text"},
        {FILES("\"/a\": {\"state\": \"ok\"}"), "not one of absent, denied, failed"},
        {FILES("\"/a\": {\"state\": 1}"), "not one of absent, denied, failed"},
        {FILES("\"/a\": {\"state\": \"unasked\"}"), "not one of absent, denied, failed"},
        {FILES("\"/a\": {\"state\": \"absent\", \"why\": 1}"), "\"why\" is not a text"},
        {FILES("\"/a\": {\"state\": \"absent\", \"what\": \"\"}"), "has more than"},
        {KIND("folders", "\"/a\": \"x\""), "is neither a list of names"},
        {KIND("folders", "\"/a\": [\"x/y\"]"), "invalid file name"},
        {KIND("folders", "\"/a\": [\"..\"]"), "invalid file name"},
        {KIND("folders", "\"/a\": [\"\"]"), "invalid file name"},
        {KIND("folders", "\"/a\": [\"a\\u0000b\"]"), "invalid file name"},
        {KIND("folders", "\"/a\": [1]"), "invalid file name"},
        {KIND("links", "\"/a\": \"b\""), "is not an absolute path"},
        {KIND("links", "\"/a\": \"/b\\u0000\""), "is not an absolute path"},
        {KIND("links", "\"/a\": []"), "is neither a path"},
        {KIND("stats", "\"/a\": \"file\""), "is not an object"},
        {KIND("stats", "\"/a\": {\"kind\": \"pipe\", \"bytes\": 0, \"access\": \"---\"}"), "\"kind\" is not one of"},
        {KIND("stats", "\"/a\": {\"kind\": \"file\", \"bytes\": -1, \"access\": \"---\"}"), "\"bytes\""},
        {KIND("stats", "\"/a\": {\"kind\": \"file\", \"bytes\": 1.5, \"access\": \"---\"}"), "\"bytes\""},
        {KIND("stats", "\"/a\": {\"kind\": \"file\", \"bytes\": 0, \"access\": \"rwxs\"}"), "\"access\""},
        {KIND("stats", "\"/a\": {\"kind\": \"file\", \"bytes\": 0, \"access\": \"xwr\"}"), "\"access\""},
        {KIND("stats", "\"/a\": {\"kind\": \"file\", \"bytes\": 0}"), "\"access\""},
        {KIND("stats", "\"/a\": {\"kind\": \"file\", \"bytes\": 0, \"access\": \"---\", \"x\": 1}"), "has more than"},
        {KIND("lines", "\"/a\": \"x\""), "path, tab and text"},
        {KIND("lines", "\"a\\tb\": \"x\""), "plain form"},
        {KIND("lines", "\"/a\\tb\": 3"), "is neither a text"},
        {KIND("elf", "\"/a\": \"x\""), "is not an object"},
        {KIND("answers", "\"nvml\": {}"), "has neither \"value\" nor \"state\""},
        {KIND("answers", "\"nvml\": 1"), "has neither \"value\" nor \"state\""},
        {KIND("answers", "\"nvml\": {\"value\": 1, \"x\": 1}"), "has more than \"value\""},
        {"{\"epkit_snapshot\": 1, \"fi\xff\": {}}", "line 1"},
        {"{\"epkit_snapshot\": 1} x", "line 1"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct source *source = (struct source *)(intptr_t)1;

        assert_int_equal(load_snapshot("made up", cases[i].text, strlen(cases[i].text), &source), EP_E_ARG);
        assert_ptr_equal(source, (struct source *)(intptr_t)1);
        if (strncmp(ep_last_error(), "made up: ", 9) != 0 || !strstr(ep_last_error(), cases[i].says))
            fail_msg("%s\nsays: %s\nnot:  %s", cases[i].text, ep_last_error(), cases[i].says);
    }
}

/* Names in errors are text from a machine. */
TEST(errors_are_clean)
{
    static const char text[] = FILES("\"/\\u001b[31m\": 1");
    struct source *source;

    assert_fails(load_snapshot("made up", text, sizeof(text) - 1, &source), EP_E_ARG, "\"/?[31m\"");
}

static char *repeated(const char *before, const char *unit, size_t n, const char *after, size_t *ret_bytes)
{
    char *text;
    FILE *out = open_memstream(&text, ret_bytes);

    fputs(before, out);
    for (size_t i = 0; i < n; i++)
        fputs(unit, out);
    fputs(after, out);
    fclose(out);
    return text;
}

TEST(snapshots_are_bounded)
{
    static const struct {
        const char *before, *unit;
        size_t n;
        const char *after, *says;
    } cases[] = {
        {"", "[", 2000000, "", "has more than 1048576 values"},
        {"", "[", 5000, "", "line 1"},
        {"{\"epkit_snapshot\": 1, \"files\": {\"/a\": \"", "x", SOURCE_FILE_MAX + 1, "\"}}", "more than 8 MiB"},
        {"{\"epkit_snapshot\": 1, \"files\": {\"/a\": \"", ",", SOURCE_FILE_MAX, "\"}}", NULL},
        {"{\"epkit_snapshot\": 1, \"folders\": {\"/a\": [\"x\"", ",\"x\"", SOURCE_NAMES_MAX, "]}}", "16384 names"},
        {"{\"epkit_snapshot\": 1, \"files\": {\"/", "a", PATH_MAX, "\": \"\"}}", "too long for a path"},
        {"{\"epkit_snapshot\": 1, \"answers\": {\"x\": {\"value\": [0", ",0", 1000000, "]}}}", "64 MiB"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct source *source = NULL;
        size_t bytes;
        char *text = repeated(cases[i].before, cases[i].unit, cases[i].n, cases[i].after, &bytes);
        ep_status status = load_snapshot("made up", text, bytes, &source);

        assert_int_equal(status, cases[i].says ? EP_E_ARG : EP_OK);
        if (cases[i].says && !strstr(ep_last_error(), cases[i].says))
            fail_msg("%s, not %s", ep_last_error(), cases[i].says);
        source_free(source);
        free(text);
    }
}

/* --- writing --- */

TEST(half_a_snapshot_is_never_seen)
{
    static const char text[] = "{\"epkit_snapshot\": 1}";
    struct source *source = load(text, sizeof(text) - 1);
    struct source_names names;
    struct source *folder;
    struct tree tree;
    char place[PATH_MAX];
    struct stat info;
    mode_t mask = umask(027);

    tree_init(&tree);
    tree_put(&tree, "/s/old", "old");
    tree_path(&tree, "/s/old", place);
    assert_int_equal(source_save(source, place), EP_OK);
    assert_int_equal(stat(place, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0640);
    umask(mask);
    /* Its own FIFO: if this test ever fails, nothing of the machine is replaced. */
    tree_path(&tree, "/fifo", place);
    assert_int_equal(mkfifo(place, 0600), 0);
    assert_int_equal(source_save(source, place), EP_E_ARG);
    assert_int_equal(lstat(place, &info), 0);
    assert_true(S_ISFIFO(info.st_mode));
    assert_int_equal(source_save(source, tree.place), EP_E_ARG);
    assert_fails(source_save(source, "/nowhere/at/all/file"), EP_E_SYSTEM, "/nowhere/at/all/file");
    assert_int_equal(source_open(tree.place, &folder), EP_OK);
    names = source_list(folder, "/s");
    assert_int_equal(names.n, 1);
    source_free(folder);
    source_free(source);
    tree_done(&tree);
}
