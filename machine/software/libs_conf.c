/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libs_conf.c - reads /etc/ld.so.conf and the files that it includes, like ldconfig(8): one folder per line, "include
 * PATTERN...", comments after '#'. "hwcap" lines and a type after '=' are obsolete and ignored.
 */
#include "libs_search.h"

#include <fnmatch.h>
#include <limits.h>
#include <string.h>

#define BLANK " \t\r\f\v"
#define MAX_FILES 256 /* include lines may form a loop */

struct conf {
    struct source *source;
    struct libs_list *list;
    int n_files;
};

static void read_file(struct conf *conf, const char *path);

bool libs_conf_next(const char **at, struct libs_conf_line *ret_line)
{
    while (**at) {
        const char *line = *at;
        size_t n = strcspn(line, "\n");
        size_t used = strcspn(line, "#\n");

        *at += n + (line[n] == '\n');
        while (used && strchr(BLANK, line[used - 1]))
            used--;
        while (used && strchr(BLANK, *line)) {
            line++;
            used--;
        }
        ret_line->is_include = used > 8 && strncmp(line, "include", 7) == 0 && strchr(BLANK, line[7]);
        if (ret_line->is_include) {
            *ret_line = (struct libs_conf_line){.is_include = true, .text = line + 8, .n = used - 8};
            return true;
        }
        if (used > 5 && strncmp(line, "hwcap", 5) == 0 && strchr(BLANK, line[5]))
            continue;
        if (memchr(line, '=', used))
            used = (size_t)((const char *)memchr(line, '=', used) - line);
        if (used == 0)
            continue;
        *ret_line = (struct libs_conf_line){.text = line, .n = used};
        return true;
    }
    return false;
}

/* Files that match a pattern with wildcards in its last component, which is the only form in use. */
static void read_matching(struct conf *conf, const char *pattern)
{
    const char *slash = strrchr(pattern, '/');
    const char *folder = libs_folder_of(conf->source, pattern);
    struct source_names names;

    if (!strpbrk(pattern, "*?[")) {
        read_file(conf, pattern);
        return;
    }
    names = source_list(conf->source, "%s", folder);
    for (size_t i = 0; i < names.n; i++)
        if (fnmatch(slash + 1, names.names[i], FNM_PERIOD) == 0)
            read_file(conf, source_printf(conf->source, "%s/%s", folder, names.names[i]));
}

static void read_include(struct conf *conf, const char *path, const struct libs_conf_line *line)
{
    const char *at = line->text, *end = line->text + line->n;

    while (at < end) {
        size_t blank = strspn(at, BLANK), n;

        at += blank < (size_t)(end - at) ? blank : (size_t)(end - at);
        n = strcspn(at, BLANK);
        if (n > (size_t)(end - at))
            n = (size_t)(end - at);
        if (n && n < PATH_MAX && *at == '/')
            read_matching(conf, source_printf(conf->source, "%.*s", (int)n, at));
        else if (n && n < PATH_MAX)
            read_matching(conf, source_printf(conf->source, "%s/%.*s", libs_folder_of(conf->source, path), (int)n, at));
        at += n;
    }
}

static void read_file(struct conf *conf, const char *path)
{
    struct libs_conf_line line;
    const char *at;

    if (conf->n_files == MAX_FILES)
        return;
    conf->n_files++;
    at = source_read(conf->source, "%s", path).text;
    while (libs_conf_next(&at, &line)) {
        if (line.is_include)
            read_include(conf, path, &line);
        else if (*line.text == '/' && line.n < PATH_MAX)
            libs_list_add(conf->source, conf->list, libs_expand(conf->source, line.text, line.n, NULL),
                          "/etc/ld.so.conf");
    }
}

void libs_conf_read(struct source *source, struct libs_list *list)
{
    struct conf conf = {.source = source, .list = list};

    read_file(&conf, "/etc/ld.so.conf");
}
