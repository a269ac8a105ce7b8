"""A ServerApp that loses the answer to every twentieth object that it pushes, so Flower pushes the object again."""

import itertools

from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse
from flwr.supercore.runtime.runtime_http_client import RuntimeHttpClient

from fedattune.deploy.server.server_app import app

push_once = RuntimeHttpClient.PushObject
numbers = itertools.count(1)


def push(client: RuntimeHttpClient, request: PushObjectRequest) -> PushObjectResponse:
    answer = push_once(client, request)
    return answer if next(numbers) % 20 else push_once(client, request)


RuntimeHttpClient.PushObject = push

__all__ = ["app"]
