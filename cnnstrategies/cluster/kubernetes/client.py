"""Sends the objects of a run to a cluster, with the official client."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from cnnstrategies.cluster.kubernetes.manifests import TRAINER_API, Object, objects
from cnnstrategies.cluster.kubernetes.run import KEY, Run
from cnnstrategies.errors import ConfigurationError

try:
    import kubernetes
    from urllib3.exceptions import HTTPError
except ImportError as error:
    raise ConfigurationError(
        "submit --to kubernetes needs the Kubernetes client: pip install '.[kubernetes]' in a clone; or print the "
        "objects with --dry_run, for kubectl create -f -"
    ) from error

PLURALS = {
    "ConfigMap": "configmaps",
    "Service": "services",
    "Job": "jobs",
    "TrainingRuntime": "trainingruntimes",
    "TrainJob": "trainjobs",
}
SECONDS = 20.0
LIMIT = {"_request_timeout": SECONDS}
HIDDEN = object()


class Cluster:
    """The cluster of the current context, or, in a pod, that of the pod.

    Raises:
        ConfigurationError: There is none.
    """

    def __init__(self) -> None:
        try:
            kubernetes.config.load_kube_config()
        except kubernetes.config.ConfigException as error:
            try:
                kubernetes.config.load_incluster_config()
            except kubernetes.config.ConfigException:
                raise ConfigurationError(
                    f"no Kubernetes cluster is configured here ({' '.join(str(error).split())}): set KUBECONFIG, and "
                    "see kubectl config get-contexts; --dry_run needs none"
                ) from error
        settings = kubernetes.client.Configuration.get_default_copy()
        settings.retries = False
        self._host = settings.host
        api = kubernetes.client.ApiClient(settings)
        self._groups = kubernetes.client.ApisApi(api)
        self._core = kubernetes.client.CoreV1Api(api)
        self._batch = kubernetes.client.BatchV1Api(api)
        self._custom = kubernetes.client.CustomObjectsApi(api)

    def start(self, run: Run) -> str:
        """Check what can be known beforehand, and make the objects of a run; either all or none.

        Returns:
            The namespace.

        Raises:
            ConfigurationError: The cluster cannot be reached, or does not take the run.
        """
        namespace = run.options.namespace or _namespace()
        made = objects(run)
        with self._explained(f"namespace {namespace}"):
            self._check_kinds(made)
            self._check_claims(run, namespace)
            self._check_gpus(run)
            for one in made:
                if one["kind"] != "TrainJob":  # It needs its runtime to be there.
                    self._create(one, namespace, dry_run="All")
        done: list[Object] = []
        try:
            for one in made:
                with self._explained(f"{one['kind']} {one['metadata']['name']}"):
                    self._create(one, namespace)
                done.append(one)
        except ConfigurationError:
            for one in reversed(done):
                with contextlib.suppress(kubernetes.client.ApiException, HTTPError):
                    self._delete(one, namespace)
            raise
        return namespace

    def _check_kinds(self, made: list[Object]) -> None:
        groups = {group.name for group in self._groups.get_api_versions(_request_timeout=SECONDS).groups}
        if made[-1]["apiVersion"] == TRAINER_API and TRAINER_API.partition("/")[0] not in groups:
            raise ConfigurationError(
                "the cluster has no TrainJob: ask for Kubeflow Trainer to be installed, or set "
                "cluster.kubernetes.kind: job"
            )

    def _check_claims(self, run: Run, namespace: str) -> None:
        for path, claim in run.options.volumes.items():
            if _look(self._core.read_namespaced_persistent_volume_claim, claim, namespace) is None:
                raise ConfigurationError(
                    f"cluster.kubernetes.volumes: namespace {namespace} has no claim {claim} for {path}: see kubectl "
                    f"get pvc -n {namespace}"
                )
        secret = run.options.key_secret
        if secret is None:
            return
        found = _look(self._core.read_namespaced_secret, secret, namespace)
        if found is None or (found is not HIDDEN and KEY not in (found.data or {})):
            raise ConfigurationError(
                f"cluster.kubernetes.key_secret: namespace {namespace} has no secret {secret} with {KEY}: "
                f"cnnstrategies-server --make-keys {KEY}, and kubectl create secret generic {secret} -n {namespace} "
                f"--from-file={KEY}"
            )

    def _check_gpus(self, run: Run) -> None:
        gpus, options = run.size.gpus_per_node, run.options
        if not gpus:
            return
        selector = ",".join(f"{key}={value}" for key, value in options.node_selector.items())
        found = _look(self._core.list_node, label_selector=selector)
        if found is None or found is HIDDEN:
            return
        there = [int((node.status.allocatable or {}).get(options.gpu, 0)) for node in found.items]
        # A cluster that makes nodes when they are asked for may have none now.
        if there and 0 < max(there) < gpus:
            raise ConfigurationError(
                f"trainer.devices={gpus}: no node{f' with {selector}' if selector else ''} has more than {max(there)} "
                f"{options.gpu}: use at most {max(there)} devices, and more nodes with trainer.num_nodes"
            )

    def _create(self, one: Object, namespace: str, **query: str) -> None:
        if group := _group(one):
            self._custom.create_namespaced_custom_object(*group, namespace, PLURALS[one["kind"]], one, **query, **LIMIT)
        else:
            api, name = self._of_kind(one["kind"])
            getattr(api, f"create_namespaced_{name}")(namespace, one, **query, **LIMIT)

    def _delete(self, one: Object, namespace: str) -> None:
        name = one["metadata"]["name"]
        if group := _group(one):
            self._custom.delete_namespaced_custom_object(*group, namespace, PLURALS[one["kind"]], name)
        else:
            api, kind = self._of_kind(one["kind"])
            # Else the pods of a job stay.
            getattr(api, f"delete_namespaced_{kind}")(name, namespace, propagation_policy="Background")

    def _of_kind(self, kind: str) -> tuple[Any, str]:
        names = {"ConfigMap": "config_map", "Service": "service", "Job": "job"}
        return self._batch if kind == "Job" else self._core, names[kind]

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except kubernetes.client.ApiException as error:
            raise ConfigurationError(f"Kubernetes refuses the run ({what}): {_reason(error)}") from error
        except HTTPError as error:
            raise ConfigurationError(
                f"no Kubernetes cluster answers at {self._host} ({type(error).__name__}): is it up, and is the context "
                "the right one? See kubectl cluster-info; --dry_run needs none"
            ) from error


def _group(one: Object) -> list[str]:
    """Group and version of an object that the client has no class for."""
    return TRAINER_API.split("/") if one["apiVersion"] == TRAINER_API else []


def _look(read: Callable[..., Any], *words: str, **query: str) -> Any:
    """What is there: None if nothing is, HIDDEN if this user may not look."""
    try:
        return read(*words, **query, _request_timeout=SECONDS)
    except kubernetes.client.ApiException as error:
        if error.status == 403:
            return HIDDEN
        if error.status == 404:
            return None
        raise


def _reason(error: Any) -> str:
    with contextlib.suppress(ValueError, TypeError):
        return " ".join(str(json.loads(error.body)["message"]).split())
    if error.status == 401:
        return "it does not know you: renew your login, as kubectl get pods would ask"
    return f"{error.status} {error.reason}"


def _namespace() -> str:
    """That of the current context, or of the pod that this is."""
    with contextlib.suppress(kubernetes.config.ConfigException):
        context = kubernetes.config.list_kube_config_contexts()[1]
        return str(context["context"].get("namespace") or "default")
    with contextlib.suppress(OSError), open("/var/run/secrets/kubernetes.io/serviceaccount/namespace") as file:
        return file.read().strip()
    return "default"
