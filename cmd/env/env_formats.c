/* SPDX-License-Identifier: Apache-2.0 */
/* env_formats.c - the advice in the formats of container engines and Kubernetes, and as JSON. */
#include "common/output.h"
#include "env.h"

#include <string.h>

#define LINE_WIDTH 118

const char *const env_format_names[] = {"sh", "docker", "k8s", "slurm", NULL};

void env_comment(FILE *stream, const char *text)
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
static void write_list(FILE *stream, const struct env_script *script, bool is_k8s)
{
    int n = 0;

    env_comment(stream,
                is_k8s ? "For 'env:' of a container in a pod."
                       : "For 'docker run --env-file FILE', and podman. A value reaches to the end of its line and is "
                         "taken as it stands.");
    for (int i = 0; i < script->advice->n; i++) {
        const struct advice_row *row = &script->advice->rows[i];

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

void env_write(FILE *stream, const struct env_script *script, enum env_format format)
{
    if (format == ENV_DOCKER || format == ENV_K8S)
        write_list(stream, script, format == ENV_K8S);
    else
        env_write_sh(stream, script, format == ENV_SLURM);
    if (script->advice->n == 0)
        env_comment(stream, "Nothing has to be set here.");
}

json_t *env_json(const struct env_script *script)
{
    static const char *const scopes[] = {[ADVICE_NODE] = "node", [ADVICE_RANK] = "rank", [ADVICE_PROGRAM] = "program"};
    json_t *rows = json_array();

    for (int i = 0; i < script->advice->n; i++) {
        const struct advice_row *row = &script->advice->rows[i];
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
