"""SQL text -> Statement, by PostgreSQL's own grammar; what is not known stays unknown and is refused."""
