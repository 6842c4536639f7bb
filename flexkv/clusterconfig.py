"""The settings of a cluster, a part of `FlexKVConfig`: `ClusterFields`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr
from pydantic_settings import BaseSettings

from flexkv.compat import parse_size, to_mapping

Size = Annotated[int, BeforeValidator(parse_size)]
Options = Annotated[dict[str, Any], BeforeValidator(to_mapping)]


class ClusterFields(BaseSettings):
    """How a node meets the others; key_secret, model and spec are the same on all of them."""

    cluster_redis_url: SecretStr | None = Field(
        None, description="Redis where the nodes of a cluster meet; none = no cluster"
    )
    cluster_username: str = Field("", description="user on that Redis, if not in the URL")
    cluster_password_file: Path | None = Field(
        None, description="file with the password on that Redis"
    )
    cluster_prefix: str = Field("flexkv", description="what all keys on that Redis begin with")
    cluster_name: str = Field("default", description="clusters of other names never meet")
    node_name: str = Field("", description="name of this node; host, process and a random part")
    cluster_listen: str = Field(
        "0.0.0.0:0", description="address where other nodes ask for blocks; port 0 = any"
    )
    cluster_advertise: str = Field(
        "", description="host, or host:port, under which others reach it; found out if not set"
    )
    peer_blocks: int = Field(
        1_000_000, ge=1, description="blocks of other nodes that this one knows of; the oldest go"
    )
    lease_ms: int = Field(10_000, ge=10, description="how long a reader may hold blocks of ours")
    peer_timeout_ms: int = Field(
        2000, ge=1, description="no answer of a node for so long is a failure"
    )
    peer_bytes_in_flight: Size = Field(
        2**28, gt=0, description="bytes of ours that other nodes hold or receive at once"
    )
    heartbeat_ms: int = Field(1000, ge=10, description="how often a node shows that it lives")
    node_ttl_ms: int = Field(
        5000, ge=20, description="a node without a sign of life for so long is gone"
    )
    cluster_courier: Literal["tcp", "mooncake"] = Field(
        "tcp", description="what carries blocks between nodes"
    )
    cluster_options: Options = Field({}, description="further options of directory and courier")
