"""The PostgreSQL proxy: asyncio sockets around the sans-I/O core in `sqlguard.wire`, on the one path."""
