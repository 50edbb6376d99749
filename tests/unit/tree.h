/* SPDX-License-Identifier: Apache-2.0 */
/* tree.h - a folder with the files of a machine, removed with its contents. */
#ifndef EP_TESTS_TREE_H
#define EP_TESTS_TREE_H

#include "temp.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct tree {
    char place[PATH_MAX];
};

static inline void tree_init(struct tree *tree)
{
    temp_template("tree", tree->place);
    assert_non_null(mkdtemp(tree->place));
    /* Tests read it as another user as well. */
    assert_int_equal(chmod(tree->place, 0755), 0);
}

static inline int tree_remove_one(const char *path, const struct stat *info, int kind, struct FTW *at)
{
    (void)info;
    (void)kind;
    (void)at;
    return remove(path);
}

static inline void tree_done(struct tree *tree)
{
    nftw(tree->place, tree_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

/* The path of the file `path` of the machine; creates its folders. */
static inline void tree_path(const struct tree *tree, const char *path, char ret_path[PATH_MAX])
{
    assert_in_range(snprintf(ret_path, PATH_MAX, "%s%s", tree->place, path), 1, PATH_MAX - 1);
    for (char *slash = ret_path + strlen(tree->place) + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = '\0';
        if (mkdir(ret_path, 0755) < 0)
            assert_int_equal(errno, EEXIST);
        *slash = '/';
    }
}

static inline void tree_put_bytes(const struct tree *tree, const char *path, const void *data, size_t bytes)
{
    char place[PATH_MAX];
    FILE *file;

    tree_path(tree, path, place);
    file = fopen(place, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

static inline void tree_put(const struct tree *tree, const char *path, const char *text)
{
    tree_put_bytes(tree, path, text, strlen(text));
}

static inline void tree_folder(const struct tree *tree, const char *path)
{
    char place[PATH_MAX];

    tree_path(tree, path, place);
    assert_int_equal(mkdir(place, 0755), 0);
}

static inline void tree_link(const struct tree *tree, const char *path, const char *target)
{
    char place[PATH_MAX];

    tree_path(tree, path, place);
    assert_int_equal(symlink(target, place), 0);
}

#endif
