"""Why a worker cannot go on."""


class ServersUnreachableError(RuntimeError):
    """Servers did not answer within the time-out, or slices are lost; the message names the servers."""


class RemovedError(RuntimeError):
    """This worker is no longer in the view (it was taken for dead): it must join again as a new incarnation."""
