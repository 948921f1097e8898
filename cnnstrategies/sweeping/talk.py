"""By what a sweep tells a run that it is a trial: environment variables, which all ranks inherit."""

SOCKET = "CNNSTRATEGIES_SWEEP"  # Where the metric is reported.
METRIC = "CNNSTRATEGIES_SWEEP_METRIC"  # Its name.
FOLDER = "CNNSTRATEGIES_SWEEP_FOLDER"  # Of the trial.
