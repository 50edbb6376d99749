/* SPDX-License-Identifier: Apache-2.0 */
/* stacks.c - the table of libraries for expert parallelism, and which of them Python finds. */
#include "stacks.h"
#include "read_software.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/*
 * Rows of one package are tried in their order, so those with a marker of their own come first. Sources: names of
 * repositories with the file, issue or release that says it; "wheel": the list of files, the METADATA and the Python of
 * the released wheel.
 */
/* clang-format off */
const struct stack stacks[] = {
    {.name = "epkit", .title = "epkit", .package = "epkit", .markers = TEXTS("epkit/compat/deep_ep"),
     .module = "epkit/_C.", .dist = "epkit", .install = "pip install ./epkit" /* the source tree: no index has it */,
     .torch = "2.3",
     .source = "pyproject.toml of epkit"},
    {.name = "hybrid-ep", .title = "HybridEP", .package = "deep_ep", .markers = TEXTS("deep_ep/hybrid_ep_buffer.py"),
     .module = "hybrid_ep_cpp.", .dist = "deep_ep",
     .install = "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP@hybrid-ep", .torch = "",
     .nvcc = "", .nvshmem_before = "3.5", .needs = STACK_NVLINK,
     .source = "deepseek-ai/DeepEP branch hybrid-ep, setup.py; #691"},
    {.name = "sgl-deep-ep", .title = "sgl-deep-ep", .package = "deep_ep", .markers = TEXTS("deep_ep/prerequisites.py"),
     .module = "deep_ep/_C.", .dist = "sgl-deep-ep", .since = "", .install = "pip install sgl-deep-ep", .torch = "2.10",
     .nccl = "2.30.4", .nvcc = "", .needs = STACK_NCCL_WHEEL | STACK_GIN,
     .source = "wheel sgl-deep-ep 0.1.2.post1; sgl-project/sglang#40671; deepseek-ai/DeepEP#710"},
    {.name = "deepep-v2.5", .title = "DeepEP 2.5", .package = "deep_ep",
     .markers = TEXTS("deep_ep/buffers/ep.py", "deep_ep/ep.py"), .module = "deep_ep/_C.", .dist = "deep_ep",
     .since = "2.5",
     .install = "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP", .torch = "2.10",
     .nccl = "2.32.3", .nvcc = "13.1", .needs = STACK_NCCL_WHEEL | STACK_GIN,
     .source = "wheel sgl-deep-ep-v25 0.1.0rc0, prerequisites.py"},
    {.name = "deepep-v2", .title = "DeepEP 2", .package = "deep_ep",
     .markers = TEXTS("deep_ep/buffers", "deep_ep/_C.*"), .module = "deep_ep/_C.", .dist = "deep_ep", .since = "2",
     .install = "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP@dd758ca", .torch = "2.10",
     .nccl = "2.30.4", .nvcc = "", .nvshmem_before = "3.5" /* its legacy classes, as of dd758ca */,
     .needs = STACK_NCCL_WHEEL | STACK_GIN, .source = "deepseek-ai/DeepEP#605, #629, #696, #710, #764"},
    {.name = "deepep-v1", .title = "DeepEP", .package = "deep_ep",
     .markers = TEXTS("deep_ep/buffer.py", "deep_ep/__init__.py"), .module = "deep_ep_cpp.", .dist = "deep_ep",
     .since = "1" /* UCCL's is 0.1.0 */,
     .install = "NVSHMEM_DIR=/usr/local/nvshmem pip install --no-build-isolation "
                "git+https://github.com/deepseek-ai/DeepEP@29d31c0",
     .torch = "", .needs = STACK_NVLINK, .source = "deepseek-ai/DeepEP 1.2.1, README.md; #211, #216, #309"},
    {.name = "sgl-deep-ep-v25", .title = "sgl-deep-ep-v25", .package = "deep_ep_v25", .markers = TEXTS("deep_ep_v25"),
     .module = "deep_ep_v25/_C.", .dist = "sgl-deep-ep-v25", .since = "",
     .install = "pip install --pre sgl-deep-ep-v25",
     .torch = "2.10", .nccl = "2.32.3", .nvcc = "13.1",
     .needs = STACK_NCCL_WHEEL | STACK_GIN,
     .source = "wheel sgl-deep-ep-v25 0.1.0rc0, prerequisites.py"},
    {.name = "nccl-ep", .title = "NCCL EP", .package = "nccl.ep", .markers = TEXTS("nccl/ep", "nccl_extensions"),
     .module = "nccl/_extensions/bindings/nccl_ep.", .dist = "nccl-extensions",
     .install = "pip install nccl-extensions", .nccl = "2.30" /* tensors need not be PyTorch's */, .nvcc = "",
     .needs = STACK_IS_PART,
     .source = "wheel nccl-extensions 0.1.0; NVIDIA/nccl release nccl4py-v0.3.1"},
    {.name = "nixl-ep", .title = "NIXL EP", .package = "nixl_ep",
     .markers = TEXTS("nixl_ep_cu13", "nixl_ep_cu12", "nixl_ep"), .module = "nixl_ep*/nixl_ep_cpp", .dist = "nixl",
     .install = "pip install nixl-cu13", .torch = "", .needs = STACK_UCX_DEVICE | STACK_IS_PART,
     .source = "wheel nixl-cu13 1.5.1"},
    {.name = "flashinfer-moe-ep", .title = "FlashInfer moe_ep", .package = "flashinfer.moe_ep",
     .markers = TEXTS("flashinfer/moe_ep"), .dist = "flashinfer-python", .install = "pip install flashinfer-python",
     .torch = "", .nvcc = "" /* without its caches */,
     .nvshmem_before = "3.6", .fixed = "0.6.8", .companions = TEXTS("flashinfer_cubin", "flashinfer_jit_cache"),
     .needs = STACK_NVLINK | STACK_NCCL_EP | STACK_IS_PART,
     .source = "wheel flashinfer-python 0.7.4; flashinfer-ai/flashinfer requirements.txt, #2943, #2960, #4781"},
    {.name = "uccl", .title = "uccl", .package = "uccl", .markers = TEXTS("uccl"), .dist = "uccl"},
    {.name = "mooncake", .title = "mooncake", .package = "mooncake", .markers = TEXTS("mooncake"),
     .dist = "mooncake-transfer-engine"},
    {.name = "mori", .title = "mori", .package = "mori", .markers = TEXTS("mori"), .dist = "mori"},
    {.name = "pplx_kernels", .title = "pplx_kernels", .package = "pplx_kernels", .markers = TEXTS("pplx_kernels"),
     .dist = "pplx-kernels"},
    {.name = NULL}};
/* clang-format on */

_Static_assert(COUNT(stacks) <= STACKS_MAX, "machine/doctor has room for a result of each row");

const struct stack *stack_find(const char *name)
{
    for (const struct stack *stack = stacks; stack->name; stack++)
        if (strcasecmp(stack->name, name) == 0)
            return stack;
    for (const struct stack *stack = stacks; stack->name; stack++)
        if (stack->since && strcmp(stack->dist, name) == 0)
            return stack;
    for (const struct stack *stack = stacks; stack->name; stack++)
        if (strcmp(stack->package, name) == 0 || strcmp(stack->dist, name) == 0)
            return stack;
    return NULL;
}

/* --- distributions --- */

/* "sgl_deep_ep-0.1.2.dist-info" is of "sgl-deep-ep"; nixl-cu13 and nixl are one. */
static bool is_dist(const char *file, const char *dist)
{
    for (; *dist; file++, dist++)
        if (*file != (*dist == '-' ? '_' : *dist))
            return false;
    if (strncmp(file, "_cu", 3) == 0)
        file += 3 + strspn(file + 3, "0123456789");
    return *file == '-' && text_ends(file, ".dist-info");
}

/* The packages with rows that a distribution contains, by its list of files: an object of true. */
static json_t *read_record(struct source_text file)
{
    json_t *packages = json_object();

    for (const struct stack *stack = stacks; stack->name; stack++) {
        char line[64];

        snprintf(line, sizeof(line), "\n%s/__init__.py,", stack->package);
        if (text_begins(file.text, line + 1) || strstr(file.text, line))
            json_object_set_new(packages, stack->package, json_true());
    }
    return packages;
}

/* Installed over each other, they leave a mixture, and the removal of one removes files of the other. */
static void find_owners(struct source *source, struct stack_installed *installed)
{
    FOR_NAMES (name, source_list(source, "%s", installed->folder)) {
        struct source_answer record;

        if (installed->n_owners == STACK_OWNERS_MAX)
            break;
        if (!text_ends(name, ".dist-info") || !(strcasestr(name, "ep") || is_dist(name, installed->stack->dist)))
            continue;
        record = source_fact(source, "packages-of-record", read_record, "%s/%s/RECORD", installed->folder, name);
        if (json_is_true(json_object_get(record.value, installed->stack->package)))
            installed->owners[installed->n_owners++] = software_without(source, name, ".dist-info");
    }
    if (installed->n_owners == 1)
        installed->n_owners = 0;
}

static const char *dist_version(struct source *source, const char *folder, const struct stack *stack)
{
    FOR_NAMES (name, source_list(source, "%s", folder))
        if (is_dist(name, stack->dist))
            return software_without(source, strchr(name, '-') + 1, ".dist-info");
    return "";
}

/* --- extensions --- */

/* The number after "_torch" in the name of an extension for one version of PyTorch: 214 for 2.14; "" for any. */
static const char *torch_tag(const char *name)
{
    const char *tag = strstr(name, "_torch");

    return tag ? tag + strlen("_torch") : "";
}

static void find_extension(struct source *source, struct stack_installed *installed, const char *package,
                           const char *torch)
{
    const char *module = installed->stack->module, *base = text_base(module), *folder = installed->folder;
    size_t above = (size_t)(base - module), n = strcspn(torch, ".");
    struct source_names names;

    /* "nixl_ep*" is the folder that was found. */
    if (above)
        folder = strchr(module, '*') ? source_printf(source, "%s/%s", folder, package)
                                     : source_printf(source, "%s/%.*s", folder, (int)above - 1, module);
    names = source_list(source, "%s", folder);
    installed->listed = names.state;
    for (size_t i = 0; i < names.n && !*installed->extension; i++) {
        const char *tag = torch_tag(names.names[i]);

        if (!text_begins(names.names[i], base) || !text_ends(names.names[i], ".so"))
            continue;
        /* PyTorch 2.14.1 imports "..._torch214". */
        if (*tag && *torch && (strncmp(tag, torch, n) != 0 || atoi(tag + n) != atoi(torch + n + (torch[n] == '.'))))
            installed->other_torch = source_printf(source, "%.*s.%d", (int)n, tag, atoi(tag + n));
        else
            installed->extension = source_printf(source, "%s/%s", folder, names.names[i]);
    }
    if (*installed->extension)
        installed->other_torch = "";
}

/* --- search --- */

/* The first file that begins as `path`, which ends with '*'. */
static const char *first_of(struct source *source, const char *path)
{
    const char *base = text_base(path);

    return software_first_with(source, source_printf(source, "%.*s", (int)(base - path), path),
                               source_printf(source, "%.*s", (int)strlen(base) - 1, base), "");
}

static const char *find_marker(struct source *source, const struct stack *stack, const char *folder)
{
    for (int i = 0; stack->markers[i]; i++) {
        const char *path = source_printf(source, "%s/%s", folder, stack->markers[i]);

        if (text_ends(path, "*") ? *first_of(source, path) : source_stat(source, "%s", path).state == SOURCE_OK)
            return stack->markers[i];
    }
    return NULL;
}

static bool has_package(const struct stacks_installed *found, const char *package)
{
    return ANY_OF(i, found->n, strcmp(found->stacks[i].stack->package, package) == 0);
}

static void add_stack(const struct software *software, struct stacks_installed *found, const struct stack *stack,
                      const char *folder, const char *marker)
{
    const struct software_deepep *deepep = &software->deepep;
    struct stack_installed *installed = &found->stacks[found->n];
    struct source *source = software->source;

    if (!stack->source) {
        found->unknown = source_printf(source, "%s%s%s", found->unknown, *found->unknown ? ", " : "", stack->title);
        return;
    }
    *installed = (struct stack_installed){.stack = stack,
                                          .folder = folder,
                                          .version = dist_version(source, folder, stack),
                                          .extension = "",
                                          .other_torch = "",
                                          .is_gone = !marker};
    if (marker && stack->module)
        find_extension(source, installed, marker, software->torch_version);
    if (marker && strcmp(stack->package, "deep_ep") == 0 && deepep->imported >= 0) {
        if (!*installed->version)
            installed->version = deepep->copies[deepep->imported].version;
        if (!*installed->extension && text_begins(stack->module, "deep_ep"))
            installed->extension = deepep->copies[deepep->imported].extension;
    }
    find_owners(source, installed);
    found->n++;
}

/* Where Python would find the stack; a package that another row has taken belongs to that one. */
static void search(const struct software *software, const struct python *python, struct stacks_installed *found,
                   const struct stack *stack)
{
    const struct software_deepep *deepep = &software->deepep;
    bool is_deepep = strcmp(stack->package, "deep_ep") == 0;
    const char *imported = deepep->imported >= 0 ? deepep->copies[deepep->imported].folder : "", *marker;

    for (size_t i = 0; i < python->n && found->n < STACKS_MAX; i++) {
        const char *folder = python->folders[i].path;

        if (!python->folders[i].on_path ||
            (is_deepep && strcmp(imported, source_printf(software->source, "%s/deep_ep", folder)) != 0))
            continue;
        marker = find_marker(software->source, stack, folder);
        if (marker) {
            add_stack(software, found, stack, folder, marker);
            return;
        }
    }
}

/* A distribution whose package another one has taken away, and no module of this name is in its place. */
static void search_gone(const struct software *software, const struct python *python, struct stacks_installed *found,
                        const struct stack *stack)
{
    struct source *source = software->source;

    if (!stack->since || has_package(found, stack->package) ||
        *python_find(source, python, source_printf(source, "%s.py", stack->package)))
        return;
    for (size_t i = 0; i < python->n && found->n < STACKS_MAX; i++) {
        const char *version = python->folders[i].on_path ? dist_version(source, python->folders[i].path, stack) : "";

        if (*version && strverscmp(version, stack->since) >= 0) {
            add_stack(software, found, stack, python->folders[i].path, NULL);
            return;
        }
    }
}

void software_read_stacks(const struct python *python, struct software *software)
{
    struct stacks_installed *found = &software->stacks;

    found->unknown = "";
    for (const struct stack *stack = stacks; stack->name; stack++)
        if (!has_package(found, stack->package))
            search(software, python, found, stack);
    for (const struct stack *stack = stacks; stack->name; stack++)
        search_gone(software, python, found, stack);
}
