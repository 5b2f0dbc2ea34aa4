"""
What the server's own functions, operators, casts and settings do: the guard's allow-list.

Names are looked up in reviewed lists that `scripts/build_functions.py` makes from real servers; what is not
in them is unknown, and unknown is a refusal. `docs/functions.md` says how the lists are made and reviewed.
"""

from sqlguard.functions.bounds import harmless_with as harmless_with
from sqlguard.functions.bounds import series_rows as series_rows
from sqlguard.functions.classify import UNKNOWN as UNKNOWN
from sqlguard.functions.classify import classify as classify
from sqlguard.functions.classify import classify_cast as classify_cast
from sqlguard.functions.classify import classify_extension as classify_extension
from sqlguard.functions.classify import classify_operator as classify_operator
from sqlguard.functions.classify import classify_relation as classify_relation
from sqlguard.functions.classify import classify_sampling as classify_sampling
from sqlguard.functions.classify import classify_setting as classify_setting
from sqlguard.functions.classify import known as known
from sqlguard.functions.classify import known_extension as known_extension
from sqlguard.functions.constants import NOT_CONSTANT as NOT_CONSTANT
from sqlguard.functions.constants import fold as fold
from sqlguard.functions.model import FunctionClass as FunctionClass
from sqlguard.functions.model import FunctionEffect as FunctionEffect
from sqlguard.functions.model import worst as worst
from sqlguard.functions.nodes import SQL_NODES as SQL_NODES
from sqlguard.functions.nodes import SqlNode as SqlNode
