/* SPDX-License-Identifier: Apache-2.0 */
/* stack.c - the software of a machine, read in one go. */
#include "base/error.h"
#include "software/read.h"
#include "source/text.h"

#include <stdlib.h>
#include <string.h>

static const char *find_cuda(struct root *root)
{
    const char *const homes[] = {root_env(root, "CUDA_HOME"), root_env(root, "CUDA_PATH"), "/usr/local/cuda"};
    struct root_names names;

    for (size_t i = 0; i < COUNT(homes); i++)
        if (homes[i] && *homes[i] == '/' && root_is_folder(root_stat(root, "%s", homes[i])))
            return root_printf(root, "%s", homes[i]);
    names = root_list(root, "/usr/local");
    for (size_t i = names.n; i-- > 0;)
        if (strncmp(names.names[i], "cuda-", 5) == 0 &&
            root_is_folder(root_stat(root, "/usr/local/%s", names.names[i])))
            return root_printf(root, "/usr/local/%s", names.names[i]);
    return "";
}

static const char *list_python(struct root *root, const struct python *python)
{
    const char *list = "";

    for (size_t i = 0; i < python->n; i++)
        if (python->folders[i].on_path)
            list = root_printf(root, "%s%s%s", list, *list ? ", " : "", python->folders[i].path);
    return list;
}

ep_status stack_read(struct root *root, const struct topo *topo, struct stack **ret_stack)
{
    struct stack *stack = calloc(1, sizeof(*stack));
    struct python *python = calloc(1, sizeof(*python));

    if (!stack || !python) {
        free(stack);
        free(python);
        return ep_fail(EP_E_MEMORY, "the description of the software");
    }
    stack->root = root;
    os_read(root, &stack->os);
    stack_read_driver(root, topo, &stack->driver);
    stack_read_verbs(root, &stack->verbs);
    stack_read_python(root, python);
    stack_read_deepep(root, python, &stack->deepep);
    stack_read_nvshmem(root, python, &stack->deepep, &stack->nvshmem);
    stack_read_nccl(root, topo, python, &stack->nccl);
    stack->cuda_home = find_cuda(root);
    stack->python_paths = list_python(root, python);
    free(python);
    *ret_stack = stack;
    return EP_OK;
}

void stack_free(struct stack *stack)
{
    free(stack);
}
