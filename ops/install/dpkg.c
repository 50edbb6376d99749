/* SPDX-License-Identifier: Apache-2.0 */
/* dpkg.c - the types apt and deb: packages in given versions. */
#include "base/error.h"
#include "types.h"

#include <fnmatch.h>
#include <string.h>

/* --- the database --- */

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

/* Takes over what a paragraph says about a package; one of several architectures that is installed counts. */
static void take(const char *from, const char *end, struct dpkg_package *package)
{
    char status[64], version[sizeof(package->version)];

    if (package->is_installed || !field(from, end, "Status: ", status, sizeof(status)))
        return;
    if (!field(from, end, "Version: ", version, sizeof(version)))
        version[0] = '\0';
    package->is_installed = strstr(status, " ok installed") != NULL;
    package->is_broken = !package->is_installed && !strstr(status, "not-installed") && !strstr(status, "config-files");
    if (package->is_installed || package->is_broken)
        memcpy(package->version, version, sizeof(version));
}

bool dpkg_find(struct root *root, const char *name, struct dpkg_package *ret_package)
{
    struct root_text text = root_read(root, "/var/lib/dpkg/status");
    const char *at = text.text, *end = text.text + text.bytes;
    char line[160];
    size_t length;

    memset(ret_package, 0, sizeof(*ret_package));
    if (text.state != ROOT_OK)
        return false;
    snprintf(line, sizeof(line), "Package: %s\n", name);
    length = strlen(line);
    while (at < end) {
        const char *stop = strstr(at, "\n\n");

        stop = stop ? stop : end;
        if ((size_t)(end - at) >= length && strncmp(at, line, length) == 0)
            take(at, stop, ret_package);
        at = stop == end ? end : stop + 2;
    }
    return true;
}

/* Is `version` what the pin says? A pin may hold * and ?, which match as in a file name. */
static bool fits(const char *pin, const char *version)
{
    return fnmatch(pin, version, 0) == 0;
}

static const char *direction(const struct check_context *context, const char *version, const char *pin)
{
    int order;

    if (strpbrk(pin, "*?") || !context->compare)
        return "other";
    order = context->compare(version, pin);
    return order < 0 ? "older" : order == 1 ? "newer" : "other";
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

        dpkg_find(context->root, name, &package);
        if (package.is_broken) {
            state_set(ret_state, STEP_PARTIAL, "%s %s is half installed", name, package.version);
            return;
        }
        if (package.is_installed && !fits(pin, package.version)) {
            state_set(ret_state, STEP_WRONG, "%s %s is installed, %s than %s", name, package.version,
                      direction(context, package.version, pin), pin);
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

/* --- scripts --- */

/*
 * apt keeps its lists and downloads in the folder of the recipe's state: the machine's own stay as they are, and go
 * away with the recipe.
 */
static const char apt_function[] =
    "epkit_apt() {\n"
    "    apt-get -q -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 -o Dpkg::Options::=--force-confold \\\n"
    "        -o Dir::State::lists=\"$EPKIT_STATE/apt/lists\" -o Dir::Cache=\"$EPKIT_STATE/apt/cache\" \\\n"
    "        -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= \\\n"
    "        -o APT::Update::Post-Invoke::= -o APT::Update::Post-Invoke-Success::= \"$@\"\n"
    "}\n"
    "epkit_mark() {\n"
    "    apt-mark -o Dir::State::lists=\"$EPKIT_STATE/apt/lists\" -o Dir::Cache=\"$EPKIT_STATE/apt/cache\" \"$@\"\n"
    "}\n"
    "epkit_packages() {\n"
    "    dpkg-query -W -f='${db:Status-Abbrev} ${binary:Package} ${Version}\\n' |\n"
    "        sed -n 's/^.[^cn][^ ]* *\\([^ ]*\\) \\([^ ]*\\)$/\\1 \\2/p' | sort\n"
    "}\n"
    "mkdir -p \"$EPKIT_STATE/apt/lists/partial\" \"$EPKIT_STATE/apt/cache/archives/partial\"\n"
    /* Downloads are made by apt's own user. */
    "if id _apt >/dev/null 2>&1; then\n"
    "    chown _apt \"$EPKIT_STATE/apt/lists/partial\" \"$EPKIT_STATE/apt/cache/archives/partial\"\n"
    "fi\n";

/* What an interrupted dpkg left is completed first. */
static const char repair[] = "dpkg --configure -a --force-confold\nepkit_apt install -y --fix-broken\n";

/* The packages with the versions, as arguments of apt-get. */
static void package_words(FILE *script, const json_t *packages)
{
    const char *name;
    json_t *value;

    json_object_foreach((json_t *)packages, name, value)
    {
        const char *pin = json_string_value(value);
        char word[320];

        snprintf(word, sizeof(word), "%s%s%s", name, strcmp(pin, "*") == 0 ? "" : "=",
                 strcmp(pin, "*") == 0 ? "" : pin);
        fputc(' ', script);
        script_word(script, word);
    }
}

static void install_command(FILE *script, const char *option)
{
    fprintf(script, "epkit_apt install -y%s --no-install-recommends --allow-downgrades --allow-change-held-packages",
            option);
}

static void keep_packages(FILE *script)
{
    fputs("if [ ! -e \"$EPKIT_BEFORE/packages\" ]; then\n"
          "    mkdir -p \"$EPKIT_BEFORE\"\n"
          "    epkit_packages >\"$EPKIT_BEFORE/packages.new\"\n"
          "    epkit_mark showauto | sort >\"$EPKIT_BEFORE/auto\"\n"
          "    if [ -e \"$EPKIT_ROOT/var/lib/apt/extended_states\" ]; then\n"
          "        cp -a \"$EPKIT_ROOT/var/lib/apt/extended_states\" \"$EPKIT_BEFORE/extended_states\"\n"
          "    fi\n"
          "    sync\n"
          "    mv \"$EPKIT_BEFORE/packages.new\" \"$EPKIT_BEFORE/packages\"\n"
          "fi\n",
          script);
}

static void note_packages(FILE *script)
{
    fputs("epkit_packages >\"$EPKIT_BEFORE/after.new\"\nsync\nmv \"$EPKIT_BEFORE/after.new\" "
          "\"$EPKIT_BEFORE/after\"\n",
          script);
}

static void apt_fetch(FILE *script, const struct recipe_step *step)
{
    const json_t *packages = json_object_get(step->args, "packages");

    fputs(apt_function, script);
    fputs("dpkg --configure -a --force-confold\nepkit_apt update\n", script);
    install_command(script, " --download-only");
    package_words(script, packages);
    fputc('\n', script);
}

static void apt_apply(FILE *script, const struct recipe_step *step)
{
    fputs(apt_function, script);
    keep_packages(script);
    fputs(repair, script);
    install_command(script, "");
    package_words(script, json_object_get(step->args, "packages"));
    fputc('\n', script);
    note_packages(script);
}

/*
 * One transaction removes what the step brought and brings back the versions that it replaced. If it would remove
 * anything else (the user has installed something that needs it), nothing is done.
 */
static void undo_packages(FILE *script, const json_t *packages, const char *name)
{
    const char *key;
    json_t *value;

    fputs(apt_function, script);
    fputs("dpkg --configure -a --force-confold\n"
          "epkit_packages >\"$EPKIT_STATE/now\"\n"
          "set --\n"
          "if [ -e \"$EPKIT_BEFORE/packages\" ]; then\n"
          "    if [ ! -e \"$EPKIT_BEFORE/after\" ]; then cp \"$EPKIT_STATE/now\" \"$EPKIT_BEFORE/after\"; fi\n"
          "    while read -r package version; do\n"
          "        if ! grep -qxF \"$package $version\" \"$EPKIT_BEFORE/after\"; then continue; fi\n"
          "        if grep -qxF \"$package $version\" \"$EPKIT_BEFORE/packages\"; then continue; fi\n"
          "        old=$(sed -n \"s/^$(printf %s \"$package\" | sed 's/[.[\\*^$]/\\\\&/g') //p\" "
          "\"$EPKIT_BEFORE/packages\")\n"
          "        if [ -n \"$old\" ]; then set -- \"$@\" \"$package=$old\"; else set -- \"$@\" \"$package-\"; fi\n"
          "    done <\"$EPKIT_STATE/now\"\n"
          "else\n"
          "    echo 'what was installed before this step is not known: its own packages are removed alone'\n",
          script);
    if (name)
        fprintf(script, "    if grep -q '^%s[: ]' \"$EPKIT_STATE/now\"; then set -- \"$@\" '%s-'; fi\n", name, name);
    json_object_foreach((json_t *)packages, key, value)
        fprintf(script, "    if grep -q '^%s[: ]' \"$EPKIT_STATE/now\"; then set -- \"$@\" '%s-'; fi\n", key, key);
    fputs(
        "fi\n"
        "if [ $# -gt 0 ]; then\n"
        "    for word in \"$@\"; do case $word in *=*) epkit_apt update; break ;; esac; done\n"
        "    for word in $(epkit_apt install -s --no-install-recommends --allow-downgrades "
        "--allow-change-held-packages \"$@\" |\n"
        "        sed -n 's/^\\(Remv\\|Purg\\) \\([^ ]*\\).*/\\2/p'); do\n"
        "        for mine in \"$@\"; do\n"
        "            case \"$mine\" in \"$word-\" | \"$word:\"*-) continue 2 ;; esac\n"
        "        done\n"
        "        echo \"not undone: $word was installed later and needs what this step installed; remove it first\" "
        ">&2\n"
        "        exit 1\n"
        "    done\n"
        "    epkit_apt install -y --purge --no-install-recommends --allow-downgrades --allow-change-held-packages "
        "\"$@\"\n"
        "fi\n"
        "if [ -e \"$EPKIT_BEFORE/auto\" ]; then\n"
        "    epkit_mark showauto | sort >\"$EPKIT_STATE/now\"\n"
        "    manual=$(comm -23 \"$EPKIT_BEFORE/auto\" \"$EPKIT_STATE/now\")\n"
        "    for package in $manual; do\n"
        "        if dpkg-query -W \"$package\" >/dev/null 2>&1; then epkit_mark auto \"$package\" >/dev/null; fi\n"
        "    done\n"
        /* apt writes this file anew in another order; the same set of packages is the same file again. */
        "    epkit_mark showauto | sort >\"$EPKIT_STATE/now\"\n"
        "    states=\"$EPKIT_ROOT/var/lib/apt/extended_states\"\n"
        "    if cmp -s \"$EPKIT_BEFORE/auto\" \"$EPKIT_STATE/now\"; then\n"
        "        if [ -e \"$EPKIT_BEFORE/extended_states\" ]; then cp -a \"$EPKIT_BEFORE/extended_states\" \"$states\"\n"
        "        else rm -f \"$states\"; fi\n"
        "    fi\n"
        "fi\n"
        "rm -f \"$EPKIT_STATE/now\"\n",
        script);
}

static void apt_undo(FILE *script, const struct recipe_step *step)
{
    undo_packages(script, json_object_get(step->args, "packages"), NULL);
}

static void apt_check(const struct check_context *context, const struct recipe_step *step, struct step_state *ret_state)
{
    dpkg_check(context, json_object_get(step->args, "packages"), ret_state);
}

static const struct step_arg apt_args[] = {{"packages", ARG_PACKAGES, true}, {NULL, 0, false}};

const struct step_type type_apt = {
    .name = "apt",
    .args = apt_args,
    .check = apt_check,
    .fetch = apt_fetch,
    .apply = apt_apply,
    .undo = apt_undo,
    .needs_live = true,
};

/* --- deb: one package file from an address --- */

static const struct step_arg deb_args[] = {
    {"package", ARG_WORD, true},
    {"version", ARG_VERSION, true},
    {"url", ARG_URL, true},
    {"sha256", ARG_SHA256, true},
    {NULL, 0, false},
};

static void deb_check(const struct check_context *context, const struct recipe_step *step, struct step_state *ret_state)
{
    json_t *packages = json_pack("{s:s}", arg_text(step, "package"), arg_text(step, "version"));

    dpkg_check(context, packages, ret_state);
    json_decref(packages);
}

/* apt's own downloader: it knows the machine's proxies, and its checksum is that of the recipe. */
static void deb_fetch(FILE *script, const struct recipe_step *step)
{
    fputs("mkdir -p \"$EPKIT_STATE/fetch\"\n/usr/lib/apt/apt-helper download-file ", script);
    script_word(script, arg_text(step, "url"));
    fputs(" \"$EPKIT_STATE/fetch/$EPKIT_STEP.deb\" ", script);
    fprintf(script, "SHA256:%s\n", arg_text(step, "sha256"));
}

static void deb_apply(FILE *script, const struct recipe_step *step)
{
    fputs(apt_function, script);
    keep_packages(script);
    fputs(repair, script);
    fprintf(script, "printf '%%s  %%s\\n' '%s' \"$EPKIT_STATE/fetch/$EPKIT_STEP.deb\" | sha256sum --check --quiet\n",
            arg_text(step, "sha256"));
    install_command(script, "");
    fputs(" \"$EPKIT_STATE/fetch/$EPKIT_STEP.deb\"\n", script);
    note_packages(script);
}

static void deb_undo(FILE *script, const struct recipe_step *step)
{
    undo_packages(script, NULL, arg_text(step, "package"));
}

const struct step_type type_deb = {
    .name = "deb",
    .args = deb_args,
    .check = deb_check,
    .fetch = deb_fetch,
    .apply = deb_apply,
    .undo = deb_undo,
    .needs_live = true,
};
