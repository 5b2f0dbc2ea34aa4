"""Connection URLs, put together so that every value arrives as it is."""

from urllib.parse import quote, urlencode


def url(*, host: str, port: int, user: str, password: str | None, dbname: str, **options: str) -> str:
    """Return `postgresql://user:password@host:port/dbname?options`; a socket directory becomes `?host=`."""
    secret = f":{quote(password, safe='')}" if password is not None else ""
    where = f"{f'[{host}]' if ':' in host else host}:{port}"
    if host.startswith("/"):
        where, options = "", {"host": host, "port": str(port), **options}
    query = f"?{urlencode(options)}" if options else ""
    return f"postgresql://{quote(user, safe='')}{secret}@{where}/{quote(dbname, safe='')}{query}"
