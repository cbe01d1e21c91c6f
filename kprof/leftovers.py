"""What a comparison that failed leaves behind: named, or removed where it holds nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

from kprof.collect.trials import LOG, Trial, TrialError
from kprof.comparison import PAIRS_FILE
from kprof.runfolder import is_run
from kprof.variants import Tell


def tidy(error: TrialError, tell: Tell) -> None:
    """Remove the folder of a comparison in which nothing was timed or printed, else name it.

    A folder that was named already, for its pairs or its output, stays without a word.
    """
    log = error.trial.log
    folder = next((one for one in log.parents if is_run(one)), None)
    if folder is None or (folder / PAIRS_FILE).exists() or str(log) in str(error):
        return
    if _is_anything_in(folder, error.trial):
        tell(f"what was timed and printed until then is kept in {folder}")
    else:
        shutil.rmtree(folder)


def _is_anything_in(folder: Path, trial: Trial) -> bool:
    """Tell whether this trial timed anything, or whether any of the comparison's printed."""
    return bool(trial.windows) or any(log.stat().st_size for log in folder.rglob(LOG))
