"""
The PostgreSQL wire protocol 3.0 to 3.2 without I/O: bytes in, messages and bytes out.

`proxy_protocol` reads what a load balancer says of the client, `buffer` cuts streams into frames, `messages` decodes
and encodes them, `startup` takes a client from its first byte to its SCRAM proof, `session` keeps the books of a
running session, `scram` and `channel_binding` do the arithmetic of logins, `reports` builds and edits errors. Sockets,
clocks and random bytes are the callers'.
"""
