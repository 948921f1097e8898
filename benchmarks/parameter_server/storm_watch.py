"""Who is a member of a run, again and again, as its coordinator says; storm.py runs this beside its hosts.

python storm_watch.py tcp://10.77.0.1:7000 run.key members
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from cnnstrategies.paramserver.places import Watcher
from cnnstrategies.paramserver.security import KeyPair

PAUSE = 0.25  # seconds between two questions
HEARD = 2.0  # seconds: who was not heard for longer is not there


@dataclass(frozen=True)
class Seen:
    """What the coordinator has answered.

    Attributes:
        at: When, in seconds.
        restarts: How often the coordinator was started again.
        servers: The lives of those servers that it hears, by their numbers.
    """

    at: float
    restarts: int
    servers: dict[int, int]


def seen(path: Path) -> list[Seen]:
    """All answers so far."""
    text = path.read_text() if path.exists() else ""
    found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [
        Seen(one["at"], one["restarts"], {int(id): incarnation for id, incarnation in one["servers"].items()})
        for one in found
    ]


def main(coordinator: str, key_file: str, path: str) -> None:
    """Ask until this process is ended."""
    with Watcher(coordinator, KeyPair.load(key_file)) as watcher, Path(path).open("a", buffering=1) as file:
        while True:
            answer = watcher.ask(1.0)
            if answer is not None:
                members = [one for one in answer.fields["members"] if one["role"] == "server" and one["silent"] < HEARD]
                servers = {one["id"]: one["incarnation"] for one in members}
                print(json.dumps(asdict(Seen(time.monotonic(), answer.fields["restarts"], servers))), file=file)
            time.sleep(PAUSE)


if __name__ == "__main__":
    main(*sys.argv[1:])
