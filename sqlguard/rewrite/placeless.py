"""
Trees without places: libpg_query's messages less the fields that only say where something stands in a text.

What means the same is equal then, whatever blanks and comments it was written with, and protobuf compares whole
trees at once. The messages are made from libpg_query's own description, so they can't drift from it.
"""

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from postgast import pg_query_pb2 as pg

#: Fields that only say where something stands in the text.
PLACES = frozenset(
    {
        "location",
        "stmt_location",
        "stmt_len",
        "list_start",
        "list_end",
        "rexpr_list_start",
        "rexpr_list_end",
    }
)


def without_places(node: Any) -> Any:
    """Return the libpg_query node *node* (a `Node`) as a tree without places."""
    bare = _node().FromString(node.SerializeToString())
    # The places came along as fields that the description does not know.
    bare.DiscardUnknownFields()
    return bare


@cache
def _node() -> Any:
    described = descriptor_pb2.FileDescriptorProto()
    pg.DESCRIPTOR.CopyToProto(described)
    for message in described.message_type:
        kept = [field for field in message.field if field.name not in PLACES]
        del message.field[:]
        message.field.extend(kept)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(described)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pg_query.Node"))
