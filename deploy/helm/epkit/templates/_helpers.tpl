{{/* Names and numbers that several templates need. */}}
{{- define "epkit.nodes" -}}{{ div (int .Values.workload.gpus) 8 }}{{- end -}}

{{- define "epkit.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "epkit.domain" -}}
{{ .Release.Name }}.{{ .Release.Namespace }}.svc.{{ .Values.network.clusterDomain }}
{{- end -}}

{{/* Host name of the first pod, as JobSet and LeaderWorkerSet make it. */}}
{{- define "epkit.master" -}}
{{ .Release.Name }}-{{ eq .Values.orchestrator "jobset" | ternary "workload-0-0" "0" }}.{{ include "epkit.domain" . }}
{{- end -}}

{{- define "epkit.sshSecret" -}}
{{ .Values.ssh.existingSecret | default (printf "%s-ssh" .Release.Name) }}
{{- end -}}

{{/* A number, truth value or text of a user's, as text. A file of values has its numbers as floating point, which
toString writes as 8.388608e+06. */}}
{{- define "epkit.text" -}}
{{ kindIs "string" . | ternary . (toJson .) }}
{{- end -}}

{{/* "true" when the job is over as soon as its first pod has succeeded. */}}
{{- define "epkit.coordinatorCompletes" -}}
{{- $v := .Values -}}
{{- if or (eq $v.workload.completion "coordinator") (and (eq $v.workload.completion "auto") (not $v.workload_launcher)) -}}
true
{{- end -}}
{{- end -}}

{{- define "epkit.privileged" -}}
{{- if kindIs "bool" .Values.workload.privileged -}}
{{ .Values.workload.privileged }}
{{- else -}}
{{ or (eq .Values.stack "managed") (eq .Values.network.mode "host") }}
{{- end -}}
{{- end -}}

{{/* Volumes of the pod, as an array. */}}
{{- define "epkit.volumes" -}}
{{- $v := .Values -}}
- name: launcher
  configMap:
    name: {{ .Release.Name }}-launcher
{{- if $v.workload.config }}
- name: configuration
  configMap:
    name: {{ .Release.Name }}-launcher
    items: [{key: workload-configuration, path: workload-configuration}]
{{- end }}
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ $v.workload.sharedMemory | quote }}
{{- if $v.ssh.enabled }}
- name: ssh
  secret:
    secretName: {{ include "epkit.sshSecret" . | quote }}
    defaultMode: 0400
{{- end }}
{{- if $v.network.gibImage }}
- name: gib
  emptyDir: {}
{{- end }}
{{- if eq $v.stack "host" }}
- name: host-driver
  hostPath: {path: {{ $v.host.driverPath | quote }}, type: Directory}
- name: host-stack
  hostPath: {path: {{ $v.host.stackPath | quote }}, type: Directory}
{{- end }}
{{- range $i, $gcs := $v.volumes.gcsMounts }}
- name: gcs-{{ $i }}
  csi:
    driver: gcsfuse.csi.storage.gke.io
    {{- if .readOnly }}
    readOnly: true
    {{- end }}
    volumeAttributes:
      bucketName: {{ .bucketName | quote }}
      {{- if .mountOptions }}
      mountOptions: {{ .mountOptions | quote }}
      {{- end }}
{{- end }}
{{- range $i, $ps := $v.volumes.psMounts }}
- name: parallelstore-{{ $i }}
  persistentVolumeClaim: {claimName: {{ .claimName | quote }}}
{{- end }}
{{- range $i, $pvc := $v.volumes.pvcMounts }}
- name: claim-{{ $i }}
  persistentVolumeClaim: {claimName: {{ .claimName | quote }}{{ if .readOnly }}, readOnly: true{{ end }}}
{{- end }}
{{- if $v.volumes.nfs.ip }}
- name: nfs
  persistentVolumeClaim: {claimName: {{ .Release.Name }}-nfs}
{{- end }}
{{- if $v.volumes.ssdMountPath }}
- name: local-ssd
  {{- if $v.volumes.ssdHostPath }}
  hostPath: {path: {{ $v.volumes.ssdHostPath | quote }}, type: Directory}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Where the container has them, as an array. */}}
{{- define "epkit.mounts" -}}
{{- $v := .Values -}}
- {name: launcher, mountPath: /workload/launcher, readOnly: true}
- {name: shared-memory, mountPath: /dev/shm}
{{- if $v.workload.config }}
- {name: configuration, mountPath: /workload/configs, readOnly: true}
{{- end }}
{{- if $v.ssh.enabled }}
- {name: ssh, mountPath: /etc/epkit/ssh, readOnly: true}
{{- end }}
{{- if $v.network.gibImage }}
- {name: gib, mountPath: /usr/local/gib}
{{- end }}
{{- if eq $v.stack "host" }}
- {name: host-driver, mountPath: /usr/local/nvidia, readOnly: true}
- {name: host-stack, mountPath: {{ $v.host.stackPath | quote }}, readOnly: true}
{{- end }}
{{- range $i, $gcs := $v.volumes.gcsMounts }}
- {name: gcs-{{ $i }}, mountPath: {{ .mountPath | default (eq $i 0 | ternary "/gcs" (printf "/gcs-%d" $i)) | quote }}}
{{- end }}
{{- range $i, $ps := $v.volumes.psMounts }}
- {name: parallelstore-{{ $i }}, mountPath: {{ .mountPath | quote }}}
{{- end }}
{{- range $i, $pvc := $v.volumes.pvcMounts }}
- {name: claim-{{ $i }}, mountPath: {{ .mountPath | quote }}{{ if .readOnly }}, readOnly: true{{ end }}}
{{- end }}
{{- if $v.volumes.nfs.ip }}
- {name: nfs, mountPath: {{ $v.volumes.nfs.mountPath | quote }}}
{{- end }}
{{- if $v.volumes.ssdMountPath }}
- {name: local-ssd, mountPath: {{ $v.volumes.ssdMountPath | quote }}}
{{- end }}
{{- end -}}

{{/* Environment of the container, as an array. What network.nccl and workload.envs name is left out by the pod, and comes
after it: a list with a name twice is refused where objects are applied by the server. */}}
{{- define "epkit.env" -}}
{{- $v := .Values -}}
- {name: JOB_IDENTIFIER, value: {{ .Release.Name | quote }}}
- {name: JOB_ORCHESTRATOR, value: {{ $v.orchestrator | quote }}}
- name: JOB_COMPLETION_INDEX
  valueFrom:
    fieldRef:
      {{- if eq $v.orchestrator "jobset" }}
      fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
      {{- else }}
      fieldPath: metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']
      {{- end }}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- {name: NNODES, value: {{ include "epkit.nodes" . | quote }}}
- {name: GPUS_PER_NODE, value: "8"}
- {name: WORLD_SIZE, value: {{ $v.workload.gpus | int | quote }}}
- {name: HOSTNAME_PREFIX, value: {{ printf "%s-%s" .Release.Name (eq $v.orchestrator "jobset" | ternary "workload-0-" "0-") | quote }}}
- {name: DOMAIN_NAME, value: {{ include "epkit.domain" . | quote }}}
- {name: RANK_0_FQDN, value: {{ include "epkit.master" . | quote }}}
- {name: MASTER_ADDR, value: {{ include "epkit.master" . | quote }}}
- {name: MASTER_PORT, value: {{ $v.network.masterPort | int | quote }}}
- {name: EPKIT_STACK, value: {{ $v.stack | quote }}}
- {name: EPKIT_JOB, value: {{ $v.workload.job | quote }}}
{{- with first (default (list) $v.volumes.gcsMounts) }}
{{- if not .readOnly }}
- {name: EPKIT_LOGS, value: {{ printf "%s/testbed-logs" (.mountPath | default "/gcs") | quote }}}
{{- end }}
{{- end }}
{{- if $v.ssh.enabled }}
- {name: EPKIT_SSH_PORT, value: {{ $v.ssh.port | int | quote }}}
{{- end }}
- {name: RUN_DEEPEP_TEST, value: {{ $v.RUN_DEEPEP_TEST | toString | quote }}}
- {name: SLEEP_INFINITY, value: {{ $v.SLEEP_INFINITY | toString | quote }}}
{{- if $v.SSH_PUBLIC_KEY }}
- {name: SSH_PUBLIC_KEY, value: {{ $v.SSH_PUBLIC_KEY | quote }}}
{{- end }}
{{- if $v.HF_TOKEN }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Release.Name }}-tokens, key: HF_TOKEN}}
{{- end }}
{{- if eq $v.network.mode "multi" }}
- {name: NCCL_SOCKET_IFNAME, value: "eth0,eth1"}
{{- end }}
{{- if $v.network.gibImage }}
- {name: NCCL_PLUGIN_PATH, value: /usr/local/gib/lib64}
{{- end }}
{{- if eq $v.stack "host" }}
- {name: NVSHMEM_HOME, value: {{ printf "%s/nvshmem" $v.host.stackPath | quote }}}
- {name: GDRCOPY_HOME, value: {{ printf "%s/gdrcopy" $v.host.stackPath | quote }}}
- {name: PYTHONPATH, value: {{ printf "%s/python:/usr/local/nvidia/deepep" $v.host.stackPath | quote }}}
{{- end }}
{{- if ne $v.stack "image" }}
- {name: LD_LIBRARY_PATH, value: "{{ if eq $v.stack "host" }}{{ $v.host.stackPath }}/nvshmem/lib:{{ end }}/usr/local/nvidia/lib64:/usr/local/nvidia/lib{{ if $v.network.gibImage }}:/usr/local/gib/lib64{{ end }}"}
{{- end }}
{{- end -}}
