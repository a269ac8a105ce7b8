"""A ClientApp whose nodes spoil their answers: `fault = "nan@2,shape@3"` in a node's configuration."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedattune.deploy.grid import pack_record, unpack_record
from fedattune.deploy.node.node import NodeRuntime
from fedattune.training.backends.message import FORMAT_VERSION, WorkerMessage, split_message

app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def answer(message: Message, context: Context) -> Message:
    config = dict(context.node_config)
    faults = str(config.pop("fault", ""))
    asked = unpack_record(message.content)
    reply = NodeRuntime(config, context.run_config).answer(asked)
    now = [fault for fault in faults.split(",") if fault.endswith(f"@{asked.head.get('round')}")]
    trains = split_message(asked)[-1].head["kind"] == "train"
    now = [fault.partition("@")[0] for fault in now if trains]
    for fault in now:
        if fault in SPOIL:
            SPOIL[fault](reply)
    content = pack_record(reply)
    if "version" in now:
        content["head"]["version"] = FORMAT_VERSION + 1
    return Message(content, reply_to=message)


def late(_: WorkerMessage) -> None:
    """Answer when the round's time is over."""
    time.sleep(float(os.environ["FAULTY_SECONDS"]))


def linger(_: WorkerMessage) -> None:
    """Answer when a file is there, or somewhat before the round's time is over."""
    end = time.monotonic() + float(os.environ["FAULTY_SECONDS"])
    while not (Path(os.environ["FEDATTUNE_STATE"]).parent / "go").exists() and time.monotonic() < end:
        time.sleep(0.1)


def nan(reply: WorkerMessage) -> None:
    name = first(reply)
    reply.tensors[name] = torch.full_like(reply.tensors[name], torch.nan)


def shape(reply: WorkerMessage) -> None:
    name = first(reply)
    reply.tensors[name] = reply.tensors[name][..., :-1]


def huge(reply: WorkerMessage) -> None:
    name = first(reply)
    reply.tensors[name] = 1e6 + reply.tensors[name]


def stale(reply: WorkerMessage) -> None:
    """Answer for the round before."""
    reply.head.get("parts", [reply.head])[-1]["round"] -= 1


def first(reply: WorkerMessage) -> str:
    return next(name for name in reply.tensors if "upload/" in name)


SPOIL: dict[str, Callable[[WorkerMessage], None]] = {
    "late": late,
    "linger": linger,
    "nan": nan,
    "shape": shape,
    "huge": huge,
    "stale": stale,
}
