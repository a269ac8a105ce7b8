"""digits-app: A Flower / PyTorch app."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Net(nn.Module):
    """A small convolutional network."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(8 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = self.pool(torch.relu(self.conv1(x)))
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


def load_data(partition_id: int, num_partitions: int, batch_size: int):
    """Load a partition of the digits: two shards of the samples sorted by class."""
    images, labels = load_digits(return_X_y=True)
    shards = np.array_split(labels.argsort(kind="stable"), 2 * num_partitions)
    rows = np.concatenate([shards[partition_id], shards[partition_id + num_partitions]])
    x = torch.tensor(images[rows] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    partition = TensorDataset(x, torch.tensor(labels[rows]))
    # Divide data on each node: 80% train, 20% test
    train, test = random_split(partition, [0.8, 0.2], torch.Generator().manual_seed(42))
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=batch_size)


def train(net, trainloader, epochs, lr, device):
    """Train the model on the training set."""
    net.to(device)  # move model to GPU if available
    criterion = torch.nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = criterion(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epochs * len(trainloader))


def test(net, testloader, device):
    """Validate the model on the test set."""
    net.to(device)
    criterion = torch.nn.CrossEntropyLoss()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for images, labels in testloader:
            outputs = net(images.to(device))
            loss += criterion(outputs, labels.to(device)).item()
            correct += (torch.max(outputs.data, 1)[1] == labels.to(device)).sum().item()
    accuracy = correct / len(testloader.dataset)
    return loss / len(testloader), accuracy
