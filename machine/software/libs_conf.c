/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libs_conf.c - reads /etc/ld.so.conf and the files that it includes, like ldconfig(8): one folder per line, "include
 * PATTERN...", comments after '#'.
 */
#include "libs_search.h"

#include <fnmatch.h>
#include <string.h>

#define BLANK " \t\r\f\v"
#define MAX_FILES 256 /* include lines may form a loop */

struct conf {
    struct source *source;
    struct libs_list *list;
    int n_files;
};

static void read_file(struct conf *conf, const char *path);

/* A copy of the next word of a line; NULL at its end. */
static const char *next_word(struct source *source, const char **at)
{
    const char *word = *at + strspn(*at, BLANK);
    size_t n = strcspn(word, BLANK "#\n");

    *at = word + n;
    return n ? source_printf(source, "%.*s", (int)n, word) : NULL;
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

static void read_line(struct conf *conf, const char *path, const char *line)
{
    const char *word = next_word(conf->source, &line);

    if (word && *word == '/')
        libs_list_add(conf->source, conf->list, libs_expand(conf->source, word, strlen(word), NULL), "/etc/ld.so.conf");
    if (!word || strcmp(word, "include") != 0)
        return;
    while ((word = next_word(conf->source, &line)))
        read_matching(
            conf, *word == '/' ? word : source_printf(conf->source, "%s/%s", libs_folder_of(conf->source, path), word));
}

static void read_file(struct conf *conf, const char *path)
{
    if (conf->n_files++ >= MAX_FILES)
        return;
    for (const char *at = source_read(conf->source, "%s", path).text; *at; at += strcspn(at, "\n"), at += *at != '\0')
        read_line(conf, path, at);
}

void libs_conf_read(struct source *source, struct libs_list *list)
{
    struct conf conf = {.source = source, .list = list};

    read_file(&conf, "/etc/ld.so.conf");
}
