/* SPDX-License-Identifier: Apache-2.0 */
#include "recipe.h"

#include "base/error.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

static const char *const recipe_keys[] = {"recipe",   "title",     "description", "target", "reboots",
                                          "versions", "variables", "steps",       NULL};

static ep_status read_head(struct recipe *recipe)
{
    const char *text;
    int line;

    if (recipe->tree->kind != YAML_MAP)
        return recipe_refuse(recipe, recipe->tree->line, "a recipe is a map that begins with 'recipe: NAME'");
    EP_TRY(recipe_check_keys(recipe, recipe->tree, "a recipe", recipe_keys));
    EP_TRY(recipe_scalar(recipe, recipe->tree, "recipe", true, &recipe->name, &line));
    if (!islower((unsigned char)*recipe->name) || strlen(recipe->name) > 40 ||
        strspn(recipe->name, "abcdefghijklmnopqrstuvwxyz0123456789-") != strlen(recipe->name))
        return recipe_refuse(recipe, line,
                             "name '%.64s': lower-case letters, digits and '-' alone, at most 40 of them, a letter "
                             "first",
                             recipe->name);
    EP_TRY(recipe_scalar(recipe, recipe->tree, "title", true, &recipe->title, &line));
    /* Exports write it into comments. */
    if (!recipe_is_line(recipe->title))
        return recipe_refuse(recipe, line, "'title' must be one line of printable text");
    EP_TRY(recipe_scalar(recipe, recipe->tree, "description", false, &text, &line));
    EP_TRY(recipe_scalar(recipe, recipe->tree, "reboots", false, &text, &line));
    if (text) {
        recipe->max_reboots = strlen(text) <= 2 && isdigit((unsigned char)*text) ? atoi(text) : -1;
        if (recipe->max_reboots < 0 || recipe->max_reboots > RECIPE_REBOOTS_MAX)
            return recipe_refuse(recipe, line, "'reboots' must be a number from 0 to %d", RECIPE_REBOOTS_MAX);
    }
    recipe->target = tree_get(recipe->tree, "target");
    return EP_OK;
}

static ep_status parse(struct recipe *recipe, const struct recipe_input *input)
{
    static const struct yaml_limits limits = {
        .what = "recipe", .bytes_max = RECIPE_BYTES_MAX, .depth_max = 8, .nodes_max = 8192};

    EP_TRY(tree_parse(recipe->file, recipe->text, recipe->bytes, &limits, &recipe->tree));
    EP_TRY(read_head(recipe));
    EP_TRY(variables_read(recipe, input));
    return steps_read(recipe);
}

ep_status recipe_parse(const char *file, const char *text, size_t bytes, const struct recipe_input *input,
                       struct recipe **ret_recipe)
{
    struct recipe *recipe = calloc(1, sizeof(*recipe));
    ep_status status;

    if (!recipe)
        return ep_fail(EP_E_MEMORY, "%s: no memory", file);
    recipe->file = strdup(file);
    recipe->text = malloc(bytes + 1);
    recipe->strings = json_array();
    if (!recipe->file || !recipe->text || !recipe->strings) {
        recipe_free(recipe);
        return ep_fail(EP_E_MEMORY, "%s: no memory", file);
    }
    memcpy(recipe->text, text, bytes);
    recipe->text[bytes] = '\0';
    recipe->bytes = bytes;
    status = parse(recipe, input);
    if (status != EP_OK) {
        recipe_free(recipe);
        return status;
    }
    *ret_recipe = recipe;
    return EP_OK;
}

void recipe_free(struct recipe *recipe)
{
    if (!recipe)
        return;
    free(recipe->variables);
    for (size_t i = 0; recipe->steps && i <= recipe->n_steps && i < tree_get(recipe->tree, "steps")->n; i++) {
        json_decref(recipe->steps[i].args);
        free(recipe->steps[i].verify);
    }
    free(recipe->steps);
    tree_free(recipe->tree);
    json_decref(recipe->strings);
    free(recipe->text);
    free(recipe->file);
    free(recipe);
}
