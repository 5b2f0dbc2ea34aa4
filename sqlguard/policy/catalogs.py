"""Relations of pg_catalog and information_schema: what describes the database, what shows more than that."""

from sqlguard.policy.verdict import Effect

#: What psql's \\d commands, drivers and ORMs read.
READABLE = frozenset(
    f"pg_{name}"
    for name in ["aggregate", "am", "amop", "amproc", "attrdef", "attribute", "auth_members", "available_extension_versions", "available_extensions", "cast", "class", "collation", "constraint", "conversion", "cursors", "database", "default_acl", "depend", "description", "enum", "event_trigger", "extension", "foreign_data_wrapper", "foreign_server", "foreign_table", "group", "index", "indexes", "inherits", "init_privs", "language", "matviews", "namespace", "opclass", "operator", "opfamily", "parameter_acl", "partitioned_table", "policies", "policy", "prepared_statements", "proc", "publication", "publication_namespace", "publication_rel", "publication_tables", "range", "rewrite", "roles", "rules", "seclabel", "seclabels", "sequence", "sequences", "settings", "shdepend", "shdescription", "shseclabel", "stat_all_indexes", "stat_all_tables", "stat_database", "stat_sys_indexes", "stat_sys_tables", "stat_user_functions", "stat_user_indexes", "stat_user_tables", "stat_xact_all_tables", "stat_xact_user_tables", "statio_all_indexes", "statio_all_tables", "statio_user_indexes", "statio_user_tables", "statistic_ext", "tables", "tablespace", "timezone_abbrevs", "timezone_names", "transform", "trigger", "ts_config", "ts_config_map", "ts_dict", "ts_parser", "ts_template", "type", "user", "views"]
)
#: What a person may want to show once: other sessions, the server's state, samples of the data.
ON_APPROVAL = frozenset(
    f"pg_{name}"
    for name in ["backend_memory_contexts", "config", "db_role_setting", "largeobject_metadata", "locks", "prepared_xacts", "replication_origin", "replication_origin_status", "replication_slots", "shmem_allocations", "stat_activity", "stat_archiver", "stat_bgwriter", "stat_checkpointer", "stat_database_conflicts", "stat_gssapi", "stat_io", "stat_progress_analyze", "stat_progress_basebackup", "stat_progress_cluster", "stat_progress_copy", "stat_progress_create_index", "stat_progress_vacuum", "stat_recovery_prefetch", "stat_replication", "stat_replication_slots", "stat_slru", "stat_ssl", "stat_statements", "stat_subscription", "stat_subscription_stats", "stat_wal", "stat_wal_receiver", "stats", "stats_ext", "stats_ext_exprs", "subscription", "subscription_rel"]
)
_HIDDEN_VIEWS = frozenset({"user_mapping_options", "user_mappings", "foreign_server_options"})


def effect(schema: str, name: str) -> Effect:
    """Say whether a system relation may be read; what is on no list may not."""
    if schema == "information_schema":
        return Effect.APPROVE if name.lstrip("_").removeprefix("pg_") in _HIDDEN_VIEWS else Effect.ALLOW
    if schema == "pg_catalog" and name in READABLE:
        return Effect.ALLOW
    if schema == "pg_catalog" and name in ON_APPROVAL:
        return Effect.APPROVE
    return Effect.REFUSE
