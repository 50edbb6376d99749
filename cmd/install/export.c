/* SPDX-License-Identifier: Apache-2.0 */
/*
 * export.c - exports a recipe as a shell script, as user data of cloud-init, as an Ansible playbook.
 *
 * They run the same scripts as apply, and resume after a reboot from a list of completed steps. They lack what needs
 * epkit on the machine: the checks of the current state, deadlines, verification of versions before a step, and all
 * preflight checks except those of system and processor.
 */
#include "base/error.h"
#include "builtin.h"
#include "install.h"

#include <stdlib.h>
#include <string.h>

const char *const export_formats[] = {"sh", "cloud-init", "ansible", NULL};

#define SCRIPT_PATH "/var/lib/epkit/install/%s/export.sh"

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
            script_word(out, step->verify[k].expect ? step->verify[k].expect : "");
            fputc('\n', out);
        }
    }
    fputs("exit \"$failed\"\n", out);
}

static void write_sh(const struct recipe *recipe, FILE *out)
{
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
}

/* Writes the script as a literal block of YAML. */
static ep_status write_block(const struct recipe *recipe, int indent, FILE *out)
{
    char *text = NULL, *line, *rest;
    size_t bytes;
    FILE *script = open_memstream(&text, &bytes);

    if (!script)
        return ep_fail(EP_E_MEMORY, "no memory");
    write_sh(recipe, script);
    if (fclose(script) != 0 || !text)
        return ep_fail(EP_E_MEMORY, "no memory");
    for (rest = text; (line = strsep(&rest, "\n"));) {
        if (*line)
            fprintf(out, "%*s%s\n", indent, "", line);
        else if (rest)
            fputc('\n', out);
    }
    free(text);
    return EP_OK;
}

/* cloud-init runs once; a systemd unit runs the script at each boot until it succeeds. */
static ep_status write_cloud_init(const struct recipe *recipe, FILE *out)
{
    fprintf(out,
            "#cloud-config\n# Recipe %s: %s. Written by epkit install export.\nwrite_files:\n"
            "  - path: " SCRIPT_PATH "\n    permissions: '0755'\n    content: |\n",
            recipe->name, recipe->title, recipe->name);
    EP_TRY(write_block(recipe, 6, out));
    fprintf(out,
            "  - path: /etc/systemd/system/epkit-export-%s.service\n    permissions: '0644'\n    content: |\n"
            "      [Unit]\n      Description=recipe %s\n      Wants=network-online.target\n"
            "      After=network-online.target\n      ConditionPathExists=!/var/lib/epkit/install/%s/complete\n"
            "      [Service]\n      Type=oneshot\n      TimeoutStartSec=infinity\n"
            "      ExecStart=/bin/sh -c '" SCRIPT_PATH "; s=$$?; case $$s in 0) touch "
            "/var/lib/epkit/install/%s/complete ;; 75) systemctl reboot ;; *) exit $$s ;; esac'\n"
            "      [Install]\n      WantedBy=multi-user.target\n"
            "runcmd:\n  - [systemctl, daemon-reload]\n  - [systemctl, enable, --now, --no-block, "
            "epkit-export-%s.service]\n",
            recipe->name, recipe->name, recipe->name, recipe->name, recipe->name, recipe->name);
    return EP_OK;
}

/* The script cannot find out whether a reboot is needed, and requests one after each step that may need it. */
static int count_reboots(const struct recipe *recipe)
{
    int n = 0;

    for (size_t i = 0; i < recipe->n_steps; i++)
        n += !recipe->steps[i].skipped && recipe->steps[i].reboot != REBOOT_NEVER;
    return n;
}

/* Runs the script until it requests no reboot any more. */
static ep_status write_ansible(const struct recipe *recipe, FILE *out)
{
    int n_reboots = count_reboots(recipe);

    fprintf(out,
            "# Recipe %s: %s. Written by epkit install export.\n- name: %s\n  hosts: all\n  become: true\n"
            "  gather_facts: false\n  tasks:\n"
            "    - name: Make the folder of the script\n      ansible.builtin.file:\n"
            "        path: /var/lib/epkit/install/%s\n        state: directory\n        mode: '0755'\n"
            "    - name: Write the script\n      ansible.builtin.copy:\n        dest: " SCRIPT_PATH
            "\n        mode: '0755'\n        content: !unsafe |\n",
            recipe->name, recipe->title, recipe->name, recipe->name, recipe->name);
    EP_TRY(write_block(recipe, 10, out));
    for (int i = 0; i <= n_reboots; i++) {
        fprintf(out,
                "    - name: Run the script%s\n      ansible.builtin.command: " SCRIPT_PATH "\n"
                "      register: epkit_run_%d\n      failed_when: epkit_run_%d.rc not in %s\n"
                "      changed_when: \"epkit_run_%d.stdout is search('(?m)^step ')\"\n",
                i ? " after the reboot" : "", recipe->name, i, i, i < n_reboots ? "[0, 75]" : "[0]", i);
        if (i)
            fprintf(out, "      when: epkit_run_%d.rc | default(0) == 75\n", i - 1);
        if (i < n_reboots)
            fprintf(out,
                    "    - name: Reboot\n      ansible.builtin.reboot:\n        reboot_timeout: 1200\n"
                    "      when: epkit_run_%d.rc | default(0) == 75\n",
                    i);
    }
    return EP_OK;
}

ep_status export_write(const struct recipe *recipe, const char *format, FILE *out)
{
    for (size_t i = 0; i < recipe->n_variables; i++) {
        const struct recipe_variable *variable = &recipe->variables[i];

        if (!variable->value && variable->line)
            return ep_fail(EP_E_ARG, "variable '%s' has no value: %s; give it by --set %s=VALUE", variable->name,
                           variable->help, variable->name);
    }
    if (strcmp(format, "cloud-init") == 0)
        return write_cloud_init(recipe, out);
    if (strcmp(format, "ansible") == 0)
        return write_ansible(recipe, out);
    write_sh(recipe, out);
    return EP_OK;
}
