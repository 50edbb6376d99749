/* SPDX-License-Identifier: Apache-2.0 */
/* Reads of a source: every state of a query, and that nothing leads out of the root directory. */
#include "log_lines.h"
#include "machine/source/state.h"
#include "tree.h"
#include "unit.h"

#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#define OUTSIDE "outside of the root directory\n"

struct fixture {
    struct tree tree, outside; /* the second must not be reached */
    struct source *source;
};

static struct source *open_tree(const struct tree *tree)
{
    struct source *source = NULL;

    assert_int_equal(source_open(tree->place, &source), EP_OK);
    return source;
}

static int setup(void **state)
{
    struct fixture *fixture = calloc(1, sizeof(*fixture));

    assert_non_null(fixture);
    tree_init(&fixture->tree);
    tree_init(&fixture->outside);
    tree_put(&fixture->outside, "/secret", OUTSIDE);
    *state = fixture;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *fixture = *state;

    source_free(fixture->source);
    tree_done(&fixture->tree);
    tree_done(&fixture->outside);
    free(fixture);
    return 0;
}

/* Opens the current tree. */
static struct source *look(struct fixture *fixture)
{
    source_free(fixture->source);
    fixture->source = open_tree(&fixture->tree);
    return fixture->source;
}

#define assert_state(answer, wanted, reason)                                                                           \
    do {                                                                                                               \
        assert_int_equal((answer).state, wanted);                                                                      \
        assert_string_equal((answer).why, reason);                                                                     \
    } while (0)

/* --- opening --- */

TEST_WITH(only_folders_and_snapshots_are_machines, setup, teardown)
{
    struct fixture *fixture = *state;
    struct source *source = (struct source *)(intptr_t)1;
    char place[PATH_MAX];

    tree_path(&fixture->tree, "/fifo", place);
    assert_int_equal(mkfifo(place, 0600), 0);
    assert_fails(source_open(place, &source), EP_E_ARG, "neither a folder nor");
    assert_fails(source_open("/nowhere/at/all", &source), EP_E_ARG, "/nowhere/at/all");
    assert_int_equal(source_open("/dev/null", &source), EP_E_ARG);
    assert_ptr_equal(source, (struct source *)(intptr_t)1);

    assert_int_equal(source_open("/", &source), EP_OK);
    assert_true(source_is_live(source));
    assert_string_equal(source_name(source), "this machine");
    source_free(source);
    assert_false(source_is_live(look(fixture)));
    assert_string_equal(source_name(fixture->source), fixture->tree.place);
    source_free(NULL);
}

TEST_WITH(processes_are_those_of_this_machine, setup, teardown)
{
    struct fixture *fixture = *state;
    char variable[] = "EPKIT_TEST=of the child", *environment[] = {variable, NULL};
    struct source *source;
    pid_t child;
    int64_t value;

    assert_int_equal(source_set_process(look(fixture), getpid()), EP_E_ARG);
    assert_int_equal(source_open(NULL, &source), EP_OK);
    assert_int_equal(source_set_process(source, 0), EP_E_ARG);
    assert_int_equal(source_set_process(source, 0x7ffffff0), EP_E_ARG);
    child = fork();
    if (child == 0) {
        execle("/bin/sleep", "sleep", "60", (char *)NULL, environment);
        _exit(1);
    }
    assert_true(child > 0);
    /* Until it has executed its program, it has our environment. */
    for (int i = 0; i < 2000; i++) {
        struct source *other;
        bool there;

        assert_int_equal(source_open(NULL, &other), EP_OK);
        assert_int_equal(source_set_process(other, child), EP_OK);
        there = source_env(other, "EPKIT_TEST") != NULL;
        source_free(other);
        if (there)
            break;
        usleep(5000);
    }
    assert_int_equal(source_set_process(source, child), EP_OK);
    assert_string_equal(source_env(source, "EPKIT_TEST"), "of the child");
    assert_null(source_env(source, "PATH"));
    assert_int_equal(source_number(source, &value, "/proc/self/oom_score_adj"), SOURCE_OK);
    assert_string_equal(source_resolve(source, "/proc/self/task").text, "/proc/self/task");
    assert_int_equal(source_set_process(source, getpid()), EP_E_STATE);
    source_free(source);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

/* --- files --- */

TEST_WITH(a_file_is_read_as_it_is, setup, teardown)
{
    struct fixture *fixture = *state;
    struct source_text text;
    struct source *source;

    tree_put_bytes(&fixture->tree, "/a/binary", "a\0b\xff\n", 5);
    tree_put(&fixture->tree, "/a/empty", "");
    source = look(fixture);
    text = source_read(source, "/%s/binary", "a");
    assert_state(text, SOURCE_OK, "");
    assert_int_equal(text.bytes, 5);
    assert_memory_equal(text.text, "a\0b\xff\n", 6);
    /* The same query has the same answer, however the path is written. */
    assert_ptr_equal(source_read(source, "//a/./binary/").text, text.text);
    assert_int_equal(source_read(source, "/a/empty").bytes, 0);
    assert_int_equal(source_read(source, "/a/empty").state, SOURCE_OK);
}

TEST_WITH(what_was_read_stays, setup, teardown)
{
    struct fixture *fixture = *state;
    struct source *source;
    uint64_t now;
    int64_t value;
    char place[PATH_MAX];

    tree_put(&fixture->tree, "/number", "17\n");
    source = look(fixture);
    assert_int_equal(source_number(source, &value, "/number"), SOURCE_OK);
    tree_put(&fixture->tree, "/number", "18446744073709551615\n");
    assert_int_equal(source_number(source, &value, "/number"), SOURCE_OK);
    assert_int_equal(value, 17);
    assert_int_equal(source_number_uncached(source, &now, "/number"), SOURCE_OK);
    assert_int_equal(now, UINT64_MAX);
    tree_path(&fixture->tree, "/number", place);
    assert_int_equal(unlink(place), 0);
    assert_int_equal(source_read(source, "/number").state, SOURCE_OK);
    assert_int_equal(source_number_uncached(source, &now, "/number"), SOURCE_ABSENT);
    tree_put(&fixture->tree, "/number", "-1\n");
    assert_int_equal(source_number_uncached(source, &now, "/number"), SOURCE_FAILED);
}

TEST_WITH(what_is_no_file_says_so, setup, teardown)
{
    struct fixture *fixture = *state;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct source *source;
    char place[PATH_MAX];
    int fd;

    tree_folder(&fixture->tree, "/folder");
    tree_path(&fixture->tree, "/fifo", place);
    assert_int_equal(mkfifo(place, 0600), 0);
    fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_in_range(snprintf(address.sun_path, sizeof(address.sun_path), "%s/socket", fixture->tree.place), 1,
                    sizeof(address.sun_path) - 1);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    close(fd);
    tree_link(&fixture->tree, "/dangling", "/nowhere");
    tree_put(&fixture->tree, "/file", "x");
    source = look(fixture);
    assert_state(source_read(source, "/folder"), SOURCE_FAILED, "is a folder");
    assert_state(source_read(source, "/fifo"), SOURCE_FAILED, "is a FIFO");
    assert_state(source_read(source, "/socket"), SOURCE_FAILED, "is a socket");
    assert_state(source_read(source, "/absent"), SOURCE_ABSENT, "No such file or directory");
    assert_state(source_read(source, "/dangling"), SOURCE_ABSENT, "No such file or directory");
    assert_state(source_read(source, "/file/below"), SOURCE_ABSENT, "Not a directory");
    assert_state(source_list(source, "/file"), SOURCE_FAILED, "is not a folder");
    assert_state(source_list(source, "/fifo"), SOURCE_FAILED, "is not a folder");
    assert_state(source_list(source, "/absent"), SOURCE_ABSENT, "No such file or directory");
    assert_state(source_read(source, "relative"), SOURCE_FAILED, "not an absolute path");
    assert_state(log_lines(source, "x", "/folder"), SOURCE_FAILED, "is a folder");
    assert_string_equal(source_read(source, "/fifo").text, "");
    assert_int_equal(source_list(source, "/absent").n, 0);
    assert_int_equal(source_stat(source, "/fifo").kind, SOURCE_OTHER);
    assert_int_equal(source_stat(source, "/socket").kind, SOURCE_OTHER);
}

TEST_WITH(devices_are_not_opened, setup, teardown)
{
    struct source *source;

    assert_int_equal(source_open(NULL, &source), EP_OK);
    assert_state(source_read(source, "/dev/null"), SOURCE_FAILED, "is a device");
    assert_int_equal(source_stat(source, "/dev/null").kind, SOURCE_CHAR_DEVICE);
    assert_true(source_stat(source, "/dev/null").may_write);
    source_free(source);
}

TEST_WITH(long_paths_are_refused, setup, teardown)
{
    struct fixture *fixture = *state;
    char *path = malloc(2 * PATH_MAX);
    struct source *source = look(fixture);

    memset(path, 'a', 2 * PATH_MAX);
    path[2 * PATH_MAX - 1] = '\0';
    assert_state(source_read(source, "/%s", path), SOURCE_FAILED, "the path is too long");
    path[300] = '\0';
    assert_int_equal(source_read(source, "/%s", path).state, SOURCE_FAILED);
    free(path);
}

TEST_WITH(a_file_may_be_too_large, setup, teardown)
{
    struct fixture *fixture = *state;
    char *text = malloc(SOURCE_FILE_MAX + 2);
    char place[PATH_MAX];
    struct source *source;

    memset(text, 'x', SOURCE_FILE_MAX + 2);
    tree_put_bytes(&fixture->tree, "/fits", text, SOURCE_FILE_MAX);
    tree_put_bytes(&fixture->tree, "/large", text, SOURCE_FILE_MAX + 1);
    tree_put(&fixture->tree, "/enormous", "");
    tree_path(&fixture->tree, "/enormous", place);
    assert_int_equal(truncate(place, (off_t)1 << 42), 0);
    source = look(fixture);
    assert_int_equal(source_read(source, "/fits").bytes, SOURCE_FILE_MAX);
    assert_state(source_read(source, "/large"), SOURCE_FAILED, "larger than 8 MiB");
    assert_state(source_read(source, "/enormous"), SOURCE_FAILED, "larger than 8 MiB");
    assert_state(log_lines(source, "y", "/enormous"), SOURCE_OK, "");
    assert_int_equal(source_stat(source, "/enormous").bytes, (int64_t)1 << 42);
    free(text);
}

/* The file is shorter than its size says when it is read, as in sysfs and /proc. */
TEST_WITH(a_file_may_shrink, setup, teardown)
{
    struct fixture *fixture = *state;
    struct source *source;
    json_t *failure, *entry;
    char place[PATH_MAX];
    int64_t bytes;
    int fd;

    tree_put(&fixture->tree, "/file", "0123456789");
    source = look(fixture);
    fd = live_open_file(source, "/file", &bytes, &failure);
    assert_true(fd >= 0);
    assert_int_equal(bytes, 10);
    assert_string_equal(source_current_path(source), "/file");
    tree_path(&fixture->tree, "/file", place);
    assert_int_equal(truncate(place, 4), 0);
    assert_int_equal(unlink(place), 0);
    entry = live_read(fd, SOURCE_FILE_MAX + 1);
    assert_string_equal(json_string_value(entry), "0123");
    json_decref(entry);
    close(fd);
    live_done(source);
    assert_string_equal(source_current_path(source), "");
}

/* As another user: root may read everything. */
TEST_WITH(what_is_not_for_this_user_is_denied, setup, teardown)
{
    struct fixture *fixture = *state;
    char place[PATH_MAX];
    int status;
    pid_t child;

    if (getuid() != 0)
        skip();
    tree_put(&fixture->tree, "/closed/file", "x");
    tree_put(&fixture->tree, "/file", "x");
    tree_path(&fixture->tree, "/file", place);
    assert_int_equal(chmod(place, 0600), 0);
    tree_path(&fixture->tree, "/closed", place);
    assert_int_equal(chmod(place, 0700), 0);
    child = fork();
    if (child == 0) {
        struct source_stat stat;
        struct source *source;
        int wrong = 0;

        if (setgid(65534) < 0 || setuid(65534) < 0 || source_open(fixture->tree.place, &source) != EP_OK)
            _exit(99);
        wrong += source_read(source, "/file").state != SOURCE_DENIED;
        wrong += source_read(source, "/closed/file").state != SOURCE_DENIED;
        wrong += source_list(source, "/closed").state != SOURCE_DENIED;
        wrong += source_resolve(source, "/closed/file").state != SOURCE_DENIED;
        stat = source_stat(source, "/file");
        wrong += stat.state != SOURCE_OK || stat.may_read || stat.may_write;
        wrong += strcmp(source_read(source, "/file").why, "Permission denied") != 0;
        source_free(source);
        _exit(wrong);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

/* --- links --- */

TEST_WITH(links_stay_in_the_root, setup, teardown)
{
    struct fixture *fixture = *state;
    struct source *source;
    char target[PATH_MAX * 2];

    tree_put(&fixture->tree, "/etc/inside", "inside\n");
    tree_link(&fixture->tree, "/absolute", "/etc/inside");
    snprintf(target, sizeof(target), "%s/secret", fixture->outside.place);
    tree_link(&fixture->tree, "/out", target);
    snprintf(target, sizeof(target), "../../../../../../../../..%s/secret", fixture->outside.place);
    tree_link(&fixture->tree, "/up", target);
    tree_link(&fixture->tree, "/a/deep/up", "../../../etc/inside");
    tree_link(&fixture->tree, "/a/deep/absolute", "/etc/inside");
    tree_link(&fixture->tree, "/round", "/round2");
    tree_link(&fixture->tree, "/round2", "round");
    tree_link(&fixture->tree, "/self", "self/self");
    tree_link(&fixture->tree, "/folder", "a/../etc");
    source = look(fixture);
    assert_string_equal(source_read(source, "/absolute").text, "inside\n");
    assert_string_equal(source_read(source, "/a/deep/up").text, "inside\n");
    assert_string_equal(source_read(source, "/a/deep/absolute").text, "inside\n");
    assert_string_equal(source_resolve(source, "/a/deep/absolute").text, "/etc/inside");
    assert_string_equal(source_read(source, "/folder/inside").text, "inside\n");
    assert_string_equal(source_read(source, "/../../etc/../etc/inside").text, "inside\n");
    assert_int_equal(source_read(source, "/out").state, SOURCE_ABSENT);
    assert_int_equal(source_read(source, "/up").state, SOURCE_ABSENT);
    assert_int_equal(source_read(source, "/..%s/secret", fixture->outside.place).state, SOURCE_ABSENT);
    assert_state(source_read(source, "/round"), SOURCE_FAILED, "Too many levels of symbolic links");
    assert_state(source_resolve(source, "/self"), SOURCE_FAILED, "Too many levels of symbolic links");
    assert_state(source_list(source, "/round/x"), SOURCE_FAILED, "Too many levels of symbolic links");
    assert_state(source_stat(source, "/self"), SOURCE_FAILED, "Too many levels of symbolic links");
    assert_int_equal(source_list(source, "/folder").n, 1);
    assert_string_equal(source_resolve(source, "/a/deep/up").text, "/etc/inside");
    assert_string_equal(source_resolve(source, "/folder").text, "/etc");
    assert_string_equal(source_resolve(source, "/").text, "/");
    assert_int_equal(source_resolve(source, "/out").state, SOURCE_ABSENT);
    assert_true(source_is_folder(source_stat(source, "/folder")));
    assert_int_equal(source_stat(source, "/out").state, SOURCE_ABSENT);
}

/* The longest chain of links that the kernel allows, and a longer one. */
TEST_WITH(links_are_counted, setup, teardown)
{
    struct fixture *fixture = *state;
    char name[16], target[16];
    struct source *source;

    tree_put(&fixture->tree, "/l0", "x\n");
    for (int i = 1; i <= 41; i++) {
        snprintf(name, sizeof(name), "/l%d", i);
        snprintf(target, sizeof(target), "l%d", i - 1);
        tree_link(&fixture->tree, name, target);
    }
    source = look(fixture);
    assert_int_equal(source_read(source, "/l40").state, SOURCE_OK);
    assert_int_equal(source_read(source, "/l41").state, SOURCE_FAILED);
    assert_string_equal(source_resolve(source, "/l40").text, "/l0");
}

TEST_WITH(the_live_machine_needs_no_openat2, setup, teardown)
{
    struct source *source;

    assert_int_equal(source_open(NULL, &source), EP_OK);
    source->has_openat2 = false;
    assert_int_equal(source_read(source, "/proc/self/status").state, SOURCE_OK);
    assert_int_equal(source_list(source, "/").state, SOURCE_OK);
    assert_int_equal(source_stat(source, "/proc").kind, SOURCE_FOLDER);
    source_free(source);
}

/* --- lines and numbers --- */

TEST_WITH(lines_are_clean, setup, teardown)
{
    struct fixture *fixture = *state;
    struct source *source;

    tree_put(&fixture->tree, "/line", " \t a\x1b[31mb \r\nsecond\n");
    tree_put(&fixture->tree, "/blank", "\n\n");
    source = look(fixture);
    assert_string_equal(source_line(source, "/line").text, "a?[31mb");
    assert_int_equal(source_line(source, "/line").bytes, 7);
    assert_string_equal(source_line(source, "/blank").text, "");
    assert_int_equal(source_line(source, "/blank").state, SOURCE_OK);
}

TEST_WITH(numbers_are_whole_lines, setup, teardown)
{
    static const struct {
        const char *text;
        enum source_state state;
        int64_t value;
    } cases[] = {{"0\n", SOURCE_OK, 0},
                 {"-1\n", SOURCE_OK, -1},
                 {"0x10de\n", SOURCE_OK, 0x10de},
                 {"010", SOURCE_OK, 10},
                 {"9223372036854775807", SOURCE_OK, INT64_MAX},
                 {"9223372036854775808", SOURCE_FAILED, 0},
                 {"", SOURCE_FAILED, 0},
                 {"x", SOURCE_FAILED, 0},
                 {"12 GB", SOURCE_FAILED, 0},
                 {"0x", SOURCE_FAILED, 0},
                 {"-", SOURCE_FAILED, 0}};
    struct fixture *fixture = *state;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        int64_t value = 77;

        tree_put(&fixture->tree, "/number", cases[i].text);
        assert_int_equal(source_number(look(fixture), &value, "/number"), cases[i].state);
        assert_int_equal(value, cases[i].state == SOURCE_OK ? cases[i].value : 77);
    }
}

TEST_WITH(logs_are_searched, setup, teardown)
{
    struct fixture *fixture = *state;
    struct source *source;
    char place[PATH_MAX];
    const int n_lines = SOURCE_FILE_MAX / 41 * 3 / 2; /* 1.5 times as many as are searched */
    FILE *file;

    tree_put(&fixture->tree, "/log", "Xid 1\nother\nXid 2");
    tree_path(&fixture->tree, "/long", place);
    file = fopen(place, "w");
    fputs("Xid at the beginning\n", file);
    for (int i = 0; i < n_lines; i++)
        fprintf(file, "%040d%s\n", i, i == n_lines - 1 ? " Xid" : "");
    fclose(file);
    source = look(fixture);
    assert_string_equal(log_lines(source, "Xid", "/log").text, "Xid 1\nXid 2\n");
    assert_string_equal(log_lines(source, "nothing", "/log").text, "");
    assert_string_equal(log_lines(source, "", "/log").text, "Xid 1\nother\nXid 2\n");
    assert_null(strstr(log_lines(source, "Xid", "/long").text, "beginning"));
    assert_non_null(strstr(log_lines(source, "Xid", "/long").text, " Xid\n"));
    assert_int_equal(log_lines(source, "0", "/long").state, SOURCE_OK);
    assert_in_range(log_lines(source, "0", "/long").bytes, SOURCE_LOG_MAX / 2, SOURCE_LOG_MAX);
    assert_int_equal(log_lines(source, "Xid", "/absent").state, SOURCE_ABSENT);
}

/* With access to the ring buffer, records come without their prefix; in any case the answer is immediate. */
TEST_WITH(the_ring_buffer_is_read_without_waiting, setup, teardown)
{
    struct source_text text;
    struct source *source;

    assert_int_equal(source_open(NULL, &source), EP_OK);
    text = log_lines(source, "", "/dev/kmsg");
    assert_int_not_equal(text.state, SOURCE_NOT_RECORDED);
    if (text.state == SOURCE_OK && text.bytes > 0)
        assert_true(text.text[strspn(text.text, "0123456789")] != ',');
    source_free(source);
}

/* --- folders --- */

TEST_WITH(folders_are_sorted_as_people_count, setup, teardown)
{
    static const char *const sorted[] = {"a", "a01", "a1", "a2", "a10", "a10b", "a10b3", "b", "mlx5_2", "mlx5_10"};
    static const char *const made[] = {"mlx5_10", "a10b3", "b", "a10", "a01", "a2", "mlx5_2", "a10b", "a1", "a"};
    struct fixture *fixture = *state;
    struct source_names names;
    char path[32];

    for (size_t i = 0; i < sizeof(made) / sizeof(made[0]); i++) {
        snprintf(path, sizeof(path), "/folder/%s", made[i]);
        tree_put(&fixture->tree, path, "");
    }
    names = source_list(look(fixture), "/folder");
    assert_state(names, SOURCE_OK, "");
    assert_int_equal(names.n, sizeof(sorted) / sizeof(sorted[0]));
    for (size_t i = 0; i < names.n; i++)
        assert_string_equal(names.names[i], sorted[i]);
    assert_ptr_equal(source_list(fixture->source, "/folder").names, names.names);
}

TEST_WITH(a_folder_may_be_too_large, setup, teardown)
{
    struct fixture *fixture = *state;
    char place[PATH_MAX], name[32];

    tree_folder(&fixture->tree, "/folder");
    tree_path(&fixture->tree, "/folder", place);
    for (int i = 0; i < 20000; i++) {
        int folder = open(place, O_PATH), fd;

        snprintf(name, sizeof(name), "%d", i);
        fd = openat(folder, name, O_CREAT | O_WRONLY, 0600);
        assert_true(fd >= 0);
        close(fd);
        close(folder);
    }
    assert_state(source_list(look(fixture), "/folder"), SOURCE_FAILED, "more than 16384 entries");
}

/* --- limits --- */

TEST_WITH(what_is_kept_is_bounded, setup, teardown)
{
    struct fixture *fixture = *state;
    char *text = calloc(1, SOURCE_FILE_MAX), path[32];
    struct source_text last;
    struct source *source;
    int n = 0;

    memset(text, 'x', SOURCE_FILE_MAX);
    for (int i = 0; i < 10; i++) {
        snprintf(path, sizeof(path), "/file%d", i);
        tree_put_bytes(&fixture->tree, path, text, SOURCE_FILE_MAX);
    }
    free(text);
    source = look(fixture);
    do {
        last = source_read(source, "/file%d", n++);
    } while (last.state == SOURCE_OK && n < 10);
    assert_state(last, SOURCE_FAILED, "more than 64 MiB were read from this machine");
    assert_int_equal(n, SOURCE_CACHE_MAX / SOURCE_FILE_MAX);
    assert_int_equal(source_read(source, "/file0").state, SOURCE_OK);
    assert_int_equal(source_stat(source, "/file0").state, SOURCE_FAILED);
    assert_int_equal(source_list(source, "/").state, SOURCE_FAILED);
}

TEST_WITH(descriptors_do_not_leak, setup, teardown)
{
    struct fixture *fixture = *state;
    struct rlimit old, few = {.rlim_cur = 24};
    struct source *source;

    assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
    few.rlim_max = old.rlim_max;
    tree_put(&fixture->tree, "/folder/file", "x");
    tree_link(&fixture->tree, "/link", "/folder/../folder/file");
    tree_link(&fixture->tree, "/round", "round");
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    for (int i = 0; i < 60; i++) {
        source = look(fixture);
        assert_int_equal(source_read(source, "/link").state, SOURCE_OK);
        assert_int_equal(source_read(source, "/folder").state, SOURCE_FAILED);
        assert_int_equal(source_list(source, "/folder").state, SOURCE_OK);
        assert_int_equal(source_list(source, "/folder/file").state, SOURCE_FAILED);
        assert_int_equal(source_stat(source, "/link").state, SOURCE_OK);
        assert_int_equal(source_resolve(source, "/link").state, SOURCE_OK);
        assert_int_equal(source_resolve(source, "/round").state, SOURCE_FAILED);
        assert_int_equal(log_lines(source, "x", "/link").state, SOURCE_OK);
    }
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
}

/* --- environment --- */

TEST_WITH(the_environment_is_sorted_and_the_first_counts, setup, teardown)
{
    static const char environ_text[] = "B=2\0A=1=1\0B=3\0empty=\0nothing\0=x\0C=last";
    struct fixture *fixture = *state;
    struct source_environment all;
    struct source *source;

    tree_put_bytes(&fixture->tree, "/proc/self/environ", environ_text, sizeof(environ_text) - 1);
    source = look(fixture);
    all = source_environment(source);
    assert_state(all, SOURCE_OK, "");
    assert_int_equal(all.n, 4);
    assert_string_equal(all.variables[0].name, "A");
    assert_string_equal(all.variables[0].value, "1=1");
    assert_string_equal(source_env(source, "B"), "2");
    assert_string_equal(source_env(source, "C"), "last");
    assert_string_equal(source_env(source, "empty"), "");
    assert_null(source_env(source, "nothing"));
    assert_null(source_env(source, ""));
}

TEST_WITH(an_environment_may_be_missing, setup, teardown)
{
    struct fixture *fixture = *state;

    assert_int_equal(source_environment(look(fixture)).state, SOURCE_ABSENT);
    assert_null(source_env(fixture->source, "PATH"));
}
