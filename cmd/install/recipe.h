/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recipe.h - a recipe: the desired state of a node, as typed steps.
 *
 *     recipe: debian-tools              a name: lower case, digits, hyphens
 *     title: RDMA tools of Debian 12
 *     target: {os: debian, release: "12", arch: amd64}       its target (preflight.c)
 *     kernels: {of: doca, 3.2.1: "6.8"} a version, and the kernels that each value of it is known to build for
 *     reboots: 2                        reboots that apply may make, 0 to 10
 *     versions:                         every version, in one place; --set changes them
 *       perftest: 4.5+0.17-1
 *     variants:                         recipes that differ in this alone; 'recipe' chooses one
 *       NAME: {title: ..., target: {...}, kernels: {...}, values: {perftest: 4.6, prefix: ""}}   "": the user gives it
 *     variables:                        what a user may change, by --set or by an environment variable
 *       prefix: {kind: path, default: /opt/deepep, env: EPKIT_PREFIX, help: where it is installed}
 *     steps:
 *       - id: perftest
 *         type: apt                     apt deb file modprobe module pip build copyset command
 *         title: perftest
 *         why: ib_write_bw measures a link
 *         budget: 1m                    expected time; the step is stopped after `deadline`, four budgets if not given
 *         needs: [other-step]
 *         when: flag !other             only where these flags hold
 *         keep_driver: "580"            done where a driver of this version or a later one is loaded, and works
 *         packages: {perftest: "@{perftest}"}
 *         verify: [{name: runs, run: ib_write_bw --version, expect: "^Version"}]
 *
 * @{NAME} stands for a version or a variable. In text that a shell runs (run, check, undo, script, verify) it is
 * refused: there each of them is a shell variable, "$prefix". No value can become code: values consist of the
 * characters of their kind (recipe_variables.c), and shell variables are set from quoted text. In `expect` a value
 * matches literally. A build whose script uses other values than before is repeated.
 *
 * Everything is checked when a recipe is read; errors are reported as FILE:LINE: reason.
 */
#ifndef EP_INSTALL_RECIPE_H
#define EP_INSTALL_RECIPE_H

#include "common/text.h"
#include "common/yaml.h"

#include <jansson.h>

#define RECIPE_BYTES_MAX (256u << 10)
#define RECIPE_STEPS_MAX 64
#define RECIPE_VARIABLES_MAX 64
#define RECIPE_REBOOTS_MAX 10

enum value_shape {
    VALUE_WORD,
    VALUE_PATH,
    VALUE_FLAG, /* "0" or "1" */
    VALUE_URL,
    VALUE_SHA256,
    VALUE_VERSION,
    VALUE_FINGERPRINT, /* of a key: 40 hexadecimal digits; the last one that a variable may have */
    VALUE_COMMIT,      /* 7 to 40 hexadecimal digits */
    VALUE_MODE,        /* "0644" */
    VALUE_BOOL,
    VALUE_TEXT,
    VALUE_SHELL,    /* text for a shell: without @{} */
    VALUE_PATHS,    /* list of paths */
    VALUE_GLOBS,    /* list of paths whose last part may hold * and ? */
    VALUE_TEXTS,    /* list of texts */
    VALUE_PACKAGES, /* map of package names to versions; "*" is any */
    VALUE_OPTIONS   /* map of names to texts on one line */
};

enum variable_source { FROM_VERSIONS, FROM_DEFAULT, FROM_ENVIRONMENT, FROM_COMMAND_LINE, FROM_MACHINE, FROM_NOWHERE };

struct recipe_variable {
    /* Borrowed from the recipe, the settings and the environment. */
    const char *name, *value; /* value: NULL if it has none yet; then apply is refused */
    const char *env, *help;   /* "" if none */
    enum value_shape kind;
    enum variable_source source;
    int line;
    bool is_used, is_skipped; /* by a step that is not skipped; by one that is */
};

enum step_reboot {
    REBOOT_NEVER,     /* the step takes effect at once */
    REBOOT_IF_NEEDED, /* apply may reboot when the step's check finds it in place but not live */
    REBOOT_AFTER      /* a reboot belongs to the step */
};

struct step_verify {
    const char *name, *run, *expect; /* expect: extended regular expression for the output, or "" */
    const char *hint;                /* hint for a failure, or "" */
};

struct step_type;

struct recipe_step {
    const char *id, *title, *why, *says; /* says: printed when the step is found done, if the flag `says_when` holds */
    const struct step_type *type;
    const char *path; /* that it writes, or in which; "" if none */
    int line, budget_s, deadline_s;
    enum step_reboot reboot;
    bool skipped; /* its `when` does not hold: the flag that does not, or "!" and the flag */
    const char *when;
    const char *keep_driver; /* "" if none */
    size_t n_needs;
    size_t needs[RECIPE_STEPS_MAX]; /* indices of steps */
    json_t *args;                   /* keys of the type, variables replaced; "values" that a build's script uses */
    size_t n_verify;
    struct step_verify *verify;
};

struct recipe {
    char *file; /* as given, for messages */
    char *text;
    size_t bytes;
    const char *name, *title;
    int max_reboots;
    const struct yaml_node *variant; /* NULL if none */
    struct yaml_node *tree;
    json_t *strings; /* storage of the strings */
    struct recipe_variable *variables;
    size_t n_variables;
    bool is_marking; /* a step that is not skipped is being read: its variables are used */
    struct recipe_step *steps;
    size_t n_steps;
    size_t order[RECIPE_STEPS_MAX]; /* each step after those that it needs, else as in the file */
};

/* A value given by the user: NAME=VALUE of --set. It outlives the recipe. */
struct recipe_setting {
    const char *name, *value;
};

struct recipe_input {
    const struct recipe_setting *settings;
    size_t n_settings;
    const char *kernel;                   /* release, "" if not known */
    const char *machine;                  /* "x86_64" */
    const char *(*env)(const char *name); /* NULL: the environment is not read */
    bool *is_value_refused;               /* set to true if a value of `settings` or `env` is refused; NULL: not */
};

/*
 * Reads a recipe from text. EP_E_ARG with FILE:LINE: reason in ep_last_error(), or with a reason that names the setting
 * or the environment variable whose value is refused.
 */
ep_status recipe_parse(const char *file, const char *text, size_t bytes, const struct recipe_input *input,
                       struct recipe **ret_recipe);
void recipe_free(struct recipe *recipe);

/* --- recipe_variables.c --- */

ep_status variables_read(struct recipe *recipe, const struct recipe_input *input);
/* Has it no value, although not all steps that use it are skipped? */
bool recipe_variable_is_missing(const struct recipe_variable *variable);

const struct recipe_variable *recipe_variable_find(const struct recipe *recipe, const char *name);

const char *variable_source_name(enum variable_source source);

/*
 * `text` with each @{NAME} replaced, owned by the recipe; `line` is for the message. `is_pattern`: it is an extended
 * regular expression, where each value matches literally.
 */
ep_status variables_replace(const struct recipe *recipe, const char *text, int line, bool is_pattern,
                            const char **ret_text);

/* --- recipe_variables.c: values --- */

/* Does the value have the shape, for a list or a map one of its values? NULL, or what is wrong with it. */
const char *value_fault(enum value_shape shape, const char *value);
const char *package_fault(const char *name);
bool recipe_is_line(const char *value); /* of printable text */

/* --- recipe.c, for the other readers --- */

#define recipe_refuse(recipe, line, format, ...)                                                                       \
    ep_fail(EP_E_ARG, "%s:%d: " format, (recipe)->file, line, ##__VA_ARGS__)
ep_status recipe_check_keys(const struct recipe *recipe, const struct yaml_node *map, const char *what,
                            const char *const *allowed);
ep_status recipe_scalar(const struct recipe *recipe, const struct yaml_node *map, const char *key, bool is_required,
                        const char **ret_text, int *ret_line);

/* Texts of a map, and where they are stored: "" if one is missing. */
struct recipe_text {
    const char *key;                                                            /* the table ends with NULL */
    size_t offset;                                                              /* of a const char * */
    enum { TEXT_OPTIONAL, TEXT_REQUIRED, TEXT_LINE, TEXT_ID, TEXT_SHELL } kind; /* all but the first are required */
};

ep_status recipe_texts(const struct recipe *recipe, const struct yaml_node *map, const struct recipe_text *texts,
                       void *ret_struct);

/* An entry of `target`, `kernels` or `values`: that of the variant, else that of the recipe. NULL if there is none. */
const struct yaml_node *recipe_entry(const struct recipe *recipe, const char *map, const char *key);

/* A copy that lives as long as the recipe. */
const char *recipe_keep(const struct recipe *recipe, const char *text);

/* --- steps.c --- */

ep_status steps_read(struct recipe *recipe);

#endif
