/* SPDX-License-Identifier: Apache-2.0 */
/* install_output.h - internal interface of `epkit install`. */
#ifndef EP_INSTALL_INSTALL_OUTPUT_H
#define EP_INSTALL_INSTALL_OUTPUT_H

#include "common/cmd.h"
#include "install.h"

#define SETTINGS_MAX 64
#define VERIFY_MAX 128

struct install_cmd_options {
    struct install_options install;
    const char *set;
    bool json;
};

/* A recipe that was found and read. */
struct chosen_recipe {
    struct recipe *recipe;
    char *text, *settings_text; /* storage of the settings */
    json_t *saved;              /* settings of an earlier apply */
    struct recipe_setting settings[SETTINGS_MAX];
    size_t n_settings;
};

/* The recipes that have a state, at most `max` of them: how many. */
#define SAVED_MAX 8
int recipe_saved(const struct install_cmd_options *options, int max, char ret_names[][64]);

/*
 * Finds and reads a recipe: a file (the name contains a / or ends in .yaml), or a recipe of the tree. With
 * `prefer_saved` the one that an earlier apply saved with its state comes first, with its settings; then `name` may be
 * NULL if there is just one. CMD_FINE, or the exit code after the reason was reported.
 */
int recipe_choose(const struct cmd *cmd, const struct install_cmd_options *options, const char *name, bool prefer_saved,
                  struct chosen_recipe *ret_chosen);
void recipe_release(struct chosen_recipe *chosen);

/* `epkit install list` and `show`. */
int recipe_list(const struct cmd *cmd, bool json);
int recipe_show(const struct cmd *cmd, const char *name);

/* Reports of plan, apply, status, verify and uninstall. `action` is the word of the command line. */
void report_plan(const struct install *install, const char *action, bool verbose);
void report_status(const struct install *install);
void report_verify(const struct verify_result *results, size_t n);
json_t *report_json(const struct cmd *cmd, const struct install *install, const char *action, const char *result,
                    const struct verify_result *results, size_t n_results);

#endif
