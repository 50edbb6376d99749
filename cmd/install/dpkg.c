/* SPDX-License-Identifier: Apache-2.0 */
/* dpkg.c - the types apt and deb: packages in given versions. */
#include "base/error.h"
#include "types.h"

#include <fnmatch.h>
#include <string.h>

struct dpkg_package {
    char version[128];
    bool is_installed, is_broken; /* broken: half-installed, unpacked or half-configured */
    bool is_held;                 /* held by the administrator in its version */
};

static bool field(const char *from, const char *end, const char *name, char *ret_value, size_t bytes)
{
    size_t length = strlen(name);

    for (const char *line = from; line && line < end; line = memchr(line, '\n', (size_t)(end - line))) {
        line += *line == '\n';
        if ((size_t)(end - line) > length && strncmp(line, name, length) == 0) {
            const char *stop = memchr(line, '\n', (size_t)(end - line));
            size_t n;

            line += length;
            n = (size_t)((stop ? stop : end) - line);
            if (n >= bytes)
                return false;
            memcpy(ret_value, line, n);
            ret_value[n] = '\0';
            return true;
        }
        if (line == end)
            break;
    }
    return false;
}

/* Merges a paragraph about a package; of several architectures the installed one counts. */
static void merge_package(const char *from, const char *end, struct dpkg_package *package)
{
    char status[64], version[sizeof(package->version)];

    if (package->is_installed || !field(from, end, "Status: ", status, sizeof(status)))
        return;
    if (!field(from, end, "Version: ", version, sizeof(version)))
        version[0] = '\0';
    package->is_installed = strstr(status, " ok installed") != NULL;
    package->is_held = package->is_installed && strncmp(status, "hold ", 5) == 0;
    package->is_broken = !package->is_installed && !strstr(status, "not-installed") && !strstr(status, "config-files");
    if (package->is_installed || package->is_broken)
        memcpy(package->version, version, sizeof(version));
}

/* False: there is no package database (ret_package is zeroed). */
static bool dpkg_find(struct source *source, const char *name, struct dpkg_package *ret_package)
{
    struct source_text text = source_read(source, "/var/lib/dpkg/status");
    const char *at = text.text, *end = text.text + text.bytes;
    char line[160];
    size_t length;

    memset(ret_package, 0, sizeof(*ret_package));
    if (text.state != SOURCE_OK)
        return false;
    snprintf(line, sizeof(line), "Package: %s\n", name);
    length = strlen(line);
    while (at < end) {
        const char *stop = strstr(at, "\n\n");

        stop = stop ? stop : end;
        if ((size_t)(end - at) >= length && strncmp(at, line, length) == 0)
            merge_package(at, stop, ret_package);
        at = stop == end ? end : stop + 2;
    }
    return true;
}

void dpkg_check(const struct check_context *context, const json_t *packages, struct step_state *ret_state)
{
    int n_missing = 0, n_fine = 0;
    char missing[128] = "";
    const char *name;
    json_t *value;

    json_object_foreach((json_t *)packages, name, value)
    {
        const char *pin = json_string_value(value);
        struct dpkg_package package;

        dpkg_find(context->source, name, &package);
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
