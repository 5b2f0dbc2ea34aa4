"""SQL text -> Statement, by PostgreSQL's own grammar; what is not known stays unknown and is refused."""

from sqlguard.statement.read import analyse as analyse
from sqlguard.statement.text import SyntaxFault as SyntaxFault
