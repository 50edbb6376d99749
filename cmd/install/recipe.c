/* SPDX-License-Identifier: Apache-2.0 */
/* recipe.c - reads a recipe: its head, and what the readers of variables and steps share. */
#include "recipe.h"

#include "base/error.h"
#include "common/memory.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

const char *recipe_keep(const struct recipe *recipe, const char *text)
{
    json_t *kept = json_string_nocheck(text);

    json_array_append_new(recipe->strings, kept);
    return json_string_value(kept);
}

ep_status recipe_check_keys(const struct recipe *recipe, const struct yaml_node *map, const char *what,
                            const char *const *allowed)
{
    for (size_t i = 0; i < map->n; i++) {
        char list[256] = "";

        if (text_is_any(map->keys[i], allowed))
            continue;
        for (size_t k = 0; allowed[k]; k++)
            text_append(list, sizeof(list), "%s%s", k ? ", " : "", allowed[k]);
        return recipe_refuse(recipe, map->key_lines[i], "%s has no key '%.64s'; it may have %s", what, map->keys[i],
                             list);
    }
    return EP_OK;
}

ep_status recipe_scalar(const struct recipe *recipe, const struct yaml_node *map, const char *key, bool is_required,
                        const char **ret_text, int *ret_line)
{
    const struct yaml_node *node = tree_get(map, key);

    *ret_text = NULL;
    *ret_line = node ? node->line : map->line;
    if (!node)
        return is_required ? recipe_refuse(recipe, map->line, "'%s' is missing", key) : EP_OK;
    if (node->kind != YAML_SCALAR)
        return recipe_refuse(recipe, node->line, "'%s' must be a text", key);
    if (is_required && !*node->text)
        return recipe_refuse(recipe, node->line, "'%s' is empty", key);
    *ret_text = node->text;
    return EP_OK;
}

ep_status recipe_texts(const struct recipe *recipe, const struct yaml_node *map, const struct recipe_text *texts,
                       void *ret_struct)
{
    for (; texts->key; texts++) {
        const char **text = (const char **)(void *)((char *)ret_struct + texts->offset);
        const char *fault;
        int line;

        EP_TRY(recipe_scalar(recipe, map, texts->key, texts->kind != TEXT_OPTIONAL, text, &line));
        *text = *text ? *text : "";
        fault = texts->kind == TEXT_SHELL ? value_fault(VALUE_SHELL, *text) : NULL;
        if (fault)
            return recipe_refuse(recipe, line, "'%s': %s", texts->key, fault);
        if (texts->kind == TEXT_LINE && !recipe_is_line(*text))
            return recipe_refuse(recipe, line, "'%s' must be one line of printable text", texts->key);
        if (texts->kind == TEXT_ID && (!islower((unsigned char)**text) || strlen(*text) > 40 ||
                                       strspn(*text, "abcdefghijklmnopqrstuvwxyz0123456789-") != strlen(*text)))
            return recipe_refuse(recipe, line,
                                 "%s '%.64s': use only lower-case letters, digits and '-', at most 40, a letter first",
                                 strcmp(texts->key, "id") == 0 ? "id" : "name", *text);
    }
    return EP_OK;
}

const struct yaml_node *recipe_entry(const struct recipe *recipe, const char *map, const char *key)
{
    const struct yaml_node *of_variant = recipe->variant ? tree_get(recipe->variant, map) : NULL;
    const struct yaml_node *of_recipe = tree_get(recipe->tree, map);
    const struct yaml_node *entry = of_variant ? tree_get(of_variant, key) : NULL;

    return entry || !of_recipe ? entry : tree_get(of_recipe, key);
}

/* Of a recipe with variants the one that its name chooses. */
static ep_status read_variant(struct recipe *recipe)
{
    const struct yaml_node *variants = tree_get(recipe->tree, "variants"), *values;
    const char *text;
    int line;

    if (!variants)
        return EP_OK;
    recipe->variant = tree_get(variants, recipe->name);
    if (!recipe->variant || recipe->variant->kind != YAML_MAP)
        return recipe_refuse(recipe, variants->line, "'variants' has no map '%s'", recipe->name);
    EP_TRY(recipe_check_keys(recipe, recipe->variant, "a variant", TEXTS("title", "target", "kernels", "values")));
    values = tree_get(recipe->variant, "values");
    for (size_t i = 0; values && i < values->n; i++)
        EP_TRY(recipe_scalar(recipe, values, values->keys[i], false, &text, &line));
    EP_TRY(recipe_scalar(recipe, recipe->variant, "title", false, &text, &line));
    if (text && !recipe_is_line(text))
        return recipe_refuse(recipe, line, "'title' must be one line of printable text");
    recipe->title = text ? text : recipe->title;
    return EP_OK;
}

static ep_status read_head(struct recipe *recipe)
{
    static const struct recipe_text texts[] = {
        {"recipe", offsetof(struct recipe, name), TEXT_ID}, {"title", offsetof(struct recipe, title), TEXT_LINE}, {0}};
    const char *text;
    int line;

    if (recipe->tree->kind != YAML_MAP)
        return recipe_refuse(recipe, recipe->tree->line, "a recipe is a map that begins with 'recipe: NAME'");
    EP_TRY(recipe_check_keys(recipe, recipe->tree, "a recipe",
                             TEXTS("recipe", "title", "description", "variants", "target", "kernels", "reboots",
                                   "versions", "variables", "steps")));
    EP_TRY(recipe_texts(recipe, recipe->tree, texts, recipe));
    EP_TRY(read_variant(recipe));
    EP_TRY(recipe_scalar(recipe, recipe->tree, "description", false, &text, &line));
    EP_TRY(recipe_scalar(recipe, recipe->tree, "reboots", false, &text, &line));
    if (text) {
        recipe->max_reboots = strlen(text) <= 2 && isdigit((unsigned char)*text) ? atoi(text) : -1;
        if (recipe->max_reboots < 0 || recipe->max_reboots > RECIPE_REBOOTS_MAX)
            return recipe_refuse(recipe, line, "'reboots' must be a number from 0 to %d", RECIPE_REBOOTS_MAX);
    }
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
    struct recipe *recipe = memory_new(1, sizeof(*recipe));
    ep_status status;

    recipe->file = memory_printf("%s", file);
    recipe->text = memory_new(bytes + 1, 1);
    recipe->strings = json_array();
    memcpy(recipe->text, text, bytes);
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
