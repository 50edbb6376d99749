/* SPDX-License-Identifier: Apache-2.0 */
/* dpkg.c - the types apt and deb: packages in given versions. */
#include "base/error.h"
#include "machine/software/software_text.h"
#include "types.h"

#include <fnmatch.h>
#include <string.h>

struct dpkg_package {
    char version[128];
    bool is_installed, is_broken; /* broken: half-installed, unpacked or half-configured */
    bool is_held;                 /* held by the administrator in its version */
};

/* Of several architectures the installed one counts. */
static struct dpkg_package find_package(const char *status, const char *name)
{
    struct dpkg_package found = {.version = ""};
    struct parse_package package;

    while (!found.is_installed && parse_package_next(&status, &package)) {
        char words[64];

        snprintf(words, sizeof(words), "%.*s", (int)package.status.n, package.status.text);
        if (!piece_is(package.name, name) || !*words || strstr(words, "not-installed") || strstr(words, "config-files"))
            continue;
        found.is_installed = package.installed;
        found.is_held = package.installed && strncmp(words, "hold ", 5) == 0;
        found.is_broken = !package.installed;
        snprintf(found.version, sizeof(found.version), "%.*s", (int)package.version.n, package.version.text);
    }
    return found;
}

void dpkg_check(const struct check_context *context, const json_t *packages, struct step_state *ret_state)
{
    int n_missing = 0, n_fine = 0;
    const char *status = source_read(context->source, "/var/lib/dpkg/status").text;
    char missing[128] = "";
    const char *name;
    json_t *value;

    json_object_foreach ((json_t *)packages, name, value) {
        const char *pin = json_string_value(value);
        struct dpkg_package package = find_package(status, name);

        if (package.is_broken) {
            state_set(ret_state, STEP_PARTIAL, "%s %s is half installed", name, package.version);
            return;
        }
        if (package.is_installed && fnmatch(pin, package.version, 0) != 0) {
            state_set(ret_state, STEP_WRONG, "%s %s is installed%s, expected %s", name, package.version,
                      package.is_held ? " and held" : "", pin);
            return;
        }
        n_fine += package.is_installed;
        if (!package.is_installed && n_missing++ == 0)
            snprintf(missing, sizeof(missing), "%s", name);
    }
    if (n_missing == 0)
        state_set(ret_state, STEP_DONE, "%d package%s installed", n_fine, n_fine == 1 ? "" : "s");
    else if (n_missing == 1)
        state_set(ret_state, n_fine ? STEP_PARTIAL : STEP_TODO, "%s is not installed", missing);
    else
        state_set(ret_state, n_fine ? STEP_PARTIAL : STEP_TODO, "%s and %d other packages are not installed", missing,
                  n_missing - 1);
}

static void apt_check(const struct check_context *context, const struct recipe_step *step, struct step_state *ret_state)
{
    dpkg_check(context, json_object_get(step->args, "packages"), ret_state);
}

static const struct step_arg apt_args[] = {{"packages", VALUE_PACKAGES, true}, {NULL, 0, false}};

const struct step_type type_apt = {
    .name = "apt", .args = apt_args, .check = apt_check, .has_fetch = true, .needs_live = true};

/* --- deb: one package file from an address --- */

static const struct step_arg deb_args[] = {
    {"package", VALUE_WORD, true},
    {"version", VALUE_VERSION, true},
    {"url", VALUE_URL, true},
    {"sha256", VALUE_SHA256, true},
    {NULL, 0, false},
};

static void deb_check(const struct check_context *context, const struct recipe_step *step, struct step_state *ret_state)
{
    json_t *packages = json_pack("{s:s}", arg_text(step, "package"), arg_text(step, "version"));

    dpkg_check(context, packages, ret_state);
    json_decref(packages);
}

const struct step_type type_deb = {
    .name = "deb", .args = deb_args, .check = deb_check, .has_fetch = true, .needs_live = true};
