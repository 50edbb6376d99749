/* SPDX-License-Identifier: Apache-2.0 */
/* Temporary files and folders of killed processes, and their removal. */
#include "unit.h"

#include "common/temporary.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char root[1024];

static int make_root(void **state)
{
    const char *folder = getenv("TMPDIR");

    (void)state;
    snprintf(root, sizeof(root), "%s/epkit-temporary-XXXXXX", folder ? folder : "/tmp");
    return mkdtemp(root) && chdir(root) == 0 ? 0 : -1;
}

static int remove_root(void **state)
{
    char command[1100];

    (void)state;
    snprintf(command, sizeof(command), "rm -r '%s'", root);
    return chdir("/") == 0 ? system(command) : -1;
}

/* The number of entries of the folder. */
static int count(const char *path)
{
    DIR *folder = opendir(path);
    struct dirent *item;
    int n = 0;

    assert_non_null(folder);
    while ((item = readdir(folder)))
        n += strcmp(item->d_name, ".") != 0 && strcmp(item->d_name, "..") != 0;
    closedir(folder);
    return n;
}

static void put(const char *path)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    fclose(file);
}

/* Its temporary name is as that of the file "it". */
static int make_folder(struct temporary *ret_temporary)
{
    return temporary_folder_in(".", ".it.epkit", ret_temporary);
}

/* A process that creates one, reports it, and waits to be killed. */
static pid_t make_in_child(bool is_folder, int *ret_fd)
{
    struct temporary temporary;
    char path[300];
    int fds[2];
    pid_t pid;

    assert_int_equal(pipe(fds), 0);
    pid = fork();
    assert_true(pid >= 0);
    if (pid > 0) {
        close(fds[1]);
        assert_int_equal(read(fds[0], path, 1), 1);
        *ret_fd = fds[0];
        return pid;
    }
    if ((is_folder ? make_folder(&temporary) : temporary_file(AT_FDCWD, "it", &temporary)) != 0)
        _exit(1);
    if (is_folder) {
        FILE *file;

        snprintf(path, sizeof(path), "%s/report.json", temporary.path);
        file = fopen(path, "w");
        if (!file)
            _exit(1);
        fclose(file);
    }
    if (write(fds[1], "", 1) == 1)
        pause();
    _exit(1);
}

static void end_child(pid_t pid, int fd)
{
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    close(fd);
}

TEST(test_killed)
{
    struct temporary temporary;

    for (int is_folder = 0; is_folder < 2; is_folder++) {
        int fd;
        pid_t pid = make_in_child(is_folder, &fd);

        /* It is running: its names are not touched. */
        assert_int_equal(count("."), 1);
        assert_int_equal(temporary_file(AT_FDCWD, "it", &temporary), 0);
        assert_int_equal(count("."), 2);
        temporary_remove(&temporary);
        assert_int_equal(count("."), 1);
        end_child(pid, fd);
        /* A file of another name does not match. */
        assert_int_equal(temporary_save("other", "", 0, 0600), 0);
        assert_int_equal(count("."), 2);
        assert_int_equal(unlink("other"), 0);
        assert_int_equal(temporary_save("it", "text", 4, 0600), 0);
        assert_int_equal(count("."), 1);
        assert_int_equal(unlink("it"), 0);
    }
}

/* Similar names that are not ours stay. */
TEST(test_others)
{
    struct temporary temporary;

    assert_int_equal(mkdir("it.backup", 0700), 0);
    assert_int_equal(mkdir(".it.epkit-folder", 0700), 0);
    assert_int_equal(mkdir(".it.epkit-folder/inner", 0700), 0);
    put("victim");
    assert_int_equal(symlink("victim", ".it.epkit-symlnk"), 0);
    put(".it.epkit-longer-name");
    put(".it.epkit-short");
    assert_int_equal(make_folder(&temporary), 0);
    assert_int_equal(temporary_rename(&temporary, "it"), 0);
    temporary_remove(&temporary);
    assert_int_equal(count("."), 7);
    assert_int_equal(count(".it.epkit-folder"), 1);
    assert_int_equal(system("rm -r ./.it* it it.backup victim"), 0);
}

TEST(test_names)
{
    char name[256];

    memset(name, 'n', 255);
    name[255] = '\0';
    assert_int_equal(temporary_save(name, "x", 1, 0600), 0);
    assert_int_equal(unlink(name), 0);
    assert_int_equal(temporary_save("not/there", "x", 1, 0600), ENOENT);
    assert_int_equal(count("."), 0);
}

/*
 * Processes that create and clean up the same names concurrently: none loses a file that another considers left over.
 */
TEST(test_at_once)
{
    pid_t pids[8];

    for (size_t i = 0; i < 8; i++) {
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (pids[i] > 0)
            continue;
        for (int round = 0; round < 400; round++) {
            struct temporary temporary;
            int number = round % 4 == 3 ? temporary_file(AT_FDCWD, "it", &temporary) : make_folder(&temporary);

            if (number != 0)
                _exit(number);
            temporary_remove(&temporary);
        }
        _exit(0);
    }
    for (size_t i = 0; i < 8; i++) {
        int status;

        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        assert_int_equal(status, 0);
    }
    assert_int_equal(count("."), 0);
}

/* A process that saves continuously, killed by a signal at any time: only complete files remain. */
TEST(test_signals)
{
    static const int signals[] = {SIGTERM, SIGINT, SIGQUIT, SIGHUP, SIGXCPU};
    enum { ROUNDS = 60, BYTES = 20000 };
    static char text[BYTES];
    struct stat info;

    assert_int_equal(mkdir("signals", 0700), 0);
    for (int i = 0; i < ROUNDS; i++) {
        int number = signals[(size_t)i % (sizeof(signals) / sizeof(signals[0]))], how;
        pid_t pid;

        signal(number, SIG_DFL); /* nohup, or a shell in the background, has it ignored */
        pid = fork();
        assert_true(pid >= 0);
        while (pid == 0)
            if (temporary_save("signals/saved", text, sizeof(text), 0600) != 0)
                _exit(1);
        while (i == 0 && stat("signals/saved", &info) != 0)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        nanosleep(&(struct timespec){.tv_nsec = 1000000 + i * 37000}, NULL);
        assert_int_equal(kill(pid, number), 0);
        assert_int_equal(waitpid(pid, &how, 0), pid);
        assert_true(WIFSIGNALED(how) && WTERMSIG(how) == number);
        assert_int_equal(count("signals"), 1);
        assert_int_equal(stat("signals/saved", &info), 0);
        assert_int_equal(info.st_size, BYTES);
    }
    assert_int_equal(unlink("signals/saved"), 0);
    assert_int_equal(rmdir("signals"), 0);
}

TEST_GROUP(make_root, remove_root)
