"""What the reviewed lists say about functions, operators, casts, settings and system views."""

import pytest

from sqlguard.functions import (
    FunctionEffect,
    classify,
    classify_cast,
    classify_extension,
    classify_operator,
    classify_relation,
    classify_sampling,
    classify_setting,
    data,
    known,
    known_extension,
    worst,
)

HARMLESS = FunctionEffect.HARMLESS
INFRASTRUCTURE = FunctionEffect.INFRASTRUCTURE
SIDE_EFFECT = FunctionEffect.SIDE_EFFECT
UNKNOWN = FunctionEffect.UNKNOWN

EXPECTED = {
    HARMLESS: """
        abs lower replace count sum string_agg json_agg jsonb_path_query row_number now clock_timestamp random
        gen_random_uuid uuidv7 to_tsvector ts_rank ts_headline xpath version current_database
        pg_get_functiondef pg_total_relation_size pg_size_pretty currval lastval pg_is_in_recovery
        pg_current_xact_id_if_assigned
        has_table_privilege pg_typeof regexp_replace format int4pl percentile_cont range_agg unnest
    """,
    SIDE_EFFECT: """
        set_config pg_notify nextval setval txid_current pg_current_xact_id query_to_xml
        query_to_xml_and_xmlschema
        cursor_to_xml ts_stat ts_rewrite lo_export lo_open pg_read_file pg_read_binary_file pg_ls_dir
        pg_ls_waldir
        pg_stat_file pg_terminate_backend pg_cancel_backend pg_reload_conf pg_rotate_logfile pg_switch_wal
        pg_logical_emit_message pg_advisory_lock pg_try_advisory_xact_lock pg_advisory_unlock_all
        pg_export_snapshot pg_stat_reset pg_create_logical_replication_slot pg_drop_replication_slot setseed
        pg_hba_file_rules pg_input_is_valid pg_promote
    """,
    FunctionEffect.WRITES: """
        lo_create lo_unlink lo_put lo_from_bytea lo_import lowrite pg_import_system_collations
        brin_summarize_new_values gin_clean_pending_list pg_restore_attribute_stats
    """,
    FunctionEffect.READS_DATA: """
        table_to_xml schema_to_xml database_to_xml lo_get pg_logical_slot_peek_changes pg_mcv_list_items
    """,
    INFRASTRUCTURE: """
        inet_server_addr inet_client_addr pg_postmaster_start_time pg_stat_get_activity pg_blocking_pids
        pg_control_system pg_relation_filepath current_setting pg_show_all_settings
    """,
    FunctionEffect.DENIAL_OF_SERVICE: """
        pg_sleep pg_sleep_for pg_sleep_until generate_series repeat lpad rpad array_fill
    """,
    FunctionEffect.INTERNAL: """
        int4in textout array_agg_transfn bthandler eqsel fmgr_sql_validator tsvector_update_trigger
        binary_upgrade_set_next_pg_type_oid pg_event_trigger_ddl_commands
    """,
    UNKNOWN: "purge_all pg_sleep2 PG_SLEEP lower_ no_such_function",
}


@pytest.mark.parametrize(
    ("effect", "name"), [(effect, name) for effect, names in EXPECTED.items() for name in names.split()]
)
def test_class_by_name(effect: FunctionEffect, name: str) -> None:
    assert classify(name).effect is effect


def test_a_class_that_is_not_plain_says_why() -> None:
    for entries in [*data.builtins().values(), *data.extensions().values()]:
        for entry in entries:
            if entry.judged.effect not in (HARMLESS, FunctionEffect.INTERNAL):
                assert entry.judged.reason, entry.name


def test_volatile_functions_are_harmless_only_with_a_reason() -> None:
    for entries in [*data.builtins().values(), *data.extensions().values()]:
        for entry in entries:
            if entry.volatility == "v" and entry.judged.effect is HARMLESS:
                assert entry.judged.reason, entry.name


def test_exact_types_pick_the_overload() -> None:
    assert classify("ts_rewrite", ("tsquery", "tsquery", "tsquery")).effect is HARMLESS
    assert classify("ts_rewrite", ("tsquery", "text")).effect is SIDE_EFFECT


def test_types_that_no_overload_has_mean_the_worst_that_fits() -> None:
    assert classify("ts_rewrite", ("unknown", "unknown")).effect is SIDE_EFFECT
    assert classify("ts_rewrite", ("unknown",) * 3).effect is HARMLESS


def test_argument_count_picks_overloads() -> None:
    assert classify("ts_rewrite", arguments=3).effect is HARMLESS
    assert classify("ts_rewrite", arguments=2).effect is SIDE_EFFECT
    # nobody has seven arguments: the worst of all
    assert classify("ts_rewrite", arguments=7).effect is SIDE_EFFECT


def test_defaults_and_variadic_arguments_count() -> None:
    (entry,) = data.builtins()["pg_catalog", "pg_terminate_backend"]
    assert [n for n in range(4) if entry.takes(n)] == [1, 2]
    (entry,) = data.builtins()["pg_catalog", "concat_ws"]
    assert [n for n in (0, 1, 2, 9) if entry.takes(n)] == [1, 2, 9]


def test_schema_counts() -> None:
    assert classify("lower", schema="app").effect is UNKNOWN
    assert classify("_pg_char_max_length", schema="information_schema").effect is HARMLESS
    assert classify("_pg_char_max_length").effect is UNKNOWN
    assert known("lower")
    assert not known("lower", schema="app")


def test_functions_of_one_release_only() -> None:
    assert {e.versions for e in data.builtins()["pg_catalog", "uuidv7"]} == {"18"}
    assert {e.versions for e in data.builtins()["pg_catalog", "pg_read_file_old"]} == {"15-16"}
    assert {e.versions for e in data.builtins()["pg_catalog", "lower"]} == {"15-18"}


@pytest.mark.parametrize(
    ("extension", "name", "effect"),
    [
        ("pg_trgm", "similarity", HARMLESS),
        ("pg_trgm", "set_limit", SIDE_EFFECT),
        ("hstore", "hstore", HARMLESS),
        ("ltree", "subpath", HARMLESS),
        ("unaccent", "unaccent", HARMLESS),
        ("pgcrypto", "digest", HARMLESS),
        ("pgcrypto", "pgp_sym_encrypt", HARMLESS),
        ("vector", "cosine_distance", HARMLESS),
        ("postgis", "st_dwithin", HARMLESS),
        ("postgis", "st_coverageunion", HARMLESS),
        ("postgis", "addgeometrycolumn", SIDE_EFFECT),
        ("postgis", "st_estimatedextent", FunctionEffect.READS_DATA),
        ("postgis", "st_generatepoints", FunctionEffect.DENIAL_OF_SERVICE),
        ("tablefunc", "crosstab", SIDE_EFFECT),
        ("tablefunc", "connectby", SIDE_EFFECT),
        ("dblink", "dblink_exec", SIDE_EFFECT),
        ("adminpack", "pg_file_write", SIDE_EFFECT),
        ("xml2", "xpath_table", SIDE_EFFECT),
        ("uuid-ossp", "uuid_generate_v4", HARMLESS),
        ("uuid-ossp", "uuid_generate_v1", INFRASTRUCTURE),
        ("pageinspect", "get_raw_page", FunctionEffect.READS_DATA),
        ("plpgsql", "plpgsql_call_handler", FunctionEffect.INTERNAL),
        ("pg_trgm", "no_such_function", UNKNOWN),
        ("no_such_extension", "similarity", UNKNOWN),
    ],
)
def test_extensions(extension: str, name: str, effect: FunctionEffect) -> None:
    assert classify_extension(extension, name).effect is effect
    assert known_extension(extension) is (extension != "no_such_extension")


def test_extension_overloads() -> None:
    assert classify_extension("isn", "isn_weak", ()).effect is HARMLESS
    assert classify_extension("isn", "isn_weak", ("boolean",)).effect is SIDE_EFFECT


def test_operators() -> None:
    for name in ("=", "||", "->>", "@>", "?", "#>>", "@@", "<->", "^@", "|/", "||/", "?#", "!~~", "&&"):
        found = classify_operator(name)
        assert (found.effect, found.bounded_argument) == (HARMLESS, None)
    assert classify_operator("===").effect is UNKNOWN
    assert classify_operator("~", "text", "text").bounded_argument == 1
    # ~ is also a containment and a bitwise operator
    assert classify_operator("~", "", "integer").bounded_argument is None


def test_every_builtin_operator_and_cast_is_harmless() -> None:
    assert {classify_operator(n, *t).effect for n, some in data.operators().items() for t in some} == {
        HARMLESS
    }
    assert {classify_cast(s, t).effect for t, some in data.casts().items() for s in some} == {HARMLESS}


def test_casts() -> None:
    assert classify_cast("text", "regclass").effect is HARMLESS
    assert classify_cast(None, "jsonb").effect is HARMLESS
    assert classify_cast("text", "money_kind").effect is UNKNOWN
    assert classify_cast(None, "internal").effect is UNKNOWN


def test_settings() -> None:
    for name in ("server_version_num", "TimeZone", "timezone", "search_path", "work_mem", "sqlguard.dry_run"):
        assert classify_setting(name).effect is HARMLESS
    for name in (
        "data_directory",
        "hba_file",
        "listen_addresses",
        "port",
        "ssl_key_file",
        "primary_conninfo",
        "log_directory",
        "app.jwt_secret",
        "no_such_setting",
    ):
        assert classify_setting(name).effect is INFRASTRUCTURE


def test_system_relations() -> None:
    for name in (
        "pg_class",
        "pg_proc",
        "pg_roles",
        "pg_stat_user_tables",
        "pg_indexes",
        "pg_sequences",
        "pg_stats",
    ):
        assert classify_relation(name).effect is HARMLESS
    assert classify_relation("tables", schema="information_schema").effect is HARMLESS
    assert classify_relation("pg_stat_activity").effect is INFRASTRUCTURE
    assert classify_relation("pg_authid").effect is FunctionEffect.READS_DATA
    assert classify_relation("pg_hba_file_rules").effect is SIDE_EFFECT
    assert classify_relation("pg_new_view").effect is UNKNOWN


def test_sampling() -> None:
    assert classify_sampling("bernoulli").effect is HARMLESS
    assert classify_sampling("evil").effect is UNKNOWN


def test_the_worst_class_speaks() -> None:
    plain, pattern, series, sleep = (
        classify(n) for n in ("lower", "regexp_like", "generate_series", "pg_sleep")
    )
    assert worst([plain, pattern]) is pattern
    assert worst([series, sleep, plain]) is sleep
