"""The invariants of simulated runs, by their numbers. A violation names the number, and shrinking a run keeps it."""

RULES = {
    1: "A slice contains the gradient of a worker's step at most once.",
    2: "A version of a slice is made of gradients of its own step. A worker that has pushed a gradient pulls "
    "values that contain it.",
    3: "All slices of a step are made of the gradients of the same workers, unless a worker dies together with a "
    "server that has some of its pushes.",
    4: "Values are results of updates, and each update uses the learning rate of its step.",
    5: "In modes with common steps, all workers receive the same values of a version of a slice.",
    6: "A gradient that a worker has seen in an answer stays, also when servers die, as long as a copy is left.",
    7: "In mode ssp, no worker is further ahead of another one than the staleness allows.",
    8: "A collective contains values of members only, and workers begin with a view that all servers have seen.",
    9: "Views only go forward: a number has one content, a worker's incarnation does not become smaller, a "
    "server that goes on does not count as new, and training begins for a process once.",
    10: "All workers get the same result of a collective, and each worker's value is in the result.",
    11: "With dynamic dispatch, each sample of an epoch is processed, and only once if no worker is lost. A "
    "worker that is let in gets samples.",
    12: "The coordinator and the servers keep a limited number of entries.",
    13: "A run makes progress within six time-outs after a fault, or ends. It ends only if a fault makes this "
    "necessary, and names the cause.",
    14: "An optimizer's state belongs to the values of its slice, and an observer sees figures of a member's "
    "present incarnation.",
    15: "A worker does not begin a step with older values than it had.",
    16: "A coordinator that is started again equals the one that was killed, and no message of a correct member "
    "is dropped as damaged.",
}
