"""One module per rule; importing this package registers them all."""

from sqlguard.policy.rules import allow_call as allow_call
from sqlguard.policy.rules import allow_query as allow_query
from sqlguard.policy.rules import allow_session as allow_session
from sqlguard.policy.rules import archive_then_delete as archive_then_delete
from sqlguard.policy.rules import bookkeeping_columns as bookkeeping_columns
from sqlguard.policy.rules import constraint_timing as constraint_timing
from sqlguard.policy.rules import copy_target as copy_target
from sqlguard.policy.rules import delete_mode as delete_mode
from sqlguard.policy.rules import deleted_in_view as deleted_in_view
from sqlguard.policy.rules import endless_recursion as endless_recursion
from sqlguard.policy.rules import explain_write as explain_write
from sqlguard.policy.rules import function_effects as function_effects
from sqlguard.policy.rules import indirect_write as indirect_write
from sqlguard.policy.rules import key_change as key_change
from sqlguard.policy.rules import prepared_and_cursors as prepared_and_cursors
from sqlguard.policy.rules import read_grant as read_grant
from sqlguard.policy.rules import refused_kind as refused_kind
from sqlguard.policy.rules import row_locks as row_locks
from sqlguard.policy.rules import select_into as select_into
from sqlguard.policy.rules import session_settings as session_settings
from sqlguard.policy.rules import set_config as set_config
from sqlguard.policy.rules import system_relations as system_relations
from sqlguard.policy.rules import transaction_modes as transaction_modes
from sqlguard.policy.rules import unknown_name as unknown_name
from sqlguard.policy.rules import unscoped_write as unscoped_write
from sqlguard.policy.rules import write_grant as write_grant
