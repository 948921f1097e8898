"""Ask a run's coordinator for its members, again and again; storm.py runs this program beside its hosts.

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
    """Answer of the coordinator.

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
    answers = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [
        Seen(answer["at"], answer["restarts"], {int(id): incarnation for id, incarnation in answer["servers"].items()})
        for answer in answers
    ]


def main(coordinator: str, key_file: str, path: str) -> None:
    """Ask until this process is ended."""
    with Watcher(coordinator, KeyPair.load(key_file)) as watcher, Path(path).open("a", buffering=1) as file:
        while True:
            answer = watcher.ask(1.0)
            if answer is not None:
                members = [member for member in answer.fields["members"] if member["role"] == "server"]
                servers = {member["id"]: member["incarnation"] for member in members if member["silent"] < HEARD}
                print(json.dumps(asdict(Seen(time.monotonic(), answer.fields["restarts"], servers))), file=file)
            time.sleep(PAUSE)


if __name__ == "__main__":
    main(*sys.argv[1:])
