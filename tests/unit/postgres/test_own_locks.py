"""The operator's own advisory locks: who waits for one waits for nobody who has another."""

from sqlguard.postgres import migrate, reconcile, retention, sweep, tasks, walls_run


def test_no_two_are_the_same() -> None:
    """A guard that was at work kept the janitor from ending tasks."""
    locks = [m.LOCK for m in (migrate, reconcile, retention, sweep, walls_run)] + [tasks.POLICY_LOCK]
    assert len(set(locks)) == len(locks)
