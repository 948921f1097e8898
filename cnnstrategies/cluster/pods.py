"""A run as pods: their names, and the commands in them."""

import shlex
import signal
from dataclasses import dataclass

from cnnstrategies.cluster.job import Size
from cnnstrategies.cluster.options import KubernetesOptions

MAIN_PORT, SERVER_PORT = 29500, 29600
CONFIGURATION, KEYS, KEY = "/run/cnnstrategies/config", "/run/cnnstrategies/keys", "run.key"
OWN_KEY = f"/dev/shm/{KEY}"  # In memory, and this user's alone.
STOPPED = 128 + int(signal.SIGTERM)  # exit code: after a step with a checkpoint, or while it was starting
HOPELESS = 78  # exit code (EX_CONFIG): a pod that is started again would end in the same way
PATIENCE = 1800  # seconds that a server's pod waits for the next start of a run that has failed
UNKNOWN = (
    f"no address for $MASTER_ADDR in {PATIENCE} s: was that pod scheduled (kubectl get pods), and does the cluster's "
    "DNS answer?"
)
TRAINER, SERVERS = "node", "servers"  # The roles of pods.


@dataclass(frozen=True)
class Run:
    """What is to run as pods.

    Attributes:
        name: Of its objects.
        task: ``fit``, or ``doctor``, which examines the pods.
        size: The pods of the trainer, and the processes and GPUs of each.
        servers: Pods that hold parameters.
        goes_on: Whether the run goes on without a pod of the trainer that is lost.
        folder: The run's, as the pods see it.
        configuration: What ``fit`` reads.
        python: The interpreter in the image.
        setup: Lines before the run.
        command: The command line that made it, for the reader.
    """

    name: str
    task: str
    options: KubernetesOptions
    size: Size
    servers: int
    goes_on: bool
    folder: str
    configuration: str
    python: str
    setup: tuple[str, ...]
    command: str


def job_name(name: str, role: str) -> str:
    """The Job of a role."""
    return name if role == TRAINER else f"{name}-{role}"


def host(name: str, role: str, number: int) -> str:
    """The name by which the others reach a pod of a run."""
    return f"{job_name(name, role)}-{number}.{name}"


def trainer_script(run: Run) -> str:
    """What a pod of the trainer runs."""
    if run.task == "doctor":
        return _doctor_script(run, TRAINER)
    # The others go on without a worker of the parameter server; it is let in when the run is started again.
    again = '[ "$NODE_RANK" -ne 0 ] && [ ! -e "$finished" ]' if run.goes_on else "false"
    return f"""running=
# A container's first process gets no signal that it has not asked for.
trap 'if [ -n "$running" ]; then kill -TERM $!; else exit {STOPPED}; fi' TERM
{_setup(run)}while :; do
    running=yes
    {shlex.quote(run.python)} -m cnnstrategies fit --config {CONFIGURATION}/config.yaml &
    child=$!
    wait $child
    code=$?
    while kill -0 $child 2>/dev/null; do # A signal has ended the wait, and not yet the run.
        wait $child
        code=$?
    done
    running=
    if [ $code -eq 0 ] || [ $code -eq {STOPPED} ]; then break; fi
    if ! {{ {again}; }}; then break; fi
    sleep 10 & wait $!
done
if [ $code -eq 0 ] && [ "$NODE_RANK" -eq 0 ]; then touch "$finished"; fi
if [ $code -ne {STOPPED} ] && [ -e "$finished" ]; then code=0; fi
exit $code
"""


def server_script(run: Run) -> str:
    """What a pod that holds parameters runs: a server for each start of the run."""
    if run.task == "doctor":
        return _doctor_script(run, SERVERS)
    server = f"{shlex.quote(run.python)} -m cnnstrategies.commands.server --config {CONFIGURATION}/config.yaml"
    return f"""running= ended=
# A server outlives the signal, and asks the run to stop, which needs it until then.
trap 'ended={STOPPED}; if [ -n "$running" ]; then kill -TERM $! 2>/dev/null; else exit $ended; fi' TERM
{_setup(run)}begin=$(date +%s)
until [ -e "$finished" ]; do
    running=yes
    {server} --index "$NODE_RANK" &
    child=$!
    while kill -0 $child 2>/dev/null && [ ! -e "$finished" ]; do sleep 1; done
    if [ -e "$finished" ]; then
        kill -KILL $child 2>/dev/null # It may be waiting for another start of the run.
        exit 0
    fi
    if wait $child; then begin=$(date +%s); fi
    running=
    if [ -n "$ended" ]; then exit $ended; fi
    if [ $(($(date +%s) - begin)) -gt {PATIENCE} ]; then exit 1; fi
    sleep 1
done
"""


def _doctor_script(run: Run, role: str) -> str:
    """What a pod that is examined runs: the servers' come after the trainer's."""
    first = 0 if role == TRAINER else run.size.nodes
    return f"""{_setup(run)}export NNODES={run.size.nodes + run.servers} NODE_RANK=$((NODE_RANK + {first}))
exec {shlex.quote(run.python)} -m cnnstrategies doctor --shared "$run" --wait {PATIENCE}
"""


def _setup(run: Run) -> str:
    lacks = "lacks the package: build one as docs/kubernetes.md says, or name its interpreter with cluster.python"
    message = f"cnnstrategies: error: the image {run.options.image} {lacks}"
    otherwise = f"{{ echo {shlex.quote(message)} >&2; exit {HOPELESS}; }}"
    lines = [
        f"run={shlex.quote(run.folder)}",
        f"finished=$run/.finished-{run.name}",
        f"{shlex.quote(run.python)} -c 'import cnnstrategies' || {otherwise}",
    ]
    if run.options.key_secret is not None:
        # As the volume has it, the file may be the group's too.
        lines.append(f"install -m 600 {KEYS}/{KEY} {OWN_KEY} || exit {HOPELESS}")
    # What the configuration names without a root is in the run folder; classes beside the image's code are found.
    lines += [
        'export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"',
        'mkdir -p "$run" && cd "$run" || exit 1',
        "begin=$(date +%s) # A pod has no name before it has a node.",
        'until getent hosts "$MASTER_ADDR" >/dev/null; do',
        f"    if [ $(($(date +%s) - begin)) -gt {PATIENCE} ]; then",
        f'        echo "cnnstrategies: error: {UNKNOWN}" >&2',
        "        exit 1",
        "    fi",
        "    sleep 1",
        "done",
    ]
    return "".join(f"{line}\n" for line in [*run.setup, *lines])
