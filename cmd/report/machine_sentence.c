/* SPDX-License-Identifier: Apache-2.0 */
/* machine_sentence.c - a one-sentence summary of the machine of each snapshot in a run folder. */
#include "cmd/topo/topo_view.h"
#include "report_run.h"

#include "machine/source/source.h"

#include <epkit/epkit.h>

/* The sentence of `epkit topo`; false: ret_text has the reason why there is none. */
static bool describe(const char *path, char *ret_text, size_t bytes)
{
    struct source *source = NULL;
    struct topo *topo = NULL;
    struct map *best = NULL;
    bool good =
        source_open(path, &source) == EP_OK && topo_read(source, &topo) == EP_OK && map_best(topo, &best) == EP_OK;

    if (good)
        topo_sentence(&(struct topo_view){.topo = topo, .best = best}, ret_text, bytes);
    else
        snprintf(ret_text, bytes, "%s", ep_last_error());
    map_free(best);
    topo_free(topo);
    source_free(source);
    return good;
}

json_t *report_snapshots(const struct folder *folder)
{
    json_t *list = json_array();

    for (size_t i = 0; i < folder->n_files; i++) {
        char text[512] = "";
        bool good;

        if (folder->files[i].kind != FOLDER_SNAPSHOT)
            continue;
        good = describe(folder->files[i].path, text, sizeof(text));
        json_array_append_new(
            list, json_pack("{s:s, s:s, s:b}", "host", folder->files[i].host, "text", text, "is_readable", good));
    }
    return list;
}
