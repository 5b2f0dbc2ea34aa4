"""DELETE becomes a soft delete, by splicing the original text and proving the result (DESIGN 3.3)."""

from sqlguard.rewrite.proof import prove as prove
from sqlguard.rewrite.result import Rewritten as Rewritten
from sqlguard.rewrite.rewriter import rewrite as rewrite
