{{/* The pod template, the same below a JobSet and a LeaderWorkerSet. */}}
{{- define "epkit.podMetadata" -}}
{{- $v := .Values -}}
labels:
  {{- include "epkit.labels" . | nindent 2 }}
  {{- with $v.workload.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  {{- mergeOverwrite (include "epkit.annotations" . | fromYaml) ($v.workload.annotations | default dict) | toYaml | nindent 2 }}
{{- end -}}

{{/* The chart's own annotations of the pods. Those of workload.annotations win over them. */}}
{{- define "epkit.annotations" -}}
{{- $v := .Values -}}
kubectl.kubernetes.io/default-container: workload
{{- if $v.volumes.gcsMounts }}
gke-gcsfuse/volumes: "true"
gke-gcsfuse/cpu-limit: {{ $v.volumes.gcsSidecar.cpuLimit | quote }}
gke-gcsfuse/memory-limit: {{ $v.volumes.gcsSidecar.memoryLimit | quote }}
gke-gcsfuse/ephemeral-storage-limit: {{ $v.volumes.gcsSidecar.ephemeralStorageLimit | quote }}
{{- end }}
{{- if $v.volumes.psMounts }}
gke-parallelstore/volumes: "true"
gke-parallelstore/cpu-limit: "0"
gke-parallelstore/memory-limit: "0"
{{- end }}
{{- if $v.queue }}
{{- range $key, $value := ($v.tasSettings.topologyRequest | default dict) }}
{{- if $value }}
{{ $key }}: {{ $value | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- if eq $v.network.mode "multi" }}
networking.gke.io/default-interface: eth0
{{- $interfaces := list }}
{{- range $i, $network := $v.network.networks }}
{{- $interfaces = append $interfaces (dict "interfaceName" (printf "eth%d" $i) "network" $network) }}
{{- end }}
networking.gke.io/interfaces: {{ toJson $interfaces | quote }}
{{- end }}
{{- end -}}

{{- define "epkit.affinity" -}}
{{- $v := .Values -}}
{{- if or $v.targetNodes $v.avoidNodes (ne $v.stack "image") -}}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
      - matchExpressions:
        {{- with $v.targetNodes }}
        - {key: kubernetes.io/hostname, operator: In, values: {{ toJson . }}}
        {{- end }}
        {{- with $v.avoidNodes }}
        - {key: kubernetes.io/hostname, operator: NotIn, values: {{ toJson . }}}
        {{- end }}
        {{- if eq $v.stack "host" }}
        # Pools whose driver GKE installs cannot have one of ours.
        - {key: cloud.google.com/gke-gpu-driver-version, operator: NotIn, values: [default, latest]}
        {{- else if eq $v.stack "managed" }}
        - {key: cloud.google.com/gke-gpu-driver-version, operator: NotIn, values: [disabled]}
        {{- end }}
{{- end -}}
{{- end -}}

{{- define "epkit.podSpec" -}}
{{- $v := .Values -}}
{{- $envs := list -}}
{{- range $v.workload.envs }}{{ $envs = append $envs .name }}{{ end -}}
{{- $nccl := $v.network.nccl | default dict -}}
{{- $selector := deepCopy ($v.nodeSelector | default dict) -}}
{{- if $v.accelerator }}{{ $_ := set $selector "cloud.google.com/gke-accelerator" $v.accelerator }}{{ end -}}
{{- if eq .Values.orchestrator "jobset" -}}
restartPolicy: Never
{{ end -}}
terminationGracePeriodSeconds: {{ int64 $v.workload.terminationGracePeriodSeconds }}
{{- if eq $v.network.mode "host" }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- with $v.workload.serviceAccountName }}
serviceAccountName: {{ . | quote }}
{{- end }}
{{- with $v.workload.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $v.workload.imagePullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . | quote }}
{{- end }}
{{- end }}
{{- with $selector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "epkit.affinity" . }}
{{ . }}
{{- end }}
tolerations:
- {key: nvidia.com/gpu, operator: Exists}
- {key: cloud.google.com/impending-node-termination, operator: Exists}
{{- with $v.tolerations }}
{{ toYaml . }}
{{- end }}
{{- if eq $v.network.mode "dranet" }}
resourceClaims:
- {name: nics, resourceClaimTemplateName: "{{ .Release.Name }}-nics"}
{{- end }}
volumes:
{{- include "epkit.volumes" . | nindent 0 }}
{{- if $v.network.gibImage }}
initContainers:
- name: nccl-plugin-installer
  image: {{ $v.network.gibImage | quote }}
  imagePullPolicy: {{ $v.workload.imagePullPolicy }}
  command: [/bin/sh, -c]
  args:
  - |
    set -eu
    /scripts/container_entry.sh install --install-nccl
    cp -R /var/lib/gib/. /target/usr/local/gib/
  # As the container after it: a namespace's quota of cpu or memory asks it of each.
  resources:
    {{- with $v.workload.resources.requests }}
    requests:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with $v.workload.resources.limits }}
    limits:
      {{- toYaml . | nindent 6 }}
    {{- end }}
  volumeMounts:
  - {name: gib, mountPath: /target/usr/local/gib}
{{- end }}
containers:
- name: workload
  image: {{ $v.workload.image | quote }}
  imagePullPolicy: {{ $v.workload.imagePullPolicy }}
  securityContext:
    {{- if eq (include "epkit.privileged" .) "true" }}
    privileged: true
    {{- else }}
    capabilities: {add: [IPC_LOCK]}
    {{- end }}
  command: [bash, /workload/launcher/start.sh]
  {{- with $v.workload.arguments }}
  args: {{ range . }}
  - {{ include "epkit.text" . | quote }}
  {{- end }}
  {{- end }}
  env:
  {{- range (include "epkit.env" . | fromYamlArray) }}
  {{- if not (or (has .name $envs) (hasKey $nccl .name)) }}
  {{- list . | toYaml | nindent 2 }}
  {{- end }}
  {{- end }}
  {{- range $name, $value := $nccl }}
  {{- if not (has $name $envs) }}
  - {name: {{ $name | quote }}, value: {{ include "epkit.text" $value | quote }}}
  {{- end }}
  {{- end }}
  {{- with $v.workload.envs }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if $v.ssh.enabled }}
  ports:
  - {name: ssh, containerPort: {{ int $v.ssh.port }}}
  {{- end }}
  volumeMounts:
  {{- include "epkit.mounts" . | nindent 2 }}
  resources:
    {{- with $v.workload.resources.requests }}
    requests:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    limits:
      {{- with $v.workload.resources.limits }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
      nvidia.com/gpu: 8
    {{- if eq $v.network.mode "dranet" }}
    claims: [{name: nics}]
    {{- end }}
{{- end -}}
