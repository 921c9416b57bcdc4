"""What a server has loaded stays: Python need not look through it for what can go."""

import gc


def keep_all() -> None:
    """Leave all that is in memory now out of later collections: one over all of torch stops every request for 0.2 s."""
    gc.collect()
    gc.freeze()
