/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_version.c - epkit version. */
#include "common/cmd.h"
#include "common/output.h"

#include <epkit/types.h>
#include <libsmartcols.h>

struct version_options {
    bool json;
};

static const struct opt version_table[] = {
    OPT_JSON_ROW(struct version_options, json),
    {0},
};

static int cmd_version(const struct cmd *cmd, const struct cmd_call *call)
{
    const struct version_options *options = call->options;
    const char *smartcols;
    json_t *document;

    scols_get_library_version(&smartcols);
    if (!options->json) {
        /* Both versions, because a broken installation may mix a command and a library of different versions. */
        out_line("epkit %d.%d.%d", EP_VERSION_MAJOR, EP_VERSION_MINOR, EP_VERSION_PATCH);
        out_line("libepkit %s, jansson %s, libsmartcols %s", ep_version(), jansson_version_str(), smartcols);
        return CMD_FINE;
    }
    document = out_document(cmd->name);
    json_object_set_new(document, "libepkit", json_string(ep_version()));
    json_object_set_new(document, "libraries",
                        json_pack("{s:s, s:s}", "jansson", jansson_version_str(), "libsmartcols", smartcols));
    return out_json(document) == 0 ? CMD_FINE : CMD_FAILED;
}

const struct cmd command_version = {
    .name = "version",
    .args = "",
    .summary = "print the versions of the command and of its libraries",
    .description = "Prints the version of the command, of the library that it has loaded, and of the libraries that it "
                   "uses. Name them when you report a bug.",
    .options = version_table,
    .options_bytes = sizeof(struct version_options),
    .examples =
        {
            {"epkit version", "Print the versions; 'epkit --version' does the same."},
        },
    .exits =
        {
            {CMD_FINE, "the versions were printed"},
        },
    .run = cmd_version,
};
