/* SPDX-License-Identifier: Apache-2.0 */
/* nccl.c - NCCL, the network plugin that it loads, and gIB. */
#include "software/parse.h"
#include "software/read.h"
#include "source/text.h"

#include <string.h>
#include <strings.h>

#define LIB "libnccl.so.2"
#define GIB "/usr/local/gib"

/* A wheel's library has the interface's number alone in its name; its version is that of the package. */
static const char *nccl_version(struct root *root, const char *path)
{
    struct root_text real = root_resolve(root, "%s", path);
    const char *version = stack_name_version(root, real.state == ROOT_OK ? real.text : path);
    const char *site = stack_without(root, path, "/nvidia/nccl/lib/" LIB);

    return *version || !*site ? version : python_version(root, site, "nvidia_nccl_cu");
}

bool stack_is_internal_net(const char *net)
{
    return strcasecmp(net, "IB") == 0 || strcasecmp(net, "Socket") == 0;
}

/*
 * As NCCL's documentation has it: NCCL_NET_PLUGIN=x is the library libnccl-net-x.so, or x itself where that is a file;
 * "none" is no plugin; not set, it is libnccl-net.so. NCCL_NET only chooses among the networks that a plugin offers.
 */
static void find_plugin(struct root *root, struct stack_nccl *nccl)
{
    struct libs_setting setting = libs_setting_of(root);
    const char *plugin = root_env(root, "NCCL_NET_PLUGIN"), *net = root_env(root, "NCCL_NET");

    nccl->plugin_name = "";
    nccl->plugin = libs_find(root, &setting, "libnccl-net.so");
    if (!plugin || !*plugin) {
        if (nccl->plugin.state != ROOT_ABSENT || (net && *net))
            nccl->plugin_name = "libnccl-net.so";
        return;
    }
    nccl->plugin = (struct lib_place){.state = ROOT_ABSENT, .path = "", .real = "", .found_by = ""};
    if (strcmp(plugin, "none") == 0 || strlen(plugin) > 1024)
        return;
    nccl->plugin_name =
        strstr(plugin, ".so") ? root_printf(root, "%s", plugin) : root_printf(root, "libnccl-net-%s.so", plugin);
    nccl->plugin = libs_find(root, &setting, nccl->plugin_name);
}

/* gIB has one file for each kind of machine, which differ by GPU. */
static const char *find_tuner_config(struct root *root, const struct topo *topo)
{
    static const char *const pairs[][2] = {{"GB200", "a4x"}, {"GB300", "a4x"}, {"B200", "a4"}, {"H200", "a3u"}};
    const char *name = topo->n_gpus ? topo->gpus[0].name : "";

    for (size_t i = 0; i < COUNT(pairs); i++) {
        const char *path = GIB "/configs/tuner_config_";

        if (!strstr(name, pairs[i][0]))
            continue;
        path = root_printf(root, "%s%s.txtpb", path, pairs[i][1]);
        return root_stat(root, "%s", path).state == ROOT_OK ? path : "";
    }
    return "";
}

void stack_read_nccl(struct root *root, const struct topo *topo, const struct python *python, struct stack_nccl *nccl)
{
    struct libs_setting setting = libs_setting_of(root);

    nccl->lib = libs_find(root, &setting, LIB);
    nccl->version = nccl->lib.state == ROOT_OK ? nccl_version(root, nccl->lib.path) : "";
    nccl->bundled = python_find(root, python, "nvidia/nccl/lib/" LIB);
    nccl->bundled_version = *nccl->bundled ? nccl_version(root, nccl->bundled) : "";
    /* Settings for a plugin that is not there would keep NCCL from starting. */
    nccl->gib =
        root_is_folder(root_stat(root, GIB)) && root_stat(root, GIB "/lib64/libnccl-net.so").state != ROOT_ABSENT ? GIB
                                                                                                                  : "";
    nccl->tuner_config = *nccl->gib ? find_tuner_config(root, topo) : "";
    stack_read_gib(root, nccl);
    find_plugin(root, nccl);
}
