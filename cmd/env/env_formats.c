/* SPDX-License-Identifier: Apache-2.0 */
/* env_formats.c - the advice in each format: variables of a shell, YAML of Kubernetes, JSON. */
#include "common/embedded.h"
#include "common/output.h"
#include "common/shell.h"
#include "common/text.h"
#include "env.h"

#include <string.h>

#define LINE_WIDTH 118

const char *const env_format_names[] = {"sh", "docker", "k8s", "slurm", NULL};

/* "# <text>" in lines of at most 120 characters. */
static void env_comment(FILE *stream, const char *text)
{
    while (*text) {
        int n = (int)strcspn(text, "\n");

        if (n > LINE_WIDTH) {
            n = LINE_WIDTH;
            while (n > 0 && text[n] != ' ')
                n--;
            /* A word longer than the line is not split. */
            if (n == 0)
                n = (int)strcspn(text, " \n");
        }
        fprintf(stream, "#%s%.*s\n", n ? " " : "", n, text);
        text += n;
        text += *text == ' ' || *text == '\n';
    }
}

/* In double quotes, for YAML. Kubernetes converts $$ to $. */
static void quote_yaml(FILE *stream, const char *text)
{
    putc('"', stream);
    for (; *text; text++) {
        if (*text == '"' || *text == '\\')
            putc('\\', stream);
        if (*text == '$')
            putc('$', stream);
        putc(*text, stream);
    }
    putc('"', stream);
}

/* Writes comments on a row; returns whether a list for all processes can express no more of it. */
static bool comment_row(FILE *stream, const struct advice_row *row)
{
    env_comment(stream, row->reason);
    if (row->scope == ADVICE_RANK) {
        fprintf(stream,
                "# %s differs from rank to rank, and a list like this one is for all of them. Start each rank with\n"
                "#     epkit env -- PROGRAM\n"
                "# or set it in what starts the ranks; by local rank:\n",
                row->name);
        for (int i = 0; i < row->n_values; i++)
            fprintf(stream, "#     %d: %s\n", i, row->values[i]);
    } else if (row->scope == ADVICE_PROGRAM) {
        fprintf(stream,
                "# %s=%s is for that program alone: in a container's environment every program would load it.\n"
                "# 'epkit env -- PROGRAM' sets it for one.\n",
                row->name, row->value);
    }
    return row->scope == ADVICE_RANK || row->scope == ADVICE_PROGRAM;
}

/* The list formats cannot unset a variable, nor prepend to one. */
static void write_list(FILE *stream, const struct doctor_machine *machine, bool is_k8s)
{
    int n = 0;

    env_comment(stream,
                is_k8s ? "For 'env:' of a container in a pod."
                       : "For 'docker run --env-file FILE', and podman. A value reaches to the end of its line and is "
                         "taken as it stands.");
    FOR_EACH (row, machine->advice->rows, machine->advice->n) {
        fputs(is_k8s ? "" : "\n", stream);
        if (comment_row(stream, row))
            continue;
        if (row->unset) {
            fprintf(stream, "# %s must not be set. A %s cannot unset it: take it out of the image.\n", row->name,
                    is_k8s ? "pod" : "file like this");
            continue;
        }
        if (row->prepend)
            fprintf(stream, "# It replaces the %s of the image: append what that has, if it is needed.\n", row->name);
        if (is_k8s) {
            fprintf(stream, "- name: %s\n  value: ", row->name);
            quote_yaml(stream, row->value);
            putc('\n', stream);
        } else {
            fprintf(stream, "%s=%s\n", row->name, row->value);
        }
        n++;
    }
    if (n == 0 && is_k8s)
        fputs("[]\n", stream);
}

/* --- a script for a shell --- */

extern const struct embedded env_shell[];

/* A part of the script, without the comments in front of the first empty line. */
static const char *part(const char *name)
{
    const struct embedded *file = env_shell;

    while (strcmp(file->name, name) != 0)
        file++;
    return strstr(file->text, "\n\n") + 2;
}

/* Only if the device files of all GPUs are known and accessible: otherwise the numbers are not those of the node. */
static bool knows_files(const struct topo *topo)
{
    return topo->n_gpus >= 2 && topo->n_hidden_gpus == 0 && !ANY_OF(i, topo->n_gpus, topo->gpus[i].minor < 0);
}

/* Sets _epkit_gpu to the GPU of this rank, '' if unknown; the same rules as advice_gpu_of(). */
static void write_rank(FILE *stream, const struct topo *topo)
{
    const char *word = "if", *text = part("shared_gpus"), *pairs = strstr(text, " @PAIRS@");

    fputs("_epkit_rank='' _epkit_size=''\n", stream);
    for (const struct advice_launcher *launcher = advice_launchers; launcher->rank; launcher++) {
        fprintf(stream, "%s [ -n \"${%s-}\" ]", word, launcher->rank);
        if (launcher->size_is_required)
            fprintf(stream, " && [ -n \"${%s-}\" ]", launcher->size);
        fprintf(stream, "; then\n    _epkit_rank=$%s _epkit_size=${%s-}\n", launcher->rank, launcher->size);
        word = "elif";
    }
    fputs("fi\n", stream);
    fputs(part("rank"), stream);
    if (!knows_files(topo))
        return;
    fprintf(stream, "%.*s", (int)(pairs - text), text);
    for (int i = 0; i < topo->n_gpus; i++)
        fprintf(stream, " %d:%d", i, topo->gpus[i].minor);
    fputs(pairs + strlen(" @PAIRS@"), stream);
}

static const char script_use[] =
    "Source it in sh, bash or zsh: '. ./FILE' or 'eval \"$(epkit env)\"'. It may be sourced again.";
static const char prolog_use[] =
    "For 'srun --task-prolog=FILE PROGRAM' (make it executable), or as TaskProlog of slurm.conf: Slurm runs it before "
    "each task and takes the lines that it prints as the task's environment. Exports in a batch script would not do: "
    "it runs once, on the first node, and srun hands one environment to all tasks.";
static const char rank_text[] =
    "These differ from rank to rank, and a rank is known by the variables of its launcher: torchrun, Open MPI, Intel "
    "MPI, PMI, Slurm. Where this script is read before the ranks are started they stay as they are; start each rank "
    "with 'epkit env -- PROGRAM' instead, between the launcher and the program. A program that starts its ranks itself "
    "needs DEEP_EP_DEVICE_TO_HCA_MAPPING, where its DeepEP reads that, or has to set them before it initialises "
    "NVSHMEM.";

/* One script exports the variables, a prolog prints them: Slurm takes all after '=' literally. */
static void write_export(FILE *stream, const char *name, bool is_prolog)
{
    fprintf(stream, is_prolog ? "printf 'export %s=%%s\\n' " : "export %s=", name);
}

/* Writes a row that is the same for all ranks. */
static void write_row(FILE *stream, const struct advice_row *row, bool is_prolog)
{
    if (row->unset) {
        fprintf(stream, is_prolog ? "echo 'unset %s'" : "unset %s", row->name);
    } else if (row->prepend) {
        fputs("_epkit_prepend ", stream);
        shell_write(stream, row->value);
        fprintf(stream, " \"${%s-}\"\n", row->name);
        write_export(stream, row->name, is_prolog);
        fputs("\"$_epkit_path\"", stream);
    } else {
        write_export(stream, row->name, is_prolog);
        shell_write(stream, row->value);
    }
    putc('\n', stream);
}

static void write_cases(FILE *stream, const struct advice_row *row, bool is_prolog)
{
    fputs("case $_epkit_gpu in\n", stream);
    for (int gpu = 0; gpu < row->n_values; gpu++) {
        fprintf(stream, is_prolog ? "%d)\n    " : "%d) ", gpu);
        write_export(stream, row->name, is_prolog);
        shell_write(stream, row->values[gpu]);
        fputs(is_prolog ? "\n    ;;\n" : " ;;\n", stream);
    }
    fputs("esac\n", stream);
}

static void write_ranks(FILE *stream, const struct doctor_machine *machine, bool is_prolog)
{
    putc('\n', stream);
    if (!is_prolog)
        env_comment(stream, rank_text);
    write_rank(stream, machine->topo);
    FOR_EACH (row, machine->advice->rows, machine->advice->n) {
        if (row->scope != ADVICE_RANK)
            continue;
        env_comment(stream, row->reason);
        write_cases(stream, row, is_prolog);
    }
    if (knows_files(machine->topo))
        fprintf(stream,
                "# These count by the numbers of the node.\n"
                "if [ -n \"${_epkit_some-}\" ]; then %sunset DEEP_EP_DEVICE_TO_HCA_MAPPING%s; "
                "%sunset EPKIT_VERBS_DEVICE%s; fi\n",
                is_prolog ? "echo '" : "", is_prolog ? "'" : "", is_prolog ? "echo '" : "", is_prolog ? "'" : "");
    if (!is_prolog)
        fputs("unset _epkit_rank _epkit_size _epkit_part _epkit_gpu _epkit_some\n", stream);
}

static void write_preload(FILE *stream, const struct advice_row *row, bool is_prolog)
{
    if (is_prolog) {
        fprintf(stream,
                "# %s=%s is not for shells and launchers: where the task is the program itself, start it by\n"
                "#     srun --task-prolog=FILE epkit env -- PROGRAM\n",
                row->name, row->value);
        return;
    }
    env_comment(stream,
                "It is not exported: shells, launchers and ssh would load it too. 'epkit_preload PROGRAM' starts one "
                "program with it. EPKIT_PRELOAD records this for child shells and 'epkit doctor'.");
    write_row(stream, &(struct advice_row){.name = "EPKIT_PRELOAD", .value = row->value}, false);
    fputs(part("preload"), stream);
}

/* Whether there are rows of that scope, or, `prepend`, those of it that are put in front of what is there. */
static bool has_rows(const struct advice *advice, enum advice_scope scope, bool prepend)
{
    return ANY_OF(i, advice->n, advice->rows[i].scope == scope && advice->rows[i].prepend >= prepend);
}

/* A script to source, or one whose output Slurm takes as the environment of a task. */
static void env_write_sh(FILE *stream, const struct doctor_machine *machine, bool is_prolog)
{
    bool prepends = has_rows(machine->advice, ADVICE_NODE, true);
    char name[128];

    text_clean(source_name(machine->source), name, sizeof(name));
    fprintf(stream, "%s# The environment of NVSHMEM, DeepEP and NCCL for %s, by 'epkit env'.\n",
            is_prolog ? "#!/bin/sh\n" : "", name);
    env_comment(stream, is_prolog ? prolog_use : script_use);
    if (prepends)
        fputs(part("prepend"), stream);
    FOR_EACH (row, machine->advice->rows, machine->advice->n) {
        if (row->scope == ADVICE_RANK)
            continue;
        putc('\n', stream);
        env_comment(stream, row->reason);
        if (row->scope == ADVICE_PROGRAM)
            write_preload(stream, row, is_prolog);
        else
            write_row(stream, row, is_prolog);
    }
    if (has_rows(machine->advice, ADVICE_RANK, false))
        write_ranks(stream, machine, is_prolog);
    if (prepends && !is_prolog)
        fputs("unset _epkit_path\nunset -f _epkit_prepend\n", stream);
}

/* --- the other formats --- */

void env_write(FILE *stream, const struct doctor_machine *machine, enum env_format format)
{
    if (format == ENV_DOCKER || format == ENV_K8S)
        write_list(stream, machine, format == ENV_K8S);
    else
        env_write_sh(stream, machine, format == ENV_SLURM);
    if (machine->advice->n == 0)
        env_comment(stream, "Nothing has to be set here.");
}

json_t *env_json(const struct doctor_machine *machine)
{
    static const char *const scopes[] = {[ADVICE_NODE] = "node", [ADVICE_RANK] = "rank", [ADVICE_PROGRAM] = "program"};
    json_t *rows = json_array();

    FOR_EACH (row, machine->advice->rows, machine->advice->n) {
        bool has_value = !row->unset && row->scope != ADVICE_RANK;
        json_t *values = row->scope == ADVICE_RANK ? json_array() : json_null();

        for (int v = 0; v < row->n_values && row->scope == ADVICE_RANK; v++)
            json_array_append_new(values, out_text(row->values[v]));
        json_array_append_new(rows, json_pack("{s:s, s:s, s:s, s:o, s:o, s:s}", "name", row->name, "scope",
                                              scopes[row->scope], "action",
                                              row->unset     ? "unset"
                                              : row->prepend ? "prepend"
                                                             : "set",
                                              "value", has_value ? out_text(row->value) : json_null(), "values", values,
                                              "reason", row->reason));
    }
    return rows;
}
