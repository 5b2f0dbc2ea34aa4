"""What drivers send to run a statement that is prepared, byte for byte, and what is expected for it."""

from sqlguard.wire.messages import Describe, Execute, Sync
from sqlguard.wire.replies import PLAIN, Reply

SYNC = Sync().encode()
#: What is expected for a Bind of the unnamed portal, its Describe, its Execute and a Sync.
RUN = [PLAIN[reply] for reply in (Reply.BIND, Reply.DESCRIBE, Reply.EXECUTE, Reply.SYNC)]
_RUNS = Execute(b"").encode() + SYNC
#: What comes behind a Bind of the unnamed portal, and what is expected for both.
TAILS = {
    _RUNS: tuple(PLAIN[reply] for reply in (Reply.BIND, Reply.EXECUTE, Reply.SYNC)),
    Describe(is_portal=True, name=b"").encode() + _RUNS: tuple(RUN),
}
