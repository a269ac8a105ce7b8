"""Data: known sets and tables, ways to divide them among clients, and the result, a `Federation`."""

from .build import load_federation, partition_dataset, restore_federation
from .client_files import deal_clients, export_clients
from .client_index import Client, ClientIndex, Part, RaggedIndex
from .dataset import Dataset
from .federated import Federation, infer_schema
from .from_objects import federation_from
from .images.folder import load_image_folder
from .manifest import find_home, list_partitions, load_manifest, save_manifest
from .node import NodeData, load_node
from .partitions import DEFAULT_SEEDS, PARTITIONS
from .schema import Schema
from .sources import SOURCES, is_image_folder, is_table, load_data, resolve_source_name
from .splits import SmallClients, split_parts
from .tables import load_table

__all__ = [
    "DEFAULT_SEEDS",
    "PARTITIONS",
    "SOURCES",
    "Client",
    "ClientIndex",
    "Dataset",
    "Federation",
    "NodeData",
    "Part",
    "RaggedIndex",
    "Schema",
    "SmallClients",
    "deal_clients",
    "export_clients",
    "federation_from",
    "find_home",
    "infer_schema",
    "is_image_folder",
    "is_table",
    "list_partitions",
    "load_data",
    "load_federation",
    "load_image_folder",
    "load_manifest",
    "load_node",
    "load_table",
    "partition_dataset",
    "resolve_source_name",
    "restore_federation",
    "save_manifest",
    "split_parts",
]
