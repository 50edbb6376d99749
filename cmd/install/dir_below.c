/* SPDX-License-Identifier: Apache-2.0 */
#include "dir_below.h"

#include "common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int open_below(int root, const char *path)
{
    return dir_resolve(root, path, O_PATH | O_DIRECTORY, RESOLVE_IN_ROOT);
}

bool dir_has(int dir, const char *path)
{
    int fd = dir_open_within(dir, path, O_PATH | O_NOFOLLOW);

    dir_close(fd);
    return fd >= 0;
}

/* Makes the folder if it may. A name that is there is a folder that another process has just made, or leads nowhere. */
static int make_below(int parent, const char *name, bool make)
{
    struct stat info;
    int made, fd;

    if (fstatat(parent, name, &info, AT_SYMLINK_NOFOLLOW) == 0)
        return S_ISDIR(info.st_mode) ? 0 : ENOTDIR;
    if (!make)
        return ENOENT;
    made = dir_open_in(parent, name, true);
    fd = made < 0 ? -1 : openat(made, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    dir_close(made);
    if (fd < 0)
        return errno;
    (void)!fchmod(fd, 0755); /* umask may have removed bits */
    dir_close(fd);
    return 0;
}

int dir_path(int fd, char ret_path[PATH_MAX])
{
    char link[40];
    ssize_t n;

    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    n = readlink(link, ret_path, PATH_MAX - 1);
    if (n < 0)
        return errno;
    ret_path[n] = '\0';
    return 0;
}

int dir_open_below(const char *root, const char *path, bool make, char ret_path[PATH_MAX])
{
    int base = dir_open(root, false), at = base, number = base < 0 ? errno : 0, unnamed = 0;
    const char *left = path, *rest = path;
    char prefix[PATH_MAX];

    while (number == 0 && *left) {
        struct piece part = text_take(&left, "/");
        char name[NAME_MAX + 1];
        int fd;

        if (part.n == 0)
            continue;
        snprintf(prefix, sizeof(prefix), "%.*s", (int)(part.text + part.n - path), path);
        snprintf(name, sizeof(name), "%.*s", (int)part.n, part.text);
        fd = open_below(base, prefix);
        if (fd < 0 && (number = errno) == ENOENT && (number = make_below(at, name, make)) == 0 &&
            (fd = open_below(base, prefix)) < 0)
            number = errno;
        if (fd < 0)
            break;
        if (at != base)
            dir_close(at);
        at = fd;
        rest = left;
    }
    rest += strspn(rest, "/");
    if ((number == 0 || (number == ENOENT && !make)) && (unnamed = dir_path(at, prefix)) == 0 &&
        snprintf(ret_path, PATH_MAX, "%s%s%s", strcmp(prefix, "/") == 0 ? "" : prefix, *rest ? "/" : "", rest) >=
            PATH_MAX)
        unnamed = ENAMETOOLONG;
    number = unnamed ? unnamed : number;
    if (at != base)
        dir_close(base);
    if (number == 0)
        return at;
    dir_close(at);
    errno = number;
    return -1;
}
