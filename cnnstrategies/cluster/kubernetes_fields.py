"""Names of the fields of pods and containers in Kubernetes, to find misspelt fields without a cluster."""

import difflib
from collections.abc import Mapping
from typing import Any

from cnnstrategies.errors import ConfigurationError

# Fields of Kubernetes 1.31 to 1.37. Keys: names of types in Kubernetes' API. Values: names of the type's fields. If a
# name is followed by a colon and a type, as in "containers:Container", then the field's value is an object of this type
# or a list of such objects, and the fields of these objects are checked as well.
FIELDS = {
    "PodSpec": (
        "activeDeadlineSeconds affinity:Affinity automountServiceAccountToken containers:Container "
        "dnsConfig dnsPolicy enableServiceLinks ephemeralContainers evictionResponders hostAliases hostIPC "
        "hostNetwork hostPID hostUsers hostname hostnameOverride imagePullSecrets:LocalObjectReference "
        "initContainers:Container nodeName nodeSelector os overhead preemptionPolicy priority "
        "priorityClassName readinessGates resourceClaims resources restartPolicy runtimeClassName "
        "schedulerName schedulingGates schedulingGroup securityContext:PodSecurityContext serviceAccount "
        "serviceAccountName setHostnameAsFQDN shareProcessNamespace subdomain terminationGracePeriodSeconds "
        "tolerations:Toleration topologySpreadConstraints:TopologySpreadConstraint volumes workloadRef"
    ),
    "Container": (
        "args command env:EnvVar envFrom:EnvFromSource image imagePullPolicy lifecycle livenessProbe name "
        "ports readinessProbe resizePolicy resources restartPolicy restartPolicyRules "
        "securityContext:SecurityContext startupProbe stdin stdinOnce terminationMessagePath "
        "terminationMessagePolicy tty volumeDevices volumeMounts workingDir"
    ),
    "PodSecurityContext": (
        "appArmorProfile fsGroup fsGroupChangePolicy runAsGroup runAsNonRoot runAsUser seLinuxChangePolicy "
        "seLinuxOptions seccompProfile:SeccompProfile supplementalGroups supplementalGroupsPolicy sysctls "
        "windowsOptions"
    ),
    "SecurityContext": (
        "allowPrivilegeEscalation appArmorProfile capabilities:Capabilities privileged procMount "
        "readOnlyRootFilesystem runAsGroup runAsNonRoot runAsUser seLinuxOptions "
        "seccompProfile:SeccompProfile windowsOptions"
    ),
    "Capabilities": "add drop",
    "SeccompProfile": "localhostProfile type",
    "Toleration": "effect key operator tolerationSeconds value",
    "TopologySpreadConstraint": (
        "labelSelector matchLabelKeys maxSkew minDomains nodeAffinityPolicy nodeTaintsPolicy topologyKey "
        "whenUnsatisfiable"
    ),
    "Affinity": "nodeAffinity:NodeAffinity podAffinity:PodAffinity podAntiAffinity:PodAntiAffinity",
    "NodeAffinity": (
        "preferredDuringSchedulingIgnoredDuringExecution:PreferredSchedulingTerm "
        "requiredDuringSchedulingIgnoredDuringExecution:NodeSelector"
    ),
    "PodAffinity": (
        "preferredDuringSchedulingIgnoredDuringExecution:WeightedPodAffinityTerm "
        "requiredDuringSchedulingIgnoredDuringExecution:PodAffinityTerm"
    ),
    "PodAntiAffinity": (
        "preferredDuringSchedulingIgnoredDuringExecution:WeightedPodAffinityTerm "
        "requiredDuringSchedulingIgnoredDuringExecution:PodAffinityTerm"
    ),
    "NodeSelector": "nodeSelectorTerms:NodeSelectorTerm",
    "NodeSelectorTerm": "matchExpressions:NodeSelectorRequirement matchFields:NodeSelectorRequirement",
    "NodeSelectorRequirement": "key operator values",
    "PreferredSchedulingTerm": "preference:NodeSelectorTerm weight",
    "PodAffinityTerm": "labelSelector matchLabelKeys mismatchLabelKeys namespaceSelector namespaces topologyKey",
    "WeightedPodAffinityTerm": "podAffinityTerm:PodAffinityTerm weight",
    "LocalObjectReference": "name",
    "EnvVarSource": (
        "configMapKeyRef:ConfigMapKeySelector fieldRef:ObjectFieldSelector fileKeyRef "
        "resourceFieldRef:ResourceFieldSelector secretKeyRef:SecretKeySelector"
    ),
    "SecretKeySelector": "key name optional",
    "ConfigMapKeySelector": "key name optional",
    "ObjectFieldSelector": "apiVersion fieldPath",
    "ResourceFieldSelector": "containerName divisor resource",
    "EnvFromSource": "configMapRef:ConfigMapEnvSource prefix secretRef:SecretEnvSource",
    "SecretEnvSource": "name optional",
    "ConfigMapEnvSource": "name optional",
    "EnvVar": "name value valueFrom:EnvVarSource",
}
# Smallest similarity of two names, from 0 to 1, with which one is taken for a misspelling of the other. A newer version
# of Kubernetes may have fields that are not in the table. They must not be refused, and kubectl checks them.
SIMILARITY = 0.8


def check_fields(key: str, value: Any, kind: str) -> None:
    """Check that a value in Kubernetes' format has no misspelt fields, and that values of fields have the right form.

    Args:
        key: Key of the value in the configuration, for the error message.
        value: The value, or a list of values.
        kind: Type in Kubernetes' API, a key of `FIELDS`.

    Raises:
        ConfigurationError: A field does not exist, but resembles an existing field; or a value is not a mapping.
    """
    if isinstance(value, list):
        for number, element in enumerate(value):
            check_fields(f"{key}[{number}]", element, kind)
        return
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{key}={value!r} is not a mapping: write the fields of {kind} in Kubernetes' format")
    fields = dict(word.partition(":")[::2] for word in FIELDS[kind].split())
    spelled = {field.lower(): field for field in fields}
    for name, content in value.items():
        if name in fields:
            if fields[name] and content is not None:
                check_fields(f"{key}.{name}", content, fields[name])
            continue
        close = difflib.get_close_matches(str(name).replace("_", "").lower(), spelled, n=1, cutoff=SIMILARITY)
        if close:
            raise ConfigurationError(f"{key}.{name} is not a field of {kind}: did you mean {spelled[close[0]]}?")
