"""Names of the actions that Lightning reports to its profiler, and of the parts of a step that contain them."""

# Prefixes in the names of a step's parts. The name of a callback or logger follows the prefix, as in
# "callback EarlyStopping".
CALLBACK, LOGGER = "callback ", "logger "
# Last part of the name of the action in which a batch is loaded, and the name of that in which a checkpoint is saved.
LOADING, SAVING = "train_dataloader_next", "save_checkpoint"


def callback_of(action: str) -> str | None:
    """Return the class name of the callback one of whose hooks is an action; None for other actions."""
    owner = action.removeprefix("[Callback]")
    return None if owner == action else owner.rpartition(".")[0].partition("{")[0].rpartition(".")[2]
