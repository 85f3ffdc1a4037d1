{{- define "readmit.labels" -}}
app.kubernetes.io/name: readmit
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "readmit.security" -}}
securityContext:
  runAsUser: {{ .Values.uid }}
  runAsGroup: {{ .Values.uid }}
  runAsNonRoot: true
  fsGroup: {{ .Values.uid }}
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* What a pod needs of its cluster. Nothing here talks to the API. */}}
{{- define "readmit.placement" -}}
automountServiceAccountToken: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Of a container whose keeper, if it has one, keeps its things in the folder named. An image seldom knows a user of this
number, and torch asks for a name and a home: compiled kernels stay there. */}}
{{- define "readmit.env" -}}
- {name: READMIT__NODE__NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
- {name: READMIT_RUNTIME, value: /run/readmit/{{ . }}}
- {name: READMIT__NODE__RUNTIME_DIR, value: /run/readmit/{{ . }}}
- {name: READMIT_STATE, value: /var/lib/readmit/state}
- {name: READMIT_LOG_FORMAT, value: json}
- {name: USER, value: readmit}
- {name: HOME, value: /var/lib/readmit/home}
{{- end }}

{{- define "readmit.mounts" -}}
- {name: run, mountPath: /run/readmit}
- {name: state, mountPath: /var/lib/readmit}
- {name: config, mountPath: /etc/readmit, readOnly: true}
{{- end }}

{{/* The containers name a command, not arguments: an engine's image has an entry point of its own. */}}
{{- define "readmit.cache" -}}
- name: cache
  image: {{ .Values.image }}
  command: [readmit, up, /etc/readmit/readmit.toml, --only, daemon]
  env:
    {{- include "readmit.env" "cache" | nindent 4 }}
  ports:
    - {name: metrics, containerPort: 9464}
  volumeMounts:
    {{- include "readmit.mounts" . | nindent 4 }}
  # The keeper here restarts the daemon within a second and holds the weights; killing it ends them. So: late.
  startupProbe: {httpGet: {path: /metrics, port: metrics}, periodSeconds: 2, timeoutSeconds: 5, failureThreshold: 60}
  livenessProbe: {httpGet: {path: /metrics, port: metrics}, periodSeconds: 20, timeoutSeconds: 10, failureThreshold: 6}
  securityContext: {{- toYaml .Values.containerSecurityContext | nindent 4 }}
  resources: {{- toYaml .Values.cache.resources | nindent 4 }}
{{- end }}

{{- define "readmit.engine" -}}
- name: engine
  image: {{ .Values.image }}
  # A keeper of its own: the kubelet would wait up to five minutes between restarts.
  command: [readmit, up, /etc/readmit/readmit.toml, --only, engine]
  env:
    {{- include "readmit.env" (printf "engine-%s" .Values.slot) | nindent 4 }}
    {{- with .Values.engine.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumeMounts:
    {{- include "readmit.mounts" . | nindent 4 }}
    - {name: models, mountPath: /models, readOnly: true}
    - {name: shm, mountPath: /dev/shm}
  # On the gate's port, which is the pod's: the engine answered correctly once.
  startupProbe:
    httpGet: {path: /startupz, port: 8000}
    periodSeconds: 10
    timeoutSeconds: 2
    failureThreshold: {{ div (add .Values.startupBudgetSeconds 9) 10 }}
  # The keeper, not the engine: a slow recovery is none of the kubelet's business, and a hanging engine the gate's.
  livenessProbe:
    exec:
      command: [readmit, status, --alive]
    periodSeconds: 30
    timeoutSeconds: 10
    failureThreshold: 3
  securityContext: {{- toYaml .Values.containerSecurityContext | nindent 4 }}
  resources: {{- toYaml .Values.engine.resources | nindent 4 }}
{{- end }}

{{- define "readmit.gate" -}}
- name: gate
  image: {{ .Values.image }}
  command: [readmit, gate, --config, /etc/readmit/readmit.toml]
  env:
    {{- include "readmit.env" (printf "engine-%s" .Values.slot) | nindent 4 }}
  ports:
    - {name: http, containerPort: 8000}
  volumeMounts:
    {{- include "readmit.mounts" . | nindent 4 }}
  startupProbe: {httpGet: {path: /livez, port: http}, periodSeconds: 1, timeoutSeconds: 2, failureThreshold: 60}
  livenessProbe: {httpGet: {path: /livez, port: http}, periodSeconds: 10, timeoutSeconds: 2, failureThreshold: 3}
  readinessProbe: {httpGet: {path: /readyz, port: http}, periodSeconds: 2, timeoutSeconds: 1, failureThreshold: 1}
  securityContext: {{- toYaml .Values.containerSecurityContext | nindent 4 }}
  resources: {{- toYaml .Values.gate.resources | nindent 4 }}
{{- end }}

{{- define "readmit.volumes" -}}
- name: config
  configMap: {name: {{ .Release.Name }}}
- name: models
  {{- toYaml .Values.model.volume | nindent 2 }}
- {name: shm, emptyDir: {medium: Memory}}
{{- end }}
