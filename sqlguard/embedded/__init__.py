"""
A real PostgreSQL of our own: for the demo, for tests, for a first look without any installation.

The one idea: everything needs only a folder with `initdb` and `postgres` in it, wherever it comes from
(a wheel, a distribution), so that the choice of the package stays behind `find_bindir`.
"""

from sqlguard.embedded.binaries import find_bindir as find_bindir
from sqlguard.embedded.binaries import major_version as major_version
from sqlguard.embedded.server import EmbeddedServer as EmbeddedServer
