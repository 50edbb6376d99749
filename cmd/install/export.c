/* SPDX-License-Identifier: Apache-2.0 */
/*
 * export.c - exports a recipe as a shell script.
 *
 * It runs the same scripts as apply, and resumes after a reboot from a list of completed steps. It lacks what needs
 * epkit on the machine: the checks of the current state, deadlines, verification of versions before a step, and all
 * preflight checks except those of system and processor.
 */
#include "base/error.h"
#include "builtin.h"
#include "install.h"

#include <string.h>

/* Each recipe has its own folder: steps of two recipes may have the same name. */
static void begin(const struct recipe *recipe, const struct recipe_step *step, FILE *out)
{
    char state[256];

    snprintf(state, sizeof(state), INSTALL_STATE "/%s/export", recipe->name);
    script_begin(out, recipe, step, state);
}

/*
 * Writes a step as a function: downloads with retries, then the rest, in a subshell so that its variables do not leak.
 */
static void write_step(const struct recipe *recipe, const struct recipe_step *step, FILE *out)
{
    char name[64];

    snprintf(name, sizeof(name), "%.48s", step->id);
    for (char *at = name; *at; at++)
        *at = *at == '-' ? '_' : *at;
    fprintf(out, "\n# %s\n# %s\n", step->title, step->type->name);
    if (step->type->has_fetch) {
        fprintf(out, "fetch_%s() (\n", name);
        begin(recipe, step, out);
        script_fetch(out, step);
        fputs(")\n", out);
    }
    fprintf(out, "apply_%s() (\n", name);
    begin(recipe, step, out);
    script_apply(out, step);
    fputs(")\n", out);
    fprintf(out, "run_step '%s' '%s' %s apply_%s\n", step->id,
            step->reboot == REBOOT_AFTER       ? "after"
            : step->reboot == REBOOT_IF_NEEDED ? "if-needed"
                                               : "never",
            step->type->has_fetch ? "fetch_" : ":", name);
}

/* Checks the target of the recipe, as far as a shell can. */
static void write_preflight(const struct recipe *recipe, FILE *out)
{
    static const char *const targets[][2] = {{"os", "$(. /etc/os-release && echo \"$ID\")"},
                                             {"release", "$(. /etc/os-release && echo \"$VERSION_ID\")"},
                                             {"arch", "$(dpkg --print-architecture)"}};

    for (size_t i = 0; recipe->target && i < sizeof(targets) / sizeof(targets[0]); i++) {
        const struct yaml_node *node = tree_get(recipe->target, targets[i][0]);

        if (!node)
            continue;
        fprintf(out, "require %s \"%s\" ", targets[i][0], targets[i][1]);
        script_word(out, node->text);
        fputc('\n', out);
    }
}

static void write_verify(const struct recipe *recipe, FILE *out)
{
    fputs("\n# Does it work?\n", out);
    for (size_t i = 0; i < recipe->n_steps; i++) {
        const struct recipe_step *step = &recipe->steps[recipe->order[i]];

        for (size_t k = 0; k < step->n_verify && !step->skipped; k++) {
            fputs("verify() (\n", out);
            begin(recipe, step, out);
            script_shell(out, step->verify[k].run);
            fputs(")\nrun_verify ", out);
            script_word(out, step->verify[k].name);
            fputc(' ', out);
            script_word(out, step->verify[k].expect);
            fputc('\n', out);
        }
    }
    fputs("exit \"$failed\"\n", out);
}

ep_status export_write(const struct recipe *recipe, FILE *out)
{
    for (size_t i = 0; i < recipe->n_variables; i++) {
        const struct recipe_variable *variable = &recipe->variables[i];

        if (!variable->value && variable->line)
            return ep_fail(EP_E_ARG, "variable '%s' has no value: %s; give it by --set %s=VALUE", variable->name,
                           variable->help, variable->name);
    }
    fprintf(out,
            "#!/bin/sh\n# Recipe %s: %s. Written by epkit install export; run it as root.\n"
            "# Exit status 75: reboot the machine and run it again; 4: the recipe is not for this machine.\n"
            "# shellcheck disable=SC1091,SC2016,SC2030,SC2031,SC2034,SC2154,SC2234,SC2317,SC2329\n",
            recipe->name, recipe->title);
    script_prelude(out);
    fprintf(out, "done_steps=\"${EPKIT_DONE:-" INSTALL_STATE "/%s/export/done}\"\n", recipe->name);
    fputs(builtin_shell[1].text, out);
    write_preflight(recipe, out);
    fputs("begin\n", out);
    for (size_t i = 0; i < recipe->n_steps; i++) {
        const struct recipe_step *step = &recipe->steps[recipe->order[i]];

        if (!step->skipped)
            write_step(recipe, step, out);
        if (!step->skipped && *step->says) {
            fputs("echo ", out);
            script_word(out, step->says);
            fputc('\n', out);
        }
    }
    write_verify(recipe, out);
    return EP_OK;
}
