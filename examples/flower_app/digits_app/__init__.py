"""digits-app: A Flower / PyTorch app."""
