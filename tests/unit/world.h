/* SPDX-License-Identifier: Apache-2.0 */
/*
 * world.h - a machine whose libraries are only said to be there: files without contents, and an overlay that tells what
 * the headers of each would say.
 */
#ifndef EP_TESTS_WORLD_H
#define EP_TESTS_WORLD_H

#include "machine/source/source.h"
#include "tree.h"

struct world {
    struct tree tree;
    json_t *elf;
    struct source *source;
};

static inline void world_init(struct world *world)
{
    tree_init(&world->tree);
    world->elf = json_object();
    world->source = NULL;
    assert_non_null(world->elf);
}

/* A library: `facts` is a JSON object as in a snapshot, with ' for ". */
static inline void world_library(struct world *world, const char *path, const char *facts)
{
    char text[4096];
    json_t *entry;

    assert_in_range(snprintf(text, sizeof(text), "%s", facts), 1, sizeof(text) - 1);
    for (char *at = text; (at = strchr(at, '\'')); at++)
        *at = '"';
    entry = json_loads(text, 0, NULL);
    assert_non_null(entry);
    tree_put(&world->tree, path, "");
    assert_int_equal(json_object_set_new(world->elf, path, entry), 0);
}

/* NUL-terminated "NAME=value" one after the other, with an empty one at the end. */
static inline void world_environment(struct world *world, const char *variables, size_t bytes)
{
    tree_put_bytes(&world->tree, "/proc/self/environ", variables, bytes);
}

static inline struct source *world_open(struct world *world)
{
    json_t *overlay = json_pack("{s:i, s:O}", "epkit_snapshot", 1, "elf", world->elf);
    char *text = json_dumps(overlay, 0);

    assert_non_null(text);
    tree_put(&world->tree, "/" SOURCE_OVERLAY, text);
    free(text);
    json_decref(overlay);
    assert_int_equal(source_open(world->tree.place, &world->source), EP_OK);
    return world->source;
}

static inline void world_done(struct world *world)
{
    source_free(world->source);
    json_decref(world->elf);
    tree_done(&world->tree);
}

#endif
