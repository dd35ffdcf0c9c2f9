"""torchft's protobuf messages.

Invariant: the messages have the names, numbers and types of torchft.proto (0.2.0). The classes are
created at import, in a descriptor pool of their own, so that they do not conflict with other
definitions.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2

SERVICE = "torchft.LighthouseService"
"""Service of its lighthouse, with the calls Quorum and Heartbeat."""

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Field.TYPE_BOOL,
    "int64": _Field.TYPE_INT64,
    "string": _Field.TYPE_STRING,
    "uint64": _Field.TYPE_UINT64,
}

_TORCHFT = {
    "QuorumMember": {
        "replica_id": (1, "string"),
        "address": (2, "string"),
        "store_address": (3, "string"),
        "step": (4, "int64"),
        "world_size": (5, "uint64"),
        "shrink_only": (6, "bool"),
        "data": (7, "string"),
        "commit_failures": (8, "int64"),
    },
    "Quorum": {
        "quorum_id": (1, "int64"),
        "participants": (2, "repeated torchft.QuorumMember"),
        "created": (3, "google.protobuf.Timestamp"),
    },
    "LighthouseQuorumRequest": {"requester": (1, "torchft.QuorumMember")},
    "LighthouseQuorumResponse": {"quorum": (1, "torchft.Quorum")},
    "LighthouseHeartbeatRequest": {"replica_id": (1, "string")},
    "LighthouseHeartbeatResponse": {},
}


def _file(
    package: str, messages: dict[str, dict[str, tuple[int, str]]]
) -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package}.proto",
        package=package,
        syntax="proto3",
        dependency=[timestamp_pb2.DESCRIPTOR.name],
    )
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            repeated, _, of = kind.rpartition(" ")
            field = message.field.add(name=field_name, number=number)
            field.label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
            if of in _SCALARS:
                field.type = _SCALARS[of]
            else:
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".{of}"
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
_pool.AddSerializedFile(_file("torchft", _TORCHFT).SerializeToString())


def _message_class(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(name))


QuorumMember = _message_class("torchft.QuorumMember")
LighthouseQuorumRequest = _message_class("torchft.LighthouseQuorumRequest")
LighthouseQuorumResponse = _message_class("torchft.LighthouseQuorumResponse")
LighthouseHeartbeatRequest = _message_class("torchft.LighthouseHeartbeatRequest")
LighthouseHeartbeatResponse = _message_class("torchft.LighthouseHeartbeatResponse")
