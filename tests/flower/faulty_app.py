"""A ClientApp whose nodes wait before they answer: `fault = "linger@2,linger@3"` in a node's configuration."""

import os
import time
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedattune.deploy.grid import pack_record, unpack_record
from fedattune.deploy.node.node import NodeRuntime
from fedattune.training.backends.message import split_message

app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def answer(message: Message, context: Context) -> Message:
    config = dict(context.node_config)
    faults = str(config.pop("fault", "")).split(",")
    asked = unpack_record(message.content)
    reply = NodeRuntime(config, context.run_config).answer(asked)
    trains = split_message(asked)[-1].head["kind"] == "train"
    if trains and f"linger@{asked.head.get('round')}" in faults:
        linger()
    return Message(pack_record(reply), reply_to=message)


def linger() -> None:
    """Wait until a file is there, or somewhat less than the round's time."""
    end = time.monotonic() + float(os.environ["FAULTY_SECONDS"])
    while not (Path(os.environ["FEDATTUNE_STATE"]).parent / "go").exists() and time.monotonic() < end:
        time.sleep(0.1)
