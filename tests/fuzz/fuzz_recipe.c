/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as a recipe: what is refused has a file and a line; what is accepted has steps in an order in which each
 * comes after its needs, and becomes scripts in every format.
 */
#include "cmd/install/install.h"

#include <epkit/types.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool holds)
{
    if (!holds)
        abort();
}

static void check_order(const struct recipe *recipe)
{
    bool is_placed[RECIPE_STEPS_MAX] = {false};

    for (size_t i = 0; i < recipe->n_steps; i++) {
        const struct recipe_step *step = &recipe->steps[recipe->order[i]];

        for (size_t k = 0; k < step->n_needs; k++)
            check(is_placed[step->needs[k]]);
        check(!is_placed[recipe->order[i]]);
        is_placed[recipe->order[i]] = true;
        check(step->budget_s > 0 && step->deadline_s > 0 && *step->id && *step->title);
    }
}

static void write_all(const struct recipe *recipe)
{
    char *text = NULL;
    size_t bytes;

    for (size_t i = 0; i < recipe->n_steps; i++) {
        FILE *out = open_memstream(&text, &bytes);

        check(out != NULL);
        script_begin(out, recipe, &recipe->steps[i], "/state");
        script_apply(out, &recipe->steps[i]);
        script_undo(out, &recipe->steps[i]);
        fclose(out);
        free(text);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct recipe_setting setting = {"word", "value"};
    bool is_value_refused = false;
    struct recipe_input input = {.settings = &setting,
                                 .n_settings = size % 2,
                                 .kernel = "6.8.0-1021-gcp",
                                 .machine = "x86_64",
                                 .is_value_refused = &is_value_refused};
    struct recipe *recipe;

    if (recipe_parse("input", (const char *)data, size, &input, &recipe) != EP_OK) {
        check(strncmp(ep_last_error(), is_value_refused ? "--set " : "input:", 6) == 0);
        return 0;
    }
    check_order(recipe);
    if (preflight_check_target(recipe) == EP_OK)
        write_all(recipe);
    recipe_free(recipe);
    return 0;
}
