/* SPDX-License-Identifier: Apache-2.0 */
/* The findings of deploy check for manifests and snapshots, above all those that only a kubelet would report
 * (tests/deploy/cluster.bats compares the rest with a real cluster). */
#include "unit.h"

#include "cmd/deploy/deploy.h"

static const char job_text[] =
    "apiVersion: batch/v1\nkind: Job\nmetadata: {name: j, namespace: ns}\nspec:\n  parallelism: 2\n  template:\n"
    "    metadata:\n      labels: {app: j}\n"
    "      annotations: {networking.gke.io/default-interface: eth1,\n"
    "        networking.gke.io/interfaces: '[{\"interfaceName\":\"eth1\",\"network\":\"rdma-0\"}]'}\n"
    "    spec:\n      serviceAccountName: runner\n      imagePullSecrets: [{name: pull}]\n"
    "      tolerations: [{key: nvidia.com/gpu, operator: Exists}]\n"
    "      volumes:\n      - {name: b, csi: {driver: gcsfuse.csi.storage.gke.io}}\n"
    "      - {name: s, secret: {secretName: keys}}\n      - {name: p, persistentVolumeClaim: {claimName: data}}\n"
    "      containers:\n      - name: c\n        image: registry.example/team/nemo:25.11\n"
    "        env: [{name: EPKIT_STACK, value: host}]\n"
    "        resources: {limits: {nvidia.com/gpu: 8, cpu: 500m}}\n";

/* A cluster on which that job runs. Each case changes one thing in it. */
static const char cluster_text[] =
    "{'epkit_cluster':1,'version':'v1.33.5-gke.1162000','groups':['v1','batch/v1','networking.gke.io/v1'],"
    "'unread':{},'items':{"
    "'namespaces':[{'metadata':{'name':'ns','labels':{'team':'a'}}}],"
    "'nodes':[{'metadata':{'name':'n0','labels':{'cloud.google.com/gke-accelerator':'nvidia-b200',"
    "'cloud.google.com/gce-topology-block':'b','iam.gke.io/gke-metadata-server-enabled':'true'}},"
    "'spec':{'taints':[{'key':'nvidia.com/gpu','value':'present','effect':'NoSchedule'}]},"
    "'status':{'conditions':[{'type':'Ready','status':'True'}],"
    "'allocatable':{'nvidia.com/gpu':'16','cpu':'4','memory':'8Gi','pods':'110'},'capacity':{'nvidia.com/gpu':'16'}}}],"
    "'pods':[],'resourcequotas':[],'networkpolicies':[],'serviceaccounts':[{'metadata':{'name':'runner',"
    "'namespace':'ns'}}],'secrets':[{'metadata':{'name':'keys','namespace':'ns'}},{'metadata':{'name':'pull',"
    "'namespace':'ns'}}],'persistentvolumeclaims':[{'metadata':{'name':'data','namespace':'ns'}}],"
    "'csidrivers':[{'metadata':{'name':'gcsfuse.csi.storage.gke.io'}}],"
    "'daemonsets':[{'metadata':{'name':'dcgm-exporter'}}],'networks':[{'metadata':{'name':'rdma-0'}}]}}";

static json_t *load(const char *text)
{
    char copy[8192];
    json_t *value;

    snprintf(copy, sizeof(copy), "%s", text);
    for (char *at = copy; *at; at++)
        if (*at == '\'')
            *at = '"';
    value = json_loads(copy, JSON_DECODE_ANY, NULL);
    assert_non_null(value);
    return value;
}

static json_t *parse(const char *text)
{
    json_t *documents = NULL;

    if (deploy_manifest_parse("m", text, strlen(text), &documents) != EP_OK)
        print_message("%s\n", ep_last_error());
    assert_non_null(documents);
    return documents;
}

/* Replaces the value at a path (keys and indices separated by '|') by `value`. */
static void change(json_t *object, const char *path, const char *value)
{
    char copy[256], *state = NULL, *key, *next;

    snprintf(copy, sizeof(copy), "%s", path);
    key = strtok_r(copy, "|", &state);
    while ((next = strtok_r(NULL, "|", &state))) {
        object = json_is_array(object) ? json_array_get(object, (size_t)(*key - '0')) : json_object_get(object, key);
        assert_non_null(object);
        key = next;
    }
    assert_int_equal(json_object_set_new(object, key, load(value)), 0);
}

static json_t *check_job(const char *text, const char *path, const char *value)
{
    json_t *documents = parse(text), *snapshot = load(cluster_text), *findings;
    struct deploy_job job;

    if (path)
        change(snapshot, path, value);
    assert_int_equal(deploy_snapshot_check(snapshot), EP_OK);
    assert_int_equal(deploy_job_find(documents, "default", &job), EP_OK);
    findings = deploy_check(snapshot, &job);
    assert_non_null(findings);
    json_decref(snapshot);
    json_decref(documents);
    return findings;
}

static json_t *check(const char *path, const char *value)
{
    return check_job(job_text, path, value);
}

TEST(test_nothing_found)
{
    json_t *findings = check(NULL, NULL);

    if (json_array_size(findings))
        json_dumpf(findings, stdout, JSON_INDENT(1));
    assert_int_equal(json_array_size(findings), 0);
    json_decref(findings);
}

TEST(test_findings)
{
    static const struct {
        const char *path, *value, *id, *says;
    } cases[] = {
        {"groups", "['v1','networking.gke.io/v1']", "api-missing",
         "no matches for kind \"Job\" in version \"batch/v1\""},
        {"items|namespaces", "[]", "namespace-missing", "namespaces \"ns\" not found"},
        {"items|csidrivers", "[]", "csi-missing",
         "driver name gcsfuse.csi.storage.gke.io not found in the list of registered CSI drivers"},
        {"items|secrets",
         "[{'metadata':{'name':'keys','namespace':'ns'}},{'metadata':{'name':'pull','namespace':'no'}}]",
         "secret-missing", "secret \"pull\" not found"},
        {"items|secrets", "[{'metadata':{'name':'pull','namespace':'ns'}}]", "secret-missing",
         "secret \"keys\" not found"},
        {"items|persistentvolumeclaims", "[]", "claim-missing", "persistentvolumeclaim \"data\" not found"},
        {"items|networks", "[{'metadata':{'name':'rdma-1'}}]", "network-missing", "network \"rdma-0\" not found"},
        {"groups", "['v1','batch/v1']", "multi-network",
         "the pods start with one interface: nothing reads networking.gke.io/interfaces"},
        {"items|daemonsets", "[]", "dcgm", "no metrics of GPUs"},
        {"version", "'v1.31.7-gke.1264999'", "gke-version", "GKE v1.31.7-gke.1264999"},
        {"items|pods",
         "[{'metadata':{'name':'x','namespace':'o'},'status':{'containerStatuses':[{'image':"
         "'registry.example/team/nemo:25.04','state':{'waiting':{'reason':'ImagePullBackOff','message':'denied'}}}]}}]",
         "image-pull", "ImagePullBackOff: denied"},
        {"items|networkpolicies", "[{'metadata':{'name':'deny'},'spec':{'podSelector':{},'policyTypes':['Ingress']}}]",
         "network-policy", "Connection timed out during banner exchange (ssh between the pods, port 222)"},
        {"items|networkpolicies",
         "[{'metadata':{'name':'http'},'spec':{'podSelector':{},'ingress':[{'from':[{'podSelector':{}}],'ports':["
         "{'port':80}]}]}}]",
         "network-policy", "Connection timed out during banner exchange (ssh between the pods, port 222)"},
        {"items|nodes|0|metadata|labels|cloud.google.com/gke-gpu-driver-version", "'latest'", "driver-managed",
         "0/1 nodes are available"},
        {"items|nodes|0|metadata|labels|iam.gke.io/gke-metadata-server-enabled", "'false'", "workload-identity",
         "PermissionDenied desc = failed to get GCS bucket"},
        {"items|nodes|0|spec|unschedulable", "true", "nodes", "0/1 nodes are available"},
        {"items|nodes|0|status|allocatable|nvidia.com/gpu", "'0x10'", "nodes", "0/1 nodes are available"},
        {"items|nodes|0|status|allocatable|nvidia.com/gpu", "'-16'", "nodes", "0/1 nodes are available"},
        {"items|pods",
         "[{'metadata':{'name':'x','namespace':'o'},'spec':{'nodeName':'n0','containers':[{'resources':{'requests':{"
         "'nvidia.com/gpu':'1'}}}]},'status':{'phase':'Running'}}]",
         "nodes", "0/1 nodes are available"},
        {"items|resourcequotas",
         "[{'metadata':{'name':'q'},'spec':{'hard':{'requests.nvidia.com/gpu':'24'}},'status':{'used':{"
         "'requests.nvidia.com/gpu':'10'}}}]",
         "namespace-quota",
         "exceeded quota: q, requested: requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=18, limited: "
         "requests.nvidia.com/gpu=24"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        json_t *findings = check(cases[i].path, cases[i].value), *finding = json_array_get(findings, 0);

        if (json_array_size(findings) != 1) {
            print_message("case %zu, %s:\n", i, cases[i].id);
            json_dumpf(findings, stdout, JSON_INDENT(1));
        }
        assert_int_equal(json_array_size(findings), 1);
        assert_string_equal(json_string_value(json_object_get(finding, "id")), cases[i].id);
        assert_string_equal(json_string_value(json_object_get(finding, "says")), cases[i].says);
        assert_true(strlen(json_string_value(json_object_get(finding, "why"))) > 0);
        assert_true(strlen(json_string_value(json_object_get(finding, "fix"))) > 0);
        json_decref(findings);
    }
}

/* A harmless change of the cluster must cause no finding. */
TEST(test_harmless)
{
    static const char *const cases[][2] = {
        {"items|networkpolicies", "[{'metadata':{'name':'x'},'spec':{'podSelector':{'matchLabels':{'app':'k'}}}}]"},
        {"items|networkpolicies", "[{'metadata':{'name':'x'},'spec':{'podSelector':{},'policyTypes':['Egress']}}]"},
        {"items|networkpolicies", "[{'metadata':{'name':'x'},'spec':{'podSelector':{},'ingress':[{}]}}]"},
        {"items|networkpolicies", "[{'metadata':{'name':'x'},'spec':{'podSelector':{},'ingress':[{'from':["
                                  "{'namespaceSelector':{'matchLabels':{'team':'a'}}}],'ports':[{'port':200,'endPort':"
                                  "300}]}]}}]"},
        {"version", "'v1.31.7-gke.1265000'"},
        {"version", "'v1.32.0-gke.1'"},
        {"items|pods", "[{'metadata':{'name':'x','namespace':'o'},'spec':{'nodeName':'n0','containers':[{'resources':{"
                       "'requests':{'nvidia.com/gpu':'8'}}}]},'status':{'phase':'Succeeded'}}]"},
        {"unread", "{'csidrivers':'forbidden'}"},
        {"items|nodes|0|status|allocatable|nvidia.com/gpu", "'1k'"},
        {"items|resourcequotas", "[{'metadata':{'name':'q'},'spec':{'hard':{'requests.nvidia.com/gpu':'1k'}}}]"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        json_t *findings = check(cases[i][0], cases[i][1]);

        if (json_array_size(findings))
            json_dumpf(findings, stdout, JSON_INDENT(1));
        assert_int_equal(json_array_size(findings), 0);
        json_decref(findings);
    }
}

#define TERMS "{requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: "

/* Nodes by the labels that accelerator, targetNodes and avoidNodes of the chart require. */
TEST(test_choice_of_nodes)
{
    static const struct {
        const char *spec;
        size_t n_findings;
    } cases[] = {
        {"nodeSelector: {cloud.google.com/gke-accelerator: nvidia-b200}", 0},
        {"nodeSelector: {cloud.google.com/gke-accelerator: nvidia-h200-141gb}", 1},
        {"affinity: {nodeAffinity: " TERMS
         "[{matchExpressions: [{key: cloud.google.com/gce-topology-block, operator: In, values: [a, b]}]}]}}}",
         0},
        {"affinity: {nodeAffinity: " TERMS
         "[{matchExpressions: [{key: cloud.google.com/gce-topology-block, operator: Exists}, "
         "{key: cloud.google.com/gce-topology-block, operator: NotIn, values: [b]}]}]}}}",
         1},
        {"affinity: {nodeAffinity: " TERMS "[{matchExpressions: [{key: other, operator: Exists}]}, "
         "{matchExpressions: [{key: other, operator: DoesNotExist}]}]}}}",
         0},
    };
    char text[1024];

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        json_t *findings;

        snprintf(text, sizeof(text),
                 "apiVersion: batch/v1\nkind: Job\nmetadata: {name: j, namespace: ns}\nspec:\n  template:\n"
                 "    spec:\n      %s\n      containers: [{name: c, image: registry.example/i:1, resources: {limits: "
                 "{nvidia.com/gpu: 8}}}]\n",
                 cases[i].spec);
        findings = check_job(text, NULL, NULL);
        if (json_array_size(findings) != cases[i].n_findings) {
            print_message("case %zu: %s\n", i, cases[i].spec);
            json_dumpf(findings, stdout, JSON_INDENT(1));
        }
        assert_int_equal(json_array_size(findings), cases[i].n_findings);
        if (cases[i].n_findings)
            assert_string_equal(json_string_value(json_object_get(json_array_get(findings, 0), "id")), "nodes");
        json_decref(findings);
    }
}

/* The manifest with `from` replaced by `to`, and the ID and message of its first finding: "" if there is none. */
static void find_first(const char *from, const char *to, char *ret_text, size_t bytes)
{
    char text[4096];
    const char *at = strstr(job_text, from);
    const json_t *finding;
    json_t *findings;

    assert_non_null(at);
    snprintf(text, sizeof(text), "%.*s%s%s", (int)(at - job_text), job_text, to, at + strlen(from));
    findings = check_job(text, NULL, NULL);
    finding = json_array_get(findings, 0);
    snprintf(ret_text, bytes, "%s%s%s", finding ? json_string_value(json_object_get(finding, "id")) : "",
             finding ? ": " : "", finding ? json_string_value(json_object_get(finding, "says")) : "");
    json_decref(findings);
}

/* The kubelet starts no pod with an annotation that GKE cannot read. */
TEST(test_interfaces)
{
    static const char *const cases[][3] = {
        {"\"rdma-0\"}]", "\"rdma-0\"},]", "network-annotation: failed to parse interface annotation: "},
        {"'[{", "'{\"a\":[{", "network-annotation: failed to parse interface annotation: "},
        {"'[{\"interfaceName\":\"eth1\",\"network\":\"rdma-0\"}]'", "'{}'",
         "network-annotation: failed to parse interface annotation: it is not a list"},
        {"networking.gke.io/default-interface: eth1,", "",
         "network-annotation: default interface must be specified for multi-nic pod"},
        {"default-interface: eth1", "default-interface: eth0",
         "network-annotation: default interface \"eth0\" must be referenced in the interface annotation"},
    };
    char text[512];

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        find_first(cases[i][0], cases[i][1], text, sizeof(text));
        if (strncmp(text, cases[i][2], strlen(cases[i][2])) != 0)
            print_message("case %zu: %s\n", i, text);
        assert_int_equal(strncmp(text, cases[i][2], strlen(cases[i][2])), 0);
    }
}

TEST(test_device_classes)
{
    static const char *const claims[] = {
        "---\nkind: ResourceClaimTemplate\napiVersion: v1\nspec: {spec: {devices: {requests: [{name: n, exactly: "
        "{deviceClassName: nics}}]}}}\n",
        "---\nkind: ResourceClaimTemplate\napiVersion: v1\nspec: {spec: {devices: {requests: [{name: n, "
        "deviceClassName: nics}]}}}\n",
        "---\nkind: ResourceClaim\napiVersion: v1\nspec: {devices: {requests: [{name: n, exactly: {deviceClassName: "
        "nics}}]}}\n",
    };
    char text[4096];

    for (size_t i = 0; i < sizeof(claims) / sizeof(claims[0]); i++) {
        json_t *findings;

        snprintf(text, sizeof(text), "%s%s", job_text, claims[i]);
        findings = check_job(text, "items|deviceclasses", "[]");
        assert_int_equal(json_array_size(findings), 1);
        assert_string_equal(json_string_value(json_object_get(json_array_get(findings, 0), "says")),
                            "device class nics does not exist");
        json_decref(findings);
        findings = check_job(text, "items|deviceclasses", "[{'metadata':{'name':'nics'}}]");
        assert_int_equal(json_array_size(findings), 0);
        json_decref(findings);
    }
}

/* A version that never was, or is no longer served: the group is there. */
TEST(test_other_version)
{
    json_t *findings = check("groups", "['v1','batch/v2','networking.gke.io/v1']");

    assert_string_equal(json_string_value(json_object_get(json_array_get(findings, 0), "fix")),
                        "write apiVersion: batch/v2, which it serves");
    json_decref(findings);
}

TEST(test_yaml)
{
    json_t *documents = parse("# nothing\n---\n---\na: {b: [1, -2, 0x1, 1.5, yes, 'true', \"7\", ~, 0400, 1e3]}\n"
                              "---\nkind: List\nitems: [{d: 1}, {e: 2}]\n");
    json_t *expected = load("[{'a':{'b':[1,-2,'0x1',1.5,'yes','true','7',null,256,1000.0]}},{'d':1},{'e':2}]");

    if (!json_equal(documents, expected))
        json_dumpf(documents, stdout, 0);
    assert_true(json_equal(documents, expected));
    json_decref(documents);
    json_decref(expected);
}

TEST(test_yaml_refused)
{
    static const char *const cases[][2] = {
        {"a: 1\na: 2\n", "m:2: 'a' is a duplicate; the first one is in line 1"},
        {"a: [1\n", "m:2: not valid YAML: "},
        {"- 1\n", "m:1: a document is not an object"},
        {"a: 1\n---\ntext\n", "m:3: a document is not an object"},
        {"{[1]: 2}\n", "m:1: a key must be a plain word"},
        {"a: {{ .Values.name }}\n", "m:1: a key must be a plain word"},
        {"a: {<<: 1}\n", "m:1: merge keys (<<) are not accepted: write the keys out"},
        {"a: &a 1\n", "m:1: anchors are not accepted in a manifest: write the value out"},
        {"a: 1\nb: *a\n", "m:2: aliases are not accepted in a manifest: write the value out"},
        {"a: \"\xff\n", "m:1: not text: "},
    };
    enum { BRACKETS = 200000, VALUES = 50001 };
    char *text = malloc(3 * BRACKETS);
    json_t *documents;
    size_t bytes;

    assert_non_null(text);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_fails(deploy_manifest_parse("m", cases[i][0], strlen(cases[i][0]), &documents), EP_E_ARG, cases[i][1]);
    }
    /* Neither depth nor number costs more than reading as far as the limit. */
    memset(text, '[', BRACKETS);
    assert_int_equal(deploy_manifest_parse("m", text, BRACKETS, &documents), EP_E_ARG);
    assert_string_equal(ep_last_error(), "m:1: nested too deeply for a manifest");
    bytes = (size_t)sprintf(text, "a: [");
    for (int i = 0; i < VALUES; i++)
        bytes += (size_t)sprintf(text + bytes, "1,");
    assert_int_equal(deploy_manifest_parse("m", text, bytes, &documents), EP_E_ARG);
    assert_string_equal(ep_last_error(), "m:1: too many values for a manifest");
    free(text);
}

TEST(test_jobs)
{
    static const struct {
        const char *text, *error;
    } cases[] = {
        {"kind: ConfigMap\n", "no JobSet"},
        {"kind: Job\nmetadata: {name: a}\n---\nkind: Job\nmetadata: {name: b}\n", "more than one job: Job a and Job b"},
        {"kind: JobSet\nmetadata: {name: a}\nspec: {replicatedJobs: []}\n", "JobSet a has no pods"},
        {"kind: JobSet\nmetadata: {name: a}\nspec: {replicatedJobs: [{replicas: 99999999999}]}\n",
         "more than 1000000 pods in one"},
        {"kind: LeaderWorkerSet\nmetadata: {name: a}\nspec: {replicas: 9999999999999, leaderWorkerTemplate: {size: "
         "9999999999999}}\n",
         "more than 1000000 pods in one"},
    };
    struct deploy_job job;
    json_t *documents;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        documents = parse(cases[i].text);
        assert_fails(deploy_job_find(documents, "ns", &job), EP_E_ARG, cases[i].error);
        json_decref(documents);
    }
    documents = deploy_job_make("ns", "a4", 24, "rack", true, false);
    assert_non_null(documents);
    assert_int_equal(deploy_job_find(documents, "other", &job), EP_OK);
    assert_string_equal(job.space, "ns");
    assert_string_equal(job.queue, "a4");
    assert_int_equal(job.n_sets, 1);
    assert_int_equal(job.sets[0].count, 3);
    json_decref(documents);
}

TEST(test_pods_of_jobs)
{
    static const struct {
        const char *text;
        int groups, n_sets;
        long long counts[2];
    } cases[] = {
        {"kind: LeaderWorkerSet\nmetadata: {name: a}\nspec: {leaderWorkerTemplate: {size: 4, leaderTemplate: {spec: {}}, "
         "workerTemplate: {spec: {}}}}\n",
         1,
         2,
         {1, 3}},
        {"kind: Job\nmetadata: {name: a}\nspec: {parallelism: 8, completions: 2, template: {spec: {}}}\n", 1, 1, {2}},
        /* All groups need nodes. */
        {"kind: LeaderWorkerSet\nmetadata: {name: a}\nspec: {replicas: 5, leaderWorkerTemplate: {size: 4, "
         "leaderTemplate: {spec: {}}, workerTemplate: {spec: {}}}}\n",
         5,
         2,
         {5, 15}},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        json_t *documents = parse(cases[i].text);
        struct deploy_job job;

        assert_int_equal(deploy_job_find(documents, "other", &job), EP_OK);
        assert_int_equal(job.groups, cases[i].groups);
        assert_int_equal(job.n_sets, cases[i].n_sets);
        for (int set = 0; set < job.n_sets; set++)
            assert_int_equal(job.sets[set].count, cases[i].counts[set]);
        json_decref(documents);
    }
}
