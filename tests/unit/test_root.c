/* SPDX-License-Identifier: Apache-2.0 */
/* Reading below a root: every state that a question can end in, and that nothing leads out. */
#include "source/state.h"
#include "tree.h"

#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <cmocka.h>

#define OUTSIDE "outside of the root\n"

struct fixture {
    struct tree tree, outside; /* the second is what must not be reached */
    struct root *root;
};

static struct root *open_tree(const struct tree *tree)
{
    struct root *root = NULL;

    assert_int_equal(root_open(tree->place, &root), EP_OK);
    return root;
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

    root_free(fixture->root);
    tree_done(&fixture->tree);
    tree_done(&fixture->outside);
    free(fixture);
    return 0;
}

/* Opens the tree as it is now. */
static struct root *look(struct fixture *fixture)
{
    root_free(fixture->root);
    fixture->root = open_tree(&fixture->tree);
    return fixture->root;
}

#define assert_state(answer, wanted, reason)                                                                           \
    do {                                                                                                               \
        assert_int_equal((answer).state, wanted);                                                                      \
        assert_string_equal((answer).why, reason);                                                                     \
    } while (0)

/* --- opening --- */

static void only_folders_and_snapshots_are_machines(void **state)
{
    struct fixture *fixture = *state;
    struct root *root = (struct root *)(intptr_t)1;
    char place[PATH_MAX];

    tree_path(&fixture->tree, "/fifo", place);
    assert_int_equal(mkfifo(place, 0600), 0);
    assert_int_equal(root_open(place, &root), EP_E_ARG);
    assert_non_null(strstr(ep_last_error(), "neither a folder nor"));
    assert_int_equal(root_open("/nowhere/at/all", &root), EP_E_ARG);
    assert_non_null(strstr(ep_last_error(), "/nowhere/at/all"));
    assert_int_equal(root_open("/dev/null", &root), EP_E_ARG);
    assert_ptr_equal(root, (struct root *)(intptr_t)1);

    assert_int_equal(root_open("/", &root), EP_OK);
    assert_true(root_is_live(root));
    assert_string_equal(root_name(root), "this machine");
    root_free(root);
    assert_false(root_is_live(look(fixture)));
    assert_string_equal(root_name(fixture->root), fixture->tree.place);
    root_free(NULL);
}

static void processes_are_those_of_this_machine(void **state)
{
    struct fixture *fixture = *state;
    char variable[] = "EPKIT_TEST=of the child", *environment[] = {variable, NULL};
    struct root *root;
    pid_t child;
    int64_t value;

    assert_int_equal(root_set_process(look(fixture), getpid()), EP_E_ARG);
    assert_int_equal(root_open(NULL, &root), EP_OK);
    assert_int_equal(root_set_process(root, 0), EP_E_ARG);
    assert_int_equal(root_set_process(root, 0x7ffffff0), EP_E_ARG);
    child = fork();
    if (child == 0) {
        execle("/bin/sleep", "sleep", "60", (char *)NULL, environment);
        _exit(1);
    }
    assert_true(child > 0);
    /* Until it has executed its program it has our environment. */
    for (int i = 0; i < 2000; i++) {
        struct root *other;
        bool there;

        assert_int_equal(root_open(NULL, &other), EP_OK);
        assert_int_equal(root_set_process(other, child), EP_OK);
        there = root_env(other, "EPKIT_TEST") != NULL;
        root_free(other);
        if (there)
            break;
        usleep(5000);
    }
    assert_int_equal(root_set_process(root, child), EP_OK);
    assert_string_equal(root_env(root, "EPKIT_TEST"), "of the child");
    assert_null(root_env(root, "PATH"));
    assert_int_equal(root_number(root, &value, "/proc/self/oom_score_adj"), ROOT_OK);
    assert_string_equal(root_resolve(root, "/proc/self/task").text, "/proc/self/task");
    assert_int_equal(root_set_process(root, getpid()), EP_E_STATE);
    root_free(root);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

/* --- files --- */

static void a_file_is_read_as_it_is(void **state)
{
    struct fixture *fixture = *state;
    struct root_text text;
    struct root *root;

    tree_put_bytes(&fixture->tree, "/a/binary", "a\0b\xff\n", 5);
    tree_put(&fixture->tree, "/a/empty", "");
    root = look(fixture);
    text = root_read(root, "/%s/binary", "a");
    assert_state(text, ROOT_OK, "");
    assert_int_equal(text.bytes, 5);
    assert_memory_equal(text.text, "a\0b\xff\n", 6);
    /* The same question has the same answer, however it is written. */
    assert_ptr_equal(root_read(root, "//a/./binary/").text, text.text);
    assert_int_equal(root_read(root, "/a/empty").bytes, 0);
    assert_int_equal(root_read(root, "/a/empty").state, ROOT_OK);
}

static void what_was_read_stays(void **state)
{
    struct fixture *fixture = *state;
    struct root *root;
    uint64_t now;
    int64_t value;
    char place[PATH_MAX];

    tree_put(&fixture->tree, "/number", "17\n");
    root = look(fixture);
    assert_int_equal(root_number(root, &value, "/number"), ROOT_OK);
    tree_put(&fixture->tree, "/number", "18446744073709551615\n");
    assert_int_equal(root_number(root, &value, "/number"), ROOT_OK);
    assert_int_equal(value, 17);
    assert_int_equal(root_number_now(root, &now, "/number"), ROOT_OK);
    assert_int_equal(now, UINT64_MAX);
    tree_path(&fixture->tree, "/number", place);
    assert_int_equal(unlink(place), 0);
    assert_int_equal(root_read(root, "/number").state, ROOT_OK);
    assert_int_equal(root_number_now(root, &now, "/number"), ROOT_ABSENT);
    tree_put(&fixture->tree, "/number", "-1\n");
    assert_int_equal(root_number_now(root, &now, "/number"), ROOT_FAILED);
}

static void what_is_no_file_says_so(void **state)
{
    struct fixture *fixture = *state;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct root *root;
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
    root = look(fixture);
    assert_state(root_read(root, "/folder"), ROOT_FAILED, "is a folder");
    assert_state(root_read(root, "/fifo"), ROOT_FAILED, "is a FIFO");
    assert_state(root_read(root, "/socket"), ROOT_FAILED, "is a socket");
    assert_state(root_read(root, "/absent"), ROOT_ABSENT, "No such file or directory");
    assert_state(root_read(root, "/dangling"), ROOT_ABSENT, "No such file or directory");
    assert_state(root_read(root, "/file/below"), ROOT_ABSENT, "Not a directory");
    assert_state(root_list(root, "/file"), ROOT_FAILED, "is no folder");
    assert_state(root_list(root, "/fifo"), ROOT_FAILED, "is no folder");
    assert_state(root_list(root, "/absent"), ROOT_ABSENT, "No such file or directory");
    assert_state(root_read(root, "relative"), ROOT_FAILED, "not an absolute path");
    assert_state(root_lines(root, "x", "/folder"), ROOT_FAILED, "is a folder");
    assert_string_equal(root_read(root, "/fifo").text, "");
    assert_int_equal(root_list(root, "/absent").n, 0);
    assert_int_equal(root_stat(root, "/fifo").kind, ROOT_OTHER);
    assert_int_equal(root_stat(root, "/socket").kind, ROOT_OTHER);
}

static void devices_are_not_opened(void **state)
{
    struct root *root;

    (void)state;
    assert_int_equal(root_open(NULL, &root), EP_OK);
    assert_state(root_read(root, "/dev/null"), ROOT_FAILED, "is a device");
    assert_int_equal(root_stat(root, "/dev/null").kind, ROOT_CHAR_DEVICE);
    assert_true(root_stat(root, "/dev/null").may_write);
    root_free(root);
}

static void long_paths_are_refused(void **state)
{
    struct fixture *fixture = *state;
    char *path = malloc(2 * PATH_MAX);
    struct root *root = look(fixture);

    memset(path, 'a', 2 * PATH_MAX);
    path[2 * PATH_MAX - 1] = '\0';
    assert_state(root_read(root, "/%s", path), ROOT_FAILED, "the path is too long");
    path[300] = '\0';
    assert_int_equal(root_read(root, "/%s", path).state, ROOT_FAILED);
    free(path);
}

static void a_file_may_be_too_large(void **state)
{
    struct fixture *fixture = *state;
    char *text = malloc(ROOT_FILE_MAX + 2);
    char place[PATH_MAX];
    struct root *root;

    memset(text, 'x', ROOT_FILE_MAX + 2);
    tree_put_bytes(&fixture->tree, "/fits", text, ROOT_FILE_MAX);
    tree_put_bytes(&fixture->tree, "/large", text, ROOT_FILE_MAX + 1);
    tree_put(&fixture->tree, "/enormous", "");
    tree_path(&fixture->tree, "/enormous", place);
    assert_int_equal(truncate(place, (off_t)1 << 42), 0);
    root = look(fixture);
    assert_int_equal(root_read(root, "/fits").bytes, ROOT_FILE_MAX);
    assert_state(root_read(root, "/large"), ROOT_FAILED, "larger than 8 MiB");
    assert_state(root_read(root, "/enormous"), ROOT_FAILED, "larger than 8 MiB");
    assert_state(root_lines(root, "y", "/enormous"), ROOT_OK, "");
    assert_int_equal(root_stat(root, "/enormous").bytes, (int64_t)1 << 42);
    free(text);
}

/* What the size said is not there any more when it is read: sysfs and /proc have sizes like that. */
static void a_file_may_shrink(void **state)
{
    struct fixture *fixture = *state;
    struct root *root;
    json_t *failure, *entry;
    char place[PATH_MAX];
    int64_t bytes;
    int fd;

    tree_put(&fixture->tree, "/file", "0123456789");
    root = look(fixture);
    fd = keep_open(root, "/file", &bytes, &failure);
    assert_true(fd >= 0);
    assert_int_equal(bytes, 10);
    assert_string_equal(root_now_reading(root), "/file");
    tree_path(&fixture->tree, "/file", place);
    assert_int_equal(truncate(place, 4), 0);
    assert_int_equal(unlink(place), 0);
    entry = live_read(fd);
    assert_string_equal(json_string_value(entry), "0123");
    json_decref(entry);
    close(fd);
    keep_done(root);
    assert_string_equal(root_now_reading(root), "");
}

/* As another user: root may read everything. */
static void what_is_not_for_this_user_is_denied(void **state)
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
        struct root *root;
        int wrong = 0;

        if (setgid(65534) < 0 || setuid(65534) < 0 || root_open(fixture->tree.place, &root) != EP_OK)
            _exit(99);
        for (int own_steps = 0; own_steps <= 1; own_steps++) {
            struct root_stat stat;

            root->has_openat2 = !own_steps;
            wrong += root_read(root, own_steps ? "/./../file" : "/file").state != ROOT_DENIED;
            wrong += root_read(root, own_steps ? "/../closed/file" : "/closed/file").state != ROOT_DENIED;
            wrong += root_list(root, own_steps ? "/../closed" : "/closed").state != ROOT_DENIED;
            wrong += root_resolve(root, "/closed/file").state != ROOT_DENIED;
            stat = root_stat(root, own_steps ? "/../file" : "/file");
            wrong += stat.state != ROOT_OK || stat.may_read || stat.may_write;
            wrong += strcmp(root_read(root, "/file").why, "Permission denied") != 0;
        }
        root_free(root);
        _exit(wrong);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

/* --- links --- */

static void links_stay_in_the_root(void **state)
{
    struct fixture *fixture = *state;
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
    for (int own_steps = 0; own_steps <= 1; own_steps++) {
        struct root *root = look(fixture);

        root->has_openat2 = root->has_openat2 && !own_steps;
        assert_string_equal(root_read(root, "/absolute").text, "inside\n");
        assert_string_equal(root_read(root, "/a/deep/up").text, "inside\n");
        assert_string_equal(root_read(root, "/a/deep/absolute").text, "inside\n");
        assert_string_equal(root_resolve(root, "/a/deep/absolute").text, "/etc/inside");
        assert_string_equal(root_read(root, "/folder/inside").text, "inside\n");
        assert_string_equal(root_read(root, "/../../etc/../etc/inside").text, "inside\n");
        assert_int_equal(root_read(root, "/out").state, ROOT_ABSENT);
        assert_int_equal(root_read(root, "/up").state, ROOT_ABSENT);
        assert_int_equal(root_read(root, "/..%s/secret", fixture->outside.place).state, ROOT_ABSENT);
        assert_state(root_read(root, "/round"), ROOT_FAILED, "Too many levels of symbolic links");
        assert_state(root_resolve(root, "/self"), ROOT_FAILED, "Too many levels of symbolic links");
        assert_state(root_list(root, "/round/x"), ROOT_FAILED, "Too many levels of symbolic links");
        assert_state(root_stat(root, "/self"), ROOT_FAILED, "Too many levels of symbolic links");
        assert_int_equal(root_list(root, "/folder").n, 1);
        assert_string_equal(root_resolve(root, "/a/deep/up").text, "/etc/inside");
        assert_string_equal(root_resolve(root, "/folder").text, "/etc");
        assert_string_equal(root_resolve(root, "/").text, "/");
        assert_int_equal(root_resolve(root, "/out").state, ROOT_ABSENT);
        assert_true(root_is_folder(root_stat(root, "/folder")));
        assert_int_equal(root_stat(root, "/out").state, ROOT_ABSENT);
    }
}

/* A chain of links that is as long as the kernel allows, and one that is longer. */
static void links_are_counted(void **state)
{
    struct fixture *fixture = *state;
    char name[16], target[16];

    tree_put(&fixture->tree, "/l0", "x\n");
    for (int i = 1; i <= 41; i++) {
        snprintf(name, sizeof(name), "/l%d", i);
        snprintf(target, sizeof(target), "l%d", i - 1);
        tree_link(&fixture->tree, name, target);
    }
    for (int own_steps = 0; own_steps <= 1; own_steps++) {
        struct root *root = look(fixture);

        root->has_openat2 = root->has_openat2 && !own_steps;
        assert_int_equal(root_read(root, "/l40").state, ROOT_OK);
        assert_int_equal(root_read(root, "/l41").state, ROOT_FAILED);
        assert_string_equal(root_resolve(root, "/l40").text, "/l0");
    }
}

static void the_live_machine_needs_no_openat2(void **state)
{
    struct root *root;

    (void)state;
    assert_int_equal(root_open(NULL, &root), EP_OK);
    root->has_openat2 = false;
    assert_int_equal(root_read(root, "/proc/self/status").state, ROOT_OK);
    assert_int_equal(root_list(root, "/").state, ROOT_OK);
    assert_int_equal(root_stat(root, "/proc").kind, ROOT_FOLDER);
    root_free(root);
}

/* --- lines and numbers --- */

static void lines_are_clean(void **state)
{
    struct fixture *fixture = *state;
    struct root *root;

    tree_put(&fixture->tree, "/line", " \t a\x1b[31mb \r\nsecond\n");
    tree_put(&fixture->tree, "/blank", "\n\n");
    root = look(fixture);
    assert_string_equal(root_line(root, "/line").text, "a?[31mb");
    assert_int_equal(root_line(root, "/line").bytes, 7);
    assert_string_equal(root_line(root, "/blank").text, "");
    assert_int_equal(root_line(root, "/blank").state, ROOT_OK);
}

static void numbers_are_whole_lines(void **state)
{
    static const struct {
        const char *text;
        enum root_state state;
        int64_t value;
    } cases[] = {{"0\n", ROOT_OK, 0},
                 {"-1\n", ROOT_OK, -1},
                 {"0x10de\n", ROOT_OK, 0x10de},
                 {"010", ROOT_OK, 10},
                 {"9223372036854775807", ROOT_OK, INT64_MAX},
                 {"9223372036854775808", ROOT_FAILED, 0},
                 {"", ROOT_FAILED, 0},
                 {"x", ROOT_FAILED, 0},
                 {"12 GB", ROOT_FAILED, 0},
                 {"0x", ROOT_FAILED, 0},
                 {"-", ROOT_FAILED, 0}};
    struct fixture *fixture = *state;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        int64_t value = 77;

        tree_put(&fixture->tree, "/number", cases[i].text);
        assert_int_equal(root_number(look(fixture), &value, "/number"), cases[i].state);
        assert_int_equal(value, cases[i].state == ROOT_OK ? cases[i].value : 77);
    }
}

static void logs_are_searched(void **state)
{
    struct fixture *fixture = *state;
    struct root *root;
    char place[PATH_MAX];
    const int n_lines = ROOT_FILE_MAX / 41 * 3 / 2; /* half as many again as are searched */
    FILE *file;

    tree_put(&fixture->tree, "/log", "Xid 1\nother\nXid 2");
    tree_path(&fixture->tree, "/long", place);
    file = fopen(place, "w");
    fputs("Xid at the beginning\n", file);
    for (int i = 0; i < n_lines; i++)
        fprintf(file, "%040d%s\n", i, i == n_lines - 1 ? " Xid" : "");
    fclose(file);
    root = look(fixture);
    assert_string_equal(root_lines(root, "Xid", "/log").text, "Xid 1\nXid 2\n");
    assert_string_equal(root_lines(root, "nothing", "/log").text, "");
    assert_string_equal(root_lines(root, "", "/log").text, "Xid 1\nother\nXid 2\n");
    assert_null(strstr(root_lines(root, "Xid", "/long").text, "beginning"));
    assert_non_null(strstr(root_lines(root, "Xid", "/long").text, " Xid\n"));
    assert_int_equal(root_lines(root, "0", "/long").state, ROOT_OK);
    assert_in_range(root_lines(root, "0", "/long").bytes, ROOT_LOG_MAX / 2, ROOT_LOG_MAX);
    assert_int_equal(root_lines(root, "Xid", "/absent").state, ROOT_ABSENT);
}

/* Whoever may read the ring buffer gets records without their prefix; everybody gets an answer at once. */
static void the_ring_buffer_is_read_without_waiting(void **state)
{
    struct root_text text;
    struct root *root;

    (void)state;
    assert_int_equal(root_open(NULL, &root), EP_OK);
    text = root_lines(root, "", "/dev/kmsg");
    assert_int_not_equal(text.state, ROOT_UNASKED);
    if (text.state == ROOT_OK && text.bytes > 0)
        assert_true(text.text[strspn(text.text, "0123456789")] != ',');
    root_free(root);
}

/* --- folders --- */

static void folders_are_sorted_as_people_count(void **state)
{
    static const char *const sorted[] = {"a", "a01", "a1", "a2", "a10", "a10b", "a10b3", "b", "mlx5_2", "mlx5_10"};
    static const char *const made[] = {"mlx5_10", "a10b3", "b", "a10", "a01", "a2", "mlx5_2", "a10b", "a1", "a"};
    struct fixture *fixture = *state;
    struct root_names names;
    char path[32];

    for (size_t i = 0; i < sizeof(made) / sizeof(made[0]); i++) {
        snprintf(path, sizeof(path), "/folder/%s", made[i]);
        tree_put(&fixture->tree, path, "");
    }
    names = root_list(look(fixture), "/folder");
    assert_state(names, ROOT_OK, "");
    assert_int_equal(names.n, sizeof(sorted) / sizeof(sorted[0]));
    for (size_t i = 0; i < names.n; i++)
        assert_string_equal(names.names[i], sorted[i]);
    assert_ptr_equal(root_list(fixture->root, "/folder").names, names.names);
}

static void a_folder_may_be_too_large(void **state)
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
    assert_state(root_list(look(fixture), "/folder"), ROOT_FAILED, "more than 16384 entries");
}

/* --- limits --- */

static void what_is_kept_is_bounded(void **state)
{
    struct fixture *fixture = *state;
    char *text = calloc(1, ROOT_FILE_MAX), path[32];
    struct root_text last;
    struct root *root;
    int n = 0;

    memset(text, 'x', ROOT_FILE_MAX);
    for (int i = 0; i < 10; i++) {
        snprintf(path, sizeof(path), "/file%d", i);
        tree_put_bytes(&fixture->tree, path, text, ROOT_FILE_MAX);
    }
    free(text);
    root = look(fixture);
    do {
        last = root_read(root, "/file%d", n++);
    } while (last.state == ROOT_OK && n < 10);
    assert_state(last, ROOT_FAILED, "more than 64 MiB were read from this machine");
    assert_int_equal(n, ROOT_KEPT_MAX / ROOT_FILE_MAX);
    assert_int_equal(root_read(root, "/file0").state, ROOT_OK);
    assert_int_equal(root_stat(root, "/file0").state, ROOT_FAILED);
    assert_int_equal(root_list(root, "/").state, ROOT_FAILED);
}

static void descriptors_do_not_leak(void **state)
{
    struct fixture *fixture = *state;
    struct rlimit old, few = {.rlim_cur = 24};
    struct root *root;

    assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
    few.rlim_max = old.rlim_max;
    tree_put(&fixture->tree, "/folder/file", "x");
    tree_link(&fixture->tree, "/link", "/folder/../folder/file");
    tree_link(&fixture->tree, "/round", "round");
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    for (int i = 0; i < 60; i++) {
        root = look(fixture);
        root->has_openat2 = root->has_openat2 && i % 2;
        assert_int_equal(root_read(root, "/link").state, ROOT_OK);
        assert_int_equal(root_read(root, "/folder").state, ROOT_FAILED);
        assert_int_equal(root_list(root, "/folder").state, ROOT_OK);
        assert_int_equal(root_list(root, "/folder/file").state, ROOT_FAILED);
        assert_int_equal(root_stat(root, "/link").state, ROOT_OK);
        assert_int_equal(root_resolve(root, "/link").state, ROOT_OK);
        assert_int_equal(root_resolve(root, "/round").state, ROOT_FAILED);
        assert_int_equal(root_lines(root, "x", "/link").state, ROOT_OK);
    }
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
}

/* --- environment --- */

static void the_environment_is_sorted_and_the_first_counts(void **state)
{
    static const char environ_text[] = "B=2\0A=1=1\0B=3\0empty=\0nothing\0=x\0C=last";
    struct fixture *fixture = *state;
    struct root_environment all;
    struct root *root;

    tree_put_bytes(&fixture->tree, "/proc/self/environ", environ_text, sizeof(environ_text) - 1);
    root = look(fixture);
    all = root_environment(root);
    assert_state(all, ROOT_OK, "");
    assert_int_equal(all.n, 4);
    assert_string_equal(all.variables[0].name, "A");
    assert_string_equal(all.variables[0].value, "1=1");
    assert_string_equal(root_env(root, "B"), "2");
    assert_string_equal(root_env(root, "C"), "last");
    assert_string_equal(root_env(root, "empty"), "");
    assert_null(root_env(root, "nothing"));
    assert_null(root_env(root, ""));
}

static void an_environment_may_be_missing(void **state)
{
    struct fixture *fixture = *state;

    assert_int_equal(root_environment(look(fixture)).state, ROOT_ABSENT);
    assert_null(root_env(fixture->root, "PATH"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
        TEST(only_folders_and_snapshots_are_machines),
        TEST(processes_are_those_of_this_machine),
        TEST(a_file_is_read_as_it_is),
        TEST(what_was_read_stays),
        TEST(what_is_no_file_says_so),
        TEST(devices_are_not_opened),
        TEST(long_paths_are_refused),
        TEST(a_file_may_be_too_large),
        TEST(a_file_may_shrink),
        TEST(what_is_not_for_this_user_is_denied),
        TEST(links_stay_in_the_root),
        TEST(links_are_counted),
        TEST(the_live_machine_needs_no_openat2),
        TEST(lines_are_clean),
        TEST(numbers_are_whole_lines),
        TEST(logs_are_searched),
        TEST(the_ring_buffer_is_read_without_waiting),
        TEST(folders_are_sorted_as_people_count),
        TEST(a_folder_may_be_too_large),
        TEST(what_is_kept_is_bounded),
        TEST(descriptors_do_not_leak),
        TEST(the_environment_is_sorted_and_the_first_counts),
        TEST(an_environment_may_be_missing),
    };

    return cmocka_run_group_tests_name("root", tests, NULL, NULL);
}
