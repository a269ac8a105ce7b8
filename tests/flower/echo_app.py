"""A Flower app that sends numbers to every node and gets them back doubled: for tests of processes and network."""

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

CUT_OFF_CODE = 3
"""Flower's error code for a reply whose upload ended with the SuperLink's process."""


def call(function: Callable[..., Iterable[Any]], *arguments: Any) -> list[Any]:
    """Call the grid, and once more if it fails: Flower gives up if the SuperLink dies after it stored an object."""
    try:
        return list(function(*arguments))
    except Exception:
        return list(function(*arguments))


server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    assert config["text"] != "fail"
    print("text:", ascii(config["text"]), flush=True)
    while len(call(grid.get_node_ids)) < int(config["nodes"]):
        time.sleep(0.2)
    sent = np.arange(int(config["numbers"]), dtype=np.float32)
    for turn in range(int(config["rounds"])):
        start = time.monotonic()

        def ask(node: int, turn: int = turn) -> Message:
            return Message(
                content=RecordDict({"arrays": ArrayRecord({"x": Array(sent)})}),
                message_type=MessageType.TRAIN,
                dst_node_id=node,
                group_id=str(turn),
            )

        nodes = call(grid.get_node_ids)
        waiting = dict(zip(call(grid.push_messages, [ask(node) for node in nodes]), nodes, strict=True))
        said = []
        while waiting:
            for reply in call(grid.pull_messages, list(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id)
                if reply.has_error() and reply.error.code == CUT_OFF_CODE:
                    waiting |= zip(call(grid.push_messages, [ask(node)]), [node], strict=True)
                    continue
                assert not reply.has_error(), reply.error
                assert np.array_equal(reply.content["arrays"]["x"].numpy(), 2 * sent)
                said.append(str(reply.content["said"]["name"]))
            time.sleep(0.1)
        print(f"round {turn}: {sorted(said)} in {time.monotonic() - start:.1f} s", flush=True)


@client.train()
def train(message: Message, context: Context) -> Message:
    received = message.content["arrays"]["x"].numpy()
    said = {"name": f"{context.node_config['name']} in {os.path.basename(os.environ['FEDATTUNE_STATE'])}"}
    content = RecordDict({"arrays": ArrayRecord({"x": Array(2 * received)}), "said": ConfigRecord(said)})
    return Message(content, reply_to=message)
