"""Train on a folder of images, one folder per client and class, without and with random crops.

Run by: python examples/image_folder.py
"""

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import fedattune

# Write the folder: some handwritten digits of 8x8 pixels, which come with scikit-learn.
digits = fedattune.load_federation("digits", partition="iid", clients=4)
folder = Path(tempfile.mkdtemp()) / "digits"
for name, client in zip(["east", "north", "south", "west"], digits.clients, strict=True):
    for row in client.all[:80]:
        file = folder / name / digits.classes[int(digits.y[row])] / f"{row}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.x[row, 0].numpy() * 15).astype(np.uint8)).save(file)

data = fedattune.load_federation(folder, options={"image_size": 32})
print(data, data.input_shape)
for augment in ("off", "crop"):  # no flips: a mirrored 2 is no 2
    result = fedattune.fit(data, "fedavg", "dnn", rounds=20, steps=10, lr=0.1, augment=augment)
    print(f"{augment:4} {result.metrics['acc_uniform']:.3f}")
