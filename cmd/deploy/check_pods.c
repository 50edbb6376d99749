/* SPDX-License-Identifier: Apache-2.0 */
/* check_pods.c - problems of the pods of a job: Pod Security, volumes, images, networks. */
#include "deploy_check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TAG_LETTERS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"

static const char *const container_lists[] = {"initContainers", "containers", NULL};

/* A feature of the pod that the Pod Security levels baseline and restricted forbid. */
static const char *unsafe(const json_t *spec)
{
    const json_t *container, *volume, *port;
    size_t i, p;

    if (get_flag(spec, "hostNetwork") || get_flag(spec, "hostPID") || get_flag(spec, "hostIPC"))
        return "host namespaces (hostNetwork, hostPID or hostIPC)";
    json_array_foreach(get_key(spec, "volumes"), i, volume) if (get_key(volume, "hostPath")) return "hostPath volumes";
    for (size_t n = 0; container_lists[n]; n++)
        json_array_foreach(get_key(spec, container_lists[n]), i, container)
        {
            if (get_flag(container, "securityContext/privileged"))
                return "privileged";
            if (json_array_size(get(container, "securityContext/capabilities/add")) > 0)
                return "non-default capabilities";
            json_array_foreach(get_key(container, "ports"), p,
                               port) if (get_number(port, "hostPort", 0) > 0) return "hostPort";
        }
    return NULL;
}

static bool drops_all(const json_t *container)
{
    const json_t *entry;
    size_t i;

    json_array_foreach(get(container, "securityContext/capabilities/drop"), i,
                       entry) if (json_is_string(entry) && strcmp(json_string_value(entry), "ALL") == 0) return true;
    return false;
}

/* A setting that the level restricted additionally requires and the pod lacks. */
static const char *unstated(const json_t *spec)
{
    const json_t *container;
    size_t i;

    for (size_t n = 0; container_lists[n]; n++)
        json_array_foreach(get_key(spec, container_lists[n]), i, container)
        {
            if (!json_is_false(get(container, "securityContext/allowPrivilegeEscalation")))
                return "privilege escalation (allowPrivilegeEscalation is not false)";
            if (!drops_all(container))
                return "capabilities (not all are dropped)";
            if (!get_flag(container, "securityContext/runAsNonRoot") && !get_flag(spec, "securityContext/runAsNonRoot"))
                return "to run as root (runAsNonRoot is not true)";
            if (!*get_text(container, "securityContext/seccompProfile/type") &&
                !*get_text(spec, "securityContext/seccompProfile/type"))
                return "all system calls (no seccompProfile)";
        }
    return NULL;
}

static void check_security(struct check *check, const struct deploy_set *set)
{
    const json_t *space = get_item(check->snapshot, "namespaces", NULL, check->job->space);
    const char *level = get_label(space, "pod-security.kubernetes.io/enforce");
    const char *version = get_label(space, "pod-security.kubernetes.io/enforce-version");
    const char *what = unsafe(set->spec);
    struct check_text text = {0};

    if (!what && strcmp(level, "restricted") == 0)
        what = unstated(set->spec);
    if (!what || (strcmp(level, "baseline") != 0 && strcmp(level, "restricted") != 0))
        return;
    CHECK_FORMAT(text.says, "violates PodSecurity \"%s:%s\"", level, *version ? version : "latest");
    CHECK_FORMAT(text.why, "the pods want %s, which the namespace forbids: no pod will be created", what);
    CHECK_FORMAT(text.fix, "kubectl label --overwrite namespace %s pod-security.kubernetes.io/enforce=privileged",
                 check->job->space);
    check_add(check, CHECK_ERROR, "pod-security", "the API server", check->job->space, &text);
}

static void check_account(struct check *check, const struct deploy_set *set)
{
    const char *account = get_text(set->spec, "serviceAccountName");
    struct check_text text = {0};

    if (!*account || !check_knows(check, "serviceaccounts") || check_brings(check, "ServiceAccount", account) ||
        get_item(check->snapshot, "serviceaccounts", check->job->space, account))
        return;
    CHECK_FORMAT(text.says, "error looking up service account %s/%s: serviceaccount \"%s\" not found",
                 check->job->space, account, account);
    CHECK_FORMAT(text.why, "no pod of this account will be created");
    CHECK_FORMAT(text.fix, "kubectl -n %s create serviceaccount %s", check->job->space, account);
    check_add(check, CHECK_ERROR, "account-missing", "the API server", account, &text);
}

/* An existing claim without a volume. A claim with WaitForFirstConsumer needs no volume yet. */
static void check_bound(struct check *check, const json_t *claim)
{
    const json_t *class_name = get(claim, "spec/storageClassName");
    const char *name = json_is_string(class_name) ? json_string_value(class_name) : "";
    const json_t *class = get_item(check->snapshot, "storageclasses", NULL, name);
    bool has_provisioner = class && strcmp(get_text(class, "provisioner"), "kubernetes.io/no-provisioner") != 0;
    struct check_text text = {0};

    if (strcmp(get_text(claim, "status/phase"), "Pending") != 0 || !check_knows(check, "storageclasses") ||
        strcmp(get_text(class, "volumeBindingMode"), "WaitForFirstConsumer") == 0)
        return;
    CHECK_FORMAT(text.says, "pod has unbound immediate PersistentVolumeClaims");
    if (class)
        CHECK_FORMAT(text.why, "claim %s waits for a volume of StorageClass %s", get_name(claim), name);
    else if (*name)
        CHECK_FORMAT(text.why, "claim %s needs StorageClass %s, which does not exist", get_name(claim), name);
    else
        CHECK_FORMAT(text.why, "claim %s has no StorageClass, and no volume fits it", get_name(claim));
    CHECK_FORMAT(text.fix, "kubectl -n %s describe pvc %s", check->job->space, get_name(claim));
    check_add(check, has_provisioner ? CHECK_WARNING : CHECK_ERROR, "claim-unbound", "the scheduler", get_name(claim),
              &text);
}

static bool has_mode(const json_t *claim, const char *mode)
{
    const json_t *entry;
    size_t i;

    json_array_foreach(get(claim, "spec/accessModes"), i,
                       entry) if (json_is_string(entry) && strcmp(json_string_value(entry), mode) == 0) return true;
    return false;
}

/* Does the driver attach volumes of this claim to nodes? -1: unknown from its StorageClass. */
static int is_attached(const struct check *check, const json_t *claim)
{
    const json_t *class_name = get(claim, "spec/storageClassName"), *driver;
    const json_t *class = get_item(check->snapshot, "storageclasses", NULL,
                                   json_is_string(class_name) ? json_string_value(class_name) : "");

    driver = get_item(check->snapshot, "csidrivers", NULL, get_text(class, "provisioner"));
    return driver ? !json_is_false(get(driver, "spec/attachRequired")) : -1;
}

/* A volume for one node or one pod, used by pods on several nodes. */
static void check_shared(struct check *check, const struct deploy_set *set, const json_t *claim)
{
    struct check_text text = {0};
    const char *name = get_name(claim);
    int attached;

    CHECK_FORMAT(text.fix, "use a claim with ReadWriteMany (Filestore, Parallelstore) or ReadOnlyMany, or a bucket");
    if (set->count > 1 && has_mode(claim, "ReadWriteOncePod")) {
        CHECK_FORMAT(text.says,
                     "node has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod access "
                     "mode");
        CHECK_FORMAT(text.why, "claim %s is for one pod, and the job has %lld", name, set->count);
        check_add(check, CHECK_ERROR, "claim-access", "the scheduler", name, &text);
        return;
    }
    /* Pods that use whole nodes never share one. */
    if (set->count <= 1 || check_gpus(set) < 8 || !has_mode(claim, "ReadWriteOnce") ||
        has_mode(claim, "ReadWriteMany") || has_mode(claim, "ReadOnlyMany"))
        return;
    attached = is_attached(check, claim);
    if (attached == 0)
        return;
    CHECK_FORMAT(text.says, "Multi-Attach error for volume");
    CHECK_FORMAT(text.why, "claim %s is for one node (ReadWriteOnce), and the job has %lld pods on as many nodes%s",
                 name, set->count, attached < 0 ? "; volumes that nothing attaches, like NFS, would do" : "");
    check_add(check, attached > 0 ? CHECK_ERROR : CHECK_WARNING, "claim-access", "the attach controller", name, &text);
}

static void check_claim(struct check *check, const struct deploy_set *set, const char *claim)
{
    const json_t *there = get_item(check->snapshot, "persistentvolumeclaims", check->job->space, claim);
    struct check_text text = {0};

    if (!*claim || !check_knows(check, "persistentvolumeclaims") || check_brings(check, "PersistentVolumeClaim", claim))
        return;
    if (there) {
        check_bound(check, there);
        check_shared(check, set, there);
        return;
    }
    CHECK_FORMAT(text.says, "persistentvolumeclaim \"%s\" not found", claim);
    CHECK_FORMAT(text.why, "a pod waits for its volumes before it gets a node");
    CHECK_FORMAT(text.fix, "create the claim in namespace %s, or name another one", check->job->space);
    check_add(check, CHECK_ERROR, "claim-missing", "the scheduler", claim, &text);
}

static void check_driver(struct check *check, const char *driver)
{
    struct check_text text = {0};

    if (!*driver || !check_knows(check, "csidrivers") || get_item(check->snapshot, "csidrivers", NULL, driver))
        return;
    CHECK_FORMAT(text.says, "driver name %s not found in the list of registered CSI drivers", driver);
    CHECK_FORMAT(text.why, "pods stay in ContainerCreating: no driver can mount their volume");
    if (strncmp(driver, "gcsfuse", 7) == 0)
        CHECK_FORMAT(text.fix, "gcloud container clusters update CLUSTER --update-addons=GcsFuseCsiDriver=ENABLED");
    else
        CHECK_FORMAT(text.fix, "install the CSI driver %s", driver);
    check_add(check, CHECK_ERROR, "csi-missing", "the kubelet", driver, &text);
}

static void check_secret(struct check *check, const char *secret, const char *what)
{
    struct check_text text = {0};

    if (!*secret || !check_knows(check, "secrets") || check_brings(check, "Secret", secret) ||
        get_item(check->snapshot, "secrets", check->job->space, secret))
        return;
    CHECK_FORMAT(text.says, "secret \"%s\" not found", secret);
    CHECK_FORMAT(text.why, "%s", what);
    CHECK_FORMAT(text.fix, "create the Secret %s in namespace %s", secret, check->job->space);
    check_add(check, CHECK_ERROR, "secret-missing", "the kubelet", secret, &text);
}

static void check_config(struct check *check, const char *config, const char *what)
{
    struct check_text text = {0};

    if (!*config || !check_knows(check, "configmaps") || check_brings(check, "ConfigMap", config) ||
        get_item(check->snapshot, "configmaps", check->job->space, config))
        return;
    CHECK_FORMAT(text.says, "configmap \"%s\" not found", config);
    CHECK_FORMAT(text.why, "%s", what);
    CHECK_FORMAT(text.fix, "create the ConfigMap %s in namespace %s", config, check->job->space);
    check_add(check, CHECK_ERROR, "config-missing", "the kubelet", config, &text);
}

/* Environment variables with values from Secrets and ConfigMaps. */
static void check_variables(struct check *check, const json_t *container)
{
    static const char why[] = "the container is not started (CreateContainerConfigError)";
    const json_t *variable;
    size_t i;

    json_array_foreach(get_key(container, "env"), i, variable)
    {
        if (!get_flag(variable, "valueFrom/secretKeyRef/optional"))
            check_secret(check, get_text(variable, "valueFrom/secretKeyRef/name"), why);
        if (!get_flag(variable, "valueFrom/configMapKeyRef/optional"))
            check_config(check, get_text(variable, "valueFrom/configMapKeyRef/name"), why);
    }
    json_array_foreach(get_key(container, "envFrom"), i, variable)
    {
        if (!get_flag(variable, "secretRef/optional"))
            check_secret(check, get_text(variable, "secretRef/name"), why);
        if (!get_flag(variable, "configMapRef/optional"))
            check_config(check, get_text(variable, "configMapRef/name"), why);
    }
}

static void check_templates(struct check *check, const struct deploy_set *set)
{
    const json_t *claim;
    struct check_text text = {0};
    size_t i;

    json_array_foreach(get_key(set->spec, "resourceClaims"), i, claim)
    {
        const char *name = get_text(claim, "resourceClaimTemplateName");

        if (!*name || !check_knows(check, "resourceclaimtemplates") ||
            check_brings(check, "ResourceClaimTemplate", name) ||
            get_item(check->snapshot, "resourceclaimtemplates", check->job->space, name))
            continue;
        CHECK_FORMAT(text.says,
                     "resource claim template \"%s\": resourceclaimtemplate.resource.k8s.io \"%s\" not found", name,
                     name);
        CHECK_FORMAT(text.why, "no claim for devices can be made: pods stay pending");
        CHECK_FORMAT(text.fix, "create the ResourceClaimTemplate %s in namespace %s", name, check->job->space);
        check_add(check, CHECK_ERROR, "claim-template-missing", "the resource claim controller", name, &text);
    }
}

static void check_volumes(struct check *check, const struct deploy_set *set)
{
    const json_t *volume, *secret, *claim, *container;
    size_t i;

    for (size_t n = 0; container_lists[n]; n++)
        json_array_foreach(get_key(set->spec, container_lists[n]), i, container) check_variables(check, container);
    check_templates(check, set);
    json_array_foreach(get_key(set->spec, "volumes"), i, volume)
    {
        if (!get_flag(volume, "configMap/optional"))
            check_config(check, get_text(volume, "configMap/name"), "pods stay in ContainerCreating");
        check_claim(check, set, get_text(volume, "persistentVolumeClaim/claimName"));
        check_driver(check, get_text(volume, "csi/driver"));
        if (!get_flag(volume, "secret/optional"))
            check_secret(check, get_text(volume, "secret/secretName"), "pods stay in ContainerCreating");
    }
    json_array_foreach(get_key(set->spec, "imagePullSecrets"), i, secret) check_secret(
        check, get_text(secret, "name"), "without it images are pulled anonymously, which fails for private ones");
    json_array_foreach(check->job->documents, i, claim) if (strcmp(get_text(claim, "kind"), "PersistentVolume") == 0)
        check_driver(check, get_text(claim, "spec/csi/driver"));
}

/* The repository, without tag or digest: access is granted per repository. */
static size_t repository_of(const char *image)
{
    const char *slash = strrchr(image, '/'), *end = strpbrk(slash ? slash : image, ":@");

    return end ? (size_t)(end - image) : strlen(image);
}

/* The message of the first pod that failed to pull from the same repository, or NULL. */
static const char *pull_failure(const struct check *check, const char *image, const json_t **ret_pod)
{
    const json_t *pod, *state;
    size_t i, s, n = repository_of(image);

    for (int list = 0; list < 2; list++)
        json_array_foreach(get_items(check->snapshot, "pods"), i, pod) json_array_foreach(
            get(pod, list == 0 ? "status/containerStatuses" : "status/initContainerStatuses"), s, state)
        {
            const char *reason = get_text(state, "state/waiting/reason"), *other = get_text(state, "image");

            if ((strcmp(reason, "ImagePullBackOff") == 0 || strcmp(reason, "ErrImagePull") == 0) &&
                repository_of(other) == n && strncmp(other, image, n) == 0) {
                *ret_pod = pod;
                return get_text(state, "state/waiting/message");
            }
        }
    return NULL;
}

/* Names that the kubelet refuses to parse. Valid: [HOST[:PORT]/]PATH[:TAG][@DIGEST], with a lower-case path. */
static bool is_image(const char *image)
{
    const char *slash = strchr(image, '/'), *path = image;
    size_t host = slash ? (size_t)(slash - image) : 0, n;

    /* The first part is a host if it cannot be part of a path. */
    if (slash && (memchr(image, '.', host) || memchr(image, ':', host) || strncmp(image, "localhost/", 10) == 0))
        path = slash + 1;
    n = repository_of(path);
    if (n == 0 || !strchr("abcdefghijklmnopqrstuvwxyz0123456789", *path) ||
        strspn(path, "abcdefghijklmnopqrstuvwxyz0123456789._/-") < n || strstr(path, "//"))
        return false;
    path += n;
    if (*path == ':') {
        n = strcspn(path + 1, "@");
        if (n == 0 || n > 128 || strspn(path + 1, TAG_LETTERS) < n || strchr(".-", path[1]))
            return false;
        path += 1 + n;
    }
    return *path == '\0' || (*path == '@' && strchr(path, ':'));
}

static void check_image(struct check *check, const struct deploy_set *set)
{
    const json_t *container, *pod = NULL;
    size_t i;

    for (size_t n = 0; container_lists[n]; n++)
        json_array_foreach(get_key(set->spec, container_lists[n]), i, container)
        {
            const char *image = get_text(container, "image"), *message = pull_failure(check, image, &pod);
            struct check_text text = {0};

            if (*image && !is_image(image)) {
                CHECK_FORMAT(text.says, "couldn't parse image name \"%.200s\"", image);
                CHECK_FORMAT(text.why, "container %.63s has no valid image name: pods stay in InvalidImageName",
                             get_text(container, "name"));
                CHECK_FORMAT(
                    text.fix,
                    "write HOST/PATH:TAG; the path may only have lower-case letters, digits, '.', '_' and '-'");
                check_add(check, CHECK_ERROR, "image-name", "the kubelet", image, &text);
            }
            if (!message)
                continue;
            CHECK_FORMAT(text.says, "ImagePullBackOff: %s", message);
            CHECK_FORMAT(text.why, "pod %s/%s cannot pull from that repository right now", get_space(pod),
                         get_name(pod));
            CHECK_FORMAT(
                text.fix,
                "give the nodes' service account roles/artifactregistry.reader on the repository, or name a Secret in "
                "workload.imagePullSecrets");
            check_add(check, CHECK_ERROR, "image-pull", "the kubelet", image, &text);
        }
}

#define INTERFACES "networking.gke.io/interfaces"
#define DEFAULT_INTERFACE "networking.gke.io/default-interface"

/*
 * The list in the annotation of GKE, as a new reference; NULL: none, or a finding says what is wrong. The agent of
 * GKE's data plane refuses a pod without a default interface that is in the list.
 */
static json_t *read_interfaces(struct check *check, const struct deploy_set *set)
{
    const json_t *annotations = get_key(set->metadata, "annotations"), *list = get_key(annotations, INTERFACES),
                 *standard = get_key(annotations, DEFAULT_INTERFACE), *interface;
    json_error_t error;
    json_t *interfaces = json_is_string(list) ? json_loads(json_string_value(list), 0, &error) : NULL;
    struct check_text text = {0};
    bool is_listed = false;
    size_t i;

    if (!json_is_string(list))
        return NULL;
    json_array_foreach(interfaces, i, interface) is_listed |=
        json_is_string(standard) && strcmp(get_text(interface, "interfaceName"), json_string_value(standard)) == 0;
    if (!json_is_array(interfaces)) {
        CHECK_FORMAT(text.says, "failed to parse interface annotation: %.160s",
                     interfaces ? "it is not a list" : error.text);
        if (interfaces)
            CHECK_FORMAT(text.why, "the annotation " INTERFACES " has to be a list in JSON");
        else
            CHECK_FORMAT(text.why, "the annotation " INTERFACES " is not JSON: line %d, column %d of it", error.line,
                         error.column);
        CHECK_FORMAT(text.fix,
                     "write [{\"interfaceName\":\"eth0\",\"network\":\"default\"}, ...], without a comma at the "
                     "end");
    } else if (!json_is_string(standard)) {
        CHECK_FORMAT(text.says, "default interface must be specified for multi-nic pod");
        CHECK_FORMAT(text.why, "the pods have the annotation " INTERFACES " without " DEFAULT_INTERFACE);
        CHECK_FORMAT(text.fix, "add the annotation " DEFAULT_INTERFACE ": eth0");
    } else if (!is_listed) {
        CHECK_FORMAT(text.says, "default interface \"%.63s\" must be referenced in the interface annotation",
                     json_string_value(standard));
        CHECK_FORMAT(text.why, "no entry of " INTERFACES " has this interfaceName");
        CHECK_FORMAT(text.fix, "add {\"interfaceName\":\"%.63s\",\"network\":\"default\"} to the list",
                     json_string_value(standard));
    } else {
        return interfaces;
    }
    check_add(check, CHECK_ERROR, "network-annotation", "the kubelet", INTERFACES, &text);
    json_decref(interfaces);
    return NULL;
}

/* Each network must exist. */
static void check_networks(struct check *check, const struct deploy_set *set)
{
    json_t *interfaces = read_interfaces(check, set);
    const json_t *interface;
    struct check_text text = {0};
    size_t i;

    if (interfaces && get_key(check->snapshot, "groups") && !check_serves(check, "networking.gke.io", NULL)) {
        CHECK_FORMAT(text.says, "the pods start with one interface: nothing reads networking.gke.io/interfaces");
        CHECK_FORMAT(text.why, "the cluster has no multi-networking, so pods get no NICs for RDMA");
        CHECK_FORMAT(text.fix, "create the cluster with --enable-multi-networking, or set network.mode=host");
        check_add(check, CHECK_WARNING, "multi-network", "nobody", "networking.gke.io", &text);
    }
    json_array_foreach(interfaces, i, interface)
    {
        const char *network = get_text(interface, "network");

        if (!check_knows(check, "networks") || get_item(check->snapshot, "networks", NULL, network))
            continue;
        CHECK_FORMAT(text.says, "network \"%s\" not found", network);
        CHECK_FORMAT(text.why, "the pod's annotation names it for interface %s", get_text(interface, "interfaceName"));
        CHECK_FORMAT(text.fix, "kubectl get networks, and set network.networks to the names there");
        check_add(check, CHECK_ERROR, "network-missing", "the kubelet", network, &text);
    }
    json_decref(interfaces);
}

/* A request for devices: v1 has it below "exactly"; v1beta1 has its fields in the request itself. */
static void check_device_class(struct check *check, const json_t *request)
{
    const char *name = get_text(request, "exactly/deviceClassName");
    struct check_text text = {0};

    name = *name ? name : get_text(request, "deviceClassName");
    if (!*name || !check_knows(check, "deviceclasses") || get_item(check->snapshot, "deviceclasses", NULL, name))
        return;
    CHECK_FORMAT(text.says, "device class %s does not exist", name);
    CHECK_FORMAT(text.why, "the claim for NICs can not be satisfied: pods stay pending");
    CHECK_FORMAT(text.fix, "install DRANET on the node pool (GKE 1.34.1-gke.1829001 and later), or set "
                           "network.mode=multi");
    check_add(check, CHECK_ERROR, "device-class-missing", "the scheduler", name, &text);
}

static void check_device_classes(struct check *check)
{
    const json_t *document, *request;
    size_t i, r;

    json_array_foreach(check->job->documents, i, document)
    {
        bool is_template = strcmp(get_text(document, "kind"), "ResourceClaimTemplate") == 0;

        json_array_foreach(get(document, is_template ? "spec/spec/devices/requests" : "spec/devices/requests"), r,
                           request) check_device_class(check, request);
    }
}

/* Does a rule of a policy allow traffic from pods with these labels to this port? */
static bool lets_in(const json_t *rule, const json_t *labels, const json_t *space_labels, long long port)
{
    const json_t *from = get_key(rule, "from"), *ports = get_key(rule, "ports"), *entry;
    bool peer = json_array_size(from) == 0, open = json_array_size(ports) == 0;
    size_t i;

    json_array_foreach(from, i, entry)
    {
        const json_t *pods = get_key(entry, "podSelector"), *spaces = get_key(entry, "namespaceSelector");

        /* An IP block may include the addresses of the pods: assume that it does. */
        peer |= get_key(entry, "ipBlock") != NULL || ((pods || spaces) && (!pods || get_selected(labels, pods)) &&
                                                      (!spaces || get_selected(space_labels, spaces)));
    }
    json_array_foreach(ports, i, entry)
    {
        const json_t *number = get_key(entry, "port");
        long long first = get_number(entry, "port", 0);

        if (strcmp(get_text(entry, "protocol"), "UDP") == 0)
            continue;
        open |= !number || json_is_string(number) || first == port ||
                (first < port && port <= get_number(entry, "endPort", 0));
    }
    return peer && open;
}

static long long ssh_port(const struct deploy_set *set)
{
    const json_t *container, *variable;
    size_t i, e;

    json_array_foreach(get_key(set->spec, "containers"), i, container) json_array_foreach(
        get_key(container, "env"), e, variable) if (strcmp(get_text(variable, "name"), "EPKIT_SSH_PORT") ==
                                                    0) return atoll(get_text(variable, "value"));
    return 222;
}

/* Policies are additive: traffic is dropped only if no policy of the pod allows it. */
static void check_policies(struct check *check, const struct deploy_set *set)
{
    const json_t *labels = get_key(set->metadata, "labels"), *policy, *rule, *document;
    const json_t *space = get(get_item(check->snapshot, "namespaces", NULL, check->job->space), "metadata/labels");
    const char *closed = NULL;
    struct check_text text = {0};
    size_t i, r;

    if (get_flag(set->spec, "hostNetwork") || set->count < 2)
        return;
    json_array_foreach(check->job->documents, i,
                       document) if (strcmp(get_text(document, "kind"), "NetworkPolicy") == 0) return;
    json_array_foreach(get_items(check->snapshot, "networkpolicies"), i, policy)
    {
        if (!get_selected(labels, get(policy, "spec/podSelector")) ||
            (json_array_size(get(policy, "spec/policyTypes")) == 1 && !get(policy, "spec/ingress") &&
             strcmp(json_string_value(json_array_get(get(policy, "spec/policyTypes"), 0)) ?: "", "Egress") == 0))
            continue;
        closed = get_name(policy);
        json_array_foreach(get(policy, "spec/ingress"), r,
                           rule) if (lets_in(rule, labels, space, ssh_port(set))) return;
    }
    if (!closed)
        return;
    CHECK_FORMAT(text.says, "Connection timed out during banner exchange (ssh between the pods, port %lld)",
                 ssh_port(set));
    CHECK_FORMAT(text.why, "NetworkPolicy %s selects the pods, and no policy lets them reach each other", closed);
    CHECK_FORMAT(text.fix, "set networkPolicy.create=true");
    check_add(check, CHECK_ERROR, "network-policy", "ssh", closed, &text);
}

void check_pods(struct check *check)
{
    check_device_classes(check);
    for (int s = 0; s < check->job->n_sets; s++) {
        const struct deploy_set *set = &check->job->sets[s];

        check_quotas(check, set);
        if (!check->job->queue)
            check_limits(check, (size_t)s);
        check_security(check, set);
        check_account(check, set);
        check_volumes(check, set);
        check_image(check, set);
        check_networks(check, set);
        check_policies(check, set);
    }
}
