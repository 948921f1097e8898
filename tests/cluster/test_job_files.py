"""Each submission has its own configuration and script in the run folder."""

from pathlib import Path

import pytest

from cnnstrategies.cluster.job_files import FilesTakenError, JobFiles

pytestmark = pytest.mark.light
FOLDER = Path("slurm/resnet")


def contents() -> dict[str, str]:
    return {path.name: path.read_text() for path in FOLDER.iterdir()}


def test_a_submission_does_not_change_the_files_of_an_earlier_one() -> None:
    first = JobFiles.in_folder(FOLDER)
    first.write("lr: 0.1", "fit config.yaml")
    assert contents() == {"config.yaml": "lr: 0.1", "job.sh": "fit config.yaml"}
    second, at_the_same_time = JobFiles.in_folder(FOLDER), JobFiles.in_folder(FOLDER)
    second.write("lr: 0.2", "fit config-2.yaml")
    with pytest.raises(FilesTakenError, match="another submission has created slurm/resnet/config-2"):
        at_the_same_time.write("lr: 0.3", "fit config-2.yaml")
    (FOLDER / "config-2.yaml").unlink()
    with pytest.raises(FilesTakenError):
        second.write("lr: 0.3", "fit config-2.yaml")
    queued = {"config.yaml": "lr: 0.1", "job.sh": "fit config.yaml", "job-2.sh": "fit config-2.yaml"}
    assert contents() == queued, "of two files that cannot both be created, none is"
    third = JobFiles.in_folder(FOLDER)
    assert (third.configuration.name, third.script.name) == ("config-3.yaml", "job-3.sh")
    third.write("lr: 0.3")
    third.remove()
    assert contents() == queued


def test_two_submissions_without_a_name_do_not_share_a_folder() -> None:
    first, second = (JobFiles.in_new_folder(FOLDER.parent, "resnet") for _ in range(2))
    first.write("lr: 0.1", "fit")
    with pytest.raises(FilesTakenError):
        second.write("lr: 0.2", "fit")
    assert JobFiles.in_new_folder(FOLDER.parent, "resnet").folder == Path("slurm/resnet-2")
    first.remove()
    assert not FOLDER.exists(), "a job that the cluster refuses leaves nothing behind"
