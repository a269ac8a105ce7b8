"""Train on your own tensors, one pair (x, y) per client; then read the result and save the models.

Run by: python examples/own_data.py
"""

import tempfile

import torch

import fedattune

# Six clients of two kinds: the second kind labels by the opposite rule, so one model for all cannot work.
generator = torch.Generator().manual_seed(0)
rule = torch.randn(8, generator=generator)
clients = []
for number, size in enumerate([60, 80, 100, 120, 160, 200]):
    x = torch.randn(size, 8, generator=generator)
    sign = 1 if number % 2 == 0 else -1
    clients.append((x, (sign * (x @ rule) > 0).long()))
data = fedattune.federation_from(clients, names=["a0", "b0", "a1", "b1", "a2", "b2"], name="two rules")

for name in ("local", "fedavg", "fedmcsa"):
    result = fedattune.fit(data, name, "mlr", rounds=30, lr=0.1)
    print(f"{name:8} {result.metrics['acc_uniform']:.3f} ({result.evaluation_point})")

# `result` is FedMCSA's: numbers per client, and who learned from whom.
for client in result.clients:
    print(f"{client.id}: {client.n_train} samples, received {client.received:.3f}, trained {client.trained:.3f}")
weights = result.mixing.last()["1.weight"]  # row: receives, column: gives
print("a0 is mixed from:", dict(zip(data.names, weights[0].round(2).tolist(), strict=True)))

# Every client's own model: as a module, or as a safetensors file to load where it is used.
x, y = clients[0]
with tempfile.TemporaryDirectory() as folder:
    files = result.save_models(folder)
    model = fedattune.load_model(files[0])
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), result.model("a0").parameters(), strict=True))
    print(f"{files[0].name}: the same model {same}, {(model(x).argmax(1) == y).float().mean():.3f} right on all of a0")
