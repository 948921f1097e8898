"""Print mutmut's results in this folder: the number of mutants of each module that tests noticed, and the survivors."""

from collections import Counter

from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import walk_mutatable_files

counts: dict[str, Counter[str]] = {}
for path in walk_mutatable_files():
    data = SourceFileMutationData(path=path)
    data.load()
    statuses = {mutant: status_by_exit_code[code] for mutant, code in data.exit_code_by_key.items()}
    if set(statuses.values()) != {"not checked"}:
        counts[str(path)] = Counter(statuses.values())
    for mutant, status in statuses.items():
        if status not in ("killed", "timeout", "no tests", "not checked"):
            print(f"{status}: {mutant}", get_diff_for_mutant(mutant, path=path), "", sep="\n")
    if untested := sorted(
        {mutant.partition("__mutmut_")[0] for mutant, status in statuses.items() if status == "no tests"}
    ):
        print("no light test calls:", *untested, "", sep="\n")
print(f"{'module':<55}mutants noticed survived not called")
for name, count in counts.items():
    noticed = count["killed"] + count["timeout"]
    survived = count.total() - noticed - count["no tests"]
    print(f"{name:<55}{count.total():>7}{noticed:>8}{survived:>9}{count['no tests']:>11}")
