"""
What libpg_query's tree is made of: which node types the walk knows, and the types of fields that have none.

The two sets are written out on purpose: a new libpg_query release that adds a node type shows up as a failing
test, and until somebody has looked at it, a statement with such a node is refused.
"""

from types import MappingProxyType
from typing import Any

from postgast import pg_query_pb2

#: Parts of queries that the walk goes through; what is special about one is in `walk` and `query`.
PARTS = frozenset(
    ["Alias", "A_ArrayExpr", "A_Const", "A_Expr", "A_Indices", "A_Indirection", "A_Star", "BitString", "BoolExpr", "Boolean", "BooleanTest", "CTECycleClause", "CTESearchClause", "CaseExpr", "CaseWhen", "CoalesceExpr", "CollateClause", "ColumnDef", "ColumnRef", "CommonTableExpr", "CurrentOfExpr", "Float", "FuncCall", "GroupingFunc", "GroupingSet", "IndexElem", "InferClause", "Integer", "JoinExpr", "JsonAggConstructor", "JsonArgument", "JsonArrayAgg", "JsonArrayConstructor", "JsonArrayQueryConstructor", "JsonBehavior", "JsonFormat", "JsonFuncExpr", "JsonIsPredicate", "JsonKeyValue", "JsonObjectAgg", "JsonObjectConstructor", "JsonOutput", "JsonParseExpr", "JsonReturning", "JsonScalarExpr", "JsonSerializeExpr", "JsonTable", "JsonTableColumn", "JsonTablePathSpec", "JsonValueExpr", "List", "LockingClause", "MergeSupportFunc", "MergeWhenClause", "MinMaxExpr", "MultiAssignRef", "NamedArgExpr", "NullTest", "OnConflictClause", "ParamRef", "RangeFunction", "RangeSubselect", "RangeTableFunc", "RangeTableFuncCol", "RangeTableSample", "RangeVar", "ResTarget", "ReturningClause", "ReturningOption", "RowExpr", "SQLValueFunction", "SetToDefault", "SortBy", "String", "SubLink", "TypeCast", "TypeName", "WindowDef", "WithClause", "XmlExpr", "XmlSerialize"]
)

#: Statements that can stand inside others; the walk knows them too.
QUERIES = frozenset({"SelectStmt", "InsertStmt", "UpdateStmt", "DeleteStmt", "MergeStmt"})

#: Statements that are looked at only at the top; `kinds` says what becomes of each, all others are refused there.
STATEMENTS = frozenset(
    ["AlterCollationStmt", "AlterDatabaseRefreshCollStmt", "AlterDatabaseSetStmt", "AlterDatabaseStmt", "AlterDefaultPrivilegesStmt", "AlterDomainStmt", "AlterEnumStmt", "AlterEventTrigStmt", "AlterExtensionContentsStmt", "AlterExtensionStmt", "AlterFdwStmt", "AlterForeignServerStmt", "AlterFunctionStmt", "AlterObjectDependsStmt", "AlterObjectSchemaStmt", "AlterOpFamilyStmt", "AlterOperatorStmt", "AlterOwnerStmt", "AlterPolicyStmt", "AlterPublicationStmt", "AlterRoleSetStmt", "AlterRoleStmt", "AlterSeqStmt", "AlterStatsStmt", "AlterSubscriptionStmt", "AlterSystemStmt", "AlterTSConfigurationStmt", "AlterTSDictionaryStmt", "AlterTableMoveAllStmt", "AlterTableSpaceOptionsStmt", "AlterTableStmt", "AlterTypeStmt", "AlterUserMappingStmt", "CallStmt", "CheckPointStmt", "ClosePortalStmt", "ClusterStmt", "CommentStmt", "CompositeTypeStmt", "ConstraintsSetStmt", "CopyStmt", "CreateAmStmt", "CreateCastStmt", "CreateConversionStmt", "CreateDomainStmt", "CreateEnumStmt", "CreateEventTrigStmt", "CreateExtensionStmt", "CreateFdwStmt", "CreateForeignServerStmt", "CreateForeignTableStmt", "CreateFunctionStmt", "CreateOpClassStmt", "CreateOpFamilyStmt", "CreatePLangStmt", "CreatePolicyStmt", "CreatePublicationStmt", "CreateRangeStmt", "CreateRoleStmt", "CreateSchemaStmt", "CreateSeqStmt", "CreateStatsStmt", "CreateStmt", "CreateSubscriptionStmt", "CreateTableAsStmt", "CreateTableSpaceStmt", "CreateTransformStmt", "CreateTrigStmt", "CreateUserMappingStmt", "CreatedbStmt", "DeallocateStmt", "DeclareCursorStmt", "DefineStmt", "DiscardStmt", "DoStmt", "DropOwnedStmt", "DropRoleStmt", "DropStmt", "DropSubscriptionStmt", "DropTableSpaceStmt", "DropUserMappingStmt", "DropdbStmt", "ExecuteStmt", "ExplainStmt", "FetchStmt", "GrantRoleStmt", "GrantStmt", "ImportForeignSchemaStmt", "IndexStmt", "ListenStmt", "LoadStmt", "LockStmt", "NotifyStmt", "PrepareStmt", "ReassignOwnedStmt", "RefreshMatViewStmt", "ReindexStmt", "RenameStmt", "RuleStmt", "SecLabelStmt", "TransactionStmt", "TruncateStmt", "UnlistenStmt", "VacuumStmt", "VariableSetStmt", "VariableShowStmt", "ViewStmt"]
)

#: Parts of statements that are refused as a whole, and nodes that only the server makes after parsing.
NEVER_WALKED = frozenset(
    ["ATAlterConstraint", "AccessPriv", "Aggref", "AlterTableCmd", "AlternativeSubPlan", "ArrayCoerceExpr", "ArrayExpr", "CallContext", "CaseTestExpr", "CoerceToDomain", "CoerceToDomainValue", "CoerceViaIO", "CollateExpr", "Constraint", "ConvertRowtypeExpr", "CreateOpClassItem", "DefElem", "DistinctExpr", "FieldSelect", "FieldStore", "FromExpr", "FuncExpr", "FunctionParameter", "InferenceElem", "InlineCodeBlock", "IntList", "IntoClause", "JsonConstructorExpr", "JsonExpr", "JsonTablePath", "JsonTablePathScan", "JsonTableSiblingJoin", "MergeAction", "NextValueExpr", "NullIfExpr", "ObjectWithArgs", "OidList", "OnConflictExpr", "OpExpr", "PLAssignStmt", "Param", "PartitionBoundSpec", "PartitionCmd", "PartitionElem", "PartitionRangeDatum", "PartitionSpec", "PublicationObjSpec", "PublicationTable", "Query", "RTEPermissionInfo", "RangeTblEntry", "RangeTblFunction", "RangeTblRef", "RawStmt", "RelabelType", "ReplicaIdentityStmt", "ReturnStmt", "ReturningExpr", "RoleSpec", "RowCompareExpr", "RowMarkClause", "ScalarArrayOpExpr", "SetOperationStmt", "SortGroupClause", "StatsElem", "SubPlan", "SubscriptingRef", "TableFunc", "TableLikeClause", "TableSampleClause", "TargetEntry", "TriggerTransition", "VacuumRelation", "Var", "WindowClause", "WindowFunc", "WindowFuncRunCondition", "WithCheckOption"]
)


def _typed() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    messages: Any = pg_query_pb2.DESCRIPTOR.message_types_by_name
    for name, message in messages.items():
        fields = {
            field.json_name: field.message_type.name
            for field in message.fields
            if field.message_type is not None and field.message_type.name != "Node"
        }
        if fields:
            found[name] = fields
    return found


#: Node type -> field -> the type of the node that stands in it without its name.
TYPED = MappingProxyType(_typed())
